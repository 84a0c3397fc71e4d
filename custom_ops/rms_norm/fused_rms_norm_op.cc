// The operators behind Paddle's own entry points: fused_rms_norm with its biases and int8 output,
// and fused_rms_norm_ext. All of them round once.
#include "custom_ops/paddle/spmd.h"
#include "custom_ops/rms_norm/rms_norm_host.h"

namespace paddle_fused {
namespace {

using DataType = paddle::DataType;
constexpr int kOneRounding = static_cast<int>(CastingMode::kGemma);

// ---- (x, weight, norm_bias)

constexpr char kAffine[] = "paddle_fused_rms_norm_affine";

std::vector<Tensor> Affine(const Tensor& x, const Tensor& weight, const Tensor& norm_bias,
                           const FloatParts& epsilon) {
  return RunRmsNorm({x, &weight, &norm_bias}, epsilon, {}, kOneRounding, kAffine);
}

std::vector<Tensor> AffineGrad(const Tensor& x, const Tensor& weight, const Tensor& norm_bias,
                               const Tensor& out_grad, const FloatParts& epsilon) {
  const RmsNormGradInputs in{x, &weight, &norm_bias, nullptr, false, true, nullptr, out_grad};
  RmsNormGrads grads = RunRmsNormGrad(in, epsilon, {}, kOneRounding, kAffine);
  return {grads.x, grads.weight, grads.norm_bias};
}

std::vector<Tensor> RaiseNoSecondOrder(const char* function) {
  PADDLE_THROW(errors::Unimplemented(
      "%s has no second-order gradient in this form: use rms_norm, whose gradient can be "
      "differentiated again.",
      function));
}

std::vector<Tensor> AffineDoubleGrad(const Tensor&, const Tensor&) {
  return RaiseNoSecondOrder("fused_rms_norm");
}

std::vector<Shape> AffineShape(const Shape& x, const Shape&, const Shape&) { return {x}; }
std::vector<DataType> AffineDtype(const DataType& x, const DataType&, const DataType&) {
  return {x};
}
std::vector<Shape> AffineGradShape(const Shape& x, const Shape& w, const Shape& b, const Shape&) {
  return {x, w, b};
}
std::vector<DataType> AffineGradDtype(const DataType& x, const DataType& w, const DataType& b,
                                      const DataType&) {
  return {x, w, b};
}
std::vector<Shape> SameAsFirstShape(const Shape& x, const Shape&) { return {x}; }
std::vector<DataType> SameAsFirstDtype(const DataType& x, const DataType&) { return {x}; }

// ---- (x, weight[, norm_bias][, bias][, residual])
// One list of inputs, since optional ones with gradients do not work in static graphs; the flags
// say which follow x and weight. Only the forms with a sum come here.

constexpr char kAddAffine[] = "paddle_fused_add_rms_norm_affine";

struct ListedInputs {
  ListedInputs(const std::vector<Tensor>& list, bool has_norm_bias, bool has_bias,
               bool has_residual) {
    const size_t expected = 2u + has_norm_bias + has_bias + has_residual;
    PADDLE_FUSED_CHECK(list.size() == expected && (has_bias || has_residual),
                       "%s: expected %d inputs, got %d.", kAddAffine, expected, list.size());
    size_t next = 2;
    if (has_norm_bias) norm_bias = &list[next++];
    if (has_bias) bias = &list[next++];
    if (has_residual) residual = &list[next++];
  }
  const Tensor* norm_bias = nullptr;
  const Tensor* bias = nullptr;
  const Tensor* residual = nullptr;
};

std::vector<Tensor> AddAffine(const std::vector<Tensor>& list, const FloatParts& epsilon,
                              bool has_norm_bias, bool has_bias, bool has_residual) {
  const ListedInputs in(list, has_norm_bias, has_bias, has_residual);
  return RunRmsNorm({list[0], &list[1], in.norm_bias, in.bias, in.residual}, epsilon, {},
                    kOneRounding, kAddAffine);
}

std::vector<Tensor> AddAffineGrad(const std::vector<Tensor>& list, const Tensor& sum,
                                  const Tensor& out_grad, const Tensor& sum_grad,
                                  const FloatParts& epsilon, bool has_norm_bias, bool has_bias,
                                  bool has_residual) {
  const ListedInputs inputs(list, has_norm_bias, has_bias, has_residual);
  const RmsNormGradInputs in{sum,  &list[1], inputs.norm_bias, inputs.bias, has_residual,
                             true, nullptr,  out_grad,         &sum_grad};
  RmsNormGrads grads = RunRmsNormGrad(in, epsilon, {}, kOneRounding, kAddAffine);
  std::vector<Tensor> results{grads.x, grads.weight};
  if (has_norm_bias) results.push_back(grads.norm_bias);
  if (has_bias) results.push_back(grads.bias);
  if (has_residual) results.push_back(grads.residual);
  return results;
}

std::vector<Tensor> AddAffineDoubleGrad(const Tensor&, const Tensor&) {
  return RaiseNoSecondOrder("fused_rms_norm");
}

std::vector<Shape> AddAffineShape(const std::vector<Shape>& list) { return {list[0], list[0]}; }
std::vector<DataType> AddAffineDtype(const std::vector<DataType>& list) {
  return {list[0], list[0]};
}

#ifdef PADDLE_FUSED_WITH_SPMD
// "rv", then the roles of what the list has behind x and weight; its attributes are the flags.
std::string ListedRoles(const spmd::Attrs& attrs) {
  std::string roles = "rv";
  if (paddle::any_cast<bool>(attrs.at(1))) roles += 'v';
  if (paddle::any_cast<bool>(attrs.at(2))) roles += 'v';
  if (paddle::any_cast<bool>(attrs.at(3))) roles += 'r';
  return roles;
}

// What belongs to the list comes and goes as a list.
spmd::ArgDistAttr Listed(const std::vector<spmd::ArgDistAttr>& flat, size_t count) {
  std::vector<spmd::TensorDistAttr> list;
  for (size_t i = 0; i < count; ++i) list.push_back(paddle::get<spmd::TensorDistAttr>(flat[i]));
  return list;
}

spmd::SpmdInfo AddAffineSpmd(const spmd::Inputs& inputs, const spmd::Attrs& attrs) {
  const std::string roles = ListedRoles(attrs);
  const spmd::SpmdInfo flat = spmd::InferRows(spmd::Flatten(inputs), roles + ">00");
  return {{Listed(flat.first, roles.size())}, flat.second};
}

spmd::SpmdInfo AddAffineGradSpmd(const spmd::Inputs& inputs, const spmd::Attrs& attrs) {
  const std::string roles = ListedRoles(attrs);
  const std::string likes = std::string("01234").substr(0, roles.size());
  const spmd::SpmdInfo flat = spmd::InferRows(spmd::Flatten(inputs), roles + "rrr>" + likes);
  std::vector<spmd::ArgDistAttr> first{Listed(flat.first, roles.size())};
  first.insert(first.end(), flat.first.begin() + roles.size(), flat.first.end());
  return {first, {Listed(flat.second, roles.size())}};
}
#endif

// ---- int8 output

constexpr char kInt8[] = "paddle_fused_rms_norm_int8";

std::vector<Tensor> RmsNormInt8(const Tensor& x, const Tensor& weight,
                                const paddle::optional<Tensor>& norm_bias,
                                const paddle::optional<Tensor>& bias,
                                const paddle::optional<Tensor>& residual, const FloatParts& epsilon,
                                float scale, int round_type, float max_bound, float min_bound) {
  const auto pointer = [](const paddle::optional<Tensor>& t) { return t ? &*t : nullptr; };
  const RmsNormInputs in{x, &weight, pointer(norm_bias), pointer(bias), pointer(residual)};
  RmsNormParams p{};
  p.epsilon = FromParts(epsilon);
  p.mode = CastingMode::kGemma;
  p.quant = {true, round_type != 0, scale, max_bound, min_bound};
  SetInputs(in, kInt8, &p);
  std::vector<Tensor> results{EmptyOn(x, x.shape(), DataType::INT8),
                              HasSum(in) ? EmptyLike(x) : EmptyOn(x, {0}, x.dtype())};
  if (x.numel() == 0) return results;
  p.y = MutableDataOf(results[0]);
  p.residual_out = MutableDataOf(results[1]);
  RunOn(
      x, kInt8, [&] { LaunchRmsNormCpu(p); }, [&](void* stream) { LaunchRmsNormCuda(p, stream); });
  return results;
}

std::vector<Shape> RmsNormInt8Shape(const Shape& x, const Shape&, const paddle::optional<Shape>&,
                                    const paddle::optional<Shape>& bias,
                                    const paddle::optional<Shape>& residual) {
  // An empty tensor stands for an absent one among distributed tensors.
  const auto given = [](const paddle::optional<Shape>& s) { return s && *s != Shape{0}; };
  return {x, given(bias) || given(residual) ? x : Shape{0}};
}
std::vector<DataType> RmsNormInt8Dtype(const DataType& x, const DataType&,
                                       const paddle::optional<DataType>&,
                                       const paddle::optional<DataType>&,
                                       const paddle::optional<DataType>&) {
  return {DataType::INT8, x};
}

#ifdef PADDLE_FUSED_WITH_SPMD
spmd::SpmdInfo RmsNormInt8Spmd(const spmd::Inputs& inputs, const spmd::Attrs&) {
  const auto given = spmd::Flatten(inputs, 3);
  const bool has_sum = !spmd::IsAbsent(given.at(3)) || !spmd::IsAbsent(given.at(4));
  // Without a sum the second output is an empty vector, placed like any other.
  return spmd::InferRows(given, has_sum ? "rvvvr>00" : "rvvvr>01");
}
#endif

// ---- fused_rms_norm_ext: y has the scale's dtype, the row's 1 / rms comes back too

constexpr char kExt[] = "paddle_fused_rms_norm_ext";

Shape WithoutLast(Shape shape) {
  if (!shape.empty()) shape.pop_back();
  return shape;
}

std::vector<Tensor> Ext(const Tensor& x, const Tensor& scale, const FloatParts& epsilon) {
  RmsNormParams p{};
  p.epsilon = FromParts(epsilon);
  p.mode = CastingMode::kGemma;
  SetInputs({x, &scale}, kExt, &p);
  p.y_dtype = p.weight_dtype;
  const Shape inv_shape = WithoutLast(x.shape());
  std::vector<Tensor> results{EmptyOn(x, x.shape(), scale.dtype())};
  if (x.numel() == 0) {
    // The mean over no columns counts as 0.
    const float inv = static_cast<float>(1.0 / std::sqrt(p.epsilon));
    results.push_back(paddle::full(inv_shape, inv, DataType::FLOAT32, x.place()));
    return results;
  }
  results.push_back(EmptyOn(x, inv_shape, DataType::FLOAT32));
  p.y = MutableDataOf(results[0]);
  p.inv_rms = results[1].data<float>();
  RunOn(x, kExt, [&] { LaunchRmsNormCpu(p); }, [&](void* stream) { LaunchRmsNormCuda(p, stream); });
  return results;
}

// A backward pass through inv_var alone leaves y_grad undefined: the gradient it would need is not
// offered, as in Paddle, and the gradients come back as zeros. 1 / rms is computed again rather
// than taken from the forward, which hands it out in float32 whatever x is: it comes from the same
// pass over x that the gradient needs anyway.
std::vector<Tensor> ExtGrad(const Tensor& x, const Tensor& scale, const Tensor& y_grad,
                            const FloatParts& epsilon) {
  const RmsNormGradInputs in{x, &scale, nullptr, nullptr, false, true, nullptr, y_grad};
  RmsNormGrads grads = RunRmsNormGrad(in, epsilon, {}, kOneRounding, kExt);
  return {grads.x, grads.weight};
}

// The same for backward passes written by hand, which bring 1 / rms.
std::vector<Tensor> ExtBwd(const Tensor& x, const Tensor& scale, const Tensor& inv_var,
                           const Tensor& y_grad, const FloatParts& epsilon) {
  PADDLE_FUSED_CHECK(inv_var.dtype() == DataType::FLOAT32 && inv_var.numel() == RowsColsOf(x).rows,
                     "%s: expected invvar to hold one float32 for each row of x.", kExt);
  PADDLE_FUSED_CHECK(y_grad.dtype() == scale.dtype() && y_grad.shape() == x.shape(),
                     "%s: expected y_grad to have scale's dtype and x's shape.", kExt);
  const RmsNormGradInputs in{x, &scale, nullptr, nullptr, false, true, &inv_var, y_grad};
  RmsNormGrads grads = RunRmsNormGrad(in, epsilon, {}, kOneRounding, kExt);
  return {grads.x, grads.weight};
}

std::vector<Tensor> ExtDoubleGrad(const Tensor&, const Tensor&) {
  return RaiseNoSecondOrder("fused_rms_norm_ext");
}

std::vector<Shape> ExtShape(const Shape& x, const Shape&) { return {x, WithoutLast(x)}; }
std::vector<DataType> ExtDtype(const DataType&, const DataType& scale) {
  return {scale, DataType::FLOAT32};
}
std::vector<Shape> ExtGradShape(const Shape& x, const Shape& scale, const Shape&) {
  return {x, scale};
}
std::vector<DataType> ExtGradDtype(const DataType& x, const DataType& scale, const DataType&) {
  return {x, scale};
}
std::vector<Shape> ExtBwdShape(const Shape& x, const Shape& scale, const Shape&, const Shape&) {
  return {x, scale};
}
std::vector<DataType> ExtBwdDtype(const DataType& x, const DataType& scale, const DataType&,
                                  const DataType&) {
  return {x, scale};
}

}  // namespace
}  // namespace paddle_fused

