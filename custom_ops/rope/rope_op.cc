// The RoPE operators: one, two or three tensors rotated in one launch (an operator cannot have
// outputs that are sometimes absent), and the tables of cosines and sines.
#include <cstdlib>
#include <cstring>

#include "custom_ops/paddle/spmd.h"
#include "custom_ops/paddle/tensor.h"
#include "custom_ops/rope/rope.h"

namespace paddle_fused {
namespace {

using DataType = paddle::DataType;
using OptionalTensor = paddle::optional<Tensor>;

constexpr char kRope[] = "paddle_fused_rope";

// Order of the axes of a rotated tensor.
enum class Layout : int { kBatchSeqHeads = 0, kSeqBatchHeads = 1, kBatchHeadsSeq = 2 };

struct RopeAttrs {
  RopeAttrs(int pairing, int layout, const std::vector<int>& shapes, const std::string& caller)
      : pairing(static_cast<RopePairing>(pairing)),
        layout(static_cast<Layout>(layout)),
        shapes(shapes),
        caller(caller) {
    PADDLE_FUSED_CHECK(pairing >= 0 && pairing <= 2 && layout >= 0 && layout <= 2,
                       "%s: unknown pairing %d or layout %d.", kRope, pairing, layout);
  }
  size_t BatchAxis() const { return layout == Layout::kSeqBatchHeads ? 1 : 0; }
  size_t SeqAxis() const {
    return layout == Layout::kSeqBatchHeads ? 0 : layout == Layout::kBatchSeqHeads ? 1 : 2;
  }
  size_t HeadAxis() const { return layout == Layout::kBatchHeadsSeq ? 1 : 2; }

