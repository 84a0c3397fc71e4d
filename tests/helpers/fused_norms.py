"""Calls of fused_rms_norm, and checks against the oracle, forward and backward."""

from __future__ import annotations

import numpy as np

import paddle_fused.nn.functional as F

from . import numeric, oracle
from .arrays import random_array
from .norms import check_weight_gradient
from .running import check, run

EPSILON = 1e-6
OPTIONAL = ("norm_bias", "bias", "residual")


def arrays(rng, shape, axis, dtype, given, weight_dtype=None):
    """A dict with x, weight, the optional inputs that are given, g and extra."""
    size = int(np.prod(shape[axis:]))
    values = {"x": random_array(rng, shape, dtype)}
    values["weight"] = random_array(rng, (size,), weight_dtype or dtype)
    kinds = {"norm_bias": ((size,), weight_dtype or dtype), "bias": ((size,), dtype)}
    for name in OPTIONAL:
        values[name] = random_array(rng, *kinds.get(name, (shape, dtype)))
        if name not in given:
            values[name] = None
    values["g"], values["extra"] = (random_array(rng, shape, dtype) for _ in range(2))
    return values


def compute(values, axis, used=(True, True)):
    """(outputs, gradients by name) of the package."""
    names = ["x", "weight", *OPTIONAL]

    def function(x, weight, norm_bias, bias, residual):
        return F.fused_rms_norm(x, weight, norm_bias, EPSILON, axis, bias, residual)

    upstream = [value if use else None for value, use in zip((values["g"], values["extra"]), used)]
    outputs, grads = run(function, [values[name] for name in names], upstream)
    return outputs, dict(zip(names, grads))


def check_outputs(outputs, values, axis, dtype):
    """Compares out and residual_out; returns what was normalised, in float64."""
    x, weight, norm_bias = values["x"], values["weight"], values["norm_bias"]
    total = oracle.f64(x)
    if values["bias"] is not None or values["residual"] is not None:
        total = oracle.residual_sum(x, values["residual"], values["bias"], axis)
        magnitude = sum_of_magnitudes(values, axis)
        check(outputs[1], total, dtype, magnitude, what="residual_out")
        total = oracle.f64(outputs[1])  # "s is rounded before it is normalised"
    magnitude = np.abs(oracle.fused_rms_norm(total, weight, None, EPSILON, axis))
    if norm_bias is not None:
        magnitude = magnitude + np.abs(oracle.f64(norm_bias)).reshape(x.shape[axis:])
    expected = oracle.fused_rms_norm(total, weight, norm_bias, EPSILON, axis)
    check(outputs[0], expected, dtype, magnitude, what="out")
    return total


def sum_of_magnitudes(values, axis):
    magnitude = np.abs(oracle.f64(values["x"]))
    if values["residual"] is not None:
        magnitude = magnitude + np.abs(oracle.f64(values["residual"]))
    if values["bias"] is not None:
        bias = np.abs(oracle.f64(values["bias"]))
        magnitude = magnitude + bias.reshape(magnitude.shape[axis:])
    return magnitude


def check_gradients(grads, values, total, axis, dtype, used=(True, True)):
    shape, weight = total.shape, values["weight"]
    size = int(np.prod(shape[axis:]))
    rows = total.size // size
    g = values["g"] if used[0] else np.zeros_like(values["g"])
    has_sum = values["bias"] is not None or values["residual"] is not None
    extra = values["extra"] if has_sum and used[1] else None
    expected = oracle.fused_rms_norm_grad(total, weight, g, EPSILON, axis, extra)
    flat = total.reshape(rows, size), oracle.f64(g).reshape(rows, size)
    dx_scale, dw_scale = oracle.rms_norm_grad_scale(flat[0], weight, flat[1], EPSILON)
    if extra is not None:
        dx_scale = dx_scale + np.abs(oracle.f64(extra)).reshape(rows, size)
    check(grads["x"], expected[0], dtype, dx_scale.reshape(shape), size, "dx")
    weight_dtype = numeric.dtype_name(weight.dtype)
    check_weight_gradient(grads["weight"], expected[1], dw_scale, rows, (dtype, weight_dtype), 0.0)
    if values["norm_bias"] is not None:
        scale, dtypes = np.abs(flat[1]).sum(0), (dtype, weight_dtype)
        actual = grads["norm_bias"]
        check_weight_gradient(actual, expected[2], scale, rows, dtypes, 0.0, "dnorm_bias")
    if values["bias"] is not None:
        check(grads["bias"], expected[3], dtype, dx_scale.sum(0), rows * size, "dbias")
    if values["residual"] is not None:
        numeric.assert_bit_equal(grads["residual"], grads["x"], "dresidual")


def check_all(values, axis, dtype, used=(True, True)):
    outputs, grads = compute(values, axis, used)
    total = check_outputs(outputs, values, axis, dtype)
    assert len(outputs) == 1 + (values["bias"] is not None or values["residual"] is not None)
    check_gradients(grads, values, total, axis, dtype, used)
