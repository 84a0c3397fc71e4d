// The vocabulary of the CUDA kernels: raw vectors with conversions to the accumulate type, math
// primitives of the shared formulas, and reductions of fixed order. Device code only.
//
// The sources are compiled with -fmad=false: products and sums are fused where a kernel says so and
// nowhere else, so that the vector and the scalar path of a kernel return the same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "custom_ops/common/types.h"

#define PADDLE_FUSED_INLINE __device__ __forceinline__

namespace paddle_fused {
namespace gpu {

// a / b, both not negative and a at most `most`; a division of 32 bits is several times shorter.
PADDLE_FUSED_INLINE int64_t Quotient(int64_t a, int64_t b, int64_t most) {
  if (most <= 0x7fffffff) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// ---- Primitives of <op>_math.h
// -------------------------------------------------------------------

PADDLE_FUSED_INLINE float ExpNonPositive(float x) { return expf(x); }
PADDLE_FUSED_INLINE double ExpNonPositive(double x) { return exp(x); }
// For results of 16 bits: a relative error below |x| 2^-23, and a reciprocal within one ULP. That
// is a hundredth of their ULP at most, and a kernel that streams 16-bit data has few instructions
// to spare.
PADDLE_FUSED_INLINE float ExpNonPositiveBrief(float x) {
  float e;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(x * 1.44269504f));
  return e;
}
// Within 2 ULP: the same with what the product before the exponential lost.
PADDLE_FUSED_INLINE float ExpNonPositiveShort(float x) {
  const float t = x * 1.44269504f;
  float e;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(t));
  // log(2) (x / log(2) - t), in two parts of 1 / log(2)
  const float lost = __fmaf_rn(x, 1.3349757e-8f, 0.69314718f * __fmaf_rn(x, 1.44269504f, -t));
  return __fmaf_rn(e, lost, e);
}
PADDLE_FUSED_INLINE float ReciprocalBrief(float v) {
  float q;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(q) : "f"(v));
  return q;
}
// Within 0.6 ULP, at some more instructions: for float32 results.
PADDLE_FUSED_INLINE float ExpNonPositiveExact(float x) {
  if (x < -104.0f) return 0.0f;
  const float shifted = __fmaf_rn(x, 1.44269504f, 12582912.0f);  // 1.5 * 2^23 rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = __fmaf_rn(n, 2.1219444e-4f, __fmaf_rn(n, -0.693359375f, x));
  float p = __fmaf_rn(r, 1.98992871e-4f, 1.39336521e-3f);
  p = __fmaf_rn(p, r, 8.3332984e-3f);
  p = __fmaf_rn(p, r, 4.16664667e-2f);
  p = __fmaf_rn(p, r, 1.66666672e-1f);
  p = __fmaf_rn(p, r, 0.5f);
  p = 1.0f + __fmaf_rn(r * r, p, r);
  const int k = __float_as_int(shifted) - 0x4b400000;
  const int k1 = k >> 1;  // two factors, so that subnormal results round once
  return p * __int_as_float((k1 + 127) << 23) * __int_as_float((k - k1 + 127) << 23);
}
PADDLE_FUSED_INLINE float Abs(float v) { return fabsf(v); }
PADDLE_FUSED_INLINE double Abs(double v) { return fabs(v); }
template <class V>
PADDLE_FUSED_INLINE V Select(bool mask, V yes, V no) {
  return mask ? yes : no;
}
// 1 / v for v in [1, 2]: the hardware's approximation and a Newton step.
PADDLE_FUSED_INLINE float ReciprocalOneToTwo(float v) {
  float q;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(q) : "f"(v));
  return __fmaf_rn(q, __fmaf_rn(-v, q, 1.0f), q);
}
PADDLE_FUSED_INLINE double ReciprocalOneToTwo(double v) { return 1.0 / v; }

