// RMSNorm backward on CUDA.
//
// The staged kernel reads x and dy once. Blocks stay for the whole launch, each with one or several
// rows at a time; cp.async keeps the next rows on their way into shared memory while one is worked
// on, every thread fetching what it will use itself, so that only the row's sums need a barrier.
// Sums over rows (dweight) stay in registers until the end, then go out as one partial row a block;
// a second kernel adds the partial rows in order. A row that outgrows a block is shared by a
// cluster, whose blocks exchange their parts of the sums through distributed shared memory.
//
// Other dtypes, gradients and roundings (float64, biases, a dy of another dtype, kNone) take plain
// kernels.
#include "custom_ops/common/cuda_launch.cuh"
#include "custom_ops/common/cuda_math.cuh"
#include "custom_ops/common/dispatch.h"
#include "custom_ops/rms_norm/rms_norm_cuda.cuh"

namespace paddle_fused {
namespace gpu {

#include "custom_ops/rms_norm/rms_norm_math.h"

namespace {

// ---- Second stage: sums of partial rows
// -----------------------------------------------------------

// dst[j] = sum of partials[i * cols + j] over i < count, in an order that depends on count alone.
template <class A>
__global__ void __launch_bounds__(512)
    SumPartialsKernel(const A* partials, int count, int64_t cols, void* dst, DType dtype) {
  __shared__ A tile[16][33];
  WaitForPreviousKernel();
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * 32; base < cols;
       base += static_cast<int64_t>(gridDim.x) * 32) {
    const int64_t j = base + threadIdx.x;
    A sum = 0;
    if (j < cols) {
#pragma unroll 8
      for (int i = threadIdx.y; i < count; i += 16) sum += partials[i * cols + j];
    }
    tile[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && j < cols) {
      A total = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) total += tile[i][threadIdx.x];
      StoreAny(dst, dtype, j, total);
    }
    __syncthreads();
  }
}

template <class A>
void SumPartials(const A* partials, int count, int64_t cols, void* dst, DType dtype,
                 cudaStream_t stream) {
  const LaunchShape shape{dim3(GridSize(CeilDiv<int64_t>(cols, 32))), dim3(32, 16)};
  Launch("rms_norm column sums", SumPartialsKernel<A>, shape, stream, partials, count, cols, dst,
         dtype);
}

// ---- Staged kernel
// --------------------------------------------------------------------------------

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
PADDLE_FUSED_INLINE unsigned ClusterRank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
PADDLE_FUSED_INLINE void ClusterBarrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
PADDLE_FUSED_INLINE void StoreToRank(const float* own, unsigned rank, float v) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(SharedAddress(own)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(v) : "memory");
}
#else  // the host launches no cluster there
PADDLE_FUSED_INLINE unsigned ClusterRank() { return 0; }
PADDLE_FUSED_INLINE void ClusterBarrier() {}
PADDLE_FUSED_INLINE void StoreToRank(const float*, unsigned, float) {}
#endif

struct StagedPlan {
  int stages, cluster;
  int block_cols;   // columns of a row that one block holds
  float* partials;  // [blocks or clusters, cols], or null when nobody needs dweight
};

constexpr int kMaxCluster = 8;

