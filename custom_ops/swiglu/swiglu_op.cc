// The SwiGLU operators: shapes, allocation and registration.
#include "custom_ops/paddle/spmd.h"
#include "custom_ops/paddle/tensor.h"
#include "custom_ops/swiglu/swiglu.h"

namespace paddle_fused {
namespace {

using DataType = paddle::DataType;

// A dimension of unknown size (-1) stays unknown.
Shape HalveLast(Shape shape) {
  if (!shape.empty() && shape.back() >= 0) shape.back() /= 2;
  return shape;
}

// Gate and up of the packed form; their row stride is the packed width.
struct Packed {
  explicit Packed(const Tensor& x, const char* op) : width(RowsColsOf(x).cols) {
    PADDLE_FUSED_CHECK(!x.shape().empty() && width % 2 == 0,
                       "%s: expected an even size of the last axis, got %d.", op, width);
  }
  const void* Up(const void* gate, DType dtype) const {
    return gate == nullptr ? nullptr : static_cast<const char*>(gate) + width / 2 * SizeOf(dtype);
  }
  void* Up(void* gate, DType dtype) const {
    return const_cast<void*>(Up(static_cast<const void*>(gate), dtype));
  }
  int64_t width;
};

void CheckProbs(const Tensor& probs, int64_t rows, const char* op) {
  PADDLE_FUSED_CHECK(probs.dtype() == DataType::FLOAT32, "%s: expected float32 probs.", op);
  PADDLE_FUSED_CHECK(probs.numel() == rows,
                     "%s: expected one prob for each of the %d rows, got %d.", op, rows,
                     probs.numel());
}

std::vector<Tensor> RunSwiglu(const Tensor& x, const Tensor* probs, const char* op) {
  const Packed packed(x, op);
  Tensor out = EmptyOn(x, HalveLast(x.shape()), x.dtype());
  SwigluParams p{};
  p.dtype = DTypeOf(x, op);
  p.rows = RowsColsOf(x).rows;
  p.cols = packed.width / 2;
  p.in_stride = packed.width;
  if (probs != nullptr) CheckProbs(*probs, p.rows, op);
  if (out.numel() == 0) return {out};
  p.gate = DataOf(x);
  p.up = packed.Up(p.gate, p.dtype);
  p.probs = probs == nullptr ? nullptr : probs->data<float>();
  p.out = MutableDataOf(out);
  RunOn(x, op, [&] { LaunchSwigluCpu(p); }, [&](void* stream) { LaunchSwigluCuda(p, stream); });
  return {out};
}

// {x_grad} or, weighted, {x_grad, probs_grad, out}.
std::vector<Tensor> RunSwigluBackward(const Tensor& x, const Tensor& upstream, const Tensor* probs,
                                      bool with_out, const char* op) {
  const Packed packed(x, op);
  SwigluBackwardParams p{};
  p.dtype = DTypeOf(x, op);
  p.rows = RowsColsOf(x).rows;
  p.cols = packed.width / 2;
  p.in_stride = packed.width;
  const Tensor out_grad = UpstreamOrZeros(upstream, HalveLast(x.shape()), x.dtype(), x, op);
  std::vector<Tensor> results{EmptyLike(x)};
  if (probs != nullptr) {
    CheckProbs(*probs, p.rows, op);
    // No columns: the sum over nothing is zero and no kernel runs to say so.
    results.push_back(p.cols == 0 ? paddle::full(probs->shape(), 0, probs->dtype(), probs->place())
                                  : EmptyLike(*probs));
  }
  if (with_out) results.push_back(EmptyLike(out_grad));
  if (x.numel() == 0) return results;
  p.gate = DataOf(x);
  p.up = packed.Up(p.gate, p.dtype);
  p.probs = probs == nullptr ? nullptr : probs->data<float>();
  p.out_grad = DataOf(out_grad);
  p.gate_grad = MutableDataOf(results[0]);
  p.up_grad = packed.Up(p.gate_grad, p.dtype);
  if (probs != nullptr) p.probs_grad = results[1].data<float>();
  if (with_out) p.out = MutableDataOf(results.back());
  RunOn(
      x, op, [&] { LaunchSwigluBackwardCpu(p); },
      [&](void* stream) { LaunchSwigluBackwardCuda(p, stream); });
  return results;
}

// ---- swiglu(x), packed

constexpr char kSwiglu[] = "paddle_fused_swiglu";

std::vector<Tensor> Swiglu(const Tensor& x) { return RunSwiglu(x, nullptr, kSwiglu); }

std::vector<Tensor> SwigluGrad(const Tensor& x, const Tensor& out_grad) {
  return RunSwigluBackward(x, out_grad, nullptr, false, kSwiglu);
}

std::vector<Tensor> SwigluDoubleGrad(const Tensor& x, const Tensor& out_grad,
                                     const Tensor& x_grad_grad) {
  const Packed packed(x, kSwiglu);
  CheckGrad(out_grad, HalveLast(x.shape()), x.dtype(), kSwiglu);
  CheckGrad(x_grad_grad, x.shape(), x.dtype(), kSwiglu);
  std::vector<Tensor> results{EmptyLike(x), EmptyLike(out_grad)};
  if (x.numel() == 0) return results;
  SwigluDoubleBackwardParams p{};
  p.dtype = DTypeOf(x, kSwiglu);
  p.rows = RowsColsOf(x).rows;
  p.cols = packed.width / 2;
  p.in_stride = packed.width;
  p.gate = DataOf(x);
  p.up = packed.Up(p.gate, p.dtype);
  p.out_grad = DataOf(out_grad);
  p.gate_grad_grad = DataOf(x_grad_grad);
  p.up_grad_grad = packed.Up(p.gate_grad_grad, p.dtype);
  p.gate_out = MutableDataOf(results[0]);
  p.up_out = packed.Up(p.gate_out, p.dtype);
  p.out_grad_grad = MutableDataOf(results[1]);
  RunOn(
      x, kSwiglu, [&] { LaunchSwigluDoubleBackwardCpu(p); },
      [&](void* stream) { LaunchSwigluDoubleBackwardCuda(p, stream); });
  return results;
}

std::vector<Shape> HalvedShape(const Shape& x) { return {HalveLast(x)}; }
std::vector<DataType> SameDtype(const DataType& x) { return {x}; }
std::vector<Shape> SwigluGradShape(const Shape& x, const Shape&) { return {x}; }
std::vector<DataType> SwigluGradDtype(const DataType& x, const DataType&) { return {x}; }
std::vector<Shape> SwigluDoubleGradShape(const Shape& x, const Shape& g, const Shape&) {
  return {x, g};
}
std::vector<DataType> SwigluDoubleGradDtype(const DataType& x, const DataType& g, const DataType&) {
  return {x, g};
}

// ---- swiglu(x, y)

constexpr char kSwigluPair[] = "paddle_fused_swiglu_pair";

void CheckPair(const Tensor& x, const Tensor& y) {
  PADDLE_FUSED_CHECK(x.dtype() == y.dtype() && x.shape() == y.shape(),
                     "%s: x and y must have one dtype and one shape.", kSwigluPair);
}

// Elementwise, so any cut into rows will do.
template <class Params>
Params PairParams(const Tensor& x) {
  Params p{};
  p.dtype = DTypeOf(x, kSwigluPair);
  const RowsCols size = RowsColsOf(x);
  p.rows = size.rows;
  p.cols = p.in_stride = size.cols;
  return p;
}

std::vector<Tensor> SwigluPair(const Tensor& x, const Tensor& y) {
  CheckPair(x, y);
  Tensor out = EmptyLike(x);
  if (x.numel() == 0) return {out};
  SwigluParams p = PairParams<SwigluParams>(x);
  p.gate = DataOf(x);
  p.up = DataOf(y);
  p.out = MutableDataOf(out);
  RunOn(
      x, kSwigluPair, [&] { LaunchSwigluCpu(p); },
      [&](void* stream) { LaunchSwigluCuda(p, stream); });
  return {out};
}

std::vector<Tensor> SwigluPairGrad(const Tensor& x, const Tensor& y, const Tensor& upstream) {
  CheckPair(x, y);
  const Tensor out_grad = UpstreamOrZeros(upstream, x.shape(), x.dtype(), x, kSwigluPair);
  std::vector<Tensor> results{EmptyLike(x), EmptyLike(y)};
  if (x.numel() == 0) return results;
  SwigluBackwardParams p = PairParams<SwigluBackwardParams>(x);
  p.gate = DataOf(x);
  p.up = DataOf(y);
  p.out_grad = DataOf(out_grad);
  p.gate_grad = MutableDataOf(results[0]);
  p.up_grad = MutableDataOf(results[1]);
  RunOn(
      x, kSwigluPair, [&] { LaunchSwigluBackwardCpu(p); },
      [&](void* stream) { LaunchSwigluBackwardCuda(p, stream); });
  return results;
}

// Either second-order direction may be undefined: nobody differentiated that gradient.
std::vector<Tensor> SwigluPairDoubleGrad(const Tensor& x, const Tensor& y, const Tensor& out_grad,
                                         const Tensor& x_grad_grad, const Tensor& y_grad_grad) {
  for (const Tensor* t : {&out_grad, &x_grad_grad, &y_grad_grad}) {
    if (t->defined()) CheckGrad(*t, x.shape(), x.dtype(), kSwigluPair);
  }
  std::vector<Tensor> results{EmptyLike(x), EmptyLike(y), EmptyLike(x)};
  if (x.numel() == 0) return results;
  SwigluDoubleBackwardParams p = PairParams<SwigluDoubleBackwardParams>(x);
  p.gate = DataOf(x);
  p.up = DataOf(y);
  p.out_grad = DataOf(out_grad);
  p.gate_grad_grad = DataOf(x_grad_grad);
  p.up_grad_grad = DataOf(y_grad_grad);
  p.gate_out = MutableDataOf(results[0]);
  p.up_out = MutableDataOf(results[1]);
  p.out_grad_grad = MutableDataOf(results[2]);
  RunOn(
      x, kSwigluPair, [&] { LaunchSwigluDoubleBackwardCpu(p); },
      [&](void* stream) { LaunchSwigluDoubleBackwardCuda(p, stream); });
  return results;
}

std::vector<Shape> PairShape(const Shape& x, const Shape&) { return {x}; }
std::vector<DataType> PairDtype(const DataType& x, const DataType&) { return {x}; }
std::vector<Shape> PairGradShape(const Shape& x, const Shape& y, const Shape&) { return {x, y}; }
std::vector<DataType> PairGradDtype(const DataType& x, const DataType& y, const DataType&) {
  return {x, y};
}
std::vector<Shape> PairDoubleGradShape(const Shape& x, const Shape& y, const Shape& g, const Shape&,
                                       const Shape&) {
  return {x, y, g};
}
std::vector<DataType> PairDoubleGradDtype(const DataType& x, const DataType& y, const DataType& g,
                                          const DataType&, const DataType&) {
  return {x, y, g};
}

// ---- weighted

constexpr char kWeighted[] = "paddle_fused_swiglu_weighted";
constexpr char kWeightedBwd[] = "paddle_fused_swiglu_weighted_bwd";

std::vector<Tensor> SwigluWeighted(const Tensor& x, const Tensor& probs) {
  return RunSwiglu(x, &probs, kWeighted);
}

std::vector<Tensor> SwigluWeightedGrad(const Tensor& x, const Tensor& probs,
                                       const Tensor& out_grad) {
  return RunSwigluBackward(x, out_grad, &probs, false, kWeighted);
}

std::vector<Tensor> SwigluWeightedBwd(const Tensor& o1, const Tensor& do2_s, const Tensor& probs) {
  return RunSwigluBackward(o1, do2_s, &probs, true, kWeightedBwd);
}

std::vector<Tensor> SwigluWeightedDoubleGrad(const Tensor& x, const Tensor&) {
  (void)x;
  PADDLE_THROW(errors::Unimplemented(
      "fused_swiglu_weighted has no second-order gradient: write the weighted SwiGLU as "
      "swiglu(x) * probs where its gradient has to be differentiated again."));
}

std::vector<Shape> WeightedShape(const Shape& x, const Shape&) { return {HalveLast(x)}; }
std::vector<DataType> WeightedDtype(const DataType& x, const DataType&) { return {x}; }
std::vector<Shape> WeightedGradShape(const Shape& x, const Shape& probs, const Shape&) {
  return {x, probs};
}
std::vector<DataType> WeightedGradDtype(const DataType& x, const DataType& probs, const DataType&) {
  return {x, probs};
}
std::vector<Shape> WeightedBwdShape(const Shape& o1, const Shape& do2_s, const Shape& probs) {
  return {o1, probs, do2_s};
}
std::vector<DataType> WeightedBwdDtype(const DataType& o1, const DataType& do2_s,
                                       const DataType& probs) {
  return {o1, probs, do2_s};
}

}  // namespace
}  // namespace paddle_fused

