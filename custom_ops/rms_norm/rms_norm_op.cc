// The operators behind rms_norm: with and without weight, with and without a residual. They are
// four because an optional input that has a gradient does not work in static graphs.
#include "custom_ops/paddle/spmd.h"
#include "custom_ops/rms_norm/rms_norm_host.h"

namespace paddle_fused {
namespace {

using DataType = paddle::DataType;

// ---- (x, weight)

constexpr char kRmsNorm[] = "paddle_fused_rms_norm";

std::vector<Tensor> RmsNorm(const Tensor& x, const Tensor& weight, const FloatParts& epsilon,
                            const FloatParts& offset, int mode, bool) {
  return RunRmsNorm({x, &weight}, epsilon, offset, mode, kRmsNorm);
}

std::vector<Tensor> RmsNormGrad(const Tensor& x, const Tensor& weight, const Tensor& out_grad,
                                const FloatParts& epsilon, const FloatParts& offset, int mode,
                                bool weight_grad) {
  const RmsNormGradInputs in{x, &weight, nullptr, nullptr, false, weight_grad, nullptr, out_grad};
  RmsNormGrads grads = RunRmsNormGrad(in, epsilon, offset, mode, kRmsNorm);
  return {grads.x, grads.weight};
}

std::vector<Tensor> RmsNormDoubleGrad(const Tensor& x, const Tensor& weight, const Tensor& out_grad,
                                      const Tensor& x_grad_grad, const Tensor& weight_grad_grad,
                                      const FloatParts& epsilon, const FloatParts& offset, int mode,
                                      bool) {
  const RmsNormSecondInputs in{x, &weight, out_grad, &x_grad_grad, nullptr, &weight_grad_grad};
  RmsNormSecondGrads second = RunRmsNormSecond(in, epsilon, offset, mode, kRmsNorm);
  return {second.x, second.weight, second.out_grad};
}

std::vector<Shape> RmsNormShape(const Shape& x, const Shape&) { return {x}; }
std::vector<DataType> RmsNormDtype(const DataType& x, const DataType&) { return {x}; }
std::vector<Shape> RmsNormGradShape(const Shape& x, const Shape& w, const Shape&) { return {x, w}; }
std::vector<DataType> RmsNormGradDtype(const DataType& x, const DataType& w, const DataType&) {
  return {x, w};
}
std::vector<Shape> RmsNormDoubleGradShape(const Shape& x, const Shape& w, const Shape& g,
                                          const Shape&, const Shape&) {
  return {x, w, g};
}
std::vector<DataType> RmsNormDoubleGradDtype(const DataType& x, const DataType& w,
                                             const DataType& g, const DataType&, const DataType&) {
  return {x, w, g};
}

// ---- (x)

constexpr char kUnweighted[] = "paddle_fused_rms_norm_unweighted";

std::vector<Tensor> Unweighted(const Tensor& x, const FloatParts& epsilon, int mode) {
  return RunRmsNorm({x}, epsilon, {}, mode, kUnweighted);
}

std::vector<Tensor> UnweightedGrad(const Tensor& x, const Tensor& out_grad,
                                   const FloatParts& epsilon, int mode) {
  const RmsNormGradInputs in{x, nullptr, nullptr, nullptr, false, false, nullptr, out_grad};
  return {RunRmsNormGrad(in, epsilon, {}, mode, kUnweighted).x};
}

std::vector<Tensor> UnweightedDoubleGrad(const Tensor& x, const Tensor& out_grad,
                                         const Tensor& x_grad_grad, const FloatParts& epsilon,
                                         int mode) {
  const RmsNormSecondInputs in{x, nullptr, out_grad, &x_grad_grad};
  RmsNormSecondGrads second = RunRmsNormSecond(in, epsilon, {}, mode, kUnweighted);
  return {second.x, second.out_grad};
}

std::vector<Shape> UnweightedShape(const Shape& x) { return {x}; }
std::vector<DataType> UnweightedDtype(const DataType& x) { return {x}; }
std::vector<Shape> UnweightedGradShape(const Shape& x, const Shape&) { return {x}; }
std::vector<DataType> UnweightedGradDtype(const DataType& x, const DataType&) { return {x}; }
std::vector<Shape> UnweightedDoubleGradShape(const Shape& x, const Shape& g, const Shape&) {
  return {x, g};
}
std::vector<DataType> UnweightedDoubleGradDtype(const DataType& x, const DataType& g,
                                                const DataType&) {
  return {x, g};
}

// ---- (x, residual, weight)

constexpr char kAdd[] = "paddle_fused_add_rms_norm";

std::vector<Tensor> AddRmsNorm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                               const FloatParts& epsilon, const FloatParts& offset, int mode,
                               bool) {
  return RunRmsNorm({x, &weight, nullptr, nullptr, &residual}, epsilon, offset, mode, kAdd);
}

std::vector<Tensor> AddRmsNormGrad(const Tensor& sum, const Tensor& weight, const Tensor& out_grad,
                                   const Tensor& sum_grad, const FloatParts& epsilon,
                                   const FloatParts& offset, int mode, bool weight_grad) {
  const RmsNormGradInputs in{sum,         &weight, nullptr,  nullptr,  true,
                             weight_grad, nullptr, out_grad, &sum_grad};
  RmsNormGrads grads = RunRmsNormGrad(in, epsilon, offset, mode, kAdd);
  return {grads.x, grads.residual, grads.weight};
}

std::vector<Tensor> AddRmsNormDoubleGrad(const Tensor& sum, const Tensor& weight,
                                         const Tensor& out_grad, const Tensor& x_grad_grad,
                                         const Tensor& residual_grad_grad,
                                         const Tensor& weight_grad_grad, const FloatParts& epsilon,
                                         const FloatParts& offset, int mode, bool) {
  const RmsNormSecondInputs in{
      sum, &weight, out_grad, &x_grad_grad, &residual_grad_grad, &weight_grad_grad, true};
  RmsNormSecondGrads second = RunRmsNormSecond(in, epsilon, offset, mode, kAdd);
  return {second.x, second.weight, second.out_grad, second.sum};
}

std::vector<Shape> AddShape(const Shape& x, const Shape&, const Shape&) { return {x, x}; }
std::vector<DataType> AddDtype(const DataType& x, const DataType&, const DataType&) {
  return {x, x};
}
std::vector<Shape> AddGradShape(const Shape& sum, const Shape& w, const Shape&, const Shape&) {
  return {sum, sum, w};
}
std::vector<DataType> AddGradDtype(const DataType& sum, const DataType& w, const DataType&,
                                   const DataType&) {
  return {sum, sum, w};
}
std::vector<Shape> AddDoubleGradShape(const Shape& sum, const Shape& w, const Shape&, const Shape&,
                                      const Shape&, const Shape&) {
  return {sum, w, sum, sum};
}
std::vector<DataType> AddDoubleGradDtype(const DataType& sum, const DataType& w, const DataType&,
                                         const DataType&, const DataType&, const DataType&) {
  return {sum, w, sum, sum};
}

// ---- (x, residual)

constexpr char kAddUnweighted[] = "paddle_fused_add_rms_norm_unweighted";

std::vector<Tensor> AddUnweighted(const Tensor& x, const Tensor& residual,
                                  const FloatParts& epsilon, int mode) {
  return RunRmsNorm({x, nullptr, nullptr, nullptr, &residual}, epsilon, {}, mode, kAddUnweighted);
}

std::vector<Tensor> AddUnweightedGrad(const Tensor& sum, const Tensor& out_grad,
                                      const Tensor& sum_grad, const FloatParts& epsilon, int mode) {
  const RmsNormGradInputs in{sum,   nullptr, nullptr,  nullptr,  true,
                             false, nullptr, out_grad, &sum_grad};
  RmsNormGrads grads = RunRmsNormGrad(in, epsilon, {}, mode, kAddUnweighted);
  return {grads.x, grads.residual};
}

std::vector<Tensor> AddUnweightedDoubleGrad(const Tensor& sum, const Tensor& out_grad,
                                            const Tensor& x_grad_grad,
                                            const Tensor& residual_grad_grad,
                                            const FloatParts& epsilon, int mode) {
  const RmsNormSecondInputs in{sum,     nullptr, out_grad, &x_grad_grad, &residual_grad_grad,
                               nullptr, true};
  RmsNormSecondGrads second = RunRmsNormSecond(in, epsilon, {}, mode, kAddUnweighted);
  return {second.x, second.out_grad, second.sum};
}

std::vector<Shape> AddUnweightedShape(const Shape& x, const Shape&) { return {x, x}; }
std::vector<DataType> AddUnweightedDtype(const DataType& x, const DataType&) { return {x, x}; }
std::vector<Shape> AddUnweightedGradShape(const Shape& sum, const Shape&, const Shape&) {
  return {sum, sum};
}
std::vector<DataType> AddUnweightedGradDtype(const DataType& sum, const DataType&,
                                             const DataType&) {
  return {sum, sum};
}
std::vector<Shape> AddUnweightedDoubleGradShape(const Shape& sum, const Shape&, const Shape&,
                                                const Shape&) {
  return {sum, sum, sum};
}
std::vector<DataType> AddUnweightedDoubleGradDtype(const DataType& sum, const DataType&,
                                                   const DataType&, const DataType&) {
  return {sum, sum, sum};
}

}  // namespace
}  // namespace paddle_fused

