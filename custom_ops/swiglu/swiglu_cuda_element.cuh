// One element of SwiGLU on CUDA, and which elements need more than float.
#pragma once

#include "custom_ops/common/cuda_vector.cuh"

namespace paddle_fused {
namespace gpu {

#include "custom_ops/swiglu/swiglu_math.h"

namespace {

// ---- One element

// As exact as results of type T can show; kSummed: float32 sums of the results besides.
template <class T, bool kSummed = false, class A>
PADDLE_FUSED_INLINE Sigmoid<A> SigmoidFor(A a) {
  if constexpr (sizeof(T) == 8) {
    return SigmoidOf(a);
  } else if constexpr (sizeof(T) == 4) {
    const float e = ExpNonPositiveExact(-Abs(a));
    // q = 1 / (1 + e), with what the sum 1 + e loses. One rounding less in silu than a s has.
    const float d = 1 + e;
    const float lost = e - (d - 1);
    float q = ReciprocalBrief(d);
    q = Fma(q, NegMulAdd(d, q, 1.0f) - lost, q);
    Sigmoid<float> sig = SigmoidFrom(a, e, q);
    sig.silu = Select(a < 0, a * e, a) * q;
    return sig;
  } else {
    const float e = kSummed ? ExpNonPositiveShort(-Abs(a)) : ExpNonPositiveBrief(-Abs(a));
    return SigmoidFrom(a, e, ReciprocalBrief(1 + e));
  }
}

template <class A>
struct Terms {
  A gate_grad, up_grad, value, weighted;  // value = silu(a) b, weighted = value * prob
};

template <class T, class A, bool kSummed = false>
PADDLE_FUSED_INLINE Terms<A> TermsOf(A a, A b, A g, A prob) {
  const auto sig = SigmoidFor<T, kSummed>(a);
  const auto grads = SwigluBackward(b, g * prob, sig);
  const A value = Swiglu(b, sig);
  return {grads.gate, grads.up, value, value * prob};
}

// ---- Elements that float cannot hold on the way
//
// Some inputs have results that the type holds while a factor or a product on the way leaves
// float's range: gates below -87, where exp(gate) is subnormal, or huge and tiny values that
// cancel. Such elements are computed again in double, where no product of these factors can leave
// the range, by a function of its own that reads the row's share once more: kernels that stream
// have no registers and few instructions to spare for what hardly ever happens.

constexpr float kFarGate = -87.0f, kTiny = 0x1p-120f, kHuge = 3.4028235e38f;
// With such a factor to come, a subnormal product's own error is below what 16 bits show.
constexpr float kSmallFactor = 256;
// With gates and ups up to the first and upstream gradients up to the second, nothing overflows,
// and what a subnormal product loses does not show in 16 bits.
constexpr float kTameFactor = 0x1p15f, kTameUpstream = 0x1p60f;

template <class A>
PADDLE_FUSED_INLINE bool Overflows(A product) {
  return !(Abs(product) <= kHuge);
}
// A product that overflows, or is small enough for a later factor to show its error.
template <class A>
PADDLE_FUSED_INLINE bool StrayProduct(A product, A x, A y) {
  return Overflows(product) || (Abs(product) < kTiny && x != 0 && y != 0);
}
// Whether silu(a) b prob needs double.
template <class T, class A>
PADDLE_FUSED_INLINE bool StrayValue(A a, A b, A value, A prob) {
  if constexpr (sizeof(T) == 2) {
    return a < kFarGate || Overflows(value) || !(Abs(prob) <= kSmallFactor);
  } else {
    return a < kFarGate || (Abs(a) < kTiny && a != 0) || StrayProduct(value, a, b);
  }
}
// Whether one of the gradients does.
template <class T, class A>
PADDLE_FUSED_INLINE bool StrayGrads(A a, A b, A g, A value, A prob) {
  if constexpr (sizeof(T) == 2) {
    const bool tame = Abs(a) <= kTameFactor && Abs(b) <= kTameFactor && Abs(g) <= kTameUpstream;
    return StrayValue<T>(a, b, value, prob) || (std::is_same_v<T, BFloat16> && !tame);
  } else {
    const A gp = g * prob;
    return StrayValue<T>(a, b, value, prob) || StrayProduct(gp, g, prob) ||
           StrayProduct(gp * b, gp, b);
  }
}

// What a thread has seen: whether any of its elements may be such a one. Halves are watched two at
// a time, by their extremes.
template <class T>
struct Watch {
  bool stray = false;
  uint32_t lowest_gate = 0, factor = 0, upstream = 0, result = 0;

  template <int N>
  PADDLE_FUSED_INLINE void Gates(const Raw<T, N>& raw) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (uint32_t w : raw.w) lowest_gate = MinOfPair<T>(lowest_gate, w);
    }
  }
  template <int N>
  PADDLE_FUSED_INLINE void Factors(const Raw<T, N>& a, const Raw<T, N>& b) {
    if constexpr (std::is_same_v<T, BFloat16>) {
#pragma unroll
      for (uint32_t w : a.w) factor = MagnitudeOfPair<T>(factor, w);
#pragma unroll
      for (uint32_t w : b.w) factor = MagnitudeOfPair<T>(factor, w);
    }
  }
  template <int N>
  PADDLE_FUSED_INLINE void Upstream(const Raw<T, N>& raw) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (uint32_t w : raw.w) upstream = MagnitudeOfPair<T>(upstream, w);
    }
  }
  template <int N>
  PADDLE_FUSED_INLINE void Results(const Raw<T, N>& raw) {
    if constexpr (std::is_same_v<T, BFloat16>) {
#pragma unroll
      for (uint32_t w : raw.w) result = MagnitudeOfPair<T>(result, w);
    }
  }
  // After a row of the forward.
  PADDLE_FUSED_INLINE bool InForward(Acc<T> prob) const {
    if constexpr (sizeof(T) == 2) {
      return LowerOfPair<T>(lowest_gate) < kFarGate || !(HigherOfPair<T>(result) <= kHuge) ||
             !(Abs(prob) <= kSmallFactor);
    } else {
      return stray;
    }
  }
  // After a row of the backward. A sum far below the upstream gradients may be made of products
  // that have lost their accuracy.
  template <bool kWeighted>
  PADDLE_FUSED_INLINE bool InBackward(Acc<T> prob, Acc<T> sum) const {
    if constexpr (sizeof(T) == 2) {
      const float g = HigherOfPair<T>(upstream);
      return LowerOfPair<T>(lowest_gate) < kFarGate || !(Abs(prob) <= kSmallFactor) ||
             HigherOfPair<T>(factor) > kTameFactor || g > kTameUpstream ||
             (kWeighted && Abs(sum) < g * 0x1p-100f);
    } else {
      return stray;
    }
  }
};

// A value that rounds to T as v does.
template <class T>
PADDLE_FUSED_INLINE float ForRoundingTo(double v) {
  return sizeof(T) == 2 ? RoundToOdd(v) : static_cast<float>(v);
}

}  // namespace
}  // namespace gpu
}  // namespace paddle_fused