  RopePairing pairing;
  Layout layout;
  // Shapes of all tensors as they came, one after the other, -1 for an unknown size: what a
  // gradient has to look like.
  const std::vector<int>& shapes;
  const std::string& caller;  // the function that an error should name
};

// [rows, dim], [batch, rows, dim] or [batch, rows, 1, dim].
struct TableSize {
  explicit TableSize(const Shape& shape) {
    PADDLE_FUSED_CHECK(
        shape.size() >= 2 && shape.size() <= 4 && (shape.size() < 4 || shape[2] == 1),
        "%s: expected tables of shape [S, R], [B, S, R] or [B, S, 1, R].", kRope);
    dim = shape.back();
    rows = shape[shape.size() == 2 ? 0 : 1];
    batch = shape.size() == 2 ? 1 : shape[0];
  }
  int64_t batch, rows, dim;
};

void SetIds(const OptionalTensor& ids, int64_t count, const void** data, bool* int32) {
  if (!ids) return;
  PADDLE_FUSED_CHECK(ids->dtype() == DataType::INT64 || ids->dtype() == DataType::INT32,
                     "%s: expected int64 or int32 position_ids.", kRope);
  PADDLE_FUSED_CHECK(ids->numel() == count,
                     "%s: expected position_ids for %d tokens (batch x sequence), got %d.", kRope,
                     count, ids->numel());
  *data = DataOf(*ids);
  *int32 = ids->dtype() == DataType::INT32;
}

void SetTables(const Tensor& sin, const Tensor& cos, RopeParams* p) {
  const TableSize size(cos.shape());
  PADDLE_FUSED_CHECK(sin.shape() == cos.shape() && sin.dtype() == cos.dtype(),
                     "%s: sin and cos must have one dtype and one shape.", kRope);
  PADDLE_FUSED_CHECK(size.dim % 2 == 0 && size.dim <= p->head_dim,
                     "%s: expected tables of an even width up to the head's %d, got %d.", kRope,
                     p->head_dim, size.dim);
  PADDLE_FUSED_CHECK(size.batch == 1 || size.batch == p->batch,
                     "%s: expected tables for 1 or %d sequences, got %d.", kRope, p->batch,
                     size.batch);
  PADDLE_FUSED_CHECK(p->position_ids != nullptr || size.rows >= p->seq,
                     "%s: the tables have %d rows, too few for a sequence of %d.", kRope, size.rows,
                     p->seq);
  p->rotary_dim = size.dim;
  p->rotary_begin = p->pairing == RopePairing::kInterleavedToHalves ? p->head_dim - size.dim : 0;
  p->table_rows = size.rows;
  p->table_batch_stride = size.batch == 1 ? 0 : size.rows * size.dim;
  p->table_dtype = DTypeOf(cos, kRope);
  p->cos = DataOf(cos);
  p->sin = DataOf(sin);
}

// Element strides of a contiguous tensor by the meaning of its axes.
RopeTensor Describe(const Tensor& in, Tensor& out, const RopeAttrs& attrs) {
  const Shape shape = in.shape();
  const int64_t strides[3] = {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3]};
  RopeTensor t{};
  t.in = DataOf(in);
  t.out = MutableDataOf(out);
  t.heads = shape[attrs.HeadAxis()];
  t.batch_stride = strides[attrs.BatchAxis()];
  t.seq_stride = strides[attrs.SeqAxis()];
  t.head_stride = strides[attrs.HeadAxis()];
  return t;
}

// An undefined input (a gradient that nobody asked through) gives zeros of the shape it would have.
Tensor ZerosBeside(const Tensor& like, const RopeAttrs& attrs, size_t index) {
  Shape shape = like.shape();
  PADDLE_FUSED_CHECK(attrs.shapes.size() >= 4 * (index + 1), "%s: no shape for tensor %d.", kRope,
                     index);
  shape[attrs.HeadAxis()] = attrs.shapes[4 * index + attrs.HeadAxis()];
  return paddle::full(shape, 0, like.dtype(), like.place());
}

// A gradient has the shape that was recorded for its tensor.
void CheckRecordedShape(const Tensor& t, const RopeAttrs& attrs, size_t index) {
  const Shape shape = t.shape();
  bool fits = t.is_dense_tensor() && shape.size() == 4;
  for (size_t i = 0; fits && i < 4 && attrs.shapes.size() >= 4 * (index + 1); ++i) {
    const int expected = attrs.shapes[4 * index + i];
    fits = expected < 0 || shape[i] == expected;
  }
  PADDLE_FUSED_CHECK(fits, "%s(): a gradient that came has not the shape of the output.",
                     attrs.caller);
}

// Out of range on the CPU: an error. On a GPU that would take a synchronisation, so the kernel
// writes NaN instead; PADDLE_FUSED_CHECK_IDS=1 checks there too, for debugging.
void CheckIds(const OptionalTensor& ids, const RopeParams& p, const std::string& caller) {
  if (p.position_ids == nullptr) return;
  const void* data = p.position_ids;
  Tensor on_host;
  if (!ids->is_cpu()) {
    static const bool wanted = [] {
      const char* text = std::getenv("PADDLE_FUSED_CHECK_IDS");
      return text != nullptr && std::strcmp(text, "0") != 0;
    }();
    if (!wanted) return;
    on_host = ids->copy_to(paddle::CPUPlace(), true);
    data = on_host.data();
  }
  int64_t bad = 0;
  if (!CheckPositionIdsCpu(data, p.position_ids_int32, p.batch * p.seq, p.table_rows, &bad)) {
    PADDLE_THROW(
        errors::InvalidArgument("%s(): position_ids: expected values in [0, %d), the rows of the "
                                "sin and cos tables, got %d",
                                caller, p.table_rows, bad));
  }
}

std::vector<Tensor> RunRope(const std::vector<const Tensor*>& inputs, const Tensor& sin,
                            const Tensor& cos, const OptionalTensor& ids, const RopeAttrs& attrs,
                            bool adjoint) {
  const Tensor* first = nullptr;
  for (const Tensor* t : inputs) {
    if (first == nullptr && t->defined()) first = t;
  }
  PADDLE_FUSED_CHECK(first != nullptr, "%s(): no gradient came for any output.", attrs.caller);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (adjoint && inputs[i]->defined()) CheckRecordedShape(*inputs[i], attrs, i);
  }
  const Shape shape = first->shape();
  PADDLE_FUSED_CHECK(shape.size() == 4, "%s: expected tensors of rank 4.", kRope);
  RopeParams p{};
  p.dtype = DTypeOf(*first, kRope);
  p.pairing = attrs.pairing;
  p.adjoint = adjoint;
  p.batch = shape[attrs.BatchAxis()];
  p.seq = shape[attrs.SeqAxis()];
  p.head_dim = shape[3];
  SetIds(ids, p.batch * p.seq, &p.position_ids, &p.position_ids_int32);
  SetTables(sin, cos, &p);
  std::vector<Tensor> results;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& in = *inputs[i];
    if (!in.defined()) {
      results.push_back(ZerosBeside(*first, attrs, i));
      continue;
    }
    const Shape own = in.shape();
    PADDLE_FUSED_CHECK(in.dtype() == first->dtype() && own.size() == 4 &&
                           own[attrs.BatchAxis()] == p.batch && own[attrs.SeqAxis()] == p.seq &&
                           own[3] == p.head_dim,
                       "%s: the tensors may differ in their number of heads only.", kRope);
    results.push_back(EmptyLike(in));
    if (in.numel() > 0) p.tensors[p.tensor_count++] = Describe(in, results.back(), attrs);
  }
  if (p.tensor_count == 0) return results;
  CheckIds(ids, p, attrs.caller);
  RunOn(*first, kRope, [&] { LaunchRopeCpu(p); }, [&](void* stream) { LaunchRopeCuda(p, stream); });
  return results;
}

