// What every operator's host code shares: the only helpers that see paddle::Tensor.
#pragma once

#include <cmath>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

// Not paddle/extension.h: this one compiles in a third of the time and lets CUDA sources be
// compiled against a CPU wheel's headers.
#include "paddle/common/enforce.h"
#include "paddle/phi/api/all.h"

// Since Paddle 3. The header that has it before that includes cuDNN's of its own time, so there the
// checks, which stand behind those in Python, throw another class.
#ifndef PADDLE_THROW
#define PADDLE_THROW(...) PD_THROW((__VA_ARGS__).to_string())
#endif

#ifdef PADDLE_FUSED_WITH_CUDA
#include <cuda_runtime.h>
#endif

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

// A double attribute as floats [a, b, c, e], (a + b + c) * 2^e: attributes of type double do not
// work in every Paddle version. Empty: 0.
inline double FromParts(const std::vector<float>& parts) {
  if (parts.size() < 2) return parts.empty() ? 0.0 : parts[0];
  double value = 0;
  for (size_t i = 0; i + 1 < parts.size(); ++i) value += static_cast<double>(parts[i]);
  return std::ldexp(value, static_cast<int>(parts.back()));
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

// A gradient that the autograd engine brings: a hook or a hand-written layer may have changed it.
inline void CheckGrad(const Tensor& grad, const Shape& shape, paddle::DataType dtype,
                      const char* op) {
  PADDLE_FUSED_CHECK(
      grad.is_dense_tensor() && grad.dtype() == dtype && grad.shape() == shape,
      "%s: the gradient that came for an output has not the output's dtype and shape.", op);
}
// Zeros for an undefined one: nobody differentiated through that output.
inline Tensor UpstreamOrZeros(const Tensor& grad, const Shape& shape, paddle::DataType dtype,
                              const Tensor& like, const char* op) {
  if (!grad.defined()) return paddle::full(shape, 0, dtype, like.place());
  CheckGrad(grad, shape, dtype, op);
  return grad;
}

// Pointers are null for a tensor that is absent, undefined or empty.
inline const void* DataOf(const Tensor& t) {
  return t.defined() && t.numel() > 0 ? t.data() : nullptr;
}
inline const void* DataOf(const paddle::optional<Tensor>& t) { return t ? DataOf(*t) : nullptr; }
inline void* MutableDataOf(Tensor& t) { return t.defined() && t.numel() > 0 ? t.data() : nullptr; }

// Memory that only a launch needs, on the device of `like`; null for no bytes.
class Workspace {
 public:
  Workspace(const Tensor& like, size_t bytes) {
    if (bytes > 0) {
      memory_ = paddle::empty({static_cast<int64_t>(bytes)}, paddle::DataType::UINT8, like.place());
    }
  }
  void* data() { return MutableDataOf(memory_); }

 private:
  Tensor memory_;
};

#ifdef PADDLE_FUSED_WITH_CUDA
// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (cudaGetDevice(&previous_) == cudaSuccess && previous_ != device) {
      changed_ = cudaSetDevice(device) == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};
#endif

// Runs cpu() or cuda(stream), by a tensor's device. An exception of the standard library must not
// leave an operator: Paddle would end the process.
template <class Cpu, class Cuda>
void RunOn(const Tensor& t, const char* op, const Cpu& cpu, const Cuda& cuda) {
  try {
    if (t.is_cpu()) return cpu();
#ifdef PADDLE_FUSED_WITH_CUDA
    if (t.is_gpu()) {
      const DeviceGuard guard(t.place().GetDeviceId());
      return cuda(static_cast<void*>(t.stream()));
    }
#endif
  } catch (const std::exception& e) {
    PADDLE_THROW(errors::Fatal("%s: %s", op, e.what()));
  }
  (void)cuda;
  PADDLE_THROW(
      errors::Unimplemented("%s: this build of paddle_fused has no kernels for the device of the "
                            "input; for a CUDA device "
                            "build it against a CUDA Paddle with nvcc present.",
                            op));
}

}  // namespace paddle_fused
