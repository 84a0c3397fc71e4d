// A plain shared library of the CUDA launchers for benchmarks and kernel checks: C entry points
// that take the params structs by pointer, and the kernels that ours are measured beside.
#include <cuda_runtime.h>

#include <exception>
#include <string>

#include "custom_ops/common/cuda_launch.cuh"
#include "custom_ops/rms_norm/rms_norm.h"
#include "custom_ops/rope/rope.h"
#include "custom_ops/swiglu/swiglu.h"

namespace {

using namespace paddle_fused;

thread_local std::string g_error;

template <class Body>
int Guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& e) {
    g_error = e.what();
    return 1;
  }
}

// Streams of one length: kIn read, kOut written.
template <int kIn, int kOut>
__global__ void __launch_bounds__(256) CopyKernel(const uint4* in, uint4* out, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint4 v[kIn];
#pragma unroll
  for (int k = 0; k < kIn; ++k) v[k] = in[k * n + i];
#pragma unroll
  for (int k = kOut; k < kIn; ++k)
    v[0].x ^= v[k].x, v[0].y ^= v[k].y, v[0].z ^= v[k].z, v[0].w ^= v[k].w;
#pragma unroll
  for (int k = 0; k < kOut; ++k) out[k * n + i] = v[k < kIn ? k : 0];
}

// The structure of Paddle 3.3's built-in weighted SwiGLU backward: 256 threads a row, vectors of
// four, approximate exponential and division, a tree in shared memory. bfloat16.
__global__ void __launch_bounds__(256)
    FourWideSwigluBackward(const uint16_t* o1, const uint16_t* do2, const float* probs,
                           uint16_t* do1, float* dprobs, uint16_t* o2, int cols) {
  __shared__ float sums[256];
  const int64_t row = blockIdx.x;
  const float prob = probs[row];
  float local = 0;
  const auto widen = [](uint32_t bits) { return __uint_as_float(bits << 16); };
  const auto pack = [](float a, float b) {
    const auto half = [](float v) {
      const uint32_t u = __float_as_uint(v);
      return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    };
    return half(a) | half(b) << 16;
  };
  for (int j = threadIdx.x * 4; j < cols; j += blockDim.x * 4) {
    const uint2 ra = *reinterpret_cast<const uint2*>(o1 + row * 2 * cols + j);
    const uint2 rb = *reinterpret_cast<const uint2*>(o1 + row * 2 * cols + cols + j);
    const uint2 rg = *reinterpret_cast<const uint2*>(do2 + row * cols + j);
    const uint32_t wa[2] = {ra.x, ra.y}, wb[2] = {rb.x, rb.y}, wg[2] = {rg.x, rg.y};
    float x[4], y[4], z[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int shift = 16 * (i % 2);
      const float a = widen(wa[i / 2] >> shift & 0xffffu), b = widen(wb[i / 2] >> shift & 0xffffu);
      const float g = widen(wg[i / 2] >> shift & 0xffffu);
      const float s = __fdividef(1.0f, 1.0f + __expf(-a)), f = a * s, gp = g * prob;
      local += g * f * b;
      x[i] = gp * b * s * (1.0f + a * (1.0f - s));
      y[i] = gp * f;
      z[i] = f * b * prob;
    }
    *reinterpret_cast<uint2*>(do1 + row * 2 * cols + j) =
        make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
    *reinterpret_cast<uint2*>(do1 + row * 2 * cols + cols + j) =
        make_uint2(pack(y[0], y[1]), pack(y[2], y[3]));
    *reinterpret_cast<uint2*>(o2 + row * cols + j) = make_uint2(pack(z[0], z[1]), pack(z[2], z[3]));
  }
  sums[threadIdx.x] = local;
  __syncthreads();
  for (int width = 128; width > 0; width /= 2) {
    if (static_cast<int>(threadIdx.x) < width) sums[threadIdx.x] += sums[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) dprobs[row] = sums[0];
}

}  // namespace

extern "C" {

const char* pf_error() { return g_error.c_str(); }

int pf_swiglu(const SwigluParams* p, void* stream, const SwigluTuning* t) {
  return Guarded([&] { LaunchSwigluCuda(*p, stream, t); });
}
int pf_swiglu_backward(const SwigluBackwardParams* p, void* stream, const SwigluTuning* t) {
  return Guarded([&] { LaunchSwigluBackwardCuda(*p, stream, t); });
}
int pf_swiglu_double_backward(const SwigluDoubleBackwardParams* p, void* stream) {
  return Guarded([&] { LaunchSwigluDoubleBackwardCuda(*p, stream); });
}
int pf_rms_norm(const RmsNormParams* p, void* stream, const RmsNormTuning* t) {
  return Guarded([&] { LaunchRmsNormCuda(*p, stream, t); });
}
size_t pf_rms_norm_backward_workspace(const RmsNormBackwardParams* p) {
  return RmsNormBackwardWorkspaceCuda(*p);
}
int pf_rms_norm_backward(const RmsNormBackwardParams* p, void* workspace, void* stream,
                         const RmsNormTuning* t) {
  return Guarded([&] { LaunchRmsNormBackwardCuda(*p, workspace, stream, t); });
}
size_t pf_rms_norm_double_backward_workspace(const RmsNormDoubleBackwardParams* p) {
  return RmsNormDoubleBackwardWorkspaceCuda(*p);
}
int pf_rms_norm_double_backward(const RmsNormDoubleBackwardParams* p, void* workspace,
                                void* stream) {
  return Guarded([&] { LaunchRmsNormDoubleBackwardCuda(*p, workspace, stream); });
}
int pf_rope(const RopeParams* p, void* stream, const RopeTuning* t) {
  return Guarded([&] { LaunchRopeCuda(*p, stream, t); });
}
int pf_rope_table(const RopeTableParams* p, void* stream) {
  return Guarded([&] { LaunchRopeTableCuda(*p, stream); });
}

// n: 16-byte vectors of one array.
int pf_copy(int in, int out, const void* src, void* dst, int64_t n, void* stream_handle) {
  return Guarded([&] {
    const dim3 grid(static_cast<unsigned>((n + 255) / 256));
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    const auto kernel = in == 1 && out == 1   ? CopyKernel<1, 1>
                        : in == 2 && out == 1 ? CopyKernel<2, 1>
                        : in == 2 && out == 2 ? CopyKernel<2, 2>
                        : in == 3 && out == 1 ? CopyKernel<3, 1>
                        : in == 3 && out == 2 ? CopyKernel<3, 2>
                                              : CopyKernel<3, 3>;
    kernel<<<grid, 256, 0, stream>>>(static_cast<const uint4*>(src), static_cast<uint4*>(dst), n);
    gpu::Check(cudaGetLastError(), "copy");
  });
}

int pf_four_wide_swiglu_backward(const void* o1, const void* do2, const float* probs, void* do1,
                                 float* dprobs, void* o2, int64_t rows, int cols, void* stream) {
  return Guarded([&] {
    FourWideSwigluBackward<<<static_cast<unsigned>(rows), 256, 0,
                             static_cast<cudaStream_t>(stream)>>>(
        static_cast<const uint16_t*>(o1), static_cast<const uint16_t*>(do2), probs,
        static_cast<uint16_t*>(do1), dprobs, static_cast<uint16_t*>(o2), cols);
    gpu::Check(cudaGetLastError(), "four wide");
  });
}

}  // extern "C"
