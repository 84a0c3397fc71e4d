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
PADDLE_FUSED_INLINE float ReciprocalBrief(float v) {
  float q;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(q) : "f"(v));
  return q;
}
// exp(x) times 2 to the exponent, which is 0 or 96, within 0.6 ULP, at some more instructions: for
// float32 results.
PADDLE_FUSED_INLINE float ExpNonPositiveExact(float x, int exponent = 0) {
  if (x < -153.0f) return 0.0f;
  const float shifted = __fmaf_rn(x, 1.44269504f, 12582912.0f);  // 1.5 * 2^23 rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = __fmaf_rn(n, 2.1219444e-4f, __fmaf_rn(n, -0.693359375f, x));
  float p = __fmaf_rn(r, 1.98992871e-4f, 1.39336521e-3f);
  p = __fmaf_rn(p, r, 8.3332984e-3f);
  p = __fmaf_rn(p, r, 4.16664667e-2f);
  p = __fmaf_rn(p, r, 1.66666672e-1f);
  p = __fmaf_rn(p, r, 0.5f);
  p = 1.0f + __fmaf_rn(r * r, p, r);
  const int k = __float_as_int(shifted) - 0x4b400000 + exponent;
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

// ---- Vectors
// -------------------------------------------------------------------------------------

// Elements of a 16-byte access.
template <class T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// N elements of T as they lie in memory.
template <class T, int N>
struct Raw {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kWords = (kBytes + 3) / 4;
  uint32_t w[kWords];
};

template <class T, int N>
PADDLE_FUSED_INLINE Raw<T, N> LoadAligned(const T* p) {
  using R = Raw<T, N>;
  R r;
  if constexpr (R::kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < R::kWords; i += 4) {
      const uint4 v = reinterpret_cast<const uint4*>(p)[i / 4];
      r.w[i] = v.x, r.w[i + 1] = v.y, r.w[i + 2] = v.z, r.w[i + 3] = v.w;
    }
  } else if constexpr (R::kBytes == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    r.w[0] = v.x, r.w[1] = v.y;
  } else if constexpr (R::kBytes == 4) {
    r.w[0] = *reinterpret_cast<const uint32_t*>(p);
  } else {
    static_assert(R::kBytes == 2, "a vector has 2, 4, 8 or a multiple of 16 bytes");
    r.w[0] = *reinterpret_cast<const uint16_t*>(p);
  }
  return r;
}
template <class T, int N>
PADDLE_FUSED_INLINE void StoreAligned(T* p, const Raw<T, N>& r) {
  using R = Raw<T, N>;
  if constexpr (R::kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < R::kWords; i += 4) {
      reinterpret_cast<uint4*>(p)[i / 4] = make_uint4(r.w[i], r.w[i + 1], r.w[i + 2], r.w[i + 3]);
    }
  } else if constexpr (R::kBytes == 8) {
    *reinterpret_cast<uint2*>(p) = make_uint2(r.w[0], r.w[1]);
  } else if constexpr (R::kBytes == 4) {
    *reinterpret_cast<uint32_t*>(p) = r.w[0];
  } else {
    *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(r.w[0]);
  }
}

template <class T, int N>
PADDLE_FUSED_INLINE void Unpack(const Raw<T, N>& r, Acc<T> (&v)[N]) {
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = __hiloint2double(r.w[2 * i + 1], r.w[2 * i]);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = __uint_as_float(r.w[i]);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = __uint_as_float(i % 2 == 0 ? r.w[i / 2] << 16 : r.w[i / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = __half2float(
          __ushort_as_half(static_cast<uint16_t>(i % 2 == 0 ? r.w[i / 2] : r.w[i / 2] >> 16)));
    }
  }
}

