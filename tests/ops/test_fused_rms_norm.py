"""fused_rms_norm in all its forms, fused_rms_norm_ext, fast_rms_norm against the oracle."""

from __future__ import annotations

import itertools

import numpy as np
import paddle
import pytest

import paddle_fused.nn.functional as F
from helpers import numeric, oracle
from helpers.arrays import DTYPES, numpy_dtype, random_array, to_numpy, to_paddle
from helpers.fused_norms import (
    EPSILON,
    OPTIONAL,
    arrays,
    check_all,
    compute,
)
from helpers.layouts import LAYOUTS
from helpers.running import assert_same, check, run

COMBINATIONS = [
    tuple(name for name, wanted in zip(OPTIONAL, flags) if wanted)
    for flags in itertools.product([False, True], repeat=3)
]


@pytest.mark.parametrize("given", COMBINATIONS, ids="+".join)
@pytest.mark.parametrize("shape, axis", [((6, 19), 1), ((2, 3, 4, 5), 2), ((3, 2, 17), -1)])
def test_combinations(rng, dtype, given, shape, axis):
    check_all(arrays(rng, shape, axis, dtype, given), axis, dtype)


@pytest.mark.parametrize("given", [c for c in COMBINATIONS if set(c) & {"bias", "residual"}])
@pytest.mark.parametrize("used", [(True, False), (False, True)], ids=["out", "residual_out"])
def test_one_output_used(rng, dtype, given, used):
    check_all(arrays(rng, (5, 23), 1, dtype, given), 1, dtype, used)


@pytest.mark.parametrize("axis", range(-4, 4))
def test_begin_norm_axis(rng, dtype, axis):
    check_all(arrays(rng, (2, 3, 4, 5), axis, dtype, OPTIONAL), axis, dtype)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("given", [(), ("norm_bias",), ("residual",), OPTIONAL], ids="+".join)
def test_weight_dtypes(rng, dtype, weight_dtype, given):
    check_all(arrays(rng, (7, 33), 1, dtype, given, weight_dtype), 1, dtype)


@pytest.mark.parametrize("given", [(), ("norm_bias",), OPTIONAL], ids="+".join)
def test_widths(rng, dtype, given):
    for width in (*range(1, 71), 255, 1023, 1025, 3420, 4096, 65537):
        check_all(arrays(rng, (2, width), 1, dtype, given), 1, dtype)


@pytest.mark.parametrize("given", [(), ("norm_bias",), OPTIONAL], ids="+".join)
@pytest.mark.parametrize("shape", [(200003, 1), (20001, 2, 2)], ids=str)
def test_many_rows(rng, dtype, given, shape):
    check_all(arrays(rng, shape, 1, dtype, given), 1, dtype)


def test_sum_of_three_is_rounded_once():
    """256 + 1 + 1 is 258 in bfloat16; 256 + 1 alone is 256."""
    parts = [np.full((1, 2), v).astype(numpy_dtype("bfloat16")) for v in (256.0, 1.0, 1.0)]
    x, residual, bias = map(to_paddle, (parts[0], parts[1], parts[2][0]))
    weight = paddle.ones([2], "bfloat16")
    _, total = F.fused_rms_norm(x, weight, None, EPSILON, 1, bias, residual)
    assert to_numpy(total).astype(np.float64).tolist() == [[258.0, 258.0]]