PADDLE_FUSED_INLINE float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
PADDLE_FUSED_INLINE double Fma(double a, double b, double c) { return __fma_rn(a, b, c); }
// c - a b
PADDLE_FUSED_INLINE float NegMulAdd(float a, float b, float c) { return __fmaf_rn(-a, b, c); }
PADDLE_FUSED_INLINE double NegMulAdd(double a, double b, double c) { return __fma_rn(-a, b, c); }

// ---- Scalars: any storage type to and from an accumulate type
// ------------------------------------

template <class A>
PADDLE_FUSED_INLINE A Widen(float v) {
  return v;
}
template <class A>
PADDLE_FUSED_INLINE A Widen(double v) {
  return static_cast<A>(v);
}
template <class A>
PADDLE_FUSED_INLINE A Widen(BFloat16 v) {
  return __uint_as_float(static_cast<uint32_t>(v.bits) << 16);
}
template <class A>
PADDLE_FUSED_INLINE A Widen(Float16 v) {
  return __half2float(__ushort_as_half(v.bits));
}

// double to float, rounded to odd: a second rounding to a half type is then the only one.
PADDLE_FUSED_INLINE float RoundToOdd(double v) {
  const float truncated = __double2float_rz(v);
  const bool exact = static_cast<double>(truncated) == v || v != v;
  return exact ? truncated : __uint_as_float(__float_as_uint(truncated) | 1u);
}

template <class T>
struct Narrow;
template <>
struct Narrow<float> {
  PADDLE_FUSED_INLINE static float From(float v) { return v; }
  PADDLE_FUSED_INLINE static float From(double v) { return static_cast<float>(v); }
};
template <>
struct Narrow<double> {
  PADDLE_FUSED_INLINE static double From(double v) { return v; }
};
template <>
struct Narrow<BFloat16> {
  PADDLE_FUSED_INLINE static BFloat16 From(float v) {
    return {__bfloat16_as_ushort(__float2bfloat16_rn(v))};
  }
  PADDLE_FUSED_INLINE static BFloat16 From(double v) { return From(RoundToOdd(v)); }
};
template <>
struct Narrow<Float16> {
  PADDLE_FUSED_INLINE static Float16 From(float v) {
    return {__half_as_ushort(__float2half_rn(v))};
  }
  PADDLE_FUSED_INLINE static Float16 From(double v) { return From(RoundToOdd(v)); }
};

PADDLE_FUSED_INLINE int ElementBytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// By dtype at run time: the same branch for all threads.
template <class A>
PADDLE_FUSED_INLINE A LoadAny(const void* p, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat64:
      return Widen<A>(static_cast<const double*>(p)[i]);
    case DType::kFloat16:
      return Widen<A>(static_cast<const Float16*>(p)[i]);
    case DType::kBFloat16:
      return Widen<A>(static_cast<const BFloat16*>(p)[i]);
    default:
      return Widen<A>(static_cast<const float*>(p)[i]);
  }
}
template <class A>
PADDLE_FUSED_INLINE void StoreAny(void* p, DType dtype, int64_t i, A v) {
  switch (dtype) {
    case DType::kFloat64:
      static_cast<double*>(p)[i] = Narrow<double>::From(v);
      break;
    case DType::kFloat16:
      static_cast<Float16*>(p)[i] = Narrow<Float16>::From(v);
      break;
    case DType::kBFloat16:
      static_cast<BFloat16*>(p)[i] = Narrow<BFloat16>::From(v);
      break;
    default:
      static_cast<float*>(p)[i] = Narrow<float>::From(v);
  }
}
// The value after a round trip through a half type; other types round nothing here.
template <class A>
PADDLE_FUSED_INLINE A RoundAny(A v, DType dtype) {
  if (dtype == DType::kFloat16) return Widen<A>(Narrow<Float16>::From(v));
  if (dtype == DType::kBFloat16) return Widen<A>(Narrow<BFloat16>::From(v));
  return v;
}

}  // namespace gpu
}  // namespace paddle_fused