// Threads: x across a row (whole warps), y rows. V vectors a thread. kExtra: a gradient of the
// residual comes in, and one may go out.
template <class T, int V, int kThreads, bool kExtra, bool kCluster, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    RmsNormBackwardKernel(const __grid_constant__ RmsNormBackwardParams p,
                          const __grid_constant__ RowConstants c,
                          const __grid_constant__ StagedPlan plan) {
  constexpr int N = kVector<T>;
  constexpr int kArrays = kExtra ? 3 : 2;
  constexpr bool kKeep = V <= 2;  // a thread's part of the row stays in registers between passes
  extern __shared__ uint4 shared[];
  __shared__ float slots[2][2][kCluster ? kMaxCluster * 16 : 32];
  const int tx = blockDim.x, thread = threadIdx.x;
  const unsigned rank = kCluster ? ClusterRank() : 0;
  const int begin = kCluster ? static_cast<int>(rank) * plan.block_cols : 0;
  const int left = static_cast<int>(p.cols) - begin;
  const int cols = left < plan.block_cols ? left : plan.block_cols;  // of this block
  const int first = thread * N, step = tx * N;
  const int64_t group = static_cast<int64_t>(blockIdx.x) / (kCluster ? plan.cluster : 1);
  const int64_t groups = gridDim.x / (kCluster ? plan.cluster : 1);
  const int64_t row_step = groups * blockDim.y;
  const bool round_hat = sizeof(T) == 2 && p.mode != CastingMode::kGemma;
  const int64_t row_elements = row_step * p.cols;
  WaitForPreviousKernel();
  LetNextKernelStart();

  int64_t row = group * blockDim.y + threadIdx.y;
  bool mine[V];  // vectors of the row that are there
#pragma unroll
  for (int k = 0; k < V; ++k) mine[k] = first + k * step < cols;
  // Element of this thread's first vector: of the row at hand, and of the next one to fetch.
  int64_t at = row * p.cols + begin + first, fetch_at = at;
  int64_t fetch_row = row;

  // This thread's vectors of one stage: [array][k], `tx` vectors apart.
  const uint32_t array_bytes = V * tx * 16, stage_bytes = kArrays * array_bytes;
  const uint32_t own =
      SharedAddress(shared) + threadIdx.y * plan.stages * stage_bytes + thread * 16;
  const auto fetch = [&](int stage) {
    if constexpr (kAligned) {
      if (fetch_row < p.rows) {
        const uint32_t to = own + stage * stage_bytes;
        const T* const from_x = static_cast<const T*>(p.x) + fetch_at;
        const T* const from_g = static_cast<const T*>(p.y_grad) + fetch_at;
        const T* const from_e = static_cast<const T*>(p.residual_out_grad) + fetch_at;
#pragma unroll
        for (int k = 0; k < V; ++k) {
          if (!mine[k]) continue;
          CopyAsync(to + k * tx * 16, from_x + k * step);
          CopyAsync(to + array_bytes + k * tx * 16, from_g + k * step);
          if constexpr (kExtra) CopyAsync(to + 2 * array_bytes + k * tx * 16, from_e + k * step);
        }
      }
      CommitCopies();
      fetch_row += row_step;
      fetch_at += row_elements;
    }
  };
  const auto load = [&](const void* base, int stage, int array, int k) {
    Raw<T, N> raw = {};
    if (mine[k]) {
      if constexpr (kAligned) {
        raw = LoadShared<T, N>(own + stage * stage_bytes + array * array_bytes + k * tx * 16);
      } else {
        raw = LoadElements<T, N>(static_cast<const T*>(base) + at + k * step,
                                 cols - first - k * step);
      }
    }
    return raw;
  };

  float scale[V][N];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const int j = first + k * step;
#pragma unroll
    for (int i = 0; i < N; ++i) scale[k][i] = 1;
    if (p.weight != nullptr && mine[k]) {
      LoadFloatsAny<kAligned>(p.weight, p.weight_dtype, begin + j, cols - j, scale[k]);
#pragma unroll
      for (int i = 0; i < N; ++i) scale[k][i] += static_cast<float>(p.offset);
    }
  }
  float sums[V][N] = {};

  for (int s = 0; s + 1 < plan.stages; ++s) fetch(s);
  if constexpr (kCluster) ClusterBarrier();  // all blocks run before one writes into another
  int stage = 0, parity = 0;
  for (; row < p.rows; row += row_step, at += row_elements) {
    fetch(stage == 0 ? plan.stages - 1 : stage - 1);
    if constexpr (kAligned) WaitForCopies(plan.stages - 1);
    Raw<T, N> raw_x[V], raw_g[V];
    float sum[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < V; ++k) {
      raw_x[k] = load(p.x, stage, 0, k);
      raw_g[k] = load(p.y_grad, stage, 1, k);
      float v[N], g[N];
      Unpack(raw_x[k], v);
      Unpack(raw_g[k], g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sum[0] = Fma(v[i], v[i], sum[0]);
        sum[1] = Fma(g[i] * scale[k][i], v[i], sum[1]);
      }
    }
    if constexpr (kCluster) {
      const int warps = tx / 32, lane = thread % 32, half = lane / 16;
      float part = WarpSumOfTwo(sum, lane);
      // A lane for each block of the cluster: the first sum from the lower half warp, the second
      // from the upper.
      if (lane % 16 < plan.cluster) {
        StoreToRank(&slots[parity][half][rank * warps + thread / 32], lane % 16, part);
      }
      ClusterBarrier();
      part = 0;
      for (int i = lane % 16; i < plan.cluster * warps; i += 16) part += slots[parity][half][i];
      part = HalfWarpSums(part);
      sum[0] = __shfl_sync(0xffffffffu, part, 0);
      sum[1] = __shfl_sync(0xffffffffu, part, 16);
    } else {
      GroupSumOfTwo(sum, slots[parity][0] + threadIdx.y * (tx / 32) * 2, thread, tx,
                    GroupBarrier{1 + static_cast<int>(threadIdx.y), tx});
    }
    parity ^= 1;
    const auto value = [&](int64_t j) {
      return Widen<float>(static_cast<const T*>(p.x)[row * p.cols + j]);
    };
    const float r =
        p.inv_rms != nullptr ? p.inv_rms[row] : InvRms<T>(sum[0], p.cols, p.mode, c, value);
    float sum_mz = sum[1] * r;
    if constexpr (!std::is_same_v<T, Float16>) {
      if (!SquaresAreSafe(sum[0] * c.inverse_cols, c)) {
        // The products may have overflowed or vanished too; every warp adds up the whole row.
        sum_mz = 0;
#pragma unroll 1
        for (int64_t j = thread % 32; j < p.cols; j += 32) {
          const float g = Widen<float>(static_cast<const T*>(p.y_grad)[row * p.cols + j]);
          sum_mz = Fma(g * ScaleAny<float>(p, j), value(j) * r, sum_mz);
        }
        sum_mz = WarpSum(sum_mz);
      }
    }
    const float mean_mz = sum_mz * c.inverse_cols;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (!mine[k]) continue;
      if constexpr (!kKeep) {
        raw_x[k] = load(p.x, stage, 0, k);
        raw_g[k] = load(p.y_grad, stage, 1, k);
      }
      float v[N], g[N], dx[N];
      Unpack(raw_x[k], v);
      Unpack(raw_g[k], g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        v[i] = v[i] * r;
        dx[i] = RmsNormInputGrad(g[i] * scale[k][i], v[i], r, mean_mz);
      }
      if constexpr (kExtra) {
        float more[N];
        Unpack(load(p.residual_out_grad, stage, 2, k), more);
#pragma unroll
        for (int i = 0; i < N; ++i) dx[i] += more[i];
      }
      const Raw<T, N> packed = Pack<T>(dx);
      const int count = cols - first - k * step;
      StoreRaw<kAligned>(static_cast<T*>(p.x_grad) + at + k * step, packed, count);
      if (p.residual_grad != nullptr) {
        StoreRaw<kAligned>(static_cast<T*>(p.residual_grad) + at + k * step, packed, count);
      }
      if (round_hat) RoundTo<T>(v);
#pragma unroll
      for (int i = 0; i < N; ++i) sums[k][i] = Fma(g[i], v[i], sums[k][i]);
    }
    stage = stage + 1 == plan.stages ? 0 : stage + 1;
  }
  if (plan.partials == nullptr) return;
  // Rows of one block are added up in shared memory, then leave as one.
  float* const rows_of_block = reinterpret_cast<float*>(shared);
  float* const partial = plan.partials + group * p.cols + begin;
  if (blockDim.y == 1) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int j = first + k * step;
      if (j < cols) StoreRaw<kAligned>(partial + j, Pack<float>(sums[k]), cols - j);
    }
    return;
  }
  if constexpr (kAligned) WaitForCopies(0);
  __syncthreads();
  const int padded = V * step;
