"""Prints a markdown table of errors in ULP: this package's and those of plain Paddle operators.

    PYTHONPATH=tests python tests/tools/measure_ulp.py [--rows 512] [--width 1024] [--seed 0]

For each function, result and dtype: the largest and the mean error against the float64 oracle, in
units in the last place of the result's dtype; where a result is a sum that may cancel, of the sum
of magnitudes, as the tests measure it. "Plain" is paddle_fused.reference, the same function
composed of Paddle's operators. A float64 result has an oracle of its own precision.
"""

from __future__ import annotations

import argparse

import numpy as np

import paddle_fused.nn.functional as F
import paddle_fused.reference as R
from helpers import numeric, oracle
from helpers.arrays import DTYPES, random_array, to_numpy, to_paddle
from helpers.running import run

EPSILON = 1e-6


def swiglu(lib, array, width):
    x, y, g = array(width, scale=3.0), array(width), array(width)
    (out,), (dx, dy) = run(lib.swiglu, [x, y], [g])
    expected, scales = oracle.swiglu_grad(x, y, g), oracle.swiglu_grad_scale(x, y, g)
    yield "out", out, oracle.swiglu(x, y), None
    yield "dx", dx, expected[0], scales[0]
    yield "dy", dy, expected[1], scales[1]


def fused_swiglu_weighted_bwd(lib, array, width):
    x, g, probs = array(2 * width, scale=3.0), array(width), array(kind="float32")
    results = lib.fused_swiglu_weighted_bwd(*map(to_paddle, (x, g, probs)))
    expected = oracle.fused_swiglu_weighted_bwd(x, g, probs)
    scaled = oracle.f64(g) * oracle.f64(probs)[:, None]
    scales = [oracle.swiglu_grad_scale(x, None, scaled), oracle.probs_grad_scale(x, g, probs), None]
    for name, *values in zip(
        ("do1", "probs_grad", "o2_s"), map(to_numpy, results), expected, scales
    ):
        yield name, *values


def rms_norm(mode):
    def measure(lib, array, width):
        x, g, weight = array(width), array(width), array(width, rows=False)

        def function(x, w):
            return lib.rms_norm(x, w, EPSILON, casting_mode=mode)

        (out,), (dx, dweight) = run(function, [x, weight], [g])
        kind = numeric.dtype_name(x.dtype)
        expected = oracle.rms_norm_grad(x, weight, g, EPSILON, 0.0, mode, kind)
        scales = oracle.rms_norm_grad_scale(x, weight, g, EPSILON)
        yield "out", out, oracle.rms_norm(x, weight, EPSILON), None
        yield "dx", dx, expected[0], scales[0]
        yield "dweight", dweight, expected[1], scales[1]

    return measure


def fused_rms_norm(lib, array, width):
    x, residual, g = array(width), array(width), array(width)
    weight, norm_bias, bias = (array(width, rows=False) for _ in range(3))

    def function(x, weight, norm_bias, bias, residual):
        return lib.fused_rms_norm(x, weight, norm_bias, EPSILON, 1, bias, residual)

    (out, total), grads = run(function, [x, weight, norm_bias, bias, residual], [g, None])
    magnitude = sum(np.abs(oracle.f64(a)) for a in (x, residual, bias))
    yield "residual_out", total, oracle.residual_sum(x, residual, bias), magnitude
    plain = oracle.fused_rms_norm(total, weight, None, EPSILON)
    magnitude = np.abs(plain) + np.abs(oracle.f64(norm_bias))
    yield "out", out, plain + oracle.f64(norm_bias), magnitude
    expected = oracle.fused_rms_norm_grad(total, weight, g, EPSILON)
    dx_scale, dw_scale = oracle.rms_norm_grad_scale(total, weight, g, EPSILON)
    yield "dx", grads[0], expected[0], dx_scale
    yield "dweight", grads[1], expected[1], dw_scale
    yield "dnorm_bias", grads[2], expected[2], np.abs(oracle.f64(g)).sum(0)
    yield "dbias", grads[3], expected[3], dx_scale.sum(0)


