"""rms_norm in every mode and form against the oracle, in ULP."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import paddle_fused.nn.functional as F
from helpers import numeric, oracle
from helpers.arrays import DTYPES, numpy_dtype, random_array, to_numpy, to_paddle
from helpers.layouts import LAYOUTS
from helpers.norms import check_gradients, check_output
from helpers.running import assert_same, run

MODES = ("llama", "gemma", "none")
EPSILON = 1e-6
NARROW = range(1, 71)
WIDE = (255, 1000, 1023, 1025, 3420, 4096, 8193)


def check(x, weight, g, mode="llama", offset=0.0, epsilon=EPSILON, what=""):
    """Forward and gradients without a residual."""

    def function(x, weight):
        return F.rms_norm(x, weight, epsilon, offset=offset, casting_mode=mode)

    (out,), grads = run(function, [x, weight], [g])
    check_output(out, x, weight, epsilon, offset, mode, f"out {what}")
    check_gradients(grads, x, weight, g, epsilon, offset, mode, what=what)


def arrays(rng, shape, dtype, weight_dtype=None, scale=1.0):
    """(x, weight, g)."""
    x, g = random_array(rng, shape, dtype, scale), random_array(rng, shape, dtype)
    return x, random_array(rng, shape[-1:], weight_dtype or dtype), g


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("widths", [NARROW, *((w,) for w in WIDE)], ids=lambda w: f"to{w[-1]}")
def test_widths(rng, dtype, mode, widths):
    for width in widths:
        x, weight, g = arrays(rng, (5, width), dtype)
        check(x, weight, g, mode, what=f"width {width}")


@pytest.mark.parametrize("weight_dtype", [None, *DTYPES])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_weight_dtypes(rng, dtype, weight_dtype, mode, offset):
    """All 16 pairs of dtypes, and no weight."""
    x, weight, g = arrays(rng, (11, 45), dtype, weight_dtype)
    check(x, None if weight_dtype is None else weight, g, mode, offset)


@pytest.mark.parametrize("rows, width", [(1, 131072), (2, 65537), (200003, 1), (40001, 3), (1, 7)])
def test_large(rng, dtype, rows, width):
    check(*arrays(rng, (rows, width), dtype))


@pytest.mark.parametrize("shape", [(7,), (3, 16), (2, 3, 17), (2, 1, 3, 33)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_ranks(rng, dtype, shape, mode):
    check(*arrays(rng, shape, dtype), mode)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 6), (0,)], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
def test_empty(dtype, shape, weighted, with_residual):
    x = np.zeros(shape, numpy_dtype(dtype))
    weight = np.ones(shape[-1:], numpy_dtype(dtype)) if weighted else None
    residual = x if with_residual else None

    def function(x, weight, residual):
        return F.rms_norm(x, weight, residual=residual)

    outputs, grads = run(function, [x, weight, residual], [x, x])
    assert_same(outputs, [x] * (2 if with_residual else 1))
    assert_same(grads, [x, np.zeros_like(weight) if weighted else None, residual])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_residual", [True, False])
def test_layouts(rng, dtype, layout, with_residual):
    """Bit-equal to contiguous copies, for views as inputs and as upstream gradients."""
    x, weight, g = arrays(rng, (6, 5, 18), dtype)
    residual, extra = random_array(rng, x.shape, dtype), random_array(rng, x.shape, dtype)
    view = LAYOUTS[layout]
    inputs, upstream = [x, weight, residual if with_residual else None], [g, extra]

    def function(x, weight, residual):
        return F.rms_norm(x, weight, residual=residual)

    expected = run(function, inputs, upstream)
    views = [None if array is None else view(array) for array in inputs]
    actual = run(function, views, [view(g), view(extra)])
    assert_same([*actual[0], *actual[1]], [*expected[0], *expected[1]])


@pytest.mark.parametrize("used", ["out", "residual_out", "both"])
@pytest.mark.parametrize("weight_dtype", [None, "same", "float32"])
@pytest.mark.parametrize("mode", MODES)
def test_residual(rng, dtype, used, weight_dtype, mode):
    x, weight, g = arrays(rng, (9, 37), dtype, dtype if weight_dtype == "same" else weight_dtype)
    weight = None if weight_dtype is None else weight
    residual, extra = random_array(rng, x.shape, dtype), random_array(rng, x.shape, dtype)
    upstream = {"out": [g, None], "residual_out": [None, extra], "both": [g, extra]}[used]

    def function(x, weight, residual):
        return F.rms_norm(x, weight, EPSILON, casting_mode=mode, residual=residual)

    (out, total), (dx, dw, dresidual) = run(function, [x, weight, residual], upstream)
    assert numeric.dtype_name(total.dtype) == dtype
    np.testing.assert_array_equal(total.astype(np.float64), oracle.residual_sum(x, residual))
    check_output(out, total, weight, EPSILON, 0.0, mode)
    numeric.assert_bit_equal(dresidual, dx, "dresidual")
    if used == "residual_out":
        numeric.assert_bit_equal(dx, extra)
        assert dw is None if weight is None else not dw.any()
        return
    check_gradients((dx, dw), total, weight, g, EPSILON, 0.0, mode, upstream[1])


@pytest.mark.parametrize("magnitude", [1e-25, 1e-18, 1e15, 1e18, 1e19, 3e38])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_float32_rows_whose_squares_leave_the_range(rng, magnitude, epsilon):
    x, weight, g = arrays(rng, (3, 40), "float32")
    x[1] = rng.uniform(0.25, 1.0, 40) * magnitude
    constant = np.full((1, 40), magnitude, np.float32)
    check(x, weight, g, epsilon=epsilon)
    out = to_numpy(F.rms_norm(to_paddle(constant), epsilon=epsilon))
    expected = oracle.rms_norm(constant, None, epsilon)
    numeric.assert_ulp(out, expected, numeric.MAX_ULP_FLOAT32)


@pytest.mark.parametrize("magnitude", [1e-200, 1e160, 1e300])
def test_float64_rows_whose_squares_leave_the_range(rng, magnitude):
    x = random_array(rng, (3, 40), "float64", magnitude)
    (out,), _ = run(lambda x: F.rms_norm(x, epsilon=0.0), [x])
    expected = oracle.rms_norm(x / magnitude, None, 0.0)
    numeric.assert_ulp(out, expected, numeric.MAX_ULP_FLOAT64)


@pytest.mark.parametrize("magnitude", [300.0, 6e4])
@pytest.mark.parametrize("mode", ["llama", "gemma"])
def test_float16_squares_beyond_float16(magnitude, mode):
    x, weight = np.full((2, 512), magnitude, np.float16), np.ones(512, np.float16)
    (out,), (dx, dw) = run(
        lambda x, w: F.rms_norm(x, w, casting_mode=mode), [x, weight], [np.ones_like(x)]
    )
    np.testing.assert_array_equal(out.astype(np.float64), np.ones(x.shape))
    assert (np.abs(dx.astype(np.float64)) < 1e-3).all()
    np.testing.assert_array_equal(dw.astype(np.float64), np.full(512, 2.0))


def test_small_rows_take_epsilon_inside_the_root():
    for dtype in ("float32", "float64", "bfloat16"):
        x = np.full((1, 64), 1e-3).astype(numpy_dtype(dtype))
        check(x, np.ones(64, x.dtype), np.ones_like(x))


@pytest.mark.parametrize("mode", ["llama", "gemma"])
def test_zero_row_with_an_epsilon_below_float16(mode):
    x, g = np.zeros((2, 8), np.float16), np.full((2, 8), 0.5, np.float16)
    (out,), (dx,) = run(lambda x: F.rms_norm(x, epsilon=1e-8, casting_mode=mode), [x], [g])
    np.testing.assert_array_equal(out, x)
    np.testing.assert_array_equal(dx.astype(np.float64), 5000.0)


def test_zero_weights_do_not_divide(rng, dtype):
    x, weight, g = arrays(rng, (4, 8), dtype)
    weight[3] = 0
    check(x, weight, g)
    check(x, np.zeros_like(weight), g)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", MODES)
def test_special_value_stays_in_its_row(rng, dtype, special, mode):
    x, weight, g = arrays(rng, (5, 21), dtype)

    def results():
        outputs, grads = run(lambda x, w: F.rms_norm(x, w, casting_mode=mode), [x, weight], [g])
        return outputs[0], grads[0]

    clean = results()
    x[2, 4] = special
    for before, after in zip(clean, results()):
        numeric.assert_bit_equal(np.delete(before, 2, 0), np.delete(after, 2, 0))
    row = results()[0][2].astype(np.float64)
    assert np.isnan(row).all() if np.isnan(special) else np.isnan(row[4])


def test_signed_zeros_and_subnormals(dtype):
    subnormal = 2.0 ** (numeric.smallest_exponent(dtype) - 2)
    x = np.array([[0.0, -0.0, subnormal, -1.0]]).astype(numpy_dtype(dtype))
    weight, g = np.ones(4, x.dtype), np.ones_like(x)
    check(x, weight, g)
    out = to_numpy(F.rms_norm(to_paddle(x), to_paddle(weight)))
    assert np.signbit(out).tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", "float16"])
def test_long_weight_sums_do_not_stall(weight_dtype):
    x = np.ones((32768, 8), numpy_dtype("bfloat16"))
    weight = np.ones(8, numpy_dtype(weight_dtype))
    _, (_, dw) = run(lambda x, w: F.rms_norm(x, w, 0.0), [x, weight], [x])
    np.testing.assert_array_equal(dw.astype(np.float64), 32768.0)


def test_weight_gradient_of_one_vector_of_zeros():
    x, weight = np.zeros(4, np.float32), np.ones(4, np.float32)
    for _ in range(10):
        _, (_, dw) = run(F.rms_norm, [x, weight], [np.full(4, -1.0, np.float32)])
        np.testing.assert_array_equal(dw, 0.0)


def test_epsilon_keeps_its_double_digits():
    """Epsilon 1e-6 is no float32 number; in float64 the difference shows."""
    x = np.full((1, 8), 1e-3)
    out = to_numpy(F.rms_norm(to_paddle(x), epsilon=1e-6))
    np.testing.assert_allclose(out, np.sqrt(0.5), rtol=1e-15)


def test_weight_trains_in_a_step(rng):
    x, weight, _ = arrays(rng, (6, 16), "float32")
    parameter = paddle.to_tensor(weight, stop_gradient=False)
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=[parameter])
    out = F.rms_norm(to_paddle(x), parameter)
    (out * out).sum().backward()
    optimizer.step()
    assert (to_numpy(parameter) != weight).all()