using paddle::Grad;
using paddle::New;
using paddle::Optional;
using paddle::Vec;
namespace pf = paddle_fused;

PD_BUILD_OP(paddle_fused_rms_norm_affine)
    .Inputs({"X", "Weight", "NormBias"})
    .Outputs({"Out"})
    .Attrs({"epsilon: std::vector<float>"})
    .SetKernelFn(PD_KERNEL(pf::Affine))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::AffineShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::AffineDtype)) PADDLE_FUSED_ROWS_SPMD("rvv>0");
PD_BUILD_GRAD_OP(paddle_fused_rms_norm_affine)
    .Inputs({"X", "Weight", "NormBias", Grad("Out")})
    .Outputs({Grad("X"), Grad("Weight"), Grad("NormBias")})
    .Attrs({"epsilon: std::vector<float>"})
    .SetKernelFn(PD_KERNEL(pf::AffineGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::AffineGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::AffineGradDtype)) PADDLE_FUSED_ROWS_SPMD("rvvr>012");
// Registered to raise: without it a second differentiation would return None in silence.
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_rms_norm_affine)
    .Inputs({"X", Grad("Out")})
    .Outputs({Grad("X")})
    .SetKernelFn(PD_KERNEL(pf::AffineDoubleGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::SameAsFirstShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::SameAsFirstDtype)) PADDLE_FUSED_ROWS_SPMD("rr>0");