#pragma unroll
  for (int k = 0; k < V; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      rows_of_block[threadIdx.y * padded + first + k * step + i] = sums[k][i];
    }
  }
  __syncthreads();
  for (int j = threadIdx.y * tx + thread; j < cols; j += tx * blockDim.y) {
    float total = 0;
    for (int y = 0; y < static_cast<int>(blockDim.y); ++y) total += rows_of_block[y * padded + j];
    partial[j] = total;
  }
}

// The most vectors of a block's part of a row.
constexpr int kMaxBlockVectors = 2048;

// Threads, vectors and cluster decide the order of a row's sums and depend on the width alone; the
// others are how many rows are on their way at a time.
RmsNormTuning BackwardTuning(int64_t cols, int vector) {
  const int64_t all = CeilDiv<int64_t>(cols, vector);
  const auto shape = [&](int vectors, int rows, int stages, int blocks, int cluster = 1) {
    const int64_t mine = CeilDiv<int64_t>(all, cluster);
    const int threads = WholeWarps(CeilDiv<int64_t>(mine, vectors));
    return RmsNormTuning{threads, rows, vectors, stages, blocks, cluster};
  };
  if (all <= 32) return shape(1, 8, 3, 2);
  if (all <= 64) return shape(2, 8, 2, 2);
  if (all <= 128) return shape(2, 8, 2, 1);
  if (all <= 320) return shape(2, 1, 3, 3);
  if (all <= 576) return shape(2, 1, 2, 2);
  if (all <= 704) return shape(4, 1, 2, 2);
  if (all <= 960) return shape(2, 1, 3, 1);
  if (all <= 1024) return shape(4, 1, 3, 1);
  if (CurrentDevice().major < 9) return shape(4, 1, 2, 1);
  if (all <= 2048) return shape(4, 1, 2, 2, 2);
  int cluster = 2;
  while (cluster < kMaxCluster && CeilDiv<int64_t>(all, cluster) > kMaxBlockVectors) cluster *= 2;
  return shape(4, 1, 3, 1, cluster);
}

