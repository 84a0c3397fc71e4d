// Placements of distributed tensors: which axes of which tensors are cut together over the
// processes.
//
// Paddle asks a rule before it runs an operator on distributed tensors, moves the inputs to the
// placements that the rule names, runs the kernel on the local parts and gives the outputs the
// placements that the rule names. A rule here is a label for each axis of each tensor. One label is
// one logical axis: all its tensors are cut alike. An axis without a label stays whole.
#pragma once

#include "custom_ops/paddle/tensor.h"

// Since Paddle 3; before, the auto-parallel engine knows no custom operators.
#if __has_include("paddle/phi/api/ext/spmd_infer.h")
#define PADDLE_FUSED_WITH_SPMD
#endif

#ifdef PADDLE_FUSED_WITH_SPMD

#include <algorithm>
#include <map>
#include <set>

// In a CUDA build these would include the headers of cuBLAS, cuDNN and others, which a machine with
// nvcc need not have. Nothing that is declared here and used below depends on that macro.
#pragma push_macro("PADDLE_WITH_CUDA")
#undef PADDLE_WITH_CUDA
#include "paddle/phi/api/ext/spmd_infer.h"
#include "paddle/phi/core/distributed/auto_parallel/dist_attr.h"
#pragma pop_macro("PADDLE_WITH_CUDA")

#define PADDLE_FUSED_SPMD(rule) .SetInferSpmdFn(rule)
#define PADDLE_FUSED_ROWS_SPMD(roles)                                                              \
  .SetInferSpmdFn([](const paddle_fused::spmd::Inputs& inputs, const paddle_fused::spmd::Attrs&) { \
    return paddle_fused::spmd::InferRows(paddle_fused::spmd::Flatten(inputs), roles);              \
  })

namespace paddle_fused {
namespace spmd {

using phi::distributed::ArgDistAttr;
using phi::distributed::DistMetaTensor;
using phi::distributed::SpmdInfo;
using phi::distributed::TensorDistAttr;

using Inputs = std::vector<paddle::CustomSpmdInferTensorArg>;
using Attrs = std::vector<paddle::CustomSpmdInferAttrArg>;
using MeshDims = std::vector<int64_t>;  // of the process mesh, over which one axis is cut

constexpr int kWhole = -1;  // an axis that no process may hold a part of

// One tensor of a rule.
struct Axes {
  std::vector<int> labels;
  const DistMetaTensor* given = nullptr;  // inputs only
  bool sum = false;  // output: each process has the sum over its part of the missing labels
  bool any = false;  // input: its values are not read, so any placement will do
};

// Mesh dimensions that cut each axis of a tensor. Newer versions of Paddle cut one axis over
// several.
template <class DistAttr>
auto CutsOf(const DistAttr& attr, int) -> decltype(attr.multi_dims_mapping()) {
  return attr.multi_dims_mapping();
}
template <class DistAttr>
std::vector<MeshDims> CutsOf(const DistAttr& attr, long) {
  std::vector<MeshDims> cuts;
  for (const int64_t dim : attr.dims_mapping())
    cuts.push_back(dim < 0 ? MeshDims{} : MeshDims{dim});
  return cuts;
}
template <class DistAttr>
auto SetCuts(DistAttr* attr, const std::vector<MeshDims>& cuts, int)
    -> decltype(attr->multi_dims_mapping(), void()) {
  attr->set_dims_mapping(cuts);
}
template <class DistAttr>
void SetCuts(DistAttr* attr, const std::vector<MeshDims>& cuts, long) {
  std::vector<int64_t> mapping;
  for (const MeshDims& dims : cuts) mapping.push_back(dims.empty() ? -1 : dims[0]);
  attr->set_dims_mapping(mapping);
}

// Whether a tensor is cut in another pattern than into one block for each process.
template <class DistAttr>
auto IsInterleaved(const DistAttr& attr, int) -> decltype(attr.get_split_factor(0) > 1) {
  for (int64_t dim = 0; dim < attr.process_mesh().ndim(); ++dim) {
    if (attr.get_split_factor(dim) > 1) return true;
  }
  return false;
}
template <class DistAttr>
bool IsInterleaved(const DistAttr&, long) {
  return false;
}

inline bool IsGiven(const DistMetaTensor& tensor) {
  return tensor.initialized() && !tensor.dist_attr().process_mesh().empty();
}

// The mesh dimensions that cut each label.
class Cuts {
 public:
  // A label is cut as in the first input where it is, labels in their order; a mesh dimension that
  // already cuts another axis of one of its tensors is left out, so that the tensor is gathered.
  Cuts(const std::vector<Axes>& inputs, const std::vector<Axes>& outputs) {
    std::set<int> labels;
    for (const Axes& tensor : inputs) labels.insert(tensor.labels.begin(), tensor.labels.end());
    labels.erase(kWhole);
    for (const int label : labels) {
      MeshDims dims = Wanted(inputs, label);
      for (const auto* tensors : {&inputs, &outputs}) {
        for (const Axes& tensor : *tensors) RemoveTaken(tensor, label, &dims);
      }
      cuts_[label] = dims;
    }
  }