def fused_rms_norm_ext(lib, array, width):
    x, g, scale = array(width), array(width), array(width, rows=False)
    (y, invvar), (dx, dscale) = run(lib.fused_rms_norm_ext, [x, scale], [g, None])
    expected_y, expected_invvar = oracle.fused_rms_norm_ext(x, scale)
    expected = oracle.rms_norm_grad(x, scale, g, 1e-5)
    scales = oracle.rms_norm_grad_scale(x, scale, g, 1e-5)
    yield "y", y, expected_y, None
    yield "invvar", invvar, expected_invvar, None
    yield "dx", dx, expected[0], scales[0]
    yield "dscale", dscale, expected[1], scales[1]


def rotary(pairs):
    def measure(lib, array, width):
        heads = max(width // 64, 1)
        q, g = array(1, heads, 64), array(1, heads, 64)
        cos, sin = (array(64, kind="float32") for _ in range(2))

        def function(q):
            tables = to_paddle(sin), to_paddle(cos)
            call = lib.fused_rotary_position_embedding
            return call(q, None, None, *tables, None, pairs, time_major=True)[0]

        (out,), (dq,) = run(function, [q], [g])
        tables = [t[:, None, None] for t in (cos, sin)]
        style = oracle.PAIRS if pairs else oracle.HALVES_STYLE
        yield "out", out, oracle.rope(q, *tables, style), oracle.rope_scale(q, *tables, style)
        expected = oracle.rope_grad(g, *tables, style)
        yield "dq", dq, expected, oracle.rope_grad_scale(g, *tables, style)

    return measure


def partial_rope(lib, array, width):
    heads = max(width // 64, 1)
    x, g = (array(heads, 64)[None] for _ in range(2))
    cos, sin = (array(1, 32, kind="float32")[None] for _ in range(2))
    (out,), (dx,) = run(
        lambda t: lib.fused_partial_rope(t, to_paddle(cos), to_paddle(sin)), [x], [g]
    )
    yield "out", out, oracle.partial_rope(x, cos, sin), oracle.partial_rope_scale(x, cos, sin)
    expected = oracle.partial_rope_grad(g, cos, sin)
    yield "dx", dx, expected, oracle.partial_rope_grad_scale(g, cos, sin)


FUNCTIONS = {
    "swiglu": swiglu,
    "fused_swiglu_weighted_bwd": fused_swiglu_weighted_bwd,
    "rms_norm, llama": rms_norm("llama"),
    "rms_norm, gemma": rms_norm("gemma"),
    "fused_rms_norm, all inputs": fused_rms_norm,
    "fused_rms_norm_ext": fused_rms_norm_ext,
    "rotary, adjacent pairs": rotary(True),
    "rotary, halves": rotary(False),
    "fused_partial_rope": partial_rope,
}


def measure(function, lib, dtype, rows, width, seed):
    """Each result's (name, dtype, largest error, mean error)."""
    rng = np.random.default_rng(seed)

    def array(*shape, kind=dtype, scale=1.0, rows=rows):
        return random_array(rng, shape if rows is False else (rows, *shape), kind, scale)

    for name, actual, expected, scale in function(lib, array, width):
        kind = numeric.dtype_name(actual.dtype)
        error = numeric.ulp_error(actual, expected, kind, scale)
        yield name, kind, float(error.max()), float(error.mean())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    print("| Function | Inputs | Result | Max | Mean | Plain: max | Plain: mean |")
    print("|---|---|---|---:|---:|---:|---:|")
    for title, function in FUNCTIONS.items():
        for dtype in DTYPES:
            both = zip(*(measure(function, lib, dtype, **options) for lib in (F, R)))
            for (name, kind, *ours), (_, _, *plain) in both:
                result = name if kind == dtype else f"{name} ({kind})"
                numbers = " | ".join(f"{value:.3g}" for value in (*ours, *plain))
                print(f"| {title} | {dtype} | {result} | {numbers} |")


if __name__ == "__main__":
    main()