bool StagedTakes(const RmsNormBackwardParams& p) {
  const DType t = p.x_dtype;
  if (t == DType::kFloat64 || p.y_grad == nullptr || p.y_dtype != t) return false;
  if (p.norm_bias_grad != nullptr || p.bias_grad != nullptr) return false;
  if (p.mode == CastingMode::kNone && SizeOf(t) == 2) return false;
  const int64_t all = CeilDiv<int64_t>(p.cols, 16 / static_cast<int64_t>(SizeOf(t)));
  return all <= kMaxBlockVectors ||
         (all <= kMaxBlockVectors * kMaxCluster && CurrentDevice().major >= 9);
}

// Row groups (blocks, or clusters) of the launch: each leaves one partial row.
int StagedGroups(int64_t rows, const RmsNormTuning& t) {
  const int64_t resident = std::max(1, CurrentDevice().multiprocessors * t.blocks / t.cluster);
  return static_cast<int>(std::min<int64_t>(resident, CeilDiv<int64_t>(rows, t.rows)));
}

// Few rows: rather a block for each than a block with several.
RmsNormTuning ForRows(RmsNormTuning t, int64_t rows) {
  while (t.rows > 1 && CeilDiv<int64_t>(rows, t.rows) < CurrentDevice().multiprocessors) --t.rows;
  return t;
}

// Returns how many partial rows it leaves.
template <class T, int V, int kThreads, bool kCluster>
int RunStaged(const RmsNormBackwardParams& p, const RmsNormTuning& t, float* partials,
              cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const bool weight_aligned = p.weight == nullptr || AlignedTo16({p.weight});
  const bool aligned = p.cols % N == 0 && weight_aligned &&
                       AlignedTo16({p.x, p.y_grad, p.x_grad}) &&
                       AlignedTo16({p.residual_out_grad, p.residual_grad});
  const bool extra = p.residual_out_grad != nullptr;
  StagedPlan plan{t.stages, t.cluster, 0, partials};
  plan.block_cols = static_cast<int>(CeilDiv<int64_t>(CeilDiv<int64_t>(p.cols, N), t.cluster)) * N;
  const int64_t row_vectors = static_cast<int64_t>(V) * t.threads * t.rows;
  const int64_t staged = aligned ? row_vectors * 16 * (extra ? 3 : 2) * t.stages : 0;
  const int64_t summed = t.rows > 1 ? row_vectors * N * 4 : 0;
  LaunchShape shape{dim3(static_cast<unsigned>(StagedGroups(p.rows, t) * t.cluster)),
                    dim3(static_cast<unsigned>(t.threads), static_cast<unsigned>(t.rows)),
                    static_cast<size_t>(std::max(staged, summed)), t.cluster};
  const auto kernel = aligned
                          ? (extra ? RmsNormBackwardKernel<T, V, kThreads, true, kCluster, true>
                                   : RmsNormBackwardKernel<T, V, kThreads, false, kCluster, true>)
                          : (extra ? RmsNormBackwardKernel<T, V, kThreads, true, kCluster, false>
                                   : RmsNormBackwardKernel<T, V, kThreads, false, kCluster, false>);
  if (t.cluster > 2) {
    // Processors come in groups whose size is no multiple of four: a cluster that finds no place
    // would start when all others are done.
    const int fitting = MaxActiveClusters(reinterpret_cast<const void*>(kernel), shape);
    if (fitting > 0) {
      shape.grid.x = std::min(shape.grid.x, static_cast<unsigned>(fitting * t.cluster));
    }
  }
  Launch("rms_norm backward", kernel, shape, stream, p, RowConstants(p.cols, p.epsilon), plan);
  return static_cast<int>(shape.grid.x) / t.cluster;
}