using Sizes = std::vector<int>;

// The same kernel is forward (of the tensors, and of the second-order directions) and adjoint (of
// the gradients).
template <bool kAdjoint>
std::vector<Tensor> Rope1(const Tensor& q, const Tensor& sin, const Tensor& cos,
                          const OptionalTensor& ids, int pairing, int layout, const Sizes& shapes,
                          const std::string& caller) {
  return RunRope({&q}, sin, cos, ids, {pairing, layout, shapes, caller}, kAdjoint);
}
template <bool kAdjoint>
std::vector<Tensor> Rope2(const Tensor& q, const Tensor& k, const Tensor& sin, const Tensor& cos,
                          const OptionalTensor& ids, int pairing, int layout, const Sizes& shapes,
                          const std::string& caller) {
  return RunRope({&q, &k}, sin, cos, ids, {pairing, layout, shapes, caller}, kAdjoint);
}
template <bool kAdjoint>
std::vector<Tensor> Rope3(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& sin,
                          const Tensor& cos, const OptionalTensor& ids, int pairing, int layout,
                          const Sizes& shapes, const std::string& caller) {
  return RunRope({&q, &k, &v}, sin, cos, ids, {pairing, layout, shapes, caller}, kAdjoint);
}

using OptionalShape = paddle::optional<Shape>;
using OptionalDtype = paddle::optional<DataType>;

std::vector<Shape> Rope1Shape(const Shape& q, const Shape&, const Shape&, const OptionalShape&) {
  return {q};
}
std::vector<DataType> Rope1Dtype(const DataType& q, const DataType&, const DataType&,
                                 const OptionalDtype&) {
  return {q};
}
std::vector<Shape> Rope2Shape(const Shape& q, const Shape& k, const Shape&, const Shape&,
                              const OptionalShape&) {
  return {q, k};
}
std::vector<DataType> Rope2Dtype(const DataType& q, const DataType& k, const DataType&,
                                 const DataType&, const OptionalDtype&) {
  return {q, k};
}
std::vector<Shape> Rope3Shape(const Shape& q, const Shape& k, const Shape& v, const Shape&,
                              const Shape&, const OptionalShape&) {
  return {q, k, v};
}
std::vector<DataType> Rope3Dtype(const DataType& q, const DataType& k, const DataType& v,
                                 const DataType&, const DataType&, const OptionalDtype&) {
  return {q, k, v};
}

#ifdef PADDLE_FUSED_WITH_SPMD
// Labels of the axes; the heads of each tensor have one of their own behind these.
enum RopeLabel : int { kBatch = 0, kSeq = 1, kHeads = 2 };

// A rotated tensor: batch, sequence and heads may be cut. Each process needs whole pairs.
spmd::Axes RotatedAxes(const spmd::DistMetaTensor* given, const RopeAttrs& attrs, int index,
                       bool cut_seq) {
  spmd::Axes axes;
  axes.given = given;
  axes.labels.assign(4, spmd::kWhole);
  axes.labels[attrs.BatchAxis()] = kBatch;
  axes.labels[attrs.SeqAxis()] = cut_seq ? static_cast<int>(kSeq) : spmd::kWhole;
  axes.labels[attrs.HeadAxis()] = kHeads + index;
  return axes;
}

// A table: cut like the sequence if its rows are the tokens, like the batch if it has one.
spmd::Axes TableAxes(const spmd::DistMetaTensor* given, bool rows_are_tokens) {
  spmd::Axes axes;
  axes.given = given;
  const size_t rank = spmd::RankOf(*given);
  axes.labels.assign(rank, spmd::kWhole);
  if (rows_are_tokens && rank > 1) axes.labels[rank == 2 ? 0 : 1] = kSeq;
  if (rank > 2 && spmd::SizeOf(*given, 0) != 1) axes.labels[0] = kBatch;
  return axes;
}

spmd::Axes IdsAxes(const spmd::DistMetaTensor* given) {
  spmd::Axes axes;
  axes.given = given;
  axes.any = spmd::IsAbsent(given);
  if (!axes.any) axes.labels = {kBatch, kSeq};
  return axes;
}