@pytest.mark.parametrize("given", COMBINATIONS, ids="+".join)
@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (2, 0, 3)], ids=str)
def test_empty(rng, dtype, given, shape):
    values = arrays(rng, shape, -1, dtype, given)
    outputs, grads = compute(values, -1)
    assert_same(outputs, [values["x"]] * len(outputs))
    for name in ("x", "weight", *given):
        numeric.assert_bit_equal(grads[name], np.zeros_like(values[name]), name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("given", COMBINATIONS, ids="+".join)
def test_layouts(rng, layout, given):
    values = arrays(rng, (6, 5, 4), 1, "float32", given)
    expected, expected_grads = compute(values, 1)
    views = {n: v if v is None else LAYOUTS[layout](v) for n, v in values.items()}
    actual, actual_grads = compute(views, 1)
    assert_same(actual, expected)
    assert_same(list(actual_grads.values()), list(expected_grads.values()))


def test_nan_stays_in_its_row(rng, dtype):
    values = arrays(rng, (5, 21), 1, dtype, OPTIONAL)
    clean, clean_grads = compute(values, 1)
    values["x"][2, 4] = np.nan
    dirty, dirty_grads = compute(values, 1)
    for before, after in zip([*clean, clean_grads["x"]], [*dirty, dirty_grads["x"]]):
        numeric.assert_bit_equal(np.delete(before, 2, 0), np.delete(after, 2, 0))
    assert np.isnan(dirty[0][2].astype(np.float64)).all()


# int8


def quantised(values, round_type, low, scale):
    tensors = [
        None if values[n] is None else to_paddle(values[n]) for n in ("x", "weight", *OPTIONAL)
    ]
    x, weight, norm_bias, bias, residual = tensors
    out, total = F.fused_rms_norm(
        x, weight, norm_bias, EPSILON, 1, bias, residual, scale, round_type, 127, low
    )
    return out, total


@pytest.mark.parametrize("round_type", [0, 1])
@pytest.mark.parametrize("low", [-127, -128])
@pytest.mark.parametrize("given", COMBINATIONS, ids="+".join)
def test_int8(rng, dtype, round_type, low, given):
    scale = 0.37
    values = arrays(rng, (30, 67), 1, dtype, given)
    out, total = quantised(values, round_type, low, scale)
    assert out.dtype == paddle.int8
    assert (total is None) == (not set(given) & {"bias", "residual"})
    normalised = values["x"] if total is None else to_numpy(total)
    exact = oracle.fused_rms_norm(normalised, values["weight"], values["norm_bias"], EPSILON, 1)
    expected = oracle.quantize_int8(exact, scale, round_type, 127, low)
    difference = np.abs(out.numpy().astype(int) - expected.astype(int))
    # The product quant_max_bound * quant_scale and the norm are float32: 8 ULP of the product.
    scaled = np.abs(exact * (127 * scale))
    to_tie = np.abs(scaled - np.floor(scaled) - 0.5)
    near_tie = to_tie <= 8 * numeric.spacing(np.maximum(scaled, 1.0), "float32")
    assert (difference <= near_tie).all(), np.argwhere(difference > near_tie)[:4].tolist()
    assert expected.max() == 127  # some saturate


@pytest.mark.parametrize("round_type, expected", [(0, [2, 2, -2, 4, 0]), (1, [2, 3, -3, 4, 1])])
def test_int8_ties(round_type, expected):
    """A weight of 0 leaves norm_bias, and 127 times 1/127 nearly 1: exact in float32 at ties."""
    x, zero = paddle.ones([1, 5]), paddle.zeros([5])
    norm_bias = paddle.to_tensor([1.5, 2.5, -2.5, 3.5, 0.5])
    scale = float(np.float32(1.0) / np.float32(127.0))
    assert np.float32(127.0) * np.float32(scale) == 1.0
    out, _ = F.fused_rms_norm(
        x, zero, norm_bias, EPSILON, 1, None, None, scale, round_type, 127, -127
    )
    np.testing.assert_array_equal(out.numpy(), [expected])


def test_int8_saturates_and_keeps_shape(dtype):
    x = np.array([[1e4, -1e4], [np.inf, 1.0]]).astype(numpy_dtype(dtype)).reshape(2, 1, 2)
    weight = to_paddle(np.full(2, 100.0).astype(numpy_dtype(dtype)))
    out, _ = F.fused_rms_norm(to_paddle(x), weight, None, EPSILON, 2, None, None, 1.0, 0, 127, -128)
    assert out.shape == [2, 1, 2]
    assert out.numpy()[0].tolist() == [[127, -128]]


# fused_rms_norm_ext and fast_rms_norm


def check_ext(function, x, scale, g):
    name, scale_dtype = numeric.dtype_name(x.dtype), numeric.dtype_name(scale.dtype)
    (y, invvar), (dx, dscale) = run(function, [x, scale], [g, None])
    expected_y, expected_invvar = oracle.fused_rms_norm_ext(x, scale)
    # y is float64 where scale is, and so is the computation.
    check(y, expected_y, scale_dtype, what="y")
    check(invvar, expected_invvar, "float32", what="invvar")
    magnitudes = oracle.rms_norm_grad_scale(x, scale, g, 1e-5)
    width, rows = max(x.shape[-1], 2), max(x.size // x.shape[-1], 2)
    expected = oracle.rms_norm_grad(x, scale, g, 1e-5)
    for actual, value, magnitude, terms, kind in zip(
        (dx, dscale), expected, magnitudes, (width, rows), (name, scale_dtype)
    ):
        # Float64 in float32's ULP here; test_ext_gradient_in_float64_is_one has the rest.
        assert numeric.dtype_name(actual.dtype) == kind
        unit = "float32" if kind == "float64" else kind
        bound = numeric.sum_bound(unit, terms)
        numeric.assert_ulp(actual, value, bound, magnitude, "autograd", unit)

    arguments = [to_paddle(array) for array in (x, scale, invvar, g)]
    x_grad, scale_grad = map(to_numpy, F.fused_rms_norm_ext_grad(*arguments, 1e-5))
    expected = oracle.fused_rms_norm_ext_grad(x, scale, invvar, g)
    check(x_grad, expected[0], name, magnitudes[0], width, "x_grad")
    check(scale_grad, expected[1], scale_dtype, magnitudes[1], rows, "scale_grad")


@pytest.mark.parametrize("function", [F.fused_rms_norm_ext, F.fast_rms_norm])
def test_ext_gradient_in_float64_is_one(rng, function):
    """The autograd gradient, not the one from a given float32 invvar."""
    x, g = (random_array(rng, (5, 40), "float64") for _ in range(2))
    scale = random_array(rng, (40,), "float64")
    _, (dx, dscale) = run(function, [x, scale], [g, None])
    expected = oracle.rms_norm_grad(x, scale, g, 1e-5)
    magnitudes = oracle.rms_norm_grad_scale(x, scale, g, 1e-5)
    check(dx, expected[0], "float64", magnitudes[0], 40, "dx")
    check(dscale, expected[1], "float64", magnitudes[1], 5, "dscale")


@pytest.mark.parametrize("function", [F.fused_rms_norm_ext, F.fast_rms_norm])
@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(45,), (11, 45), (2, 3, 45), (2, 1, 3, 16)], ids=str)
def test_ext(rng, dtype, function, scale_dtype, shape):
    """All 16 pairs of dtypes; y has the scale's."""
    x, scale = random_array(rng, shape, dtype), random_array(rng, shape[-1:], scale_dtype)
    check_ext(function, x, scale, random_array(rng, shape, scale_dtype))


