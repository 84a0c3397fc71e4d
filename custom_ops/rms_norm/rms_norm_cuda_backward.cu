// RMSNorm backward on CUDA.
//
// The staged kernel reads x and dy once; rms_norm_cuda_staged.cuh has its frame. Sums over rows
// (dweight) stay in registers until the end, then go out as one partial row a block; a second
// kernel adds the partial rows in order.
//
// Other dtypes, gradients and roundings (float64, biases, a dy of another dtype, kNone) take the
// plain kernels.
#include "custom_ops/rms_norm/rms_norm_cuda_columns.cuh"
#include "custom_ops/rms_norm/rms_norm_cuda_plain.h"
#include "custom_ops/rms_norm/rms_norm_cuda_staged.cuh"

namespace paddle_fused {
namespace gpu {

#include "custom_ops/rms_norm/rms_norm_math.h"

namespace {

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
  constexpr int kParts = V == 2 ? 2 : 1;  // so that 1 and 2 vectors a thread add in the same order
  __shared__ float slots[2][2][kCluster ? kMaxCluster * 16 : 32];
  const int tx = blockDim.x, thread = threadIdx.x;
  const bool round_hat = sizeof(T) == 2 && p.mode != CastingMode::kGemma;
  const T* from[kArrays];
  from[0] = static_cast<const T*>(p.x);
  from[1] = static_cast<const T*>(p.y_grad);
  if constexpr (kExtra) from[2] = static_cast<const T*>(p.residual_out_grad);
  RowStream<T, V, kArrays, kCluster, kAligned> s(plan, from, p.rows, p.cols, shared);
  s.PrefetchStart(p.weight, ElementBytes(p.weight_dtype));
  WaitForPreviousKernel();
  s.Start();

  float scale[V][N];
#pragma unroll
  for (int k = 0; k < V; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) scale[k][i] = 1;
    if (p.weight != nullptr && s.mine[k]) {
      LoadFloatsAny<kAligned>(p.weight, p.weight_dtype, s.begin + s.first + k * s.step, s.Left(k),
                              scale[k]);
#pragma unroll
      for (int i = 0; i < N; ++i) scale[k][i] += static_cast<float>(p.offset);
    }
  }
  float sums[V][N] = {};