// Inputs: `count` rotated tensors, sin, cos, ids. The sequence is cut if each process can tell the
// rows of its tokens: by their ids, or because the tables have as many rows as there are tokens.
template <int count>
spmd::SpmdInfo RopeSpmd(const spmd::Inputs& inputs, const spmd::Attrs& attributes) {
  const std::vector<const spmd::DistMetaTensor*> given = spmd::Flatten(inputs, 1);
  PADDLE_FUSED_CHECK(given.size() == count + 3, "%s: unexpected number of inputs.", kRope);
  const std::vector<int> none;
  const std::string name = kRope;
  const RopeAttrs attrs(paddle::any_cast<int>(attributes.at(0)),
                        paddle::any_cast<int>(attributes.at(1)), none, name);
  const spmd::DistMetaTensor& table = *given[count];
  const size_t rank = spmd::RankOf(table);
  const int64_t rows = rank < 2 ? -1 : spmd::SizeOf(table, rank == 2 ? 0 : 1);
  const bool has_ids = !spmd::IsAbsent(given[count + 2]);
  const bool rows_are_tokens =
      !has_ids && rows >= 0 && rows == spmd::SizeOf(*given[0], attrs.SeqAxis());
  std::vector<spmd::Axes> in, out;
  for (int i = 0; i < count; ++i) {
    in.push_back(RotatedAxes(given[i], attrs, i, has_ids || rows_are_tokens));
    out.push_back(in.back());
  }
  for (int i = count; i < count + 2; ++i) in.push_back(TableAxes(given[i], rows_are_tokens));
  in.push_back(IdsAxes(given[count + 2]));
  return spmd::Infer(in, out);
}
#endif

// ---- Tables

constexpr char kTable[] = "paddle_fused_rope_table";

// A dim below 0 is that of x's last axis: a static graph may not know it when the call is recorded.
std::vector<Shape> RopeTableShape(const Shape& x, const OptionalShape& ids, int seq_axis, int dim) {
  Shape shape = ids && !ids->empty() && *ids != Shape{0} ? *ids : Shape{x.at(seq_axis)};
  shape.push_back(dim >= 0 ? dim : x.back());
  return {shape, shape};
}
std::vector<DataType> RopeTableDtype(const DataType&, const OptionalDtype&) {
  return {DataType::FLOAT32, DataType::FLOAT32};
}

// x gives the length of the sequence where there are no position_ids, and the device.
std::vector<Tensor> RopeTable(const Tensor& x, const OptionalTensor& ids, int seq_axis, int dim,
                              const std::vector<float>& base, int pairing) {
  const Shape shape = RopeTableShape(x.shape(), ids ? OptionalShape(ids->shape()) : OptionalShape(),
                                     seq_axis, dim)[0];
  const int64_t width = shape.back();
  PADDLE_FUSED_CHECK(width % 2 == 0, "%s: expected an even width, got %d.", kTable, width);
  std::vector<Tensor> results{EmptyOn(x, shape, DataType::FLOAT32),
                              EmptyOn(x, shape, DataType::FLOAT32)};
  if (results[0].numel() == 0) return results;
  RopeTableParams p{};
  p.pairing = static_cast<RopePairing>(pairing);
  p.base = FromParts(base);
  p.dim = width;
  p.rows = results[0].numel() / width;
  SetIds(ids, p.rows, &p.position_ids, &p.position_ids_int32);
  p.cos = results[0].data<float>();
  p.sin = results[1].data<float>();
  RunOn(
      x, kTable, [&] { LaunchRopeTableCpu(p); },
      [&](void* stream) { LaunchRopeTableCuda(p, stream); });
  return results;
}

#ifdef PADDLE_FUSED_WITH_SPMD
// With ids the tables lie as these do, and of x only the last axis counts. Without, every process
// makes all rows, from the whole length of x's sequence.
spmd::SpmdInfo RopeTableSpmd(const spmd::Inputs& inputs, const spmd::Attrs& attributes) {
  const std::vector<const spmd::DistMetaTensor*> given = spmd::Flatten(inputs, 1);
  const bool has_ids = !spmd::IsAbsent(given.at(1));
  const int dim = paddle::any_cast<int>(attributes.at(1));
  spmd::Axes x;
  x.given = given[0];
  x.any = has_ids && dim >= 0;
  x.labels.assign(spmd::RankOf(*given[0]), spmd::kWhole);
  const spmd::Axes ids = IdsAxes(given[1]);
  spmd::Axes table;
  table.labels = has_ids ? ids.labels : std::vector<int>{spmd::kWhole};
  table.labels.push_back(spmd::kWhole);
  return spmd::Infer({x, ids}, {table, table});
}
#endif

}  // namespace
}  // namespace paddle_fused