template <class T, int N>
PADDLE_FUSED_INLINE Raw<T, N> Pack(const Acc<T> (&v)[N]) {
  Raw<T, N> r;
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      r.w[2 * i] = __double2loint(v[i]), r.w[2 * i + 1] = __double2hiint(v[i]);
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) r.w[i] = __float_as_uint(v[i]);
  } else if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      if constexpr (std::is_same_v<T, BFloat16>) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(v[i], v[i + 1]);
        r.w[i / 2] = *reinterpret_cast<const uint32_t*>(&two);
      } else {
        const __half2 two = __floats2half2_rn(v[i], v[i + 1]);
        r.w[i / 2] = *reinterpret_cast<const uint32_t*>(&two);
      }
    }
  } else {
    static_assert(N == 1, "an even number of halves, or one");
    r.w[0] = Narrow<T>::From(v[0]).bits;
  }
  return r;
}

// Makes the compiler unpack r again from here on, instead of keeping its floats in registers.
template <class T, int N>
PADDLE_FUSED_INLINE void KeepPacked(Raw<T, N>& r) {
#pragma unroll
  for (int i = 0; i < Raw<T, N>::kWords; ++i) asm volatile("" : "+r"(r.w[i]));
}

// Values after a round trip through storage type T.
template <class T, int N>
PADDLE_FUSED_INLINE void RoundTo(float (&v)[N]) {
  if constexpr (sizeof(T) == 2) Unpack(Pack<T>(v), v);
}

// The first `count` of N elements, one by one; the others are zero.
template <class T, int N>
PADDLE_FUSED_INLINE Raw<T, N> LoadElements(const T* p, int64_t count) {
  Raw<T, N> r = {};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) {
      if constexpr (sizeof(T) == 2) {
        r.w[i / 2] |= static_cast<uint32_t>(p[i].bits) << (16 * (i % 2));
      } else if constexpr (sizeof(T) == 4) {
        r.w[i] = __float_as_uint(p[i]);
      } else {
        r.w[2 * i] = __double2loint(p[i]), r.w[2 * i + 1] = __double2hiint(p[i]);
      }
    }
  }
  return r;
}
template <class T, int N>
PADDLE_FUSED_INLINE void StoreElements(T* p, const Raw<T, N>& r, int64_t count) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) {
      if constexpr (sizeof(T) == 2) {
        p[i].bits = static_cast<uint16_t>(r.w[i / 2] >> (16 * (i % 2)));
      } else if constexpr (sizeof(T) == 4) {
        p[i] = __uint_as_float(r.w[i]);
      } else {
        p[i] = __hiloint2double(r.w[2 * i + 1], r.w[2 * i]);
      }
    }
  }
}

// One access when the kernel was chosen for aligned rows of whole vectors, else element by element.
// Both see the same elements in the same lanes, so every result has the same bits.
template <bool kAligned, int N, class T>
PADDLE_FUSED_INLINE Raw<T, N> LoadRaw(const T* p, int64_t count) {
  if constexpr (kAligned) {
    return LoadAligned<T, N>(p);
  } else {
    return LoadElements<T, N>(p, count);
  }
}
template <bool kAligned, class T, int N>
PADDLE_FUSED_INLINE void StoreRaw(T* p, const Raw<T, N>& r, int64_t count) {
  if constexpr (kAligned) {
    StoreAligned(p, r);
  } else {
    StoreElements(p, r, count);
  }
}

// A vector whose dtype is known at run time, as float.
template <bool kAligned, class T, int N>
PADDLE_FUSED_INLINE void LoadFloats(const void* p, int64_t at, int64_t count, float (&v)[N]) {
  const Raw<T, N> raw = LoadRaw<kAligned, N>(static_cast<const T*>(p) + at, count);
  if constexpr (sizeof(T) == 8) {
    double wide[N];
    Unpack(raw, wide);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = static_cast<float>(wide[i]);
  } else {
    Unpack(raw, v);
  }
}
template <bool kAligned, int N>
PADDLE_FUSED_INLINE void LoadFloatsAny(const void* p, DType dtype, int64_t at, int64_t count,
                                       float (&v)[N]) {
  switch (dtype) {
    case DType::kFloat64:
      return LoadFloats<kAligned, double>(p, at, count, v);
    case DType::kFloat16:
      return LoadFloats<kAligned, Float16>(p, at, count, v);
    case DType::kBFloat16:
      return LoadFloats<kAligned, BFloat16>(p, at, count, v);
    default:
      return LoadFloats<kAligned, float>(p, at, count, v);
  }
}