using paddle::Grad;
namespace pf = paddle_fused;

PD_BUILD_OP(paddle_fused_swiglu)
    .Inputs({"X"})
    .Outputs({"Out"})
    .SetKernelFn(PD_KERNEL(pf::Swiglu))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::HalvedShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::SameDtype)) PADDLE_FUSED_ROWS_SPMD("r>0");
PD_BUILD_GRAD_OP(paddle_fused_swiglu)
    .Inputs({"X", Grad("Out")})
    .Outputs({Grad("X")})
    .SetKernelFn(PD_KERNEL(pf::SwigluGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::SwigluGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::SwigluGradDtype)) PADDLE_FUSED_ROWS_SPMD("rr>0");
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_swiglu)
    .Inputs({"X", Grad("Out"), Grad(Grad("X"))})
    .Outputs({Grad("X"), Grad(Grad("Out"))})
    .SetKernelFn(PD_KERNEL(pf::SwigluDoubleGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::SwigluDoubleGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::SwigluDoubleGradDtype)) PADDLE_FUSED_ROWS_SPMD("rrr>01");

PD_BUILD_OP(paddle_fused_swiglu_pair)
    .Inputs({"X", "Y"})
    .Outputs({"Out"})
    .SetKernelFn(PD_KERNEL(pf::SwigluPair))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::PairShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::PairDtype)) PADDLE_FUSED_ROWS_SPMD("ee>0");