  if constexpr (kCluster) ClusterBarrier();  // all blocks run before one writes into another
  int parity = 0;
  for (; s.row < p.rows; s.Next()) {
    s.FetchAndWait();
    const int64_t row = s.row;
    Raw<T, N> raw_x[V], raw_g[V];
    float parts[kParts][2] = {};
#pragma unroll
    for (int k = 0; k < V; ++k) {
      float (&part)[2] = parts[k % kParts];
      raw_x[k] = s.Load(0, k);
      raw_g[k] = s.Load(1, k);
      float v[N], g[N];
      Unpack(raw_x[k], v);
      Unpack(raw_g[k], g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        part[0] = Fma(v[i], v[i], part[0]);
        part[1] = Fma(g[i] * scale[k][i], v[i], part[1]);
      }
    }
    float sum[2];
    if constexpr (kCluster) {
      ClusterSumOfTwo(parts[0], sum, slots[parity], plan.cluster);
    } else {
      GroupSumOfTwo(parts, sum, slots[parity][0] + threadIdx.y * (tx / 32) * 2 * kParts, thread, tx,
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
      if (!s.mine[k]) continue;
      if constexpr (!kKeep) {
        raw_x[k] = s.Load(0, k);
        raw_g[k] = s.Load(1, k);
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
        Unpack(s.Load(2, k), more);
#pragma unroll
        for (int i = 0; i < N; ++i) dx[i] += more[i];
      }
      const Raw<T, N> packed = Pack<T>(dx);
      const int64_t to = s.at + k * s.step;
      StoreRaw<kAligned>(static_cast<T*>(p.x_grad) + to, packed, s.Left(k));
      if (p.residual_grad != nullptr) {
        StoreRaw<kAligned>(static_cast<T*>(p.residual_grad) + to, packed, s.Left(k));
      }
      if (round_hat) RoundTo<T>(v);
#pragma unroll
      for (int i = 0; i < N; ++i) sums[k][i] = Fma(g[i], v[i], sums[k][i]);
    }
  }
  if (plan.partials == nullptr) return;
  // Rows of one block are added up in shared memory, then leave as one.
  float* const rows_of_block = reinterpret_cast<float*>(shared);
  float* const partial = plan.partials + s.Group() * p.cols + s.begin;
  if (blockDim.y == 1) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int j = s.first + k * s.step;
      if (s.mine[k]) StoreRaw<kAligned>(partial + j, Pack<float>(sums[k]), s.Left(k));
    }
    return;
  }
  if constexpr (kAligned) WaitForCopies(0);
  __syncthreads();
  const int padded = V * s.step;
#pragma unroll
  for (int k = 0; k < V; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      rows_of_block[threadIdx.y * padded + s.first + k * s.step + i] = sums[k][i];
    }
  }
  __syncthreads();
  for (int j = threadIdx.y * tx + thread; j < s.cols; j += tx * blockDim.y) {
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
  if (all <= 256) return shape(2, 4, 2, 1);
  if (all <= 320) return shape(2, 1, 3, 3);
  if (all <= 512) return shape(2, 2, 2, 1);
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

// Few rows: rather a block for each than a block with several, and rather more threads than more
// vectors a thread, where the order of the sums stays the same.
RmsNormTuning ForRows(RmsNormTuning t, int64_t rows, int64_t cols, int vector) {
  const int threads = WholeWarps(CeilDiv<int64_t>(cols, vector));
  if (t.vectors == 2 && threads <= 512 && rows <= CurrentDevice().multiprocessors) {
    return {threads, 1, 1, 2, 1, 1};
  }
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
  const auto kernel = aligned
                          ? (extra ? RmsNormBackwardKernel<T, V, kThreads, true, kCluster, true>
                                   : RmsNormBackwardKernel<T, V, kThreads, false, kCluster, true>)
                          : (extra ? RmsNormBackwardKernel<T, V, kThreads, true, kCluster, false>
                                   : RmsNormBackwardKernel<T, V, kThreads, false, kCluster, false>);
  const int64_t summed = t.rows > 1 ? int64_t{V} * t.threads * t.rows * N : 0;
  return LaunchStaged<T>("rms_norm backward", kernel, p, p.rows, p.cols, t, V,
                         aligned ? (extra ? 3 : 2) : 0, summed, partials, stream);
}

template <class T>
void RunStagedOf(const RmsNormBackwardParams& p, void* workspace, cudaStream_t stream,
                 const RmsNormTuning* tuning) {
  RmsNormTuning t = tuning != nullptr
                        ? *tuning
                        : ForRows(BackwardTuning(p.cols, kVector<T>), p.rows, p.cols, kVector<T>);
  // Three arrays in two stages have as much on its way as two in three.
  if (tuning == nullptr && p.residual_out_grad != nullptr) t.stages = 2;
  float* const partials = p.weight_grad == nullptr ? nullptr : static_cast<float*>(workspace);
  const auto run = t.cluster > 1    ? RunStaged<T, 4, 512, true>
                   : t.vectors == 4 ? RunStaged<T, 4, 512, false>
                   : t.vectors == 2 ? RunStaged<T, 2, 512, false>
                                    : RunStaged<T, 1, 512, false>;
  const int groups = run(p, t, partials, stream);
  if (partials != nullptr) {
    SumPartials(partials, groups, p.cols, p.weight_grad, p.weight_dtype, stream);
  }
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
  return PlainBackwardWorkspace(p);
}

void LaunchRmsNormBackwardCuda(const RmsNormBackwardParams& p, void* workspace, void* stream_handle,
                               const RmsNormTuning* tuning) {
  using namespace gpu;
  if (p.rows == 0 || p.cols == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (!StagedTakes(p)) return RunPlainBackward(p, workspace, stream);
  switch (p.x_dtype) {
    case DType::kFloat16:
      return RunStagedOf<Float16>(p, workspace, stream, tuning);
    case DType::kBFloat16:
      return RunStagedOf<BFloat16>(p, workspace, stream, tuning);
    default:
      return RunStagedOf<float>(p, workspace, stream, tuning);
  }
}

}  // namespace paddle_fused