#define ADD_AFFINE_ATTRS \
  "epsilon: std::vector<float>", "has_norm_bias: bool", "has_bias: bool", "has_residual: bool"

PD_BUILD_OP(paddle_fused_add_rms_norm_affine)
    .Inputs({Vec("Inputs")})
    .Outputs({"Out", "ResidualOut"})
    .Attrs({ADD_AFFINE_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::AddAffine))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::AddAffineShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::AddAffineDtype)) PADDLE_FUSED_SPMD(pf::AddAffineSpmd);
PD_BUILD_GRAD_OP(paddle_fused_add_rms_norm_affine)
    .Inputs({Vec("Inputs"), "ResidualOut", Grad("Out"), Grad("ResidualOut")})
    .Outputs({Grad(Vec("Inputs"))})
    .Attrs({ADD_AFFINE_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::AddAffineGrad)) PADDLE_FUSED_SPMD(pf::AddAffineGradSpmd);
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_add_rms_norm_affine)
    .Inputs({"ResidualOut", Grad("Out")})
    .Outputs({New(Grad("ResidualOut"))})
    .SetKernelFn(PD_KERNEL(pf::AddAffineDoubleGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::SameAsFirstShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::SameAsFirstDtype)) PADDLE_FUSED_ROWS_SPMD("rr>0");

