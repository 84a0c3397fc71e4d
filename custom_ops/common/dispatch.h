// dtype values to template arguments.
#pragma once

#include "custom_ops/common/types.h"

namespace paddle_fused {

template <class T>
struct TypeTag {
  using type = T;
};

// Calls body(TypeTag<T>{}) for the storage type that `dtype` names, and returns its result.
template <class Body>
decltype(auto) DispatchDType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat64:
      return body(TypeTag<double>{});
    case DType::kFloat16:
      return body(TypeTag<Float16>{});
    case DType::kBFloat16:
      return body(TypeTag<BFloat16>{});
    default:
      return body(TypeTag<float>{});
  }
}

}  // namespace paddle_fused