  MeshDims Of(int label) const {
    const auto found = cuts_.find(label);
    return found == cuts_.end() ? MeshDims{} : found->second;
  }

  // Where a tensor lies; what it sums over is partial.
  TensorDistAttr Place(const Axes& tensor, const phi::distributed::ProcessMesh& mesh) const {
    if (tensor.any) return tensor.given->dist_attr();
    TensorDistAttr attr(Shape(tensor.labels.size(), 1));  // only the rank counts
    attr.set_process_mesh(mesh);
    std::vector<MeshDims> cuts;
    for (const int label : tensor.labels) cuts.push_back(Of(label));
    SetCuts(&attr, cuts, 0);
    if (!tensor.sum) return attr;
    MeshDims partial;
    for (const auto& entry : cuts_) {
      const auto& labels = tensor.labels;
      if (std::count(labels.begin(), labels.end(), entry.first) > 0) continue;
      partial.insert(partial.end(), entry.second.begin(), entry.second.end());
    }
    if (!partial.empty()) attr.set_partial_status(partial);
    return attr;
  }

 private:
  static MeshDims Wanted(const std::vector<Axes>& inputs, int label) {
    for (const Axes& tensor : inputs) {
      if (tensor.given == nullptr || tensor.any) continue;
      const std::vector<MeshDims> cuts = CutsOf(tensor.given->dist_attr(), 0);
      for (size_t i = 0; i < tensor.labels.size() && i < cuts.size(); ++i) {
        if (tensor.labels[i] == label && !cuts[i].empty()) return cuts[i];
      }
    }
    return {};
  }

  void RemoveTaken(const Axes& tensor, int label, MeshDims* dims) const {
    const auto& labels = tensor.labels;
    if (tensor.any || std::count(labels.begin(), labels.end(), label) == 0) return;
    for (const int other : labels) {
      if (other == label) continue;
      for (const int64_t taken : Of(other)) {
        dims->erase(std::remove(dims->begin(), dims->end(), taken), dims->end());
      }
    }
  }

