"""The oracle's gradients against central differences, and the error measures on known cases."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from helpers import numeric, oracle
from helpers.arrays import DTYPES, numpy_dtype, random_array


@pytest.fixture
def rng():
    return np.random.default_rng(20240)


def central_difference(function, x, step=1e-5):
    """The gradient of a scalar function at x, one element at a time."""
    x = np.array(x, dtype=np.float64)
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        values = []
        for sign in (1.0, -1.0):
            moved = x.copy()
            moved[index] += sign * step
            values.append(function(moved))
        gradient[index] = (values[0] - values[1]) / (2.0 * step)
    return gradient


def assert_gradient(actual, function, x):
    np.testing.assert_allclose(actual, central_difference(function, x), rtol=1e-7, atol=1e-8)


# SwiGLU


def test_sigmoid_keeps_its_accuracy_far_out():
    a = np.array([-700.0, -40.0, 0.0, 40.0, 1e4, -1e4])
    expected = [np.exp(-700.0), 1.0 / (1.0 + np.exp(40.0)), 0.5, 1.0 - np.exp(-40.0), 1.0, 0.0]
    np.testing.assert_allclose(oracle.sigmoid(a), expected, rtol=1e-14)


def test_swiglu_grad(rng):
    x, y, g = (random_array(rng, (2, 3), "float64") for _ in range(3))
    dx, dy = oracle.swiglu_grad(x, y, g)
    assert_gradient(dx, lambda t: (g * oracle.swiglu(t, y)).sum(), x)
    assert_gradient(dy, lambda t: (g * oracle.swiglu(x, t)).sum(), y)
    for value, scale in zip((dx, dy), oracle.swiglu_grad_scale(x, y, g)):
        assert (scale * (1 + 1e-12) >= np.abs(value)).all()


def test_swiglu_joined_equals_split(rng):
    x, v = (random_array(rng, (2, 6), "float64") for _ in range(2))
    g = random_array(rng, (2, 3), "float64")
    gate, up = x[..., :3], x[..., 3:]
    np.testing.assert_array_equal(oracle.swiglu(x), oracle.swiglu(gate, up))
    joined = oracle.swiglu_grad(x, None, g)
    np.testing.assert_array_equal(joined, np.concatenate(oracle.swiglu_grad(gate, up, g), -1))
    x_grad, ddout = oracle.swiglu_double_grad(x, None, g, v)
    *split, split_ddout = oracle.swiglu_double_grad(gate, up, g, v[..., :3], v[..., 3:])
    np.testing.assert_array_equal(x_grad, np.concatenate(split, -1))
    np.testing.assert_array_equal(ddout, split_ddout)


def test_swiglu_double_grad(rng):
    x, y, g, v, u = (random_array(rng, (2, 3), "float64") for _ in range(5))

    def first_gradients(x, y, g):
        dx, dy = oracle.swiglu_grad(x, y, g)
        return (v * dx + u * dy).sum()

    x_grad, y_grad, ddout = oracle.swiglu_double_grad(x, y, g, v, u)
    assert_gradient(x_grad, lambda t: first_gradients(t, y, g), x)
    assert_gradient(y_grad, lambda t: first_gradients(x, t, g), y)
    assert_gradient(ddout, lambda t: first_gradients(x, y, t), g)


@pytest.mark.parametrize("probs_shape", [(2, 2), (2, 2, 1)])
def test_fused_swiglu_weighted_bwd(rng, probs_shape):
    x = random_array(rng, (2, 2, 6), "float64")
    g = random_array(rng, (2, 2, 3), "float64")
    probs = random_array(rng, probs_shape, "float64")
    dx, probs_grad, out = oracle.fused_swiglu_weighted_bwd(x, g, probs)
    np.testing.assert_array_equal(out, oracle.fused_swiglu_weighted(x, probs))
    assert_gradient(dx, lambda t: (g * oracle.fused_swiglu_weighted(t, probs)).sum(), x)
    assert_gradient(probs_grad, lambda t: (g * oracle.fused_swiglu_weighted(x, t)).sum(), probs)
    assert (oracle.probs_grad_scale(x, g, probs) >= np.abs(probs_grad)).all()


# RMSNorm


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm_gradients(rng, offset, has_weight):
    x, g, v = (random_array(rng, (2, 3, 4), "float64") for _ in range(3))
    weight, u = (random_array(rng, (4,), "float64") for _ in range(2))
    weight = weight if has_weight else None
    epsilon = 1e-3

    def forward(x, w):
        return (g * oracle.rms_norm(x, w, epsilon, offset)).sum()

    dx, dweight = oracle.rms_norm_grad(x, weight, g, epsilon, offset)
    assert_gradient(dx, lambda t: forward(t, weight), x)

    def first_gradients(x, w, g):
        dx, dweight = oracle.rms_norm_grad(x, w, g, epsilon, offset)
        return (v * dx).sum() + (0.0 if dweight is None else (u * dweight).sum())

    x_grad, weight_grad, ddout = oracle.rms_norm_double_grad(x, weight, g, v, u, epsilon, offset)
    assert_gradient(x_grad, lambda t: first_gradients(t, weight, g), x)
    assert_gradient(ddout, lambda t: first_gradients(x, weight, t), g)
    if not has_weight:
        assert dweight is None and weight_grad is None
        return
    assert_gradient(dweight, lambda t: forward(x, t), weight)
    assert_gradient(weight_grad, lambda t: first_gradients(x, t, g), weight)
    for value, scale in zip(
        (dx, dweight), oracle.rms_norm_grad_scale(x, weight, g, epsilon, offset)
    ):
        assert (scale * (1 + 1e-12) >= np.abs(value)).all()


def test_rms_norm_double_grad_without_weight_direction(rng):
    x, g, v = (random_array(rng, (2, 4), "float64") for _ in range(3))
    weight = random_array(rng, (4,), "float64")
    absent = oracle.rms_norm_double_grad(x, weight, g, v, None)
    zero = oracle.rms_norm_double_grad(x, weight, g, v, np.zeros(4))
    for a, b in zip(absent, zero):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_fused_rms_norm_grad(rng, axis):
    x, residual, g, extra = (random_array(rng, (2, 2, 3), "float64") for _ in range(4))
    size = 6 if axis == 1 else 3
    weight, norm_bias, bias = (random_array(rng, (size,), "float64") for _ in range(3))

    def objective(x=x, residual=residual, weight=weight, norm_bias=norm_bias, bias=bias):
        total = oracle.residual_sum(x, residual, bias, axis)
        out = oracle.fused_rms_norm(total, weight, norm_bias, 1e-3, axis)
        return (g * out).sum() + (extra * total).sum()

    total = oracle.residual_sum(x, residual, bias, axis)
    dx, dw, dnorm_bias, dbias = oracle.fused_rms_norm_grad(total, weight, g, 1e-3, axis, extra)
    assert_gradient(dx, lambda t: objective(x=t), x)
    assert_gradient(dx, lambda t: objective(residual=t), residual)
    assert_gradient(dw, lambda t: objective(weight=t), weight)
    assert_gradient(dnorm_bias, lambda t: objective(norm_bias=t), norm_bias)
    assert_gradient(dbias, lambda t: objective(bias=t), bias)


def test_fused_rms_norm_ext_grad(rng):
    x, g = (random_array(rng, (3, 4), "float64") for _ in range(2))
    scale = random_array(rng, (4,), "float64")
    invvar = oracle.fused_rms_norm_ext(x, scale, 1e-3)[1]
    assert invvar.shape == (3,)
    for actual, expected in zip(
        oracle.fused_rms_norm_ext_grad(x, scale, invvar, g),
        oracle.rms_norm_grad(x, scale, g, 1e-3),
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_casting_modes_round_where_they_should(rng):
    x = random_array(rng, (4, 16), "bfloat16")
    weight = random_array(rng, (16,), "bfloat16")
    exact = oracle.rms_norm(x, weight, 1e-6, 1.0)
    rounded = {
        mode: oracle.rms_norm_rounded(x, weight, 1e-6, 1.0, mode, "bfloat16")
        for mode in ("llama", "gemma", "none")
    }
    np.testing.assert_array_equal(rounded["gemma"], exact)
    for mode in ("llama", "none"):
        assert (rounded[mode] != exact).any()
        np.testing.assert_allclose(rounded[mode], exact, rtol=2.0**-6)
    xhat = oracle.rms_norm_rounded(x, np.ones(16), 1e-6, 0.0, "llama", "bfloat16")
    np.testing.assert_array_equal(xhat, xhat.astype(ml_dtypes.bfloat16).astype(np.float64))
    np.testing.assert_array_equal(
        oracle.rms_norm_rounded(x, weight, 1e-6, 1.0, "none", "float32"), exact
    )


@pytest.mark.parametrize(
    "round_type, expected", [(0, [0, 2, 2, -2, 0, 7, -8]), (1, [1, 2, 3, -2, 0, 7, -8])]
)
def test_quantize_ties(round_type, expected):
    values = np.array([0.5, 1.5, 2.5, -1.5, 0.49999999999999994 / 2, 100.0, -100.0]) / 7.0
    np.testing.assert_array_equal(oracle.quantize_int8(values, 1.0, round_type, 7, -8), expected)


# RoPE


def rotate_by_definition(x, cos, sin, style):
    """One vector, feature by feature, as the definition reads."""
    half = len(cos) // 2
    out = x.copy()
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if style == oracle.PAIRS else (i, i + half)
        out[first] = x[first] * cos[first] - x[second] * sin[first]
        out[second] = x[second] * cos[second] + x[first] * sin[second]
    return out


@pytest.mark.parametrize("style", [oracle.PAIRS, oracle.HALVES_STYLE])
def test_rope_is_its_definition(rng, style):
    x = random_array(rng, (8,), "float64")
    cos, sin = (random_array(rng, (6,), "float64") for _ in range(2))
    expected = rotate_by_definition(x, cos, sin, style)
    np.testing.assert_allclose(oracle.rope(x, cos, sin, style), expected, rtol=1e-14)


def test_rope_on_the_documented_example():
    x, cos, sin = np.array([1.0, 2.0, 3.0, 4.0]), np.zeros(4), np.ones(4)
    assert oracle.rope(x, cos, sin, oracle.PAIRS).tolist() == [-2, 1, -4, 3]
    assert oracle.rope(x, cos, sin, oracle.HALVES_STYLE).tolist() == [-3, -4, 1, 2]


@pytest.mark.parametrize("style", [oracle.PAIRS, oracle.HALVES_STYLE])
def test_rope_grad(rng, style):
    x, g = (random_array(rng, (2, 3, 2, 6), "float64") for _ in range(2))
    cos, sin = (random_array(rng, (1, 3, 1, 4), "float64") for _ in range(2))
    dx = oracle.rope_grad(g, cos, sin, style)
    assert_gradient(dx, lambda t: (g * oracle.rope(t, cos, sin, style)).sum(), x)
    out = oracle.rope(x, cos, sin, style)
    assert (oracle.rope_scale(x, cos, sin, style) * (1 + 1e-12) >= np.abs(out)).all()
    assert (oracle.rope_grad_scale(g, cos, sin, style) * (1 + 1e-12) >= np.abs(dx)).all()


def test_partial_rope(rng):
    x, g = (random_array(rng, (1, 3, 2, 6), "float64") for _ in range(2))
    cos, sin = (random_array(rng, (1, 3, 1, 4), "float64") for _ in range(2))
    out = oracle.partial_rope(x, cos, sin)
    c, s, tail = cos[0, 1, 0], sin[0, 1, 0], x[0, 1, 0, 2:]
    expected = [
        tail[0] * c[0] - tail[1] * s[0],
        tail[2] * c[1] - tail[3] * s[1],
        tail[1] * c[2] + tail[0] * s[2],
        tail[3] * c[3] + tail[2] * s[3],
    ]
    np.testing.assert_allclose(out[0, 1, 0], [*x[0, 1, 0, :2], *expected], rtol=1e-14)
    dx = oracle.partial_rope_grad(g, cos, sin)
    assert_gradient(dx, lambda t: (g * oracle.partial_rope(t, cos, sin)).sum(), x)
    assert (oracle.partial_rope_scale(x, cos, sin) * (1 + 1e-12) >= np.abs(out)).all()
    assert (oracle.partial_rope_grad_scale(g, cos, sin) * (1 + 1e-12) >= np.abs(dx)).all()


def test_rope_tables():
    cos, sin = oracle.rope_tables(np.array([0, 5]), 4, 100.0, oracle.PAIRS)
    angles = np.array([[0.0] * 4, [5.0, 5.0, 0.5, 0.5]])
    np.testing.assert_allclose(cos, np.cos(angles), rtol=1e-7)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=1e-7)
    np.testing.assert_array_equal(cos, cos.astype(np.float32).astype(np.float64))
    halves, _ = oracle.rope_tables(np.array([0, 5]), 4, 100.0, oracle.HALVES_STYLE)
    np.testing.assert_array_equal(halves, cos[:, [0, 2, 1, 3]])


# Rounding and error measures


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_ulp_apart(dtype):
    kind = numpy_dtype(dtype)
    values = np.array([1.0, -3.0, 100.0, 1e-3], dtype=kind)
    mantissa = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[dtype]
    step = values.astype(np.float64)
    step = np.exp2(np.floor(np.log2(np.abs(step))) - mantissa)
    moved = (values.astype(np.float64) + step).astype(kind)
    np.testing.assert_array_equal(numeric.ulp_error(moved, values, dtype), 1.0)
    np.testing.assert_array_equal(numeric.ulp_error(values, values, dtype), 0.0)


def test_the_unit_is_that_of_the_expected_value():
    below = np.nextafter(np.float32(1.0), np.float32(0.0))
    assert numeric.ulp_error(below, 1.0, "float32") == 0.5
    assert numeric.ulp_error(np.float32(1.0), np.float64(below), "float32") == 1.0


@pytest.mark.parametrize(
    "dtype, smallest",
    [("float32", 2.0**-149), ("float16", 2.0**-24), ("bfloat16", 2.0**-133)],
)
def test_subnormal_spacing(dtype, smallest):
    assert numeric.spacing(0.0, dtype) == smallest
    assert numeric.spacing(5 * smallest, dtype) == smallest
    assert numeric.ulp_error(0.0, 3 * smallest, dtype) == 3.0
    assert numeric.round_to(2.5 * smallest, dtype) == 2 * smallest
    assert numeric.round_to(0.5 * smallest, dtype) == 0.0


def test_special_values_must_match():
    nan, inf = np.nan, np.inf
    actual = np.array([nan, inf, -inf, nan, 1.0, inf, 1.0, inf, -0.0], dtype=np.float32)
    expected = np.array([nan, inf, -inf, 1.0, nan, -inf, inf, 1.0, 0.0])
    error = numeric.ulp_error(actual, expected, "float32")
    assert error[[0, 1, 2, 8]].tolist() == [0.0] * 4
    assert np.isinf(error[3:7]).all()
    assert error[7] > 1e9


def test_overflow_by_rounding():
    inf = np.float16(np.inf)
    assert numeric.ulp_error(inf, 65520.0, "float16") == 0.5
    assert numeric.ulp_error(inf, 1e9, "float16") == 0.0
    assert numeric.ulp_error(np.float16(65504), 65519.0, "float16") < 0.5
    assert numeric.ulp_error(inf, 65504.0, "float16") == 1.0
    assert numeric.ulp_error(np.float16(65504), 1e9, "float16") > 1e6
    assert numeric.ulp_error(-inf, 1e9, "float16") > 1e6
    assert np.isinf(numeric.ulp_error(np.inf, 1.0, "float64"))
    np.testing.assert_array_equal(
        numeric.round_to([65519.9, 65520.0, -1e9], "float16"), [65504.0, np.inf, -np.inf]
    )


def test_bfloat16_rounds_ties_to_even():
    one = 1.0
    values = [one + 2.0**-8, one + 3 * 2.0**-8, -(one + 2.0**-8), one + 2.0**-8 + 2.0**-40]
    expected = [one, one + 2.0**-6, -one, one + 2.0**-7]
    np.testing.assert_array_equal(numeric.round_to(values, "bfloat16"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_to_agrees_with_casts(rng, dtype):
    # From float32, a cast to any dtype rounds once.
    values = (rng.standard_normal(2000) * np.exp2(rng.integers(-40, 30, 2000))).astype(np.float32)
    values[:4] = [np.nan, np.inf, -np.inf, -0.0]
    with np.errstate(over="ignore"):
        expected = values.astype(numpy_dtype(dtype)).astype(np.float64)
    rounded = numeric.round_to(values, dtype)
    numeric.assert_bit_equal(rounded[1:], expected[1:])
    assert np.isnan(rounded[0])


def test_scale_widens_the_unit():
    assert numeric.ulp_error(np.float32(2.0**-23), 0.0, "float32", scale=1.0) == 1.0
    # A half keeps its own unit until the sum has cancelled far.
    step = 2.0**-7
    assert numeric.ulp_error(1.0 + step, 1.0, "bfloat16", scale=4.0) == 1.0
    assert numeric.ulp_error(2.0**-16, 0.0, "bfloat16", scale=1.0) == 1.0


def test_assert_ulp_reports_the_worst():
    expected = np.ones((2, 3))
    actual = np.ones((2, 3), dtype=np.float32)
    actual[1, 2] += 8 * np.finfo(np.float32).eps
    actual[0, 1] += 2 * np.finfo(np.float32).eps
    numeric.assert_ulp(actual, expected, 8.0)
    with pytest.raises(AssertionError, match=r"out: 8 ULP of float32 at index \(1, 2\).*mean 1.6"):
        numeric.assert_ulp(actual, expected, 4.0, what="out")
    with pytest.raises(AssertionError, match="shape"):
        numeric.assert_ulp(actual, expected[0], 4.0)
    numeric.assert_ulp(np.empty((0, 3), np.float32), np.empty((0, 3)), 0.0)


def test_assert_bit_equal():
    values = np.array([1.0, 2.0, np.nan], dtype=ml_dtypes.bfloat16)
    numeric.assert_bit_equal(values, values.copy())
    numeric.assert_bit_equal(np.float32(1.0), np.float32(1.0))
    with pytest.raises(AssertionError, match=r"1 of 2 elements differ, first at \(1,\)"):
        numeric.assert_bit_equal(np.array([1.0, 0.0]), np.array([1.0, -0.0]))
    with pytest.raises(AssertionError, match="dtype"):
        numeric.assert_bit_equal(values, values.astype(np.float32))


def test_bounds():
    assert numeric.elementwise_bound("bfloat16") == 1.0
    assert numeric.elementwise_bound(np.float32) == 4.0
    assert numeric.rms_norm_bound("float16", "llama") == 1.5
    assert numeric.rms_norm_bound("float16", "gemma") == 1.0
    assert numeric.sum_bound("float32", 1024) == 44.0
    assert numeric.sum_bound(ml_dtypes.bfloat16, 1024) == 1.0