using paddle::Grad;
using paddle::New;
namespace pf = paddle_fused;

#define RMS_NORM_ATTRS                                                              \
  "epsilon: std::vector<float>", "offset: std::vector<float>", "casting_mode: int", \
      "weight_grad: bool"
#define RMS_NORM_UNWEIGHTED_ATTRS "epsilon: std::vector<float>", "casting_mode: int"

PD_BUILD_OP(paddle_fused_rms_norm)
    .Inputs({"X", "Weight"})
    .Outputs({"Out"})
    .Attrs({RMS_NORM_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::RmsNorm))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::RmsNormShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::RmsNormDtype)) PADDLE_FUSED_ROWS_SPMD("rv>0");
PD_BUILD_GRAD_OP(paddle_fused_rms_norm)
    .Inputs({"X", "Weight", Grad("Out")})
    .Outputs({Grad("X"), Grad("Weight")})
    .Attrs({RMS_NORM_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::RmsNormGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::RmsNormGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::RmsNormGradDtype)) PADDLE_FUSED_ROWS_SPMD("rvr>01");
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_rms_norm)
    .Inputs({"X", "Weight", Grad("Out"), Grad(Grad("X")), Grad(Grad("Weight"))})
    .Outputs({Grad("X"), Grad("Weight"), Grad(Grad("Out"))})
    .Attrs({RMS_NORM_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::RmsNormDoubleGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::RmsNormDoubleGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::RmsNormDoubleGradDtype))
        PADDLE_FUSED_ROWS_SPMD("rvrrv>012");

