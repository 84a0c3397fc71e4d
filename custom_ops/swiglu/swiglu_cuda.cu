// SwiGLU on CUDA: kernels and launchers.
//
// Streaming: every element is read once and written once, in 16-byte vectors with plain loads and
// stores (cache hints cost 2 to 9 % on an H200). A block takes a few rows, `threads` threads each,
// and either whole rows (probs_grad is a sum over the row) or a tile of columns.
#include "custom_ops/common/cuda_async.cuh"
#include "custom_ops/common/cuda_launch.cuh"
#include "custom_ops/common/cuda_reduce.cuh"
#include "custom_ops/common/cuda_vector.cuh"
#include "custom_ops/common/dispatch.h"
#include "custom_ops/swiglu/swiglu.h"
#include "custom_ops/swiglu/swiglu_cuda_element.cuh"

namespace paddle_fused {
namespace gpu {

namespace {

// How rows x cols is cut: tasks of blockDim.y rows and tile_cols columns, row tiles innermost so
// that neighbouring blocks read neighbouring memory.
struct Tiles {
  int64_t rows, cols;
  int64_t tile_cols, tiles;  // tiles of a row
  int64_t tasks;
};

struct Task {
  int64_t row, begin, end;  // begin: this thread's first column
};

// Rows that are not there have no columns.
template <class T>
PADDLE_FUSED_INLINE Task TaskOf(const Tiles& t, int64_t index) {
  int64_t row_block = index, tile = 0;
  if (t.tiles > 1) {
    row_block = Quotient(index, t.tiles, t.tasks);
    tile = index - row_block * t.tiles;
  }
  const int64_t first = tile * t.tile_cols;
  const int64_t last = first + t.tile_cols;
  const int64_t row = row_block * blockDim.y + threadIdx.y;
  if (row >= t.rows) return {0, 0, 0};
  return {row, first + threadIdx.x * kVector<T>, last < t.cols ? last : t.cols};
}

// Calls body(j, left, v) for this thread's vectors of one task: v[k] are the elements of tensor k
// from column j on, `left` of them there. U vectors of every tensor are on their way before the
// first is used. A null tensor is zeros.
template <bool kAligned, int U, bool kMayBeNull, class T, int K, class Body>
PADDLE_FUSED_INLINE void ForVectors(const T* const (&from)[K], int64_t begin, int64_t end,
                                    const Body& body) {
  constexpr int N = kVector<T>;
  const int step = blockDim.x * N;
  for (int64_t j = begin; j < end; j += U * step) {
    Raw<T, N> raw[U][K];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t at = j + u * step;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (kMayBeNull) raw[u][k] = {};
        if (at < end && !(kMayBeNull && from[k] == nullptr)) {
          raw[u][k] = LoadRaw<kAligned, N>(from[k] + at, end - at);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t at = j + u * step;
      if (at >= end) break;
      body(at, end - at, raw[u]);
    }
  }
}

// Before the previous kernel ends: the first vectors of the block's first task.
template <int U, class T, int K>
PADDLE_FUSED_INLINE void PrefetchVectors(const T* const (&from)[K], int64_t begin, int64_t end) {
  if (!InFirstWave()) return;
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t at = begin + u * static_cast<int>(blockDim.x) * kVector<T>;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (at < end) Prefetch(from[k] + at);
    }
  }
}

// Calls body(row, at) for this thread's elements of one task, one by one.
template <class T, class Body>
PADDLE_FUSED_INLINE void ForElements(const Task& task, const Body& body) {
  constexpr int N = kVector<T>;
#pragma unroll 1
  for (int64_t j = task.begin; j < task.end; j += blockDim.x * N) {
    const int count = static_cast<int>(task.end - j < N ? task.end - j : N);
#pragma unroll 1
    for (int i = 0; i < count; ++i) body(j + i);
  }
}

template <class T>
PADDLE_FUSED_INLINE void SwigluAgain(const SwigluParams& p, Task task) {
  if constexpr (sizeof(T) < 8) {
    const float prob = p.probs != nullptr ? p.probs[task.row] : 1.0f;
    ForElements<T>(task, [&](int64_t j) {
      const int64_t in = task.row * p.in_stride + j, out = task.row * p.cols + j;
      const float a = Widen<float>(static_cast<const T*>(p.gate)[in]);
      const float b = Widen<float>(static_cast<const T*>(p.up)[in]);
      if (!StrayValue<T>(a, b, Swiglu(b, SigmoidFor<T>(a)), prob)) return;
      const auto wide = TermsOf<double, double>(a, b, 0, prob);
      static_cast<T*>(p.out)[out] = Narrow<T>::From(ForRoundingTo<T>(wide.weighted));
    });
  }
}

template <class T, int U, bool kAligned>
__global__ void __launch_bounds__(U == 1 ? 256 : 128, U == 1 ? 5 : 9)
    SwigluKernel(const __grid_constant__ SwigluParams p, const __grid_constant__ Tiles tiles) {
  using A = Acc<T>;
  constexpr int N = kVector<T>;
  bool started = false;
  for (int64_t index = blockIdx.x; index < tiles.tasks; index += gridDim.x) {
    const Task task = TaskOf<T>(tiles, index);
    const T* const from[2] = {static_cast<const T*>(p.gate) + task.row * p.in_stride,
                              static_cast<const T*>(p.up) + task.row * p.in_stride};
    T* const out = static_cast<T*>(p.out) + task.row * tiles.cols;
    if (!started) {
      if (kAligned) PrefetchVectors<U>(from, task.begin, task.end);
      WaitForPreviousKernel();
      LetNextKernelStart();
      started = true;
    }
    Watch<T> watch;
    A prob = 1;
    ForVectors<kAligned, U, false>(from, task.begin, task.end,
                                   [&](int64_t j, int64_t left, const Raw<T, N>(&raw)[2]) {
                                     if (p.probs != nullptr)
                                       prob = static_cast<A>(p.probs[task.row]);
                                     A a[N], b[N];
                                     Unpack(raw[0], a);
                                     Unpack(raw[1], b);
                                     watch.Gates(raw[0]);
#pragma unroll
                                     for (int i = 0; i < N; ++i) {
                                       const A value = Swiglu(b[i], SigmoidFor<T>(a[i]));
                                       if constexpr (sizeof(T) == 4)
                                         watch.stray |= StrayValue<T>(a[i], b[i], value, prob);
                                       a[i] = value * prob;
                                     }
                                     const Raw<T, N> packed = Pack<T>(a);
                                     watch.Results(packed);
                                     StoreRaw<kAligned>(out + j, packed, left);
                                   });
    if (sizeof(T) < 8 && watch.InForward(prob)) SwigluAgain<T>(p, task);
  }
}

// Returns this thread's share of probs_grad.
template <class T, bool kWeighted>
PADDLE_FUSED_INLINE float SwigluBackwardAgain(const SwigluBackwardParams& p, Task task) {
  float sum = 0;
  if constexpr (sizeof(T) < 8) {
    const float prob = kWeighted ? p.probs[task.row] : 1.0f;
    ForElements<T>(task, [&](int64_t j) {
      const int64_t in = task.row * p.in_stride + j, out = task.row * p.cols + j;
      const float a = Widen<float>(static_cast<const T*>(p.gate)[in]);
      const float b = Widen<float>(static_cast<const T*>(p.up)[in]);
      const float g = Widen<float>(static_cast<const T*>(p.out_grad)[out]);
      const float value = Swiglu(b, SigmoidFor<T, true>(a));
      const auto wide = TermsOf<double, double>(a, b, g, prob);
      sum += static_cast<float>(g * wide.value);
      if (StrayGrads<T>(a, b, g, value, prob)) {
        static_cast<T*>(p.gate_grad)[in] = Narrow<T>::From(ForRoundingTo<T>(wide.gate_grad));
        static_cast<T*>(p.up_grad)[in] = Narrow<T>::From(ForRoundingTo<T>(wide.up_grad));
      }
      // By the forward's rule.
      if (kWeighted && p.out != nullptr && StrayValue<T>(a, b, value, prob)) {
        static_cast<T*>(p.out)[out] = Narrow<T>::From(ForRoundingTo<T>(wide.weighted));
      }
    });
  }
  return sum;
}

// kWeighted: with probs, whole rows; kOut: stores the forward's result too.
template <class T, bool kWeighted, bool kOut, bool kAligned>
__global__ void __launch_bounds__(512, 2)
    SwigluBackwardKernel(const __grid_constant__ SwigluBackwardParams p,
                         const __grid_constant__ Tiles tiles) {
  using A = Acc<T>;
  constexpr int N = kVector<T>;
  __shared__ A slots[2][16];
  bool started = false;
  int parity = 0;
  for (int64_t index = blockIdx.x; index < tiles.tasks; index += gridDim.x) {
    const Task task = TaskOf<T>(tiles, index);
    const T* const from[3] = {static_cast<const T*>(p.gate) + task.row * p.in_stride,
                              static_cast<const T*>(p.up) + task.row * p.in_stride,
                              static_cast<const T*>(p.out_grad) + task.row * tiles.cols};
    T* const gate_grad = static_cast<T*>(p.gate_grad) + task.row * p.in_stride;
    T* const up_grad = static_cast<T*>(p.up_grad) + task.row * p.in_stride;
    T* const out = static_cast<T*>(p.out) + task.row * tiles.cols;
    if (!started) {
      if (kAligned) PrefetchVectors<1>(from, task.begin, task.end);
      WaitForPreviousKernel();
      LetNextKernelStart();
      started = true;
    }
    const A prob = kWeighted ? static_cast<A>(p.probs[task.row]) : A{1};
    A sum[1] = {0};
    Watch<T> watch;
    ForVectors<kAligned, 1, false>(
        from, task.begin, task.end, [&](int64_t j, int64_t left, const Raw<T, N>(&raw)[3]) {
          A a[N], b[N], g[N], o[N];
          Unpack(raw[0], a);
          Unpack(raw[1], b);
          Unpack(raw[2], g);
          watch.Gates(raw[0]);
          watch.Factors(raw[0], raw[1]);
          watch.Upstream(raw[2]);
#pragma unroll
          for (int i = 0; i < N; ++i) {
            const auto t = TermsOf<T, A, true>(a[i], b[i], g[i], prob);
            if constexpr (sizeof(T) == 4) {
              watch.stray |= StrayGrads<T>(a[i], b[i], g[i], t.value, prob);
            }
            if constexpr (kWeighted) sum[0] += g[i] * t.value;
            a[i] = t.gate_grad, b[i] = t.up_grad, o[i] = t.weighted;
          }
          StoreRaw<kAligned>(gate_grad + j, Pack<T>(a), left);
          StoreRaw<kAligned>(up_grad + j, Pack<T>(b), left);
          if constexpr (kOut) StoreRaw<kAligned>(out + j, Pack<T>(o), left);
        });
    if (sizeof(T) < 8 && watch.template InBackward<kWeighted>(prob, sum[0])) {
      sum[0] = SwigluBackwardAgain<T, kWeighted>(p, task);
    }
    if constexpr (kWeighted) {
      GroupSum(sum, slots[parity] + threadIdx.y * (blockDim.x / 32), threadIdx.x, blockDim.x,
               BlockBarrier{});
      parity ^= 1;
      if (task.end > 0 && threadIdx.x == 0) p.probs_grad[task.row] = static_cast<float>(sum[0]);
    }
  }
}

template <class T>
__device__ __noinline__ SwigluSecond<float> SecondInDouble(float a, float b, float g, float va,
                                                           float vb) {
  const double wide = a;
  const auto t =
      SwigluDoubleBackward(wide, static_cast<double>(b), static_cast<double>(g),
                           static_cast<double>(va), static_cast<double>(vb), SigmoidOf(wide));
  return {ForRoundingTo<T>(t.upstream), ForRoundingTo<T>(t.gate), ForRoundingTo<T>(t.up)};
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(256)
    SwigluDoubleBackwardKernel(const __grid_constant__ SwigluDoubleBackwardParams p,
                               const __grid_constant__ Tiles tiles) {
  using A = Acc<T>;
  constexpr int N = kVector<T>;
  WaitForPreviousKernel();
  LetNextKernelStart();
  for (int64_t index = blockIdx.x; index < tiles.tasks; index += gridDim.x) {
    const Task task = TaskOf<T>(tiles, index);
    const int64_t in = task.row * p.in_stride, out = task.row * tiles.cols;
    const auto row = [](const void* base, int64_t at) {
      return base == nullptr ? nullptr : static_cast<const T*>(base) + at;
    };
    const T* const from[5] = {row(p.gate, in), row(p.up, in), row(p.out_grad, out),
                              row(p.gate_grad_grad, in), row(p.up_grad_grad, in)};
    ForVectors<kAligned, 1, true>(
        from, task.begin, task.end, [&](int64_t j, int64_t left, const Raw<T, N>(&raw)[5]) {
          A a[N], b[N], g[N], va[N], vb[N];
          Unpack(raw[0], a);
          Unpack(raw[1], b);
          Unpack(raw[2], g);
          Unpack(raw[3], va);
          Unpack(raw[4], vb);
#pragma unroll
          for (int i = 0; i < N; ++i) {
            auto second = SwigluDoubleBackward(a[i], b[i], g[i], va[i], vb[i], SigmoidFor<T>(a[i]));
            if constexpr (sizeof(T) < 8) {
              if (a[i] < kFarGate) second = SecondInDouble<T>(a[i], b[i], g[i], va[i], vb[i]);
            }
            a[i] = second.gate;
            b[i] = second.up;
            g[i] = second.upstream;
          }
          StoreRaw<kAligned>(static_cast<T*>(p.gate_out) + in + j, Pack<T>(a), left);
          StoreRaw<kAligned>(static_cast<T*>(p.up_out) + in + j, Pack<T>(b), left);
          StoreRaw<kAligned>(static_cast<T*>(p.out_grad_grad) + out + j, Pack<T>(g), left);
        });
  }
}

// Pointers and row starts on 16-byte boundaries, rows of whole vectors.
template <class Params>
bool IsAligned(const Params& p, int vector, std::initializer_list<const void*> pointers) {
  return p.cols % vector == 0 && p.in_stride % vector == 0 && AlignedTo16(pointers);
}

// Contiguous rows without probs are one long row to an elementwise kernel: cut them evenly.
template <class Params>
void Flatten(Params* p) {
  constexpr int64_t kCols = 16384;
  if (p->in_stride != p->cols) return;
  const int64_t total = p->rows * p->cols;
  p->rows = total % kCols == 0 ? total / kCols : 1;
  p->cols = p->in_stride = total / p->rows;
}

// Column tiles of `vectors` vectors a thread.
Tiles CutColumns(int64_t rows, int64_t cols, int vector, const SwigluTuning& t) {
  Tiles tiles{rows, cols, static_cast<int64_t>(t.threads) * t.vectors * vector, 1, 0};
  tiles.tiles = CeilDiv(cols, tiles.tile_cols);
  tiles.tasks = CeilDiv<int64_t>(rows, t.rows) * tiles.tiles;
  return tiles;
}
Tiles WholeRows(int64_t rows, int64_t cols, const SwigluTuning& t) {
  return {rows, cols, cols, 1, CeilDiv<int64_t>(rows, t.rows)};
}
LaunchShape ShapeOf(const Tiles& tiles, const SwigluTuning& t) {
  return {dim3(GridSize(tiles.tasks)),
          dim3(static_cast<unsigned>(t.threads), static_cast<unsigned>(t.rows))};
}

// Threads and vectors that divide a row evenly into tiles; two vectors a thread where they do.
SwigluTuning ElementwiseTuning(int64_t cols, int vector, int most_vectors) {
  const int64_t all = CeilDiv<int64_t>(cols, vector);
  for (int vectors = most_vectors; vectors > 1; vectors /= 2) {
    for (int threads : {128, 96, 64}) {
      const int64_t tile = threads * vectors;
      if (all >= tile && (CeilDiv(all, tile) * tile - all) * 16 <= all) {
        return {threads, threads >= 96 ? 1 : 2, vectors};
      }
    }
  }
  // Small blocks start and end at different times, which keeps memory busy.
  if (all % 128 == 0) return {128, 1, 1};
  const int threads = WholeWarps(CeilDiv<int64_t>(all, CeilDiv<int64_t>(all, 256)));
  return {threads, std::max(1, 256 / threads), 1};
}

// The order of the sum over a row depends on the threads, so they depend on the width alone.
SwigluTuning RowTuning(int64_t cols, int vector) {
  const int64_t all = CeilDiv<int64_t>(cols, vector);
  int threads = 256;
  if (all <= 256) {
    // One turn, or two of half the threads.
    threads = WholeWarps(CeilDiv<int64_t>(all, all > 128 ? 2 : 1));
  } else {
    int64_t best = INT64_MAX;
    for (int candidate : {all > 1024 ? 448 : 256, 256, 512, 448, 384, 320, 288, 224, 192}) {
      const int64_t idle = CeilDiv<int64_t>(all, candidate) * candidate - all;
      if (idle < best) best = idle, threads = candidate;
    }
  }
  return {threads, threads >= 96 ? 1 : 256 / threads, 1};
}

template <class T, bool kAligned>
void RunBackward(const SwigluBackwardParams& p, cudaStream_t stream, const SwigluTuning& t) {
  constexpr int N = kVector<T>;
  const bool weighted = p.probs != nullptr;
  const Tiles tiles = weighted ? WholeRows(p.rows, p.cols, t) : CutColumns(p.rows, p.cols, N, t);
  const auto kernel = !weighted          ? SwigluBackwardKernel<T, false, false, kAligned>
                      : p.out == nullptr ? SwigluBackwardKernel<T, true, false, kAligned>
                                         : SwigluBackwardKernel<T, true, true, kAligned>;
  Launch("swiglu backward", kernel, ShapeOf(tiles, t), stream, p, tiles);
}

}  // namespace
}  // namespace gpu

