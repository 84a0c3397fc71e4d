// Host code that the RMSNorm operators share: from tensors to params, allocation, launch.
#pragma once

#include <cmath>
#include <vector>

#include "custom_ops/paddle/tensor.h"
#include "custom_ops/rms_norm/rms_norm.h"

namespace paddle_fused {

using FloatParts = std::vector<float>;

inline CastingMode ModeOf(int mode, const char* op) {
  PADDLE_FUSED_CHECK(mode >= 0 && mode <= 2, "%s: unknown casting mode %d.", op, mode);
  return static_cast<CastingMode>(mode);
}

inline void CheckVector(const Tensor& vector, int64_t cols, const char* op, const char* name) {
  PADDLE_FUSED_CHECK(vector.numel() == cols,
                     "%s: expected %s to have the %d elements of a row, got %d.", op, name, cols,
                     vector.numel());
}

inline void CheckLikeX(const Tensor& t, const Tensor& x, const char* op, const char* name) {
  PADDLE_FUSED_CHECK(t.dtype() == x.dtype() && t.shape() == x.shape(),
                     "%s: expected %s to have the dtype and shape of x.", op, name);
}

// What goes into one forward; absent inputs are null.
struct RmsNormInputs {
  const Tensor& x;
  const Tensor* weight = nullptr;
  const Tensor* norm_bias = nullptr;
  const Tensor* bias = nullptr;
  const Tensor* residual = nullptr;
};

inline bool HasSum(const RmsNormInputs& in) { return in.bias != nullptr || in.residual != nullptr; }

// Sets the inputs of p and checks that they fit each other.
inline void SetInputs(const RmsNormInputs& in, const char* op, RmsNormParams* p) {
  const RowsCols size = RowsColsOf(in.x);
  p->rows = size.rows;
  p->cols = size.cols;
  p->x_dtype = p->y_dtype = DTypeOf(in.x, op);
  p->x = DataOf(in.x);
  if (in.weight != nullptr) {
    CheckVector(*in.weight, size.cols, op, "weight");
    p->weight_dtype = DTypeOf(*in.weight, op);
    p->weight = DataOf(*in.weight);
  }
  if (in.norm_bias != nullptr) {
    CheckVector(*in.norm_bias, size.cols, op, "norm_bias");
    p->norm_bias_dtype = DTypeOf(*in.norm_bias, op);
    p->norm_bias = DataOf(*in.norm_bias);
  }
  if (in.bias != nullptr) {
    CheckVector(*in.bias, size.cols, op, "bias");
    PADDLE_FUSED_CHECK(in.bias->dtype() == in.x.dtype(), "%s: bias must have x's dtype.", op);
    p->bias = DataOf(*in.bias);
  }
  if (in.residual != nullptr) {
    CheckLikeX(*in.residual, in.x, op, "residual");
    p->residual = DataOf(*in.residual);
  }
}

// {out}, or {out, residual_out} when there is a sum to keep.
inline std::vector<Tensor> RunRmsNorm(const RmsNormInputs& in, const FloatParts& epsilon,
                                      const FloatParts& offset, int mode, const char* op) {
  RmsNormParams p{};
  p.epsilon = FromParts(epsilon);
  p.offset = FromParts(offset);
  p.mode = ModeOf(mode, op);
  SetInputs(in, op, &p);
  std::vector<Tensor> results{EmptyLike(in.x)};
  if (HasSum(in)) results.push_back(EmptyLike(in.x));
  if (in.x.numel() == 0) return results;
  p.y = MutableDataOf(results[0]);
  if (HasSum(in)) p.residual_out = MutableDataOf(results[1]);
  RunOn(
      in.x, op, [&] { LaunchRmsNormCpu(p); }, [&](void* stream) { LaunchRmsNormCuda(p, stream); });
  return results;
}

// Gradients that a backward may be asked for. Null: the forward had no such input.
struct RmsNormGradInputs {
  const Tensor& normalised;  // x, or residual_out
  const Tensor* weight = nullptr;
  const Tensor* norm_bias = nullptr;
  const Tensor* bias = nullptr;
  bool has_residual = false;
  bool weight_grad = true;  // false: the weight is frozen, its gradient comes back as zeros
  const Tensor* inv_rms = nullptr;
  const Tensor& out_grad;                     // may be undefined
  const Tensor* residual_out_grad = nullptr;  // may be undefined
};

struct RmsNormGrads {
  Tensor x, residual, weight, norm_bias, bias;
};

// Allocates a column sum; zero when no kernel will write it.
inline Tensor ColumnSumLike(const Tensor& t, bool written) {
  return written ? EmptyLike(t) : paddle::full(t.shape(), 0, t.dtype(), t.place());
}

inline RmsNormGrads RunRmsNormGrad(const RmsNormGradInputs& in, const FloatParts& epsilon,
                                   const FloatParts& offset, int mode, const char* op) {
  const Tensor& x = in.normalised;
  const bool runs = x.numel() > 0;
  RmsNormBackwardParams p{};
  const RowsCols size = RowsColsOf(x);
  p.rows = size.rows;
  p.cols = size.cols;
  p.epsilon = FromParts(epsilon);
  p.offset = FromParts(offset);
  p.mode = ModeOf(mode, op);
  p.x_dtype = DTypeOf(x, op);
  p.y_dtype = in.out_grad.defined() ? DTypeOf(in.out_grad, op) : p.x_dtype;
  // y may have another dtype than x (fused_rms_norm_ext), never another shape.
  if (in.out_grad.defined()) CheckGrad(in.out_grad, x.shape(), in.out_grad.dtype(), op);
  if (in.residual_out_grad != nullptr && in.residual_out_grad->defined()) {
    CheckGrad(*in.residual_out_grad, x.shape(), x.dtype(), op);
  }
  RmsNormGrads grads;
  grads.x = EmptyLike(x);
  if (in.has_residual) grads.residual = EmptyLike(x);
  if (in.weight != nullptr) {
    CheckVector(*in.weight, size.cols, op, "weight");
    grads.weight = ColumnSumLike(*in.weight, runs && in.weight_grad);
    p.weight_dtype = DTypeOf(*in.weight, op);
  }
  if (in.norm_bias != nullptr) {
    grads.norm_bias = ColumnSumLike(*in.norm_bias, runs);
    p.norm_bias_dtype = DTypeOf(*in.norm_bias, op);
  }
  if (in.bias != nullptr) grads.bias = ColumnSumLike(*in.bias, runs);
  if (!runs) return grads;
  p.x = DataOf(x);
  p.y_grad = DataOf(in.out_grad);
  if (in.residual_out_grad != nullptr) p.residual_out_grad = DataOf(*in.residual_out_grad);
  if (in.inv_rms != nullptr) p.inv_rms = in.inv_rms->data<float>();
  p.x_grad = MutableDataOf(grads.x);
  p.residual_grad = MutableDataOf(grads.residual);
  if (in.weight != nullptr) p.weight = DataOf(*in.weight);
  if (in.weight_grad) p.weight_grad = MutableDataOf(grads.weight);
  p.norm_bias_grad = MutableDataOf(grads.norm_bias);
  p.bias_grad = MutableDataOf(grads.bias);
  RunOn(
      x, op, [&] { LaunchRmsNormBackwardCpu(p); },
      [&](void* stream) {
        Workspace workspace(x, RmsNormBackwardWorkspaceCuda(p));
        LaunchRmsNormBackwardCuda(p, workspace.data(), stream);
      });
  return grads;
}

// Second-order gradients; undefined tensors stand for zeros.
struct RmsNormSecondInputs {
  const Tensor& normalised;
  const Tensor* weight = nullptr;
  const Tensor& out_grad;
  const Tensor* x_grad_grad = nullptr;
  const Tensor* residual_grad_grad = nullptr;
  const Tensor* weight_grad_grad = nullptr;
  bool with_sum = false;  // also return x_grad_grad + residual_grad_grad
};

struct RmsNormSecondGrads {
  Tensor x, weight, out_grad, sum;
};

inline RmsNormSecondGrads RunRmsNormSecond(const RmsNormSecondInputs& in, const FloatParts& epsilon,
                                           const FloatParts& offset, int mode, const char* op) {
  const Tensor& x = in.normalised;
  const bool runs = x.numel() > 0;
  for (const Tensor* t : {&in.out_grad, in.x_grad_grad, in.residual_grad_grad}) {
    if (t != nullptr && t->defined()) CheckGrad(*t, x.shape(), x.dtype(), op);
  }
  if (in.weight_grad_grad != nullptr && in.weight_grad_grad->defined()) {
    CheckGrad(*in.weight_grad_grad, in.weight->shape(), in.weight->dtype(), op);
  }
  RmsNormSecondGrads out;
  out.x = EmptyLike(x);
  out.out_grad = EmptyLike(x);
  if (in.weight != nullptr) out.weight = ColumnSumLike(*in.weight, runs);
  if (in.with_sum) out.sum = EmptyLike(x);
  if (!runs) return out;
  const auto data = [](const Tensor* t) { return t == nullptr ? nullptr : DataOf(*t); };
  RmsNormDoubleBackwardParams p{};
  const RowsCols size = RowsColsOf(x);
  p.rows = size.rows;
  p.cols = size.cols;
  p.epsilon = FromParts(epsilon);
  p.offset = FromParts(offset);
  p.mode = ModeOf(mode, op);
  p.dtype = DTypeOf(x, op);
  if (in.weight != nullptr) p.weight_dtype = DTypeOf(*in.weight, op);
  p.x = DataOf(x);
  p.weight = data(in.weight);
  p.y_grad = DataOf(in.out_grad);
  p.x_grad_grad = data(in.x_grad_grad);
  p.residual_grad_grad = data(in.residual_grad_grad);
  p.weight_grad_grad = data(in.weight_grad_grad);
  p.x_out = MutableDataOf(out.x);
  p.weight_out = MutableDataOf(out.weight);
  p.y_grad_grad = MutableDataOf(out.out_grad);
  p.sum_grad_grad = MutableDataOf(out.sum);
  RunOn(
      x, op, [&] { LaunchRmsNormDoubleBackwardCpu(p); },
      [&](void* stream) {
        Workspace workspace(x, RmsNormDoubleBackwardWorkspaceCuda(p));
        LaunchRmsNormDoubleBackwardCuda(p, workspace.data(), stream);
      });
  return out;
}

}  // namespace paddle_fused