def test_ext_widths(rng, dtype):
    for width in (*range(1, 71), 255, 1023, 1025, 3420, 4096, 65537):
        x, g = random_array(rng, (3, width), dtype), random_array(rng, (3, width), dtype)
        check_ext(F.fused_rms_norm_ext, x, random_array(rng, (width,), dtype), g)


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (0,)], ids=str)
def test_ext_empty(dtype, shape):
    x, scale = np.zeros(shape, numpy_dtype(dtype)), np.ones(shape[-1:], numpy_dtype(dtype))
    (y, invvar), grads = run(F.fused_rms_norm_ext, [x, scale], [x, None])
    assert_same([y, *grads], [x, x, np.zeros_like(scale)])
    assert invvar.shape == shape[:-1] and invvar.dtype == np.float32 and np.isfinite(invvar).all()
    results = F.fused_rms_norm_ext_grad(*map(to_paddle, (x, scale, invvar, x)), 1e-5)
    assert_same([to_numpy(r) for r in results], [x, np.zeros_like(scale)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ext_layouts(rng, layout):
    x, g = (random_array(rng, (6, 5, 4), "float32") for _ in range(2))
    scale, view = random_array(rng, (4,), "float32"), LAYOUTS[layout]
    expected = run(F.fused_rms_norm_ext, [x, scale], [g, None])
    actual = run(F.fused_rms_norm_ext, [view(x), view(scale)], [view(g), None])
    assert_same([*actual[0], *actual[1]], [*expected[0], *expected[1]])
