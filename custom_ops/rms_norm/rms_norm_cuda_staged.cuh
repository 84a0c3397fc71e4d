// Rows on their way: the frame of RMSNorm's staged backward kernel.
//
// Blocks stay for the whole launch, each with one or several rows at a time; cp.async keeps the
// next rows on their way into shared memory while one is worked on. Every thread fetches what it
// will use itself, so only the row's sums need a barrier. A row that outgrows a block is shared by
// a cluster, whose blocks exchange their parts of the sums through distributed shared memory.
#pragma once

#include "custom_ops/common/cuda_async.cuh"
#include "custom_ops/common/cuda_launch.cuh"
#include "custom_ops/common/cuda_reduce.cuh"
#include "custom_ops/rms_norm/rms_norm_cuda.cuh"

namespace paddle_fused {
namespace gpu {

struct StagedPlan {
  int stages, cluster;
  int block_cols;   // columns of a row that one block holds
  float* partials;  // [blocks or clusters, cols], or null when nobody needs dweight
};

// One thread's view. Threads: x across a row (whole warps), y rows. V vectors a thread, kArrays
// tensors of the same shape.
template <class T, int V, int kArrays, bool kCluster, bool kAligned>
struct RowStream {
  static constexpr int N = kVector<T>;
  const StagedPlan& plan;
  const T* (&from)[kArrays];
  int begin, cols;  // of this block: first column, and how many
  int first, step;  // this thread's first column in the block, and how far to its next vector
  bool mine[V];     // vectors that are there
  int64_t rows, row_step, row_elements;
  int64_t row, at;  // at: element of this thread's first vector
  int64_t fetch_row, fetch_at;
  uint32_t array_bytes, stage_bytes, own;
  int stage = 0;

  PADDLE_FUSED_INLINE RowStream(const StagedPlan& plan_, const T* (&from_)[kArrays], int64_t rows_,
                                int64_t row_cols, const void* shared)
      : plan(plan_), from(from_), rows(rows_) {
    const int tx = blockDim.x;
    begin = kCluster ? static_cast<int>(ClusterRank()) * plan.block_cols : 0;
    const int left = static_cast<int>(row_cols) - begin;
    cols = left < plan.block_cols ? left : plan.block_cols;
    first = threadIdx.x * N;
    step = tx * N;
#pragma unroll
    for (int k = 0; k < V; ++k) mine[k] = first + k * step < cols;
    row_step = Groups() * blockDim.y;
    row_elements = row_step * row_cols;
    row = fetch_row = Group() * blockDim.y + threadIdx.y;
    at = fetch_at = row * row_cols + begin + first;
    array_bytes = V * tx * 16;
    stage_bytes = kArrays * array_bytes;
    own = SharedAddress(shared) + threadIdx.y * plan.stages * stage_bytes + threadIdx.x * 16;
  }
  PADDLE_FUSED_INLINE int64_t Group() const { return blockIdx.x / (kCluster ? plan.cluster : 1); }
  PADDLE_FUSED_INLINE int64_t Groups() const { return gridDim.x / (kCluster ? plan.cluster : 1); }

  // Before the previous kernel ends: the rows that Start will fetch, and the weight.
  PADDLE_FUSED_INLINE void PrefetchStart(const void* weight, int weight_bytes) const {
    if constexpr (kAligned) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        if (weight == nullptr || !mine[k]) continue;
        Prefetch(static_cast<const char*>(weight) +
                 static_cast<int64_t>(begin + first + k * step) * weight_bytes);
      }
      int64_t r = row, e = at;
      for (int s = 0; s + 1 < plan.stages && r < rows; ++s, r += row_step, e += row_elements) {
#pragma unroll
        for (int k = 0; k < V; ++k) {
          if (!mine[k]) continue;
#pragma unroll
          for (int a = 0; a < kArrays; ++a) Prefetch(from[a] + e + k * step);
        }
      }
    }
  }
  PADDLE_FUSED_INLINE void Start() {
    for (int s = 0; s + 1 < plan.stages; ++s) Fetch(s);
  }
  // Asks for one more row and waits until the one at hand is there.
  PADDLE_FUSED_INLINE void FetchAndWait() {
    Fetch(stage == 0 ? plan.stages - 1 : stage - 1);
    if constexpr (kAligned) WaitForCopies(plan.stages - 1);
    if (row + row_step >= rows) LetNextKernelStart();
  }
  PADDLE_FUSED_INLINE void Next() {
    stage = stage + 1 == plan.stages ? 0 : stage + 1;
    row += row_step;
    at += row_elements;
  }
  PADDLE_FUSED_INLINE Raw<T, N> Load(int array, int k) const {
    Raw<T, N> raw = {};
    if (mine[k]) {
      if constexpr (kAligned) {
        raw = LoadShared<T, N>(own + stage * stage_bytes + array * array_bytes +
                               k * step * static_cast<int>(sizeof(T)));
      } else {
        raw = LoadElements<T, N>(from[array] + at + k * step, Left(k));
      }
    }
    return raw;
  }
  PADDLE_FUSED_INLINE int Left(int k) const { return cols - first - k * step; }

