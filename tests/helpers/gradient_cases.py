"""Every differentiable function with small shapes: which inputs, and how often."""

from __future__ import annotations

import numpy as np

import paddle_fused.nn.functional as F

from .arrays import random_array, to_paddle

EPSILON = 2.0**-20
TABLES = [np.random.default_rng(seed).standard_normal((7, 4)) for seed in (1, 2)]
IDS = np.array([[3, 0, 6], [1, 1, 5]])


def norm(**options):
    def function(x, *rest):
        names = [n for n in ("weight", "residual") if n in options["given"]]
        return F.rms_norm(
            x,
            epsilon=EPSILON,
            offset=options.get("offset", 0.0),
            casting_mode=options.get("mode", "llama"),
            **dict(zip(names, rest)),
        )

    return function


def fused_norm(given):
    def function(x, weight, *rest):
        named = {"norm_bias": None, **dict(zip(given, rest))}
        return F.fused_rms_norm(x, weight, epsilon=EPSILON, begin_norm_axis=1, **named)

    return function


def tables():
    return [to_paddle(t) for t in TABLES]


def rope(pairs=True, time_major=False, with_ids=False, generated=False):
    def function(*tensors):
        sin, cos = (None, None) if generated else tables()
        q, k, v = (*tensors, None, None)[:3]
        ids = to_paddle(IDS) if with_ids else None
        return F.fused_rotary_position_embedding(
            q, k, v, sin, cos, ids, pairs, time_major, rotary_emb_base=50.0
        )

    return function


def applied(unsqueeze_dim):
    return lambda q, k: F.apply_rotary_pos_emb(q, k, *tables(), unsqueeze_dim=unsqueeze_dim)


def partial(x):
    return F.fused_partial_rope(x, *(t.reshape([1, 7, 1, 4]) for t in tables()))


X, W = (2, 3, 6), (6,)
ROWS, AXES = (4, 6), (2, 3, 2)  # both with rows of 6 elements
Q, K = (2, 3, 2, 6), (2, 3, 1, 6)

# name: (function, shapes of its differentiable inputs). Differentiable twice, at least:
TWICE = {
    "swiglu joined": (F.swiglu, [X]),
    "swiglu pair": (F.swiglu, [X, X]),
    "rms_norm": (norm(given="weight"), [X, W]),
    "rms_norm offset": (norm(given="weight", offset=1.0, mode="gemma"), [X, W]),
    "rms_norm none": (norm(given="weight", mode="none"), [X, W]),
    "rms_norm unweighted": (norm(given=""), [X]),
    "rms_norm residual": (norm(given="weight residual"), [X, W, X]),
    "rms_norm unweighted residual": (norm(given="residual"), [X, X]),
    "fused_rms_norm": (fused_norm([]), [ROWS, W]),
    "fused_rms_norm residual": (fused_norm(["residual"]), [ROWS, W, ROWS]),
    "fused_rms_norm of two axes": (fused_norm([]), [AXES, W]),
    "fused_rms_norm of two axes residual": (fused_norm(["residual"]), [AXES, W, AXES]),
}
# Linear, and their derivatives are such functions again:
ROTATIONS = {
    "rope q": (rope(), [Q]),
    "rope q halves": (rope(False), [Q]),
    "rope qk ids": (rope(True, with_ids=True), [Q, K]),
    "rope qkv halves": (rope(False), [Q, K, K]),
    "rope qkv time_major ids": (rope(True, True, True), [(3, 2, h, 6) for h in (2, 1, 1)]),
    "rope generated": (rope(False, generated=True), [Q, K]),
    "rope generated ids": (rope(True, with_ids=True, generated=True), [Q]),
    "apply_rotary_pos_emb": (applied(1), [(2, 2, 3, 6), (2, 1, 3, 6)]),
    "apply_rotary_pos_emb 2": (applied(2), [Q, K]),
    "fused_partial_rope": (partial, [Q]),
}
# Differentiable once, and a second time raises:
ONCE = {
    "fused_swiglu_weighted": (F.fused_swiglu_weighted, [X, (2, 3)]),
    "fused_swiglu_weighted keepdim": (F.fused_swiglu_weighted, [X, (2, 3, 1)]),
    "fused_rms_norm_ext": (lambda x, w: F.fused_rms_norm_ext(x, w, EPSILON)[:1], [X, W]),
    "fast_rms_norm": (lambda x, w: F.fast_rms_norm(x, w, EPSILON)[:1], [X, W]),
}
# Those of fused_rms_norm that have second-order gradients are above.
for _given in (["norm_bias"], ["bias"], ["norm_bias", "bias"], ["norm_bias", "residual"]):
    for _x, _kind in ((ROWS, ""), (AXES, " of two axes")):
        _shapes = [_x if name == "residual" else W for name in _given]
        ONCE[f"fused_rms_norm{_kind} {' '.join(_given)}"] = fused_norm(_given), [_x, W, *_shapes]
_given = ["norm_bias", "bias", "residual"]
ONCE["fused_rms_norm " + " ".join(_given)] = fused_norm(_given), [ROWS, W, W, W, ROWS]
CASES = {**TWICE, **ROTATIONS, **ONCE}


def make_inputs(rng, name, dtype="float64"):
    """Random inputs of a case; probabilities are float32 and multiples of the step."""
    arrays = [random_array(rng, shape, dtype) for shape in CASES[name][1]]
    if "swiglu_weighted" in name:
        arrays[1] = np.round(random_array(rng, arrays[1].shape, "float32") * 64) / np.float32(64)
    return arrays