// ---- Sums of fixed order
// -------------------------------------------------------------------------

// Every lane gets the sum; additions commute, so the butterfly gives all lanes the same bits.
template <class A>
PADDLE_FUSED_INLINE A WarpSum(A v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}
PADDLE_FUSED_INLINE double WarpMax(double v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    v = fmax(v, __shfl_xor_sync(0xffffffffu, v, offset));
  }
  return v;
}

// A barrier for `threads` (whole warps) of the block.
struct GroupBarrier {
  int id, threads;
  PADDLE_FUSED_INLINE void operator()() const {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
  }
};
struct BlockBarrier {
  PADDLE_FUSED_INLINE void operator()() const { __syncthreads(); }
};

// Two sums in one butterfly: the lower half warp ends with the first, the upper with the second.
template <class A>
PADDLE_FUSED_INLINE A HalfWarpSums(A mine) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) {
    mine += __shfl_xor_sync(0xffffffffu, mine, offset);
  }
  return mine;
}
template <class A>
PADDLE_FUSED_INLINE A WarpSumOfTwo(const A (&v)[2], int lane) {
  const bool upper = lane >= 16;
  const A mine = upper ? v[1] : v[0], other = upper ? v[0] : v[1];
  return HalfWarpSums(mine + __shfl_xor_sync(0xffffffffu, other, 16));
}

// GroupSum for two values at half the shuffles.
template <class A, class Barrier>
PADDLE_FUSED_INLINE void GroupSumOfTwo(A (&v)[2], A* slots, int thread, int threads,
                                       const Barrier& barrier) {
  const int lane = thread % 32, warps = threads / 32;
  A mine = WarpSumOfTwo(v, lane);
  if (threads > 32) {
    A* const half = slots + (lane / 16) * warps;
    if (lane % 16 == 0) half[thread / 32] = mine;
    barrier();
    const int w = lane % 16;
    mine = w < warps ? half[w] : A{0};
    if (warps > 16) mine += w + 16 < warps ? half[w + 16] : A{0};
    mine = HalfWarpSums(mine);
  }
  v[0] = __shfl_sync(0xffffffffu, mine, 0);
  v[1] = __shfl_sync(0xffffffffu, mine, 16);
}

// Sums over the whole warps of a row group. `slots` are K * 32 values of shared memory that belong
// to the group; the caller alternates two sets so that one barrier a sum is enough.
template <class A, int K, class Barrier>
PADDLE_FUSED_INLINE void GroupSum(A (&v)[K], A* slots, int thread, int threads,
                                  const Barrier& barrier) {
#pragma unroll
  for (int k = 0; k < K; ++k) v[k] = WarpSum(v[k]);
  if (threads <= 32) return;
  const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) slots[warp * K + k] = v[k];
  }
  barrier();
#pragma unroll
  for (int k = 0; k < K; ++k) v[k] = WarpSum(lane < warps ? slots[lane * K + k] : A{0});
}

// ---- Copies into shared memory that run beside the arithmetic
// -------------------------------------

PADDLE_FUSED_INLINE uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
PADDLE_FUSED_INLINE void CopyAsync(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
PADDLE_FUSED_INLINE void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's groups are on their way.
PADDLE_FUSED_INLINE void WaitForCopies(int pending) {
  if (pending == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else if (pending == 2) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else if (pending == 3) {
    asm volatile("cp.async.wait_group 3;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
}
// 16 bytes of T.
template <class T, int N>
PADDLE_FUSED_INLINE Raw<T, N> LoadShared(uint32_t shared) {
  static_assert(Raw<T, N>::kBytes == 16, "one access");
  Raw<T, N> r;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
               : "r"(shared)
               : "memory");
  return r;
}

// Programmatic dependent launch: nothing before this line may touch global memory. A no-op where
// the kernel was launched without it or the architecture lacks it.
PADDLE_FUSED_INLINE void WaitForPreviousKernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
PADDLE_FUSED_INLINE void LetNextKernelStart() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gpu
}  // namespace paddle_fused
