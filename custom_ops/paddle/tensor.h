// What every operator's host code shares: the only helpers that see paddle::Tensor.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

// Not paddle/extension.h: this one compiles in a third of the time and lets CUDA sources be
// compiled against a CPU wheel's headers.
#include "paddle/phi/api/all.h"
#include "paddle/phi/core/enforce.h"

#include "custom_ops/common/cpu_memory.h"
#include "custom_ops/common/types.h"

namespace paddle_fused {

using Shape = std::vector<int64_t>;
using paddle::Tensor;

// The C++ checks are a backstop behind the Python layer's: they reach Python as the same classes,
// ValueError, NotImplementedError and RuntimeError.
#if __has_include("paddle/common/errors.h")
namespace errors = ::common::errors;
#else
namespace errors = ::phi::errors;
#endif

#define PADDLE_FUSED_CHECK(condition, ...)                                \
  do {                                                                    \
    if (!(condition)) {                                                   \
      PADDLE_THROW(::paddle_fused::errors::InvalidArgument(__VA_ARGS__)); \
    }                                                                     \
  } while (0)

inline DType DTypeOf(const Tensor& t, const char* op) {
  switch (t.dtype()) {
    case paddle::DataType::FLOAT32:
      return DType::kFloat32;
    case paddle::DataType::FLOAT64:
      return DType::kFloat64;
    case paddle::DataType::FLOAT16:
      return DType::kFloat16;
    case paddle::DataType::BFLOAT16:
      return DType::kBFloat16;
    default:
      PADDLE_THROW(errors::InvalidArgument(
          "%s: expected a float32, float64, float16 or bfloat16 tensor.", op));
  }
}

// A double attribute as two floats: attributes of type double do not work in every Paddle version.
inline double FromParts(const std::vector<float>& parts) {
  double value = 0;
  for (float part : parts) value += static_cast<double>(part);
  return value;
}

// A view of the sizes of a tensor as [rows, cols], normalising from `axis` on.
struct RowsCols {
  int64_t rows = 1, cols = 1;
};
inline RowsCols RowsColsOf(const Shape& shape, size_t axis) {
  RowsCols size;
  for (size_t i = 0; i < shape.size(); ++i) (i < axis ? size.rows : size.cols) *= shape[i];
  return size;
}
inline RowsCols RowsColsOf(const Tensor& t) {
  const Shape shape = t.shape();
  return RowsColsOf(shape, shape.empty() ? 0 : shape.size() - 1);
}

// An uninitialised tensor on the device of `like`, ready to be written for the first time.
inline Tensor EmptyOn(const Tensor& like, const Shape& shape, paddle::DataType dtype) {
  Tensor t = paddle::empty(shape, dtype, like.place());
  if (like.is_cpu() && t.numel() > 0) AdviseHugePages(t.data(), t.numel() * phi::SizeOf(t.dtype()));
  return t;
}
inline Tensor EmptyLike(const Tensor& t) { return EmptyOn(t, t.shape(), t.dtype()); }

// Pointers are null for a tensor that is absent, undefined or empty.
inline const void* DataOf(const Tensor& t) {
  return t.defined() && t.numel() > 0 ? t.data() : nullptr;
}
inline const void* DataOf(const paddle::optional<Tensor>& t) { return t ? DataOf(*t) : nullptr; }
inline void* MutableDataOf(Tensor& t) { return t.defined() && t.numel() > 0 ? t.data() : nullptr; }

// Runs body for a tensor's device. An exception of the standard library must not leave an operator:
// Paddle would end the process.
template <class Body>
void RunOn(const Tensor& t, const char* op, const Body& body) {
  if (!t.is_cpu()) {
    PADDLE_THROW(errors::Unimplemented(
        "%s: this build of paddle_fused has CPU kernels only, but the input is on another device; "
        "build it against a CUDA Paddle with nvcc present.",
        op));
  }
  try {
    body();
  } catch (const std::exception& e) {
    PADDLE_THROW(errors::Fatal("%s: %s", op, e.what()));
  }
}

}  // namespace paddle_fused
