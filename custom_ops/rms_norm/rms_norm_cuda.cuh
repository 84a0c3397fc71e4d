// What the forward and the backward kernels of RMSNorm share: 1 / rms of a row, and the factor of a
// column.
#pragma once

#include <cmath>

#include "custom_ops/common/cuda_reduce.cuh"
#include "custom_ops/common/cuda_vector.cuh"
#include "custom_ops/rms_norm/rms_norm.h"

namespace paddle_fused {
namespace gpu {

// The same for every row; the divisions are done once, on the host.
struct RowConstants {
  RowConstants(int64_t cols, double eps)
      : inverse_cols(static_cast<float>(1.0 / static_cast<double>(cols))),
        epsilon(static_cast<float>(eps)),
        of_zeros(static_cast<float>(1.0 / std::sqrt(eps))),
        root_epsilon(static_cast<float>(std::sqrt(eps))),
        epsilon_is_tiny(eps < 1e-30) {}
  float inverse_cols, epsilon;
  float of_zeros;  // 1 / rms of a row of zeros
  float root_epsilon;
  bool epsilon_is_tiny;
};

// The larger magnitude; NaN wins.
template <class A>
PADDLE_FUSED_INLINE A LargerOf(A largest, A v) {
  return v > largest || v != v ? v : largest;
}
PADDLE_FUSED_INLINE float ScaleTo(float magnitude) {  // a power of two, about 1 / magnitude
  return scalbnf(1.0f, -min(max(ilogbf(magnitude), -126), 126));
}
PADDLE_FUSED_INLINE double ScaleTo(double magnitude) {
  return scalbn(1.0, -min(max(ilogb(magnitude), -1022), 1022));
}

// 1 / sqrt(mean(x^2) + epsilon) without overflow or underflow of the squares. Rare rows only: every
// warp reads the whole row, so that no barrier is needed. value(j) is element j.
template <class A, class Value>
PADDLE_FUSED_INLINE A SafeInvRms(int64_t cols, A root_epsilon, const Value& value) {
  A largest = 0;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int64_t j = lane; j < cols; j += 32) largest = LargerOf(largest, Abs(value(j)));
#pragma unroll 1
  for (int offset = 16; offset > 0; offset /= 2) {
    largest = LargerOf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  if (!(largest > 0) || isinf(largest)) return 1 / (largest + root_epsilon);
  const A scale = ScaleTo(largest);
  A sum = 0;
#pragma unroll 1
  for (int64_t j = lane; j < cols; j += 32) {
    const A v = value(j) * scale;
    sum = Fma(v, v, sum);
  }
  const A small = root_epsilon * scale;
  const A mean = WarpSum(sum) / static_cast<A>(cols);
  return scale / sqrt(mean + small * small);
}

PADDLE_FUSED_INLINE bool SquaresAreSafe(float mean, const RowConstants& c) {
  return mean <= 1e38f && (mean >= 1e-30f || !c.epsilon_is_tiny);
}

// From the sum of squares of a float32 or half row; T is its dtype.
template <class T, class Value>
PADDLE_FUSED_INLINE float InvRms(float sum, int64_t cols, CastingMode mode, const RowConstants& c,
                                 const Value& value) {
  const float mean = sum * c.inverse_cols;
  if (sizeof(T) == 2 && mode == CastingMode::kNone) {
    float v[1] = {mean};
    RoundTo<T>(v);
    v[0] += c.epsilon;
    RoundTo<T>(v);
    v[0] = __frsqrt_rn(v[0]);
    RoundTo<T>(v);
    return v[0];
  }
  if constexpr (std::is_same_v<T, Float16>) {
    if (mean == 0) return c.of_zeros;  // no other float16 row has squares that get lost
  } else {
    if (!SquaresAreSafe(mean, c)) return SafeInvRms<float>(cols, c.root_epsilon, value);
  }
  return __frsqrt_rn(mean + c.epsilon);
}

// The same with dtypes at run time, in double.
template <class A>
PADDLE_FUSED_INLINE bool SquaresAreSafeAny(A sum, int64_t cols, double epsilon) {
  constexpr double kTiny = sizeof(A) == 4 ? 1e-30 : 1e-290;
  const double mean = static_cast<double>(sum) / static_cast<double>(cols);
  return mean <= (sizeof(A) == 4 ? 1e38 : 1e307) && (mean >= kTiny || epsilon >= kTiny);
}
template <class A, class Value>
PADDLE_FUSED_INLINE A InvRmsAny(A sum, int64_t cols, double epsilon, CastingMode mode, DType dtype,
                                const Value& value) {
  const bool half = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  if (half && mode == CastingMode::kNone) {
    const double mean = RoundAny(static_cast<double>(sum) / static_cast<double>(cols), dtype);
    return static_cast<A>(RoundAny(1.0 / sqrt(RoundAny(mean + epsilon, dtype)), dtype));
  }
  if (!SquaresAreSafeAny(sum, cols, epsilon)) {
    return SafeInvRms<A>(cols, static_cast<A>(sqrt(epsilon)), value);
  }
  return static_cast<A>(1.0 / sqrt(static_cast<double>(sum) / static_cast<double>(cols) + epsilon));
}

// offset + weight of column j, or 1 without a weight; kNone rounds it to x's dtype.
template <class A, class Params>
PADDLE_FUSED_INLINE A ScaleAny(const Params& p, int64_t j) {
  if (p.weight == nullptr) return 1;
  A v = LoadAny<A>(p.weight, p.weight_dtype, j) + static_cast<A>(p.offset);
  if constexpr (std::is_same_v<Params, RmsNormDoubleBackwardParams>) {
    return p.mode == CastingMode::kNone ? RoundAny(v, p.dtype) : v;
  } else {
    return p.mode == CastingMode::kNone ? RoundAny(v, p.x_dtype) : v;
  }
}

}  // namespace gpu
}  // namespace paddle_fused
