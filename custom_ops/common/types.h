// Scalar types and small helpers that every layer below the operators shares. Framework-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace paddle_fused {

enum class DType : int8_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

// Storage only: arithmetic happens in float after a load.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

// The type that arithmetic and sums use for tensors of type T.
template <class T>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};
template <class T>
using Acc = typename AccumulateType<T>::type;

// double as soon as one of the two tensors is.
template <class T, class U>
using AccOf = std::conditional_t<sizeof(Acc<T>) == 8, Acc<T>, Acc<U>>;

}  // namespace paddle_fused
