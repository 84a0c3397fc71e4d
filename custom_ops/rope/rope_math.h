// The rotation, once for every target. `V` is a vector of the accumulate type on the CPU and a
// scalar on a GPU. Included inside each target's namespace after PADDLE_FUSED_INLINE exists there;
// hence no include guard.
//
// A pair (first, second) with table entries c1, s1 at first's index and c2, s2 at second's:
//   forward   y1 = x1 c1 - x2 s1    y2 = x2 c2 + x1 s2
//   adjoint   x1 = y1 c1 + y2 s2    x2 = y2 c2 - y1 s1
// Both are  own * c + partner * s  with the sine of RopeSines: the adjoint takes the partner's.

template <class V>
PADDLE_FUSED_INLINE V RopeRotate(V own, V partner, V c, V s) {
  return own * c + partner * s;
}

template <class V>
struct RopeSines {
  V first, second;
};

template <class V>
PADDLE_FUSED_INLINE RopeSines<V> RopeSignedSines(V s1, V s2, bool adjoint) {
  return adjoint ? RopeSines<V>{s2, -s1} : RopeSines<V>{-s1, s2};
}