PD_BUILD_GRAD_OP(paddle_fused_swiglu_pair)
    .Inputs({"X", "Y", Grad("Out")})
    .Outputs({Grad("X"), Grad("Y")})
    .SetKernelFn(PD_KERNEL(pf::SwigluPairGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::PairGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::PairGradDtype)) PADDLE_FUSED_ROWS_SPMD("eee>01");
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_swiglu_pair)
    .Inputs({"X", "Y", Grad("Out"), Grad(Grad("X")), Grad(Grad("Y"))})
    .Outputs({Grad("X"), Grad("Y"), Grad(Grad("Out"))})
    .SetKernelFn(PD_KERNEL(pf::SwigluPairDoubleGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::PairDoubleGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::PairDoubleGradDtype)) PADDLE_FUSED_ROWS_SPMD("eeeee>012");

PD_BUILD_OP(paddle_fused_swiglu_weighted)
    .Inputs({"X", "Probs"})
    .Outputs({"Out"})
    .SetKernelFn(PD_KERNEL(pf::SwigluWeighted))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::WeightedShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::WeightedDtype)) PADDLE_FUSED_ROWS_SPMD("rr>0");
PD_BUILD_GRAD_OP(paddle_fused_swiglu_weighted)
    .Inputs({"X", "Probs", Grad("Out")})
    .Outputs({Grad("X"), Grad("Probs")})
    .SetKernelFn(PD_KERNEL(pf::SwigluWeightedGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::WeightedGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::WeightedGradDtype)) PADDLE_FUSED_ROWS_SPMD("rrr>01");
// Registered to raise: without it a second differentiation would return None in silence.
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_swiglu_weighted)
    .Inputs({"X", Grad("Out")})
    .Outputs({Grad("X")})
    .SetKernelFn(PD_KERNEL(pf::SwigluWeightedDoubleGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::SwigluGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::SwigluGradDtype)) PADDLE_FUSED_ROWS_SPMD("rr>0");

PD_BUILD_OP(paddle_fused_swiglu_weighted_bwd)
    .Inputs({"O1", "Do2S", "UnzippedProbs"})
    .Outputs({"Do1", "ProbsGrad", "O2S"})
    .SetKernelFn(PD_KERNEL(pf::SwigluWeightedBwd))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::WeightedBwdShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::WeightedBwdDtype)) PADDLE_FUSED_ROWS_SPMD("rrr>021");
