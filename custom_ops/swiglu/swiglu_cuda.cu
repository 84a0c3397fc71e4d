// SwiGLU on CUDA: kernels and launchers.
//
// Streaming: every element is read once and written once, in 16-byte vectors with plain loads and
// stores (cache hints cost 2 to 9 % on an H200). A block takes a few rows, `threads` threads each,
// and either whole rows (probs_grad is a sum over the row) or a tile of columns.
#include "custom_ops/common/cuda_launch.cuh"
#include "custom_ops/common/cuda_math.cuh"
#include "custom_ops/common/dispatch.h"
#include "custom_ops/swiglu/swiglu.h"

namespace paddle_fused {
namespace gpu {

#include "custom_ops/swiglu/swiglu_math.h"

namespace {

// The sigmoid of a gate below this is near or below the smallest float32, and its products with a
// gate and an up need not be. For such gates s and silu are held times 2^96 until the end.
constexpr float kFarGate = -87.0f;

// What results are to be multiplied with that come of SigmoidFor<T, true>.
template <class T, class A>
PADDLE_FUSED_INLINE A ScaleFor(A a) {
  if constexpr (sizeof(T) == 4) return a < kFarGate ? 0x1p-96f : 1.0f;
  return 1;
}

// As exact as results of type T can show.
template <class T, bool kScaled, class A>
PADDLE_FUSED_INLINE Sigmoid<A> SigmoidFor(A a) {
  if constexpr (sizeof(T) == 8) {
    return SigmoidOf(a);
  } else if constexpr (sizeof(T) == 4) {
    const bool scaled = kScaled && a < kFarGate;
    const float e = ExpNonPositiveExact(-Abs(a), scaled ? 96 : 0);
    // q = 1 / (1 + e), with what the sum 1 + e loses. One rounding less in silu than a s has.
    const float addend = scaled ? 0.0f : e;
    const float d = 1 + addend;
    const float lost = addend - (d - 1);
    float q = ReciprocalBrief(d);
    q = Fma(q, NegMulAdd(d, q, 1.0f) - lost, q);
    Sigmoid<float> sig = SigmoidFrom(a, e, q);
    sig.silu = Select(a < 0, a * e, a) * q;
    return sig;
  } else {
    const float e = ExpNonPositiveBrief(-Abs(a));
    return SigmoidFrom(a, e, ReciprocalBrief(1 + e));
  }
}

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

template <int N>
PADDLE_FUSED_INLINE Task TaskOf(const Tiles& t, int64_t index) {
  int64_t row_block = index, tile = 0;
  if (t.tiles > 1) {
    if (t.tasks <= 0x7fffffff) {
      row_block = static_cast<uint32_t>(index) / static_cast<uint32_t>(t.tiles);
    } else {
      row_block = index / t.tiles;
    }
    tile = index - row_block * t.tiles;
  }
  const int64_t first = tile * t.tile_cols;
  const int64_t last = first + t.tile_cols;
  return {row_block * blockDim.y + threadIdx.y, first + threadIdx.x * N,
          last < t.cols ? last : t.cols};
}

template <class T, int U, bool kAligned>
__global__ void __launch_bounds__(256, 5)
    SwigluKernel(const __grid_constant__ SwigluParams p, const __grid_constant__ Tiles tiles) {
  using A = Acc<T>;
  constexpr int N = kVector<T>;
  WaitForPreviousKernel();
  LetNextKernelStart();
  for (int64_t index = blockIdx.x; index < tiles.tasks; index += gridDim.x) {
    const Task task = TaskOf<N>(tiles, index);
    if (task.row >= tiles.rows) continue;
    const T* gate = static_cast<const T*>(p.gate) + task.row * p.in_stride;
    const T* up = static_cast<const T*>(p.up) + task.row * p.in_stride;
    T* out = static_cast<T*>(p.out) + task.row * tiles.cols;
    const int step = blockDim.x * N;
    for (int64_t j = task.begin; j < task.end; j += U * step) {
      Raw<T, N> raw_a[U], raw_b[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t at = j + u * step;
        if (at < task.end) {
          raw_a[u] = LoadRaw<kAligned, N>(gate + at, task.end - at);
          raw_b[u] = LoadRaw<kAligned, N>(up + at, task.end - at);
        }
      }
      const A prob = p.probs != nullptr ? static_cast<A>(p.probs[task.row]) : A{1};
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t at = j + u * step;
        if (at >= task.end) break;
        A a[N], b[N];
        Unpack(raw_a[u], a);
        Unpack(raw_b[u], b);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const auto sig = SigmoidFor<T, true>(a[i]);
          a[i] = Swiglu(b[i], sig) * prob * ScaleFor<T>(a[i]);
        }
        StoreRaw<kAligned>(out + at, Pack<T>(a), task.end - at);
      }
    }
  }
}

// kWeighted: with probs, whole rows; kOut: stores the forward's result too.
template <class T, bool kWeighted, bool kOut, bool kAligned>
__global__ void __launch_bounds__(512)
    SwigluBackwardKernel(const __grid_constant__ SwigluBackwardParams p,
                         const __grid_constant__ Tiles tiles) {
  using A = Acc<T>;
  constexpr int N = kVector<T>;
  __shared__ A slots[2][16 * 32];
  WaitForPreviousKernel();
  LetNextKernelStart();
  int parity = 0;
  for (int64_t index = blockIdx.x; index < tiles.tasks; index += gridDim.x) {
    const Task task = TaskOf<N>(tiles, index);
    const bool active = task.row < tiles.rows;
    const int64_t row = active ? task.row : 0;
    const T* gate = static_cast<const T*>(p.gate) + row * p.in_stride;
    const T* up = static_cast<const T*>(p.up) + row * p.in_stride;
    const T* out_grad = static_cast<const T*>(p.out_grad) + row * tiles.cols;
    T* gate_grad = static_cast<T*>(p.gate_grad) + row * p.in_stride;
    T* up_grad = static_cast<T*>(p.up_grad) + row * p.in_stride;
    T* out = static_cast<T*>(p.out) + row * tiles.cols;
    const A prob = kWeighted ? static_cast<A>(p.probs[row]) : A{1};
    A sum[1] = {0};
    const int64_t end = active ? task.end : 0;
    for (int64_t j = task.begin; j < end; j += blockDim.x * N) {
      const Raw<T, N> raw_a = LoadRaw<kAligned, N>(gate + j, end - j);
      const Raw<T, N> raw_b = LoadRaw<kAligned, N>(up + j, end - j);
      const Raw<T, N> raw_g = LoadRaw<kAligned, N>(out_grad + j, end - j);
      A a[N], b[N], g[N], value[N];
      Unpack(raw_a, a);
      Unpack(raw_b, b);
      Unpack(raw_g, g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const auto sig = SigmoidFor<T, true>(a[i]);
        const A scale = ScaleFor<T>(a[i]);
        value[i] = Swiglu(b[i], sig);
        const auto grads = SwigluBackward(b[i], kWeighted ? g[i] * prob : g[i], sig);
        if constexpr (kWeighted) sum[0] += g[i] * value[i] * scale;
        a[i] = grads.gate * scale;
        b[i] = grads.up * scale;
        value[i] = value[i] * prob * scale;
      }
      StoreRaw<kAligned>(gate_grad + j, Pack<T>(a), end - j);
      StoreRaw<kAligned>(up_grad + j, Pack<T>(b), end - j);
      if constexpr (kOut) StoreRaw<kAligned>(out + j, Pack<T>(value), end - j);
    }
    if constexpr (kWeighted) {
      GroupSum(sum, slots[parity] + threadIdx.y * 32, threadIdx.x, blockDim.x, BlockBarrier{});
      parity ^= 1;
      if (active && threadIdx.x == 0) p.probs_grad[row] = static_cast<float>(sum[0]);
    }
  }
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
    const Task task = TaskOf<N>(tiles, index);
    if (task.row >= tiles.rows) continue;
    const int64_t in = task.row * p.in_stride, out = task.row * tiles.cols;
    for (int64_t j = task.begin; j < task.end; j += blockDim.x * N) {
      const int64_t left = task.end - j;
      const auto load = [&](const void* base, int64_t at, A(&v)[N]) {
        if (base == nullptr) {
#pragma unroll
          for (int i = 0; i < N; ++i) v[i] = 0;
        } else {
          Unpack(LoadRaw<kAligned, N>(static_cast<const T*>(base) + at, left), v);
        }
      };
      A a[N], b[N], g[N], va[N], vb[N];
      load(p.gate, in + j, a);
      load(p.up, in + j, b);
      load(p.out_grad, out + j, g);
      load(p.gate_grad_grad, in + j, va);
      load(p.up_grad_grad, in + j, vb);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const auto second =
            SwigluDoubleBackward(a[i], b[i], g[i], va[i], vb[i], SigmoidFor<T, false>(a[i]));
        a[i] = second.gate;
        b[i] = second.up;
        g[i] = second.upstream;
      }
      StoreRaw<kAligned>(static_cast<T*>(p.gate_out) + in + j, Pack<T>(a), left);
      StoreRaw<kAligned>(static_cast<T*>(p.up_out) + in + j, Pack<T>(b), left);
      StoreRaw<kAligned>(static_cast<T*>(p.out_grad_grad) + out + j, Pack<T>(g), left);
    }
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
  const int threads = WholeWarps(CeilDiv<int64_t>(all, CeilDiv<int64_t>(all, 256)));
  return {threads, std::max(1, 256 / threads), 1};
}

// The order of the sum over a row depends on the threads, so they depend on the width alone.
SwigluTuning RowTuning(int64_t cols, int vector) {
  const int64_t all = CeilDiv<int64_t>(cols, vector);
  int threads = 256;
  if (all <= 256) {
    // One turn, or two of half the threads.
    threads = WholeWarps(CeilDiv<int64_t>(all, all > 192 ? 2 : 1));
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
void RunBackward(const SwigluBackwardParams& p, cudaStream_t stream, const SwigluTuning* tuning) {
  constexpr int N = kVector<T>;
  const bool weighted = p.probs != nullptr;
  const SwigluTuning t = tuning != nullptr ? *tuning
                         : weighted        ? RowTuning(p.cols, N)
                                           : ElementwiseTuning(p.cols, N, 1);
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
    const auto run = aligned ? RunBackward<T, true> : RunBackward<T, false>;
    run(p, static_cast<cudaStream_t>(stream), tuning);
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
