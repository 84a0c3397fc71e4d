// What memory allows: copies that read R streams and write W, with ordinary and with streaming
// stores. Built by copies_worker.py; every thread takes a contiguous part of each stream.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

template <int R, int W, bool kStream>
__attribute__((target("avx2"))) void Part(char** in, char** out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 32) {
    __m256i sum = _mm256_load_si256(reinterpret_cast<__m256i*>(in[0] + i));
    for (int r = 1; r < R; ++r) {
      sum = _mm256_xor_si256(sum, _mm256_load_si256(reinterpret_cast<__m256i*>(in[r] + i)));
    }
    for (int w = 0; w < W; ++w) {
      __m256i* to = reinterpret_cast<__m256i*>(out[w] + i);
      kStream ? _mm256_stream_si256(to, sum) : _mm256_store_si256(to, sum);
    }
  }
  _mm_sfence();
}

template <int R, int W>
void Run(char** in, char** out, int64_t begin, int64_t end, bool stream) {
  stream ? Part<R, W, true>(in, out, begin, end) : Part<R, W, false>(in, out, begin, end);
}

}  // namespace

// Copies `bytes` of each stream, a multiple of 64; false where the ratio is not built.
extern "C" bool copy_streams(int reads, int writes, char** in, char** out, int64_t bytes,
                             int threads, bool stream) {
  const auto run = reads == 1 && writes == 1   ? Run<1, 1>
                   : reads == 2 && writes == 1 ? Run<2, 1>
                   : reads == 3 && writes == 2 ? Run<3, 2>
                   : reads == 3 && writes == 3 ? Run<3, 3>
                                               : nullptr;
  if (run == nullptr) return false;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int t = 0; t < threads; ++t) {
    const int64_t blocks = bytes / 64;
    run(in, out, blocks * t / threads * 64, blocks * (t + 1) / threads * 64, stream);
  }
  return true;
}

extern "C" void copy_plain(char* in, char* out, int64_t bytes, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int t = 0; t < threads; ++t) {
    const int64_t begin = bytes * t / threads, end = bytes * (t + 1) / threads;
    std::memcpy(out + begin, in + begin, end - begin);
  }
}