template <class T>
void RunStagedOf(const RmsNormBackwardParams& p, void* workspace, cudaStream_t stream,
                 const RmsNormTuning* tuning) {
  RmsNormTuning t =
      tuning != nullptr ? *tuning : ForRows(BackwardTuning(p.cols, kVector<T>), p.rows);
  // Three arrays in two stages have as much on its way as two in three.
  if (tuning == nullptr && p.residual_out_grad != nullptr) t.stages = 2;
  float* const partials = p.weight_grad == nullptr ? nullptr : static_cast<float*>(workspace);
  const auto run = t.cluster > 1    ? RunStaged<T, 4, 512, true>
                   : t.vectors == 4 ? RunStaged<T, 4, 512, false>
                   : t.vectors == 2 ? RunStaged<T, 2, 512, false>
                                    : RunStaged<T, 1, 1024, false>;
  const int groups = run(p, t, partials, stream);
  if (partials != nullptr) {
    SumPartials(partials, groups, p.cols, p.weight_grad, p.weight_dtype, stream);
  }
}

// ---- Plain kernels: any dtypes, any width, all gradients
// ----------------------------------------------

// What the column sums need to know of a row.
template <class A>
struct RowScalars {
  A r, mean;
};

// One block a row; writes the row's gradients and its scalars.
template <class A>
__global__ void __launch_bounds__(512)
    PlainBackwardKernel(const __grid_constant__ RmsNormBackwardParams p, RowScalars<A>* scalars) {
  __shared__ A slots[2][2 * 32];
  WaitForPreviousKernel();
  const bool round_all = p.mode == CastingMode::kNone;
  int parity = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t at = row * p.cols;
    const auto x = [&](int64_t j) { return LoadAny<A>(p.x, p.x_dtype, at + j); };
    const auto dy = [&](int64_t j) {
      return p.y_grad == nullptr ? A{0} : LoadAny<A>(p.y_grad, p.y_dtype, at + j);
    };
    A sum[2] = {0, 0};
    for (int64_t j = threadIdx.x; j < p.cols; j += blockDim.x) {
      const A v = x(j);
      sum[0] += round_all ? RoundAny(v * v, p.x_dtype) : v * v;
      sum[1] += dy(j) * ScaleAny<A>(p, j) * v;
    }
    GroupSum(sum, slots[parity], threadIdx.x, blockDim.x, BlockBarrier{});
    const A r = p.inv_rms != nullptr ? static_cast<A>(p.inv_rms[row])
                                     : InvRmsAny(sum[0], p.cols, p.epsilon, p.mode, p.x_dtype, x);
    A sum_mz[1] = {sum[1] * r};
    if (!SquaresAreSafeAny(sum[0], p.cols, p.epsilon)) {
      sum_mz[0] = 0;
      for (int64_t j = threadIdx.x % 32; j < p.cols; j += 32) {
        sum_mz[0] += dy(j) * ScaleAny<A>(p, j) * (x(j) * r);
      }
      sum_mz[0] = WarpSum(sum_mz[0]);
    }
    parity ^= 1;
    const A mean = sum_mz[0] / static_cast<A>(p.cols);
    if (threadIdx.x == 0 && scalars != nullptr) scalars[row] = {r, mean};
    for (int64_t j = threadIdx.x; j < p.cols; j += blockDim.x) {
      A dx = RmsNormInputGrad(dy(j) * ScaleAny<A>(p, j), x(j) * r, r, mean);
      if (p.residual_out_grad != nullptr) {
        dx += LoadAny<A>(p.residual_out_grad, p.x_dtype, at + j);
      }
      StoreAny(p.x_grad, p.x_dtype, at + j, dx);
      if (p.residual_grad != nullptr) StoreAny(p.residual_grad, p.x_dtype, at + j, dx);
    }
  }
}

