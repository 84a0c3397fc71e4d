// 16-byte vectors as they lie in memory, and the accumulate types they unpack to. Device code only.
#pragma once

#include "custom_ops/common/cuda_math.cuh"

namespace paddle_fused {
namespace gpu {

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

// Products of halves, rounded once: what float products rounded to T are, but for subnormal ones,
// which float may round before.
template <class T, int N>
PADDLE_FUSED_INLINE Raw<T, N> MultiplyHalves(const Raw<T, N>& a, const Raw<T, N>& b) {
  Raw<T, N> r;
#pragma unroll
  for (int i = 0; i < Raw<T, N>::kWords; ++i) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const __nv_bfloat162 v = __hmul2_rn(*reinterpret_cast<const __nv_bfloat162*>(&a.w[i]),
                                          *reinterpret_cast<const __nv_bfloat162*>(&b.w[i]));
      r.w[i] = *reinterpret_cast<const uint32_t*>(&v);
    } else {
      const __half2 v = __hmul2_rn(*reinterpret_cast<const __half2*>(&a.w[i]),
                                   *reinterpret_cast<const __half2*>(&b.w[i]));
      r.w[i] = *reinterpret_cast<const uint32_t*>(&v);
    }
  }
  return r;
}

// ---- Two halves of type T in a word

PADDLE_FUSED_INLINE float LowHalf(BFloat16, uint32_t w) { return __uint_as_float(w << 16); }
PADDLE_FUSED_INLINE float HighHalf(BFloat16, uint32_t w) {
  return __uint_as_float(w & 0xffff0000u);
}
PADDLE_FUSED_INLINE float LowHalf(Float16, uint32_t w) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(w)));
}
PADDLE_FUSED_INLINE float HighHalf(Float16, uint32_t w) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(w >> 16)));
}
template <class T>
PADDLE_FUSED_INLINE float LowerOfPair(uint32_t w) {
  return fminf(LowHalf(T{}, w), HighHalf(T{}, w));
}
// NaN if one is.
template <class T>
PADDLE_FUSED_INLINE float HigherOfPair(uint32_t w) {
  const float low = fabsf(LowHalf(T{}, w)), high = fabsf(HighHalf(T{}, w));
  return low > high || low != low ? low : high;
}
// Half by half; a NaN loses.
template <class T>
PADDLE_FUSED_INLINE uint32_t MinOfPair(uint32_t a, uint32_t b) {
  uint32_t r;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
}
// The larger magnitudes, with any signs; a NaN wins.
template <class T>
PADDLE_FUSED_INLINE uint32_t MagnitudeOfPair(uint32_t a, uint32_t b) {
  uint32_t r;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
#else
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
  }
#endif
  return r;
}

}  // namespace gpu
}  // namespace paddle_fused
