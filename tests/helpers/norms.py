"""Comparisons of RMSNorm results that its three casting modes need."""

from __future__ import annotations

import numpy as np

from . import numeric, oracle
from .numeric import HALVES, dtype_name, spacing

# "none" rounds a row's 1/rms and every product; a float32 computation on the other side of one tie
# moves an element by one step, and a row by one step of 1/rms.
MAX_ULP_NONE_HALF = 4.0
# Its gradient holds the third power of that 1/rms, whose own error is 2.5 half steps of up to four
# roundings, and the terms of a narrow row cancel.
MAX_ULP_NONE_HALF_GRADIENT = 10.0
# The share of elements that must equal the oracle with the mode's own roundings.
MIN_EQUAL = 0.98


def check_output(actual, x, weight, epsilon, offset, mode, what="out", ordinary=True) -> None:
    """Out against the exact value and, of a half, against the mode's own roundings.

    The latter only of ordinary data: where 1/rms is 1, products are ties.
    """
    name = dtype_name(x.dtype)
    assert dtype_name(actual.dtype) == name, what
    rounded = oracle.rms_norm_rounded(x, weight, epsilon, offset, mode, name)
    if mode == "none" and name in HALVES:
        numeric.assert_ulp(actual, rounded, MAX_ULP_NONE_HALF, what=what)
    else:
        exact = oracle.rms_norm(x, weight, epsilon, offset)
        moved = towards(actual, exact, subnormal_slack(x, weight, epsilon, offset, mode))
        bound = numeric.rms_norm_bound(name, mode)
        numeric.assert_ulp(moved, exact, bound, what=what, dtype=name)
    if ordinary and name in HALVES and mode != "none" and actual.size >= 100:
        equal = numeric.round_to(rounded, name) == actual.astype(np.float64)
        assert equal.mean() >= MIN_EQUAL, f"{what}: {equal.mean():.4f} equal {mode}'s roundings"


def towards(actual, expected, slack) -> np.ndarray:
    """Float64 values of actual, moved towards the expected ones by at most the slack."""
    wide = np.asarray(actual).astype(np.float64)
    with np.errstate(invalid="ignore"):
        moved = wide + np.clip(expected - wide, -slack, slack)
    return np.where(np.isfinite(wide), moved, wide)


def subnormal_slack(x, weight, epsilon, offset, mode="llama") -> np.ndarray:
    """Half a step of x·r times the factor where x·r is subnormal: the bound is of normal ones.

    Subnormal in the dtype that x·r is in: x's for a half of "llama" mode, else the arithmetic's.
    """
    name = dtype_name(x.dtype)
    if name in HALVES and mode != "llama":
        name = "float32"
    xhat = oracle.normalized(x, epsilon)
    factor = np.ones(1) if weight is None else np.abs(offset + oracle.f64(weight))
    smallest_normal = np.ldexp(1.0, numeric.smallest_exponent(name))
    return np.where(np.abs(xhat) < smallest_normal, 0.5 * spacing(xhat, name) * factor, 0.0)


def subnormal_gradient_slack(x, weight, g, epsilon, offset) -> np.ndarray:
    """Half a step times 1/rms for each of dx's two products that is subnormal before it.

    dx = r (c − x̂ mean(c x̂)) with c = g (offset + weight); 1/rms then magnifies their roundings.
    """
    name = "float64" if dtype_name(x.dtype) == "float64" else "float32"
    smallest_normal = np.ldexp(1.0, numeric.smallest_exponent(name))
    xhat = oracle.normalized(x, epsilon)
    c = oracle.f64(g) * (1.0 if weight is None else offset + oracle.f64(weight))
    products = c, xhat * np.mean(c * xhat, axis=-1, keepdims=True)
    subnormal = sum((np.abs(p) < smallest_normal).astype(np.float64) for p in products)
    half_step = 0.5 * spacing(0.0, name) * oracle.inverse_rms(x, epsilon)
    return np.where(subnormal > 0, half_step, 0.0) * subnormal