enum class ColumnTerm { kWeight, kNormBias, kBias };

// Partial sums of one gradient: block x a tile of columns, block y a range of rows.
template <class A, ColumnTerm kTerm>
__global__ void __launch_bounds__(256)
    PlainColumnsKernel(const __grid_constant__ RmsNormBackwardParams p,
                       const RowScalars<A>* scalars, A* partials) {
  WaitForPreviousKernel();
  const int64_t chunk = (p.rows + gridDim.y - 1) / gridDim.y;
  const int64_t begin = blockIdx.y * chunk;
  const int64_t end = begin + chunk < p.rows ? begin + chunk : p.rows;
  for (int64_t j = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; j < p.cols;
       j += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const A scale = kTerm == ColumnTerm::kBias ? ScaleAny<A>(p, j) : A{1};
    A sum = 0;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * p.cols + j;
      const A g = p.y_grad == nullptr ? A{0} : LoadAny<A>(p.y_grad, p.y_dtype, at);
      if constexpr (kTerm == ColumnTerm::kNormBias) {
        sum += g;
      } else {
        const RowScalars<A> s = scalars[row];
        A z = LoadAny<A>(p.x, p.x_dtype, at) * s.r;
        if constexpr (kTerm == ColumnTerm::kBias) {
          sum += RmsNormInputGrad(g * scale, z, s.r, s.mean);
          if (p.residual_out_grad != nullptr) sum += LoadAny<A>(p.residual_out_grad, p.x_dtype, at);
        } else {
          if (p.mode != CastingMode::kGemma) z = RoundAny(z, p.x_dtype);
          sum += g * z;
        }
      }
    }
    partials[blockIdx.y * p.cols + j] = sum;
  }
}

// Ranges of rows: a function of the row count alone.
int ColumnRanges(int64_t rows) {
  return static_cast<int>(std::clamp<int64_t>(CeilDiv<int64_t>(rows, 64), 1, 256));
}
LaunchShape ColumnsShape(int64_t rows, int64_t cols) {
  return {dim3(GridSize(CeilDiv<int64_t>(cols, 256)), static_cast<unsigned>(ColumnRanges(rows))),
          dim3(256)};
}
LaunchShape RowsShape(int64_t rows, int64_t cols) {
  const int threads = WholeWarps(std::min<int64_t>(512, CeilDiv<int64_t>(cols, 4)));
  return {dim3(GridSize(rows)), dim3(static_cast<unsigned>(threads))};
}
size_t PlainWorkspace(int64_t rows, int64_t cols, size_t element) {
  const size_t scalars = static_cast<size_t>(CeilDiv<int64_t>(rows, 2) * 4) * element;
  return scalars + static_cast<size_t>(ColumnRanges(rows)) * static_cast<size_t>(cols) * element;
}
template <class A>
A* PartialsAfter(void* workspace, int64_t rows) {
  return static_cast<A*>(workspace) + CeilDiv<int64_t>(rows, 2) * 4;
}

template <class A, ColumnTerm kTerm>
void PlainColumns(const RmsNormBackwardParams& p, void* workspace, void* dst, DType dtype,
                  cudaStream_t stream) {
  if (dst == nullptr) return;
  A* const partials = PartialsAfter<A>(workspace, p.rows);
  Launch("rms_norm backward", PlainColumnsKernel<A, kTerm>, ColumnsShape(p.rows, p.cols), stream, p,
         static_cast<const RowScalars<A>*>(workspace), partials);
  SumPartials(partials, ColumnRanges(p.rows), p.cols, dst, dtype, stream);
}

