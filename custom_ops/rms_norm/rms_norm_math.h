// The RMSNorm formulas, once for every target. `V` is a vector of the accumulate type on the CPU
// and a scalar on a GPU; A is the accumulate type. Included inside each target's namespace after
// PADDLE_FUSED_INLINE and NegMulAdd exist there; hence no include guard.
//
// With h the width, w = offset + weight, r = 1 / sqrt(mean(x^2) + epsilon), z = x r, m = dy w:
//   y  = z w + norm_bias
//   dx = r (m - z mean(m z)),   dw = sum over rows of dy z

template <class V, class A>
PADDLE_FUSED_INLINE V RmsNormInputGrad(V m, V z, A r, A mean_mz) {
  return r * NegMulAdd(z, mean_mz, m);
}

// Means over one row that the second-order gradients need, with v = ddx and u = ddw.
template <class A>
struct RmsNormSecondMeans {
  A mv, mz, zv, guz;
};

template <class V>
struct RmsNormSecond {
  V x, weight, upstream;
};

// Derivatives of <v, dx> + <u, dw> with respect to x, w (one row's share) and dy = g.
template <class V, class A>
PADDLE_FUSED_INLINE RmsNormSecond<V> RmsNormDoubleBackward(V g, V w, V z, V v, V u, A r,
                                                           const RmsNormSecondMeans<A>& mean) {
  const V m = g * w;
  const V centred = r * (v - z * mean.zv);
  const V inner = z * (3 * mean.zv * mean.mz - mean.mv) - v * mean.mz - m * mean.zv;
  return {r * (r * inner + (g * u - z * mean.guz)), g * centred, centred * w + z * u};
}
