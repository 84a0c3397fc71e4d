// The SwiGLU formulas, once for every target. `V` is a vector of the accumulate type on the CPU and
// a scalar on a GPU. Included inside each target's namespace, after PADDLE_FUSED_INLINE and
// ExpNonPositive, ReciprocalOneToTwo, Abs and Select exist there; hence no include guard.
//
// With a = gate, b = up, s = sigmoid(a), f = silu(a) = a s, and t = 1 - s computed without
// cancellation:  f' = s (1 + a t),  f'' = s t (2 + a (t - s)).

template <class V>
struct Sigmoid {
  V s, t;
};

// exp is only taken of a non-positive argument, so nothing overflows and both s and 1 - s keep
// their relative accuracy at either end.
// e = exp(-|a|), q = 1 / (1 + e).
template <class V>
PADDLE_FUSED_INLINE Sigmoid<V> SigmoidFrom(V a, V e, V q) {
  const V eq = e * q;
  return {Select(a < 0, eq, q), Select(a < 0, q, eq)};
}
template <class V>
PADDLE_FUSED_INLINE Sigmoid<V> SigmoidOf(V a) {
  const V e = ExpNonPositive(-Abs(a));
  return SigmoidFrom(a, e, ReciprocalOneToTwo(1 + e));
}

template <class V>
PADDLE_FUSED_INLINE V Swiglu(V a, V b, Sigmoid<V> sig) {
  return (a * sig.s) * b;
}

template <class V>
struct SwigluGrads {
  V gate, up;
};

// Gradients of silu(a) b under the upstream gradient g. The products keep a factor that may
// underflow or overflow (g) away from the ones that may not (s and t).
template <class V>
PADDLE_FUSED_INLINE SwigluGrads<V> SwigluBackward(V a, V b, V g, Sigmoid<V> sig) {
  return {(g * b) * (sig.s * (1 + a * sig.t)), g * (a * sig.s)};
}

// Derivatives of <va, d gate> + <vb, d up> with respect to g, a and b.
template <class V>
struct SwigluSecond {
  V upstream, gate, up;
};

template <class V>
PADDLE_FUSED_INLINE SwigluSecond<V> SwigluDoubleBackward(V a, V b, V g, V va, V vb,
                                                         Sigmoid<V> sig) {
  const V silu = a * sig.s;
  const V first = sig.s * (1 + a * sig.t);
  const V second = (sig.s * sig.t) * (2 + a * (sig.t - sig.s));
  return {(va * b) * first + vb * silu, (va * g) * b * second + (vb * g) * first, (va * g) * first};
}