template <class A>
void RunPlain(const RmsNormBackwardParams& p, void* workspace, cudaStream_t stream) {
  Launch("rms_norm backward", PlainBackwardKernel<A>, RowsShape(p.rows, p.cols), stream, p,
         static_cast<RowScalars<A>*>(workspace));
  PlainColumns<A, ColumnTerm::kWeight>(p, workspace, p.weight_grad, p.weight_dtype, stream);
  PlainColumns<A, ColumnTerm::kNormBias>(p, workspace, p.norm_bias_grad, p.norm_bias_dtype, stream);
  PlainColumns<A, ColumnTerm::kBias>(p, workspace, p.bias_grad, p.x_dtype, stream);
}

bool InDouble(const RmsNormBackwardParams& p) {
  return p.x_dtype == DType::kFloat64 || p.y_dtype == DType::kFloat64;
}

// ---- Second-order gradients
// ---------------------------------------------------------------------------

// The direction of the input: the two gradients of x and residual that come back, added.
template <class A>
PADDLE_FUSED_INLINE A Direction(const RmsNormDoubleBackwardParams& p, int64_t at) {
  A v = p.x_grad_grad == nullptr ? A{0} : LoadAny<A>(p.x_grad_grad, p.dtype, at);
  if (p.residual_grad_grad != nullptr) v += LoadAny<A>(p.residual_grad_grad, p.dtype, at);
  return v;
}

template <class A>
__global__ void __launch_bounds__(512)
    DoubleBackwardKernel(const __grid_constant__ RmsNormDoubleBackwardParams p,
                         RowScalars<A>* scalars) {
  __shared__ A slots[2][4 * 32];
  WaitForPreviousKernel();
  const bool round_all = p.mode == CastingMode::kNone;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t at = row * p.cols;
    const auto x = [&](int64_t j) { return LoadAny<A>(p.x, p.dtype, at + j); };
    const auto dy = [&](int64_t j) {
      return p.y_grad == nullptr ? A{0} : LoadAny<A>(p.y_grad, p.dtype, at + j);
    };
    const auto u = [&](int64_t j) {
      return p.weight_grad_grad == nullptr ? A{0}
                                           : LoadAny<A>(p.weight_grad_grad, p.weight_dtype, j);
    };
    A squares[1] = {0};
    for (int64_t j = threadIdx.x; j < p.cols; j += blockDim.x) {
      const A v = x(j);
      squares[0] += round_all ? RoundAny(v * v, p.dtype) : v * v;
    }
    GroupSum(squares, slots[0], threadIdx.x, blockDim.x, BlockBarrier{});
    const A r = InvRmsAny(squares[0], p.cols, p.epsilon, p.mode, p.dtype, x);
    A sum[4] = {0, 0, 0, 0};
    for (int64_t j = threadIdx.x; j < p.cols; j += blockDim.x) {
      const A z = x(j) * r, g = dy(j), v = Direction<A>(p, at + j);
      const A m = g * ScaleAny<A>(p, j);
      sum[0] += m * v;
      sum[1] += m * z;
      sum[2] += z * v;
      sum[3] += g * u(j) * z;
    }
    GroupSum(sum, slots[1], threadIdx.x, blockDim.x, BlockBarrier{});
    const A h = static_cast<A>(p.cols);
    const RmsNormSecondMeans<A> mean{sum[0] / h, sum[1] / h, sum[2] / h, sum[3] / h};
    if (threadIdx.x == 0 && scalars != nullptr) scalars[row] = {r, mean.zv};
    for (int64_t j = threadIdx.x; j < p.cols; j += blockDim.x) {
      const A v = Direction<A>(p, at + j);
      const auto second =
          RmsNormDoubleBackward(dy(j), ScaleAny<A>(p, j), x(j) * r, v, u(j), r, mean);
      StoreAny(p.x_out, p.dtype, at + j, second.x);
      StoreAny(p.y_grad_grad, p.dtype, at + j, second.upstream);
      if (p.sum_grad_grad != nullptr) StoreAny(p.sum_grad_grad, p.dtype, at + j, v);
    }
    __syncthreads();  // the slots are used again
  }
}

