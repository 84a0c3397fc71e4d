// RMSNorm backward and double backward on CUDA for any dtypes, any width and all gradients: one
// block a row, element by element, then a kernel for each sum over rows. The backward's common
// cases take the staged kernel instead.
#include "custom_ops/rms_norm/rms_norm_cuda.cuh"
#include "custom_ops/rms_norm/rms_norm_cuda_columns.cuh"
#include "custom_ops/rms_norm/rms_norm_cuda_plain.h"

namespace paddle_fused {
namespace gpu {

#include "custom_ops/rms_norm/rms_norm_math.h"

namespace {

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

// One row's share of a gradient that is a sum over rows.
template <class A>
struct WeightTerm {
  const RowScalars<A>* scalars;
  PADDLE_FUSED_INLINE A At(const RmsNormBackwardParams& p, int64_t row, int64_t j) const {
    if (p.y_grad == nullptr) return 0;
    const int64_t at = row * p.cols + j;
    A z = LoadAny<A>(p.x, p.x_dtype, at) * scalars[row].r;
    if (p.mode != CastingMode::kGemma) z = RoundAny(z, p.x_dtype);
    return LoadAny<A>(p.y_grad, p.y_dtype, at) * z;
  }
};
template <class A>
struct NormBiasTerm {
  PADDLE_FUSED_INLINE A At(const RmsNormBackwardParams& p, int64_t row, int64_t j) const {
    return p.y_grad == nullptr ? A{0} : LoadAny<A>(p.y_grad, p.y_dtype, row * p.cols + j);
  }
};
template <class A>
struct BiasTerm {
  const RowScalars<A>* scalars;
  PADDLE_FUSED_INLINE A At(const RmsNormBackwardParams& p, int64_t row, int64_t j) const {
    const int64_t at = row * p.cols + j;
    const RowScalars<A> s = scalars[row];
    const A g = p.y_grad == nullptr ? A{0} : LoadAny<A>(p.y_grad, p.y_dtype, at);
    A dx =
        RmsNormInputGrad(g * ScaleAny<A>(p, j), LoadAny<A>(p.x, p.x_dtype, at) * s.r, s.r, s.mean);
    if (p.residual_out_grad != nullptr) dx += LoadAny<A>(p.residual_out_grad, p.x_dtype, at);
    return dx;
  }
};

LaunchShape RowsShape(int64_t rows, int64_t cols) {
  const int threads = WholeWarps(std::min<int64_t>(512, CeilDiv<int64_t>(cols, 4)));
  return {dim3(GridSize(rows)), dim3(static_cast<unsigned>(threads))};
}

// The workspace: the rows' scalars, then partial rows.
size_t ScalarsBytes(int64_t rows, size_t element) {
  return static_cast<size_t>(CeilDiv<int64_t>(rows, 2) * 4) * element;
}
size_t WorkspaceBytes(int64_t rows, int64_t cols, size_t element) {
  return ScalarsBytes(rows, element) +
         static_cast<size_t>(ColumnRanges(rows)) * static_cast<size_t>(cols) * element;
}
template <class A>
A* PartialsOf(void* workspace, int64_t rows) {
  return reinterpret_cast<A*>(static_cast<char*>(workspace) + ScalarsBytes(rows, sizeof(A)));
}

template <class A>
void RunPlain(const RmsNormBackwardParams& p, void* workspace, cudaStream_t stream) {
  auto* const scalars = static_cast<RowScalars<A>*>(workspace);
  A* const partials = PartialsOf<A>(workspace, p.rows);
  Launch("rms_norm backward", PlainBackwardKernel<A>, RowsShape(p.rows, p.cols), stream, p,
         scalars);
  if (p.weight_grad != nullptr) {
    SumColumns(p, WeightTerm<A>{scalars}, partials, p.weight_grad, p.weight_dtype, stream);
  }
  if (p.norm_bias_grad != nullptr) {
    SumColumns(p, NormBiasTerm<A>{}, partials, p.norm_bias_grad, p.norm_bias_dtype, stream);
  }
  if (p.bias_grad != nullptr) {
    SumColumns(p, BiasTerm<A>{scalars}, partials, p.bias_grad, p.x_dtype, stream);
  }
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
struct SecondWeightTerm {
  const RowScalars<A>* scalars;
  PADDLE_FUSED_INLINE A At(const RmsNormDoubleBackwardParams& p, int64_t row, int64_t j) const {
    if (p.y_grad == nullptr) return 0;
    const int64_t at = row * p.cols + j;
    const RowScalars<A> s = scalars[row];
    const RmsNormSecondMeans<A> mean{0, 0, s.mean, 0};
    return RmsNormDoubleBackward(LoadAny<A>(p.y_grad, p.dtype, at), A{1},
                                 LoadAny<A>(p.x, p.dtype, at) * s.r, Direction<A>(p, at), A{0}, s.r,
                                 mean)
        .weight;
  }
};

template <class A>
void RunDouble(const RmsNormDoubleBackwardParams& p, void* workspace, cudaStream_t stream) {
  const bool weight = p.weight_out != nullptr;
  auto* const scalars = weight ? static_cast<RowScalars<A>*>(workspace) : nullptr;
  Launch("rms_norm double backward", DoubleBackwardKernel<A>, RowsShape(p.rows, p.cols), stream, p,
         scalars);
  if (!weight) return;
  SumColumns(p, SecondWeightTerm<A>{scalars}, PartialsOf<A>(workspace, p.rows), p.weight_out,
             p.weight_dtype, stream);
}

}  // namespace

size_t PlainBackwardWorkspace(const RmsNormBackwardParams& p) {
  return WorkspaceBytes(p.rows, p.cols, InDouble(p) ? 8 : 4);
}
void RunPlainBackward(const RmsNormBackwardParams& p, void* workspace, cudaStream_t stream) {
  InDouble(p) ? RunPlain<double>(p, workspace, stream) : RunPlain<float>(p, workspace, stream);
}

}  // namespace gpu

size_t RmsNormDoubleBackwardWorkspaceCuda(const RmsNormDoubleBackwardParams& p) {
  if (p.rows == 0 || p.cols == 0 || p.weight_out == nullptr) return 0;
  return gpu::WorkspaceBytes(p.rows, p.cols, p.dtype == DType::kFloat64 ? 8 : 4);
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
