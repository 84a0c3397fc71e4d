"""Checks of the SwiGLU functions against the oracle, forward and backward.

`view` makes the tensor of an array, as those of `layouts` do.
"""

from __future__ import annotations

import paddle_fused.nn.functional as F

from . import numeric, oracle
from .arrays import to_numpy, to_paddle
from .running import check, run

# The derivative of silu is a sum of two terms, s + silu (1 - s), which cancel near a = -1.28.
GATE_TERMS = 2


def check_swiglu(x, y, g, what="", view=to_paddle):
    """The plain form, joined when y is None: forward and gradients."""
    name = numeric.dtype_name(x.dtype)
    inputs = [x] if y is None else [x, y]
    (out,), grads = run(F.swiglu, [view(a) for a in inputs], [view(g)])
    check(out, oracle.swiglu(x, y), name, what=f"out {what}")
    expected, scale = oracle.swiglu_grad(x, y, g), oracle.swiglu_grad_scale(x, y, g)
    if y is None:
        expected, scale = [expected], [scale]
    for grad, value, magnitude, terms in zip(grads, expected, scale, (GATE_TERMS, 1)):
        check(grad, value, name, magnitude, terms, what=f"gradient {what}")


def weighted_oracle(x, g, probs):
    """((do1, its scale), (probs_grad, its scale), o2_s)."""
    do1, probs_grad, o2_s = oracle.fused_swiglu_weighted_bwd(x, g, probs)
    gp = oracle.f64(g) * oracle.f64(probs).reshape((*x.shape[:-1], 1))
    do1_scale = oracle.swiglu_grad_scale(x, None, gp)
    return (do1, do1_scale), (probs_grad, oracle.probs_grad_scale(x, g, probs)), o2_s


def check_weighted(x, g, probs, what="", view=to_paddle):
    """The forward, its autograd and the stand-alone backward."""
    name, terms = numeric.dtype_name(x.dtype), max(g.shape[-1], 2)
    do1, probs_grad, o2_s = weighted_oracle(x, g, probs)
    (out,), (dx, dprobs) = run(F.fused_swiglu_weighted, [view(x), view(probs)], [view(g)])
    arguments = [view(array) for array in (x, g, probs)]
    results = [to_numpy(r) for r in F.fused_swiglu_weighted_bwd(*arguments)]
    for actual_do1, actual_probs_grad, actual_out in ((dx, dprobs, out), results):
        check(actual_do1, do1[0], name, do1[1], GATE_TERMS, what=f"do1 {what}")
        check(actual_probs_grad, probs_grad[0], "float32", probs_grad[1], terms, f"dprob {what}")
        bound = numeric.elementwise_bound(name)
        if name == "float32":
            bound = numeric.MAX_ULP_WEIGHTED_FLOAT32
        assert numeric.dtype_name(actual_out.dtype) == name
        numeric.assert_ulp(actual_out, o2_s, bound, what=f"o2_s {what}")