PD_BUILD_OP(paddle_fused_rms_norm_unweighted)
    .Inputs({"X"})
    .Outputs({"Out"})
    .Attrs({RMS_NORM_UNWEIGHTED_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::Unweighted))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::UnweightedShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::UnweightedDtype)) PADDLE_FUSED_ROWS_SPMD("r>0");
PD_BUILD_GRAD_OP(paddle_fused_rms_norm_unweighted)
    .Inputs({"X", Grad("Out")})
    .Outputs({Grad("X")})
    .Attrs({RMS_NORM_UNWEIGHTED_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::UnweightedGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::UnweightedGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::UnweightedGradDtype)) PADDLE_FUSED_ROWS_SPMD("rr>0");
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_rms_norm_unweighted)
    .Inputs({"X", Grad("Out"), Grad(Grad("X"))})
    .Outputs({Grad("X"), Grad(Grad("Out"))})
    .Attrs({RMS_NORM_UNWEIGHTED_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::UnweightedDoubleGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::UnweightedDoubleGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::UnweightedDoubleGradDtype))
        PADDLE_FUSED_ROWS_SPMD("rrr>01");

PD_BUILD_OP(paddle_fused_add_rms_norm)
    .Inputs({"X", "Residual", "Weight"})
    .Outputs({"Out", "ResidualOut"})
    .Attrs({RMS_NORM_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::AddRmsNorm))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::AddShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::AddDtype)) PADDLE_FUSED_ROWS_SPMD("rrv>00");
PD_BUILD_GRAD_OP(paddle_fused_add_rms_norm)
    .Inputs({"ResidualOut", "Weight", Grad("Out"), Grad("ResidualOut")})
    .Outputs({Grad("X"), Grad("Residual"), Grad("Weight")})
    .Attrs({RMS_NORM_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::AddRmsNormGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::AddGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::AddGradDtype)) PADDLE_FUSED_ROWS_SPMD("rvrr>001");
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_add_rms_norm)
    .Inputs({"ResidualOut", "Weight", Grad("Out"), Grad(Grad("X")), Grad(Grad("Residual")),
             Grad(Grad("Weight"))})
    .Outputs({New(Grad("ResidualOut")), Grad("Weight"), Grad(Grad("Out")),
              Grad(Grad("ResidualOut"))})
    .Attrs({RMS_NORM_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::AddRmsNormDoubleGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::AddDoubleGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::AddDoubleGradDtype)) PADDLE_FUSED_ROWS_SPMD("rvrrrv>0100");

PD_BUILD_OP(paddle_fused_add_rms_norm_unweighted)
    .Inputs({"X", "Residual"})
    .Outputs({"Out", "ResidualOut"})
    .Attrs({RMS_NORM_UNWEIGHTED_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::AddUnweighted))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::AddUnweightedShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::AddUnweightedDtype)) PADDLE_FUSED_ROWS_SPMD("rr>00");
PD_BUILD_GRAD_OP(paddle_fused_add_rms_norm_unweighted)
    .Inputs({"ResidualOut", Grad("Out"), Grad("ResidualOut")})
    .Outputs({Grad("X"), Grad("Residual")})
    .Attrs({RMS_NORM_UNWEIGHTED_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::AddUnweightedGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::AddUnweightedGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::AddUnweightedGradDtype)) PADDLE_FUSED_ROWS_SPMD("rrr>00");
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_add_rms_norm_unweighted)
    .Inputs({"ResidualOut", Grad("Out"), Grad(Grad("X")), Grad(Grad("Residual"))})
    .Outputs({New(Grad("ResidualOut")), Grad(Grad("Out")), Grad(Grad("ResidualOut"))})
    .Attrs({RMS_NORM_UNWEIGHTED_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::AddUnweightedDoubleGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::AddUnweightedDoubleGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::AddUnweightedDoubleGradDtype))
        PADDLE_FUSED_ROWS_SPMD("rrrr>000");