  std::map<int, MeshDims> cuts_;
};

// Placements of all inputs and outputs. Partial inputs become sums before the kernel sees them:
// what it computes of parts is not a part of what it computes of the sum, or would be rounded
// twice.
inline SpmdInfo Infer(const std::vector<Axes>& inputs, const std::vector<Axes>& outputs) {
  const phi::distributed::ProcessMesh* mesh = nullptr;
  for (const Axes& tensor : inputs) {
    if (tensor.given == nullptr) continue;
    if (mesh == nullptr) mesh = &tensor.given->dist_attr().process_mesh();
    if (!tensor.any && IsInterleaved(tensor.given->dist_attr(), 0)) {
      PADDLE_THROW(errors::Unimplemented(
          "paddle_fused takes distributed tensors that are cut into one block for each process; "
          "reshard one with a split_factor first."));
    }
  }
  PADDLE_FUSED_CHECK(mesh != nullptr, "%s", "paddle_fused: expected a distributed tensor.");
  const Cuts cuts(inputs, outputs);
  SpmdInfo info;
  for (const Axes& tensor : inputs) {
    info.first.emplace_back(tensor.given == nullptr ? TensorDistAttr() : cuts.Place(tensor, *mesh));
  }
  for (const Axes& tensor : outputs) info.second.emplace_back(cuts.Place(tensor, *mesh));
  return info;
}

// All inputs one after the other, those of a list, too; null for one that is absent. Only the
// `optional` last ones may be: with an undefined gradient Paddle 3.3 goes on to end the process.
inline std::vector<const DistMetaTensor*> Flatten(const Inputs& inputs, size_t optional = 0) {
  std::vector<const DistMetaTensor*> flat;
  for (const auto& input : inputs) {
    if (const auto* one = paddle::get_if<DistMetaTensor>(&input)) {
      flat.push_back(one);
    } else {
      for (const auto& each : paddle::get<std::vector<DistMetaTensor>>(input))
        flat.push_back(&each);
    }
  }
  for (size_t i = 0; i < flat.size(); ++i) {
    if (IsGiven(*flat[i])) continue;
    if (i + optional < flat.size()) {
      PADDLE_THROW(errors::Unimplemented(
          "paddle_fused: on distributed tensors a backward pass needs all gradients that belong to "
          "an operator; the one to the gradient of an input is missing."));
    }
    flat[i] = nullptr;
  }
  return flat;
}

inline size_t RankOf(const DistMetaTensor& tensor) {
  return static_cast<size_t>(tensor.dims().size());
}
inline int64_t SizeOf(const DistMetaTensor& tensor, size_t axis) {
  return tensor.dims()[static_cast<int>(axis)];
}

// What stands for an absent optional input, see paddle_fused/_distributed.py.
inline bool IsAbsent(const DistMetaTensor* tensor) {
  return tensor == nullptr || (RankOf(*tensor) == 1 && SizeOf(*tensor, 0) == 0);
}

// Operators that treat each row by itself. One letter for each input:
//   r  rows: cut over the leading axes, as all others; the rest is whole
//   e  elementwise: as r, but every axis may be cut
//   v  a vector that all rows share: whole
// The first is rows or elementwise. Then, behind ">", the number of the input that each output is
// placed like; one like a vector is a sum over rows. "-" is like input 0 without its last axis.
inline SpmdInfo InferRows(const std::vector<const DistMetaTensor*>& given,
                          const std::string& roles) {
  const size_t count = roles.find('>');
  PADDLE_FUSED_CHECK(given.size() == count, "%s", "paddle_fused: unexpected number of inputs.");
  const size_t rank = RankOf(*given[0]);
  const size_t rows = roles[0] == 'e' ? rank : rank == 0 ? 0 : rank - 1;
  std::vector<Axes> inputs, outputs;
  for (size_t i = 0; i < count; ++i) {
    Axes axes;
    axes.given = given[i];
    axes.any = IsAbsent(given[i]) && i > 0;
    axes.labels.resize(given[i] == nullptr ? 0 : RankOf(*given[i]), kWhole);
    for (size_t axis = 0; axis < axes.labels.size() && axis < rows && roles[i] != 'v'; ++axis) {
      axes.labels[axis] = static_cast<int>(axis);
    }
    inputs.push_back(axes);
  }
  for (size_t i = count + 1; i < roles.size(); ++i) {
    const size_t like = roles[i] == '-' ? 0 : static_cast<size_t>(roles[i] - '0');
    Axes axes;
    axes.labels = inputs[like].labels;
    axes.sum = roles[like] == 'v';
    if (roles[i] == '-' && rank > 0) axes.labels.pop_back();
    outputs.push_back(axes);
  }
  return Infer(inputs, outputs);
}

}  // namespace spmd
}  // namespace paddle_fused

#else

#define PADDLE_FUSED_SPMD(rule)
#define PADDLE_FUSED_ROWS_SPMD(roles)

#endif