template <class A>
__global__ void __launch_bounds__(256)
    DoubleColumnsKernel(const __grid_constant__ RmsNormDoubleBackwardParams p,
                        const RowScalars<A>* scalars, A* partials) {
  WaitForPreviousKernel();
  const int64_t chunk = (p.rows + gridDim.y - 1) / gridDim.y;
  const int64_t begin = blockIdx.y * chunk;
  const int64_t end = begin + chunk < p.rows ? begin + chunk : p.rows;
  for (int64_t j = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; j < p.cols;
       j += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    A sum = 0;
    for (int64_t row = begin; row < end && p.y_grad != nullptr; ++row) {
      const int64_t at = row * p.cols + j;
      const RowScalars<A> s = scalars[row];
      const RmsNormSecondMeans<A> mean{0, 0, s.mean, 0};
      sum += RmsNormDoubleBackward(LoadAny<A>(p.y_grad, p.dtype, at), A{1},
                                   LoadAny<A>(p.x, p.dtype, at) * s.r, Direction<A>(p, at), A{0},
                                   s.r, mean)
                 .weight;
    }
    partials[blockIdx.y * p.cols + j] = sum;
  }
}

template <class A>
void RunDouble(const RmsNormDoubleBackwardParams& p, void* workspace, cudaStream_t stream) {
  const bool weight = p.weight_out != nullptr;
  RowScalars<A>* const scalars = weight ? static_cast<RowScalars<A>*>(workspace) : nullptr;
  Launch("rms_norm double backward", DoubleBackwardKernel<A>, RowsShape(p.rows, p.cols), stream, p,
         scalars);
  if (!weight) return;
  A* const partials = PartialsAfter<A>(workspace, p.rows);
  Launch("rms_norm double backward", DoubleColumnsKernel<A>, ColumnsShape(p.rows, p.cols), stream,
         p, static_cast<const RowScalars<A>*>(scalars), partials);
  SumPartials(partials, ColumnRanges(p.rows), p.cols, p.weight_out, p.weight_dtype, stream);
}

}  // namespace
}  // namespace gpu

size_t RmsNormBackwardWorkspaceCuda(const RmsNormBackwardParams& p) {
  using namespace gpu;
  if (p.rows == 0 || p.cols == 0) return 0;
  if (StagedTakes(p)) {
    // As many partial rows as there are blocks at most.
    const int64_t groups = std::min<int64_t>(p.rows, 4 * CurrentDevice().multiprocessors);
    return p.weight_grad == nullptr ? 0 : static_cast<size_t>(groups * p.cols) * sizeof(float);
  }
  return PlainWorkspace(p.rows, p.cols, InDouble(p) ? 8 : 4);
}

void LaunchRmsNormBackwardCuda(const RmsNormBackwardParams& p, void* workspace, void* stream_handle,
                               const RmsNormTuning* tuning) {
  using namespace gpu;
  if (p.rows == 0 || p.cols == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (!StagedTakes(p)) {
    return InDouble(p) ? RunPlain<double>(p, workspace, stream)
                       : RunPlain<float>(p, workspace, stream);
  }
  switch (p.x_dtype) {
    case DType::kFloat16:
      return RunStagedOf<Float16>(p, workspace, stream, tuning);
    case DType::kBFloat16:
      return RunStagedOf<BFloat16>(p, workspace, stream, tuning);
    default:
      return RunStagedOf<float>(p, workspace, stream, tuning);
  }
}

size_t RmsNormDoubleBackwardWorkspaceCuda(const RmsNormDoubleBackwardParams& p) {
  using namespace gpu;
  if (p.rows == 0 || p.cols == 0 || p.weight_out == nullptr) return 0;
  return PlainWorkspace(p.rows, p.cols, p.dtype == DType::kFloat64 ? 8 : 4);
}

void LaunchRmsNormDoubleBackwardCuda(const RmsNormDoubleBackwardParams& p, void* workspace,
                                     void* stream_handle) {
  using namespace gpu;
  if (p.rows == 0 || p.cols == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  p.dtype == DType::kFloat64 ? RunDouble<double>(p, workspace, stream)
                             : RunDouble<float>(p, workspace, stream);
}

}  // namespace paddle_fused
