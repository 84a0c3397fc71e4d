// The SwiGLU formulas, once for every target. `V` is a vector of the accumulate type on the CPU and
// a scalar on a GPU. Included inside each target's namespace, after PADDLE_FUSED_INLINE and
// ExpNonPositive, ReciprocalOneToTwo, Abs and Select exist there; hence no include guard.
//
// With a = gate, b = up, s = sigmoid(a), f = silu(a) = a s, and t = 1 - s computed without
// cancellation:  f' = s (1 + a t) = s + f t,  f'' = s t (2 + a (t - s)).

template <class V>
struct Sigmoid {
  V s, t, silu;
};

// From e = exp(-|a|) and q = 1 / (1 + e): s and 1 - s keep their relative accuracy at either end.
template <class V>
PADDLE_FUSED_INLINE Sigmoid<V> SigmoidFrom(V a, V e, V q) {
  const V eq = e * q;
  const V s = Select(a < 0, eq, q);
  return {s, Select(a < 0, q, eq), a * s};
}

// exp is only taken of a non-positive argument, so nothing overflows.
template <class V>
PADDLE_FUSED_INLINE Sigmoid<V> SigmoidOf(V a) {
  const V e = ExpNonPositive(-Abs(a));
  const V d = 1 + e;
  Sigmoid<V> sig = SigmoidFrom(a, e, ReciprocalOneToTwo(d));
  sig.silu = Select(a < 0, a * e, a) / d;  // a division of its own: one rounding less than a s
  return sig;
}

template <class V>
PADDLE_FUSED_INLINE V Swiglu(V b, Sigmoid<V> sig) {
  return sig.silu * b;
}

template <class V>
struct SwigluGrads {
  V gate, up;
};

// Gradients of silu(a) b under the upstream gradient g.
template <class V>
PADDLE_FUSED_INLINE SwigluGrads<V> SwigluBackward(V b, V g, Sigmoid<V> sig) {
  return {(g * b) * (sig.s + sig.silu * sig.t), g * sig.silu};
}

// Derivatives of <va, d gate> + <vb, d up> with respect to g, a and b.
template <class V>
struct SwigluSecond {
  V upstream, gate, up;
};

template <class V>
PADDLE_FUSED_INLINE SwigluSecond<V> SwigluDoubleBackward(V a, V b, V g, V va, V vb,
                                                         Sigmoid<V> sig) {
  const V first = sig.s + sig.silu * sig.t;
  const V second = (sig.s * sig.t) * (2 + a * (sig.t - sig.s));
  return {(va * b) * first + vb * sig.silu, (va * g) * b * second + (vb * g) * first,
          (va * g) * first};
}