PD_BUILD_OP(paddle_fused_rms_norm_int8)
    .Inputs({"X", "Weight", Optional("NormBias"), Optional("Bias"), Optional("Residual")})
    .Outputs({"Out", "ResidualOut"})
    .Attrs({"epsilon: std::vector<float>", "quant_scale: float", "quant_round_type: int",
            "quant_max_bound: float", "quant_min_bound: float"})
    .SetKernelFn(PD_KERNEL(pf::RmsNormInt8))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::RmsNormInt8Shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::RmsNormInt8Dtype)) PADDLE_FUSED_SPMD(pf::RmsNormInt8Spmd);

PD_BUILD_OP(paddle_fused_rms_norm_ext)
    .Inputs({"X", "Scale"})
    .Outputs({"Y", "InvVar"})
    .Attrs({"epsilon: std::vector<float>"})
    .SetKernelFn(PD_KERNEL(pf::Ext))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::ExtShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::ExtDtype)) PADDLE_FUSED_ROWS_SPMD("rv>0-");
PD_BUILD_GRAD_OP(paddle_fused_rms_norm_ext)
    .Inputs({"X", "Scale", Grad("Y")})
    .Outputs({Grad("X"), Grad("Scale")})
    .Attrs({"epsilon: std::vector<float>"})
    .SetKernelFn(PD_KERNEL(pf::ExtGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::ExtGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::ExtGradDtype)) PADDLE_FUSED_ROWS_SPMD("rvr>01");
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_rms_norm_ext)
    .Inputs({"X", Grad("Y")})
    .Outputs({Grad("X")})
    .SetKernelFn(PD_KERNEL(pf::ExtDoubleGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::SameAsFirstShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::SameAsFirstDtype)) PADDLE_FUSED_ROWS_SPMD("rr>0");

PD_BUILD_OP(paddle_fused_rms_norm_ext_bwd)
    .Inputs({"X", "Scale", "InvVar", "YGrad"})
    .Outputs({"XGrad", "ScaleGrad"})
    .Attrs({"epsilon: std::vector<float>"})
    .SetKernelFn(PD_KERNEL(pf::ExtBwd))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::ExtBwdShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::ExtBwdDtype)) PADDLE_FUSED_ROWS_SPMD("rvrr>01");