using paddle::Grad;
using paddle::Optional;
namespace pf = paddle_fused;

#define ROPE_ATTRS "pairing: int", "layout: int", "shapes: std::vector<int>", "caller: std::string"

PD_BUILD_OP(paddle_fused_rope)
    .Inputs({"Q", "Sin", "Cos", Optional("PositionIds")})
    .Outputs({"OutQ"})
    .Attrs({ROPE_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::Rope1<false>))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::Rope1Shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::Rope1Dtype)) PADDLE_FUSED_SPMD(pf::RopeSpmd<1>);
PD_BUILD_GRAD_OP(paddle_fused_rope)
    .Inputs({Grad("OutQ"), "Sin", "Cos", Optional("PositionIds")})
    .Outputs({Grad("Q")})
    .Attrs({ROPE_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::Rope1<true>))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::Rope1Shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::Rope1Dtype)) PADDLE_FUSED_SPMD(pf::RopeSpmd<1>);
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_rope)
    .Inputs({Grad(Grad("Q")), "Sin", "Cos", Optional("PositionIds")})
    .Outputs({Grad(Grad("OutQ"))})
    .Attrs({ROPE_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::Rope1<false>))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::Rope1Shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::Rope1Dtype)) PADDLE_FUSED_SPMD(pf::RopeSpmd<1>);

PD_BUILD_OP(paddle_fused_rope_qk)
    .Inputs({"Q", "K", "Sin", "Cos", Optional("PositionIds")})
    .Outputs({"OutQ", "OutK"})
    .Attrs({ROPE_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::Rope2<false>))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::Rope2Shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::Rope2Dtype)) PADDLE_FUSED_SPMD(pf::RopeSpmd<2>);
PD_BUILD_GRAD_OP(paddle_fused_rope_qk)
    .Inputs({Grad("OutQ"), Grad("OutK"), "Sin", "Cos", Optional("PositionIds")})
    .Outputs({Grad("Q"), Grad("K")})
    .Attrs({ROPE_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::Rope2<true>))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::Rope2Shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::Rope2Dtype)) PADDLE_FUSED_SPMD(pf::RopeSpmd<2>);
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_rope_qk)
    .Inputs({Grad(Grad("Q")), Grad(Grad("K")), "Sin", "Cos", Optional("PositionIds")})
    .Outputs({Grad(Grad("OutQ")), Grad(Grad("OutK"))})
    .Attrs({ROPE_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::Rope2<false>))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::Rope2Shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::Rope2Dtype)) PADDLE_FUSED_SPMD(pf::RopeSpmd<2>);

PD_BUILD_OP(paddle_fused_rope_qkv)
    .Inputs({"Q", "K", "V", "Sin", "Cos", Optional("PositionIds")})
    .Outputs({"OutQ", "OutK", "OutV"})
    .Attrs({ROPE_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::Rope3<false>))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::Rope3Shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::Rope3Dtype)) PADDLE_FUSED_SPMD(pf::RopeSpmd<3>);
PD_BUILD_GRAD_OP(paddle_fused_rope_qkv)
    .Inputs({Grad("OutQ"), Grad("OutK"), Grad("OutV"), "Sin", "Cos", Optional("PositionIds")})
    .Outputs({Grad("Q"), Grad("K"), Grad("V")})
    .Attrs({ROPE_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::Rope3<true>))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::Rope3Shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::Rope3Dtype)) PADDLE_FUSED_SPMD(pf::RopeSpmd<3>);
PD_BUILD_DOUBLE_GRAD_OP(paddle_fused_rope_qkv)
    .Inputs({Grad(Grad("Q")), Grad(Grad("K")), Grad(Grad("V")), "Sin", "Cos",
             Optional("PositionIds")})
    .Outputs({Grad(Grad("OutQ")), Grad(Grad("OutK")), Grad(Grad("OutV"))})
    .Attrs({ROPE_ATTRS})
    .SetKernelFn(PD_KERNEL(pf::Rope3<false>))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::Rope3Shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::Rope3Dtype)) PADDLE_FUSED_SPMD(pf::RopeSpmd<3>);

PD_BUILD_OP(paddle_fused_rope_table)
    .Inputs({"X", Optional("PositionIds")})
    .Outputs({"Cos", "Sin"})
    .Attrs({"seq_axis: int", "dim: int", "base: std::vector<float>", "pairing: int"})
    .SetKernelFn(PD_KERNEL(pf::RopeTable))
    .SetInferShapeFn(PD_INFER_SHAPE(pf::RopeTableShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(pf::RopeTableDtype)) PADDLE_FUSED_SPMD(pf::RopeTableSpmd);