void LaunchSwigluCuda(const SwigluParams& params, void* stream, const SwigluTuning* tuning) {
  using namespace gpu;
  if (params.rows == 0 || params.cols == 0) return;
  SwigluParams p = params;
  if (p.probs == nullptr) Flatten(&p);
  DispatchDType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVector<T>;
    const SwigluTuning t = tuning != nullptr ? *tuning : ElementwiseTuning(p.cols, N, 2);
    const Tiles tiles = CutColumns(p.rows, p.cols, N, t);
    const bool aligned = IsAligned(p, N, {p.gate, p.up, p.out});
    const auto kernel = !aligned         ? SwigluKernel<T, 1, false>
                        : t.vectors == 1 ? SwigluKernel<T, 1, true>
                                         : SwigluKernel<T, 2, true>;
    Launch("swiglu", kernel, ShapeOf(tiles, t), static_cast<cudaStream_t>(stream), p, tiles);
  });
}

void LaunchSwigluBackwardCuda(const SwigluBackwardParams& params, void* stream,
                              const SwigluTuning* tuning) {
  using namespace gpu;
  if (params.rows == 0 || params.cols == 0) return;
  SwigluBackwardParams p = params;
  if (p.probs == nullptr) Flatten(&p);
  DispatchDType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool aligned =
        IsAligned(p, kVector<T>, {p.gate, p.up, p.out_grad, p.gate_grad, p.up_grad, p.out});
    const SwigluTuning t = tuning != nullptr    ? *tuning
                           : p.probs != nullptr ? RowTuning(p.cols, kVector<T>)
                                                : ElementwiseTuning(p.cols, kVector<T>, 1);
    const auto run = aligned ? RunBackward<T, true> : RunBackward<T, false>;
    run(p, static_cast<cudaStream_t>(stream), t);
  });
}

void LaunchSwigluDoubleBackwardCuda(const SwigluDoubleBackwardParams& params, void* stream) {
  using namespace gpu;
  if (params.rows == 0 || params.cols == 0) return;
  SwigluDoubleBackwardParams p = params;
  Flatten(&p);
  DispatchDType(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVector<T>;
    const SwigluTuning t = ElementwiseTuning(p.cols, N, 1);
    const Tiles tiles = CutColumns(p.rows, p.cols, N, t);
    const bool aligned = IsAligned(p, N,
                                   {p.gate, p.up, p.out_grad, p.gate_grad_grad, p.up_grad_grad,
                                    p.gate_out, p.up_out, p.out_grad_grad});
    const auto kernel =
        aligned ? SwigluDoubleBackwardKernel<T, true> : SwigluDoubleBackwardKernel<T, false>;
    Launch("swiglu double backward", kernel, ShapeOf(tiles, t), static_cast<cudaStream_t>(stream),
           p, tiles);
  });
}

}  // namespace paddle_fused