def inverse_rms_of_mode(x, epsilon, mode):
    """1/rms as the gradient uses it: "none" rounds it to the half dtype on its way."""
    name = dtype_name(x.dtype)
    if mode != "none" or name not in HALVES:
        return oracle.inverse_rms(x, epsilon)
    squares = numeric.round_to(oracle.f64(x) ** 2, name)
    mean = numeric.round_to(np.mean(squares, axis=-1, keepdims=True), name)
    return numeric.round_to(1.0 / np.sqrt(numeric.round_to(mean + epsilon, name)), name)


def tie_slack(xhat, g, dtype) -> np.ndarray:
    """What rounding x·r to the other neighbour may move each weight gradient by.

    Only terms within a few float32 ULP of a tie of the half dtype count.
    """
    unit = spacing(xhat, dtype)
    to_tie = np.abs(np.abs(xhat / unit - np.floor(xhat / unit)) - 0.5) * unit
    near = to_tie <= 8 * spacing(xhat, "float32")
    moved = np.abs(oracle.f64(g)) * np.where(near, unit, 0.0)
    return moved.sum(axis=tuple(range(moved.ndim - 1)))


def check_weight_gradient(actual, expected, scale, rows, dtypes, slack, what="dweight"):
    """As `check`, after moving towards the expected value by at most the slack of ties.

    dtypes are x's and the weight's. What is no float64 accumulates in float32, though a float64
    weight gets a float64 gradient.
    """
    x_dtype, weight_dtype = dtypes
    assert dtype_name(actual.dtype) == weight_dtype, what
    unit = weight_dtype if x_dtype == "float64" or weight_dtype != "float64" else "float32"
    bound = numeric.sum_bound(unit, max(rows, 2))
    numeric.assert_ulp(towards(actual, expected, slack), expected, bound, scale, what, unit)


def check_gradients(grads, x, weight, g, epsilon, offset, mode, extra=None, what=""):
    """(dx, dweight) of rms_norm; extra is what reaches the normalised sum from elsewhere."""
    name, (dx, dweight) = dtype_name(x.dtype), grads
    own_rounding = mode == "none" and name in HALVES
    expected, _ = oracle.rms_norm_grad(x, weight, g, epsilon, offset)
    scale, dw_scale = oracle.rms_norm_grad_scale(x, weight, g, epsilon, offset)
    if extra is not None:
        expected, scale = expected + oracle.f64(extra), scale + np.abs(oracle.f64(extra))
    if own_rounding:
        # 1/rms is a half number here: its error is in every element of the row.
        worst = np.abs(dx.astype(np.float64) - expected) / spacing(scale, name)
        assert (worst <= MAX_ULP_NONE_HALF_GRADIENT).all(), f"dx {what}: {worst.max()} ULP of scale"
    else:
        assert dtype_name(dx.dtype) == name, f"dx {what}"
        moved = towards(dx, expected, subnormal_gradient_slack(x, weight, g, epsilon, offset))
        bound = numeric.sum_bound(name, max(x.shape[-1], 2))
        numeric.assert_ulp(moved, expected, bound, scale, f"dx {what}", name)
    if weight is None:
        return
    xhat = oracle.f64(x) * inverse_rms_of_mode(x, epsilon, mode)
    slack, terms = 0.0, xhat
    if mode != "gemma" and name in HALVES:
        slack, terms = tie_slack(xhat, g, name), numeric.round_to(xhat, name)
        if own_rounding:  # a row whose 1/rms fell to the other side of a tie
            slack = slack + np.abs(terms * oracle.f64(g)).reshape(-1, x.shape[-1]).sum(0) * 2.0**-7
    dw = (oracle.f64(g) * terms).reshape(-1, x.shape[-1]).sum(0)
    rows = max(x.size // max(x.shape[-1], 1), 1)
    dtypes = name, dtype_name(weight.dtype)
    check_weight_gradient(dweight, dw, dw_scale, rows, dtypes, slack, f"dweight {what}")
