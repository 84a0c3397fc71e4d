// Sums over rows: partial rows, then a second kernel that adds them up in order.
#pragma once

#include "custom_ops/common/cuda_async.cuh"
#include "custom_ops/common/cuda_launch.cuh"
#include "custom_ops/common/cuda_reduce.cuh"

namespace paddle_fused {
namespace gpu {
namespace {

// dst[j] = sum of partials[i * cols + j] over i < count, in an order that depends on count alone.
// next_early: the kernel after this one may start while the one before still runs, to prefetch.
template <class A>
__global__ void __launch_bounds__(1024)
    SumPartialsKernel(const A* partials, int count, int64_t cols, void* dst, DType dtype,
                      bool next_early) {
  __shared__ A tile[32][33];
  if (next_early) LetNextKernelStart();
  WaitForPreviousKernel();
  LetNextKernelStart();
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * 32; base < cols;
       base += static_cast<int64_t>(gridDim.x) * 32) {
    const int64_t j = base + threadIdx.x;
    A sum = 0;
    if (j < cols) {
#pragma unroll 8
      for (int i = threadIdx.y; i < count; i += 32) sum += partials[i * cols + j];
    }
    tile[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    const A total = WarpSum(tile[threadIdx.x][threadIdx.y]);
    if (threadIdx.x == 0 && base + threadIdx.y < cols) {
      StoreAny(dst, dtype, base + threadIdx.y, total);
    }
    __syncthreads();
  }
}

template <class A>
void SumPartials(const A* partials, int count, int64_t cols, void* dst, DType dtype,
                 cudaStream_t stream) {
  const LaunchShape shape{dim3(GridSize(CeilDiv<int64_t>(cols, 32))), dim3(32, 32)};
  // Where the partial rows come from few blocks, the next kernel's blocks would take their place.
  const bool next_early = count >= CurrentDevice().multiprocessors;
  Launch("rms_norm column sums", SumPartialsKernel<A>, shape, stream, partials, count, cols, dst,
         dtype, next_early);
}

// Partial sums of Term::At(p, row, at) over a range of rows, at = row * cols + j: block x a tile of
// columns, block y a range of rows.
template <class A, class Term, class Params>
__global__ void __launch_bounds__(256)
    ColumnsKernel(const __grid_constant__ Params p, const Term term, A* partials) {
  WaitForPreviousKernel();
  const int64_t chunk = (p.rows + gridDim.y - 1) / gridDim.y;
  const int64_t begin = blockIdx.y * chunk;
  const int64_t end = begin + chunk < p.rows ? begin + chunk : p.rows;
  for (int64_t j = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; j < p.cols;
       j += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    A sum = 0;
    for (int64_t row = begin; row < end; ++row) sum += term.At(p, row, j);
    partials[blockIdx.y * p.cols + j] = sum;
  }
}

// Ranges of rows: a function of the row count alone.
inline int ColumnRanges(int64_t rows) {
  return static_cast<int>(std::clamp<int64_t>(CeilDiv<int64_t>(rows, 64), 1, 256));
}

// dst[j] = sum of term over the rows.
template <class A, class Term, class Params>
void SumColumns(const Params& p, const Term& term, A* partials, void* dst, DType dtype,
                cudaStream_t stream) {
  const int ranges = ColumnRanges(p.rows);
  const LaunchShape shape{
      dim3(GridSize(CeilDiv<int64_t>(p.cols, 256)), static_cast<unsigned>(ranges)), dim3(256)};
  Launch("rms_norm column sums", ColumnsKernel<A, Term, Params>, shape, stream, p, term, partials);
  SumPartials(partials, ranges, p.cols, dst, dtype, stream);
}

}  // namespace
}  // namespace gpu
}  // namespace paddle_fused