 private:
  PADDLE_FUSED_INLINE void Fetch(int to_stage) {
    if constexpr (kAligned) {
      if (fetch_row < rows) {
        const uint32_t to = own + to_stage * stage_bytes;
#pragma unroll
        for (int k = 0; k < V; ++k) {
          if (!mine[k]) continue;
#pragma unroll
          for (int a = 0; a < kArrays; ++a) {
            CopyAsync(to + a * array_bytes + k * step * static_cast<int>(sizeof(T)),
                      from[a] + fetch_at + k * step);
          }
        }
      }
      CommitCopies();
      fetch_row += row_step;
      fetch_at += row_elements;
    }
  }
};

// Two sums over the threads of a cluster; slots: one value of either a warp.
template <int kSlots>
PADDLE_FUSED_INLINE void ClusterSumOfTwo(const float (&v)[2], float (&sum)[2],
                                         float (&slots)[2][kSlots], int cluster) {
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32, half = lane / 16;
  float part = WarpSumOfTwo(v, lane);
  // A lane for each block of the cluster.
  if (lane % 16 < cluster) {
    StoreToRank(&slots[half][ClusterRank() * warps + threadIdx.x / 32], lane % 16, part);
  }
  ClusterBarrier();
  part = 0;
  for (int i = lane % 16; i < cluster * warps; i += 16) part += slots[half][i];
  part = HalfWarpSums(part);
  sum[0] = __shfl_sync(0xffffffffu, part, 0);
  sum[1] = __shfl_sync(0xffffffffu, part, 16);
}

// Row groups (blocks, or clusters) of a launch: each leaves one partial row.
inline int StagedGroups(int64_t rows, const RmsNormTuning& t) {
  const int64_t resident = std::max(1, CurrentDevice().multiprocessors * t.blocks / t.cluster);
  return static_cast<int>(std::min<int64_t>(resident, CeilDiv<int64_t>(rows, t.rows)));
}

// `staged`: tensors that come through shared memory; `summed`: floats of shared memory that the end
// of the kernel uses again. Returns how many row groups there are.
template <class T, class Params>
int LaunchStaged(const char* name,
                 void (*kernel)(const Params, const RowConstants, const StagedPlan),
                 const Params& p, int64_t rows, int64_t cols, const RmsNormTuning& t, int vectors,
                 int staged, int64_t summed, float* partials, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  StagedPlan plan{t.stages, t.cluster, 0, partials};
  plan.block_cols = static_cast<int>(CeilDiv<int64_t>(CeilDiv<int64_t>(cols, N), t.cluster)) * N;
  const int64_t bytes = int64_t{16} * vectors * t.threads * t.rows * staged * t.stages;
  LaunchShape shape{dim3(static_cast<unsigned>(StagedGroups(rows, t) * t.cluster)),
                    dim3(static_cast<unsigned>(t.threads), static_cast<unsigned>(t.rows)),
                    static_cast<size_t>(std::max(bytes, summed * 4)), t.cluster};
  // As much as keeps another block off: the next launch starts while this one ends, and must find
  // room for its share of blocks on every multiprocessor, not for two shares on the first that is
  // done.
  const int64_t alone = CurrentDevice().shared_bytes / (t.blocks + 1) + 1024;
  const bool full = static_cast<int>(shape.grid.x) == CurrentDevice().multiprocessors * t.blocks;
  if (full) shape.shared_bytes = std::max(shape.shared_bytes, static_cast<size_t>(alone));
  if (t.cluster > 2) {
    // Processors come in groups whose size is no multiple of four: a cluster that finds no place
    // would start when all others are done.
    const int fitting = MaxActiveClusters(reinterpret_cast<const void*>(kernel), shape);
    if (fitting > 0) {
      shape.grid.x = std::min(shape.grid.x, static_cast<unsigned>(fitting * t.cluster));
    }
  }
  Launch(name, kernel, shape, stream, p, RowConstants(cols, p.epsilon), plan);
  return static_cast<int>(shape.grid.x) / t.cluster;
}

}  // namespace gpu
}  // namespace paddle_fused
