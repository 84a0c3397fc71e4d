"""swiglu, fused_swiglu_weighted and its backward against the oracle, in ULP."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import paddle_fused.nn.functional as F
from helpers import numeric, oracle
from helpers.arrays import numpy_dtype, random_array, to_numpy, to_paddle
from helpers.layouts import LAYOUTS
from helpers.running import assert_same, check, run
from helpers.swiglus import check_swiglu, check_weighted

NARROW = range(1, 71)
WIDE = (255, 1000, 1023, 1025, 3420, 4096)
SHAPES = [(6,), (3, 10), (2, 3, 34), (2, 1, 3, 14)]  # of the packed input


def weighted_arrays(rng, rows, width, dtype, keep=False):
    x = random_array(rng, (*rows, 2 * width), dtype, 3.0)
    g = random_array(rng, (*rows, width), dtype)
    return x, g, random_array(rng, (*rows, 1) if keep else rows, "float32")


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("widths", [NARROW, *((w,) for w in WIDE)], ids=lambda w: f"to{w[-1]}")
def test_swiglu_widths(rng, dtype, joined, widths):
    for width in widths:
        g = random_array(rng, (3, width), dtype)
        x = random_array(rng, (3, 2 * width if joined else width), dtype, 3.0)
        y = None if joined else random_array(rng, (3, width), dtype)
        check_swiglu(x, y, g, f"width {width}")


@pytest.mark.parametrize("widths", [NARROW, *((w,) for w in WIDE)], ids=lambda w: f"to{w[-1]}")
def test_weighted_widths(rng, dtype, widths):
    for width in widths:
        check_weighted(*weighted_arrays(rng, (3,), width, dtype), f"width {width}")


# One row of 65537 and 200003 rows of 1: large in each direction, 0.2 million elements at most.
@pytest.mark.parametrize("rows, width", [(1, 65537), (5, 8192), (200003, 1), (40001, 3)])
def test_large(rng, dtype, rows, width):
    x, g, probs = weighted_arrays(rng, (rows,), width, dtype)
    check_weighted(x, g, probs)
    check_swiglu(x, None, g)
    check_swiglu(x[:, :width].copy(), x[:, width:].copy(), g)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("keep", [True, False])
def test_ranks(rng, dtype, shape, keep):
    x, g, probs = weighted_arrays(rng, shape[:-1], shape[-1] // 2, dtype, keep)
    check_weighted(x, g, probs)
    check_swiglu(x, None, g)
    half = shape[-1] // 2
    check_swiglu(x[..., :half].copy(), x[..., half:].copy(), g)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 6), (0,)], ids=str)
def test_empty(dtype, shape):
    half = (*shape[:-1], shape[-1] // 2)
    x, g = np.zeros(shape, numpy_dtype(dtype)), np.zeros(half, numpy_dtype(dtype))
    for probs in (np.ones(shape[:-1], np.float32), np.ones((*shape[:-1], 1), np.float32)):
        (out,), (dx, dprobs) = run(F.fused_swiglu_weighted, [x, probs], [g])
        do1, probs_grad, o2_s = F.fused_swiglu_weighted_bwd(*map(to_paddle, (x, g, probs)))
        for actual_do1, actual_probs, actual_out in (
            (dx, dprobs, out),
            (to_numpy(do1), to_numpy(probs_grad), to_numpy(o2_s)),
        ):
            numeric.assert_bit_equal(actual_do1, x)
            numeric.assert_bit_equal(actual_probs, np.zeros_like(probs))
            numeric.assert_bit_equal(actual_out, g)
    for inputs in ([x], [g, g]):
        (out,), grads = run(F.swiglu, inputs, [g])
        assert_same([out, *grads], [g, *inputs])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(rng, dtype, layout):
    """Bit-equal to contiguous copies, for views as inputs and as upstream gradients."""
    x, g, probs = weighted_arrays(rng, (6, 5), 8, dtype)
    view = LAYOUTS[layout]
    assert view(x).is_contiguous() == (layout == "offset_by_one")
    expected = run(F.fused_swiglu_weighted, [x, probs], [g])
    actual = run(F.fused_swiglu_weighted, [view(x), view(probs)], [view(g)])
    assert_same([*actual[0], *actual[1]], [*expected[0], *expected[1]], "weighted")

    expected = F.fused_swiglu_weighted_bwd(*map(to_paddle, (x, g, probs)))
    actual = F.fused_swiglu_weighted_bwd(*map(view, (x, g, probs)))
    assert_same([to_numpy(t) for t in actual], [to_numpy(t) for t in expected], "backward")

    for inputs in ([x], [x[..., :8], x[..., 8:]]):
        expected = run(F.swiglu, [np.ascontiguousarray(i) for i in inputs], [g])
        actual = run(F.swiglu, [view(i) for i in inputs], [view(g)])
        assert_same([*actual[0], *actual[1]], [*expected[0], *expected[1]], "plain")


def special_values(dtype):
    """Signed zeros, subnormals, powers of two up to the largest number, and saturating gates."""
    smallest, normal = float(numeric.spacing(0.0, dtype)), 2.0 ** numeric.smallest_exponent(dtype)
    values = [0.0, smallest, 3 * smallest, normal, 1e-3, 1.0, 1.278, 10.0, 30.0, 86.0]
    values += [1e4, numeric.largest_value(dtype)]
    return np.array([sign * v for v in values for sign in (1, -1)]).astype(numpy_dtype(dtype))


def test_special_gates(dtype):
    """Every special gate; an up half of ordinary size."""
    gate = special_values(dtype)
    up, g = np.full_like(gate, 0.875), np.full_like(gate, -0.75)
    check_swiglu(gate, up, g)
    check_swiglu(np.concatenate([gate, up]), None, g)
    check_weighted(np.concatenate([gate, up])[None], g[None], np.full(1, 0.5, np.float32))
    x, g, probs = np.stack([gate, up], 1), g[:, None], np.full(len(gate), 0.5, np.float32)
    check_weighted(x, g, probs, "one gate a row")


def test_special_ups(dtype):
    up = special_values(dtype)
    gate, g = np.full_like(up, 0.5), np.full_like(up, 0.25)
    check_swiglu(gate, up, g)
    check_swiglu(np.concatenate([gate, up]), None, g)


@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
def test_special_values_among_ordinary_ones(rng, dtype, half):
    """In rows of several whole steps, whose other columns would not need the careful path."""
    special, width = special_values(dtype), 96
    rows = np.arange(len(special))
    x, g, probs = weighted_arrays(rng, (len(special),), width, dtype)
    x[rows, half * width + rng.integers(0, width, len(special))] = special
    check_weighted(x, g, probs)


@pytest.mark.parametrize("up", [1.0, 1e30])
@pytest.mark.parametrize("gates", [(-86, -80), (-103, -86), (-150, -103)], ids=str)
def test_deeply_saturated_gates(gates, up):
    """exp(gate) is subnormal, or 0, in float32 where silu(gate) times a large up is neither."""
    gate = np.arange(*gates, 0.25, dtype=np.float32)
    up, g = np.full_like(gate, up), np.full_like(gate, 0.5)
    check_swiglu(gate, up, g)


def test_result_in_range_of_a_product_that_is_not():
    """Gate times up overflows float32; with the probability it fits."""
    x = np.array([[3e38, 1.5]], np.float32)
    for dtype in ("float32", "bfloat16"):
        expected = oracle.fused_swiglu_weighted(x.astype(numpy_dtype(dtype)), 0.5)
        out = F.fused_swiglu_weighted(
            to_paddle(x.astype(numpy_dtype(dtype))), to_paddle(np.full(1, 0.5, np.float32))
        )
        check(to_numpy(out), expected, dtype)


def test_probability_gradient_in_range_of_a_product_that_is_not():
    """silu(gate) times up leaves float32 at either end; times the upstream gradient it is back."""
    x = np.array([[3e38, 50.0], [-117.0, 2.6e3], [1e-30, 1e-12]], np.float32)
    g = np.array([[1e-20], [5e5], [1e9]], np.float32)
    check_weighted(x, g, np.full(3, 0.5, np.float32))


def test_signed_zero_and_infinity(dtype):
    gate = np.array([-0.0, 0.0, 2.0, np.inf, -np.inf, np.inf, np.nan, 1.0]).astype(
        numpy_dtype(dtype)
    )
    up = np.array([1.0, -1.0, -0.0, 1.0, 1.0, -np.inf, 1.0, np.nan]).astype(numpy_dtype(dtype))
    out = to_numpy(F.swiglu(to_paddle(gate), to_paddle(up))).astype(np.float64)
    np.testing.assert_array_equal(out, [-0.0, -0.0, -0.0, np.inf, np.nan, -np.inf, np.nan, np.nan])
    np.testing.assert_array_equal(np.signbit(out[:3]), [True, True, True])


def test_nan_stays_in_its_row(rng, dtype):
    x, g, probs = weighted_arrays(rng, (5,), 9, dtype)
    clean = [*F.fused_swiglu_weighted_bwd(*map(to_paddle, (x, g, probs))), F.swiglu(to_paddle(x))]
    x[2, 4] = np.nan
    dirty = [*F.fused_swiglu_weighted_bwd(*map(to_paddle, (x, g, probs))), F.swiglu(to_paddle(x))]
    for before, after in zip(map(to_numpy, clean), map(to_numpy, dirty)):
        numeric.assert_bit_equal(np.delete(before, 2, 0), np.delete(after, 2, 0))
        assert np.isnan(after[2].astype(np.float64)).any()


def test_gates_at_ten_thousand_are_finite(dtype):
    x = np.array([[1e4, -1e4, 2.0, 2.0]]).astype(numpy_dtype(dtype))
    g, probs = np.ones((1, 2), numpy_dtype(dtype)), np.ones(1, np.float32)
    do1, probs_grad, o2_s = map(
        to_numpy, F.fused_swiglu_weighted_bwd(*map(to_paddle, (x, g, probs)))
    )
    np.testing.assert_array_equal(do1.astype(np.float64), [[2.0, 0.0, oracle.f64(x)[0, 0], 0.0]])
    np.testing.assert_array_equal(o2_s.astype(np.float64), [[2 * oracle.f64(x)[0, 0], 0.0]])
    np.testing.assert_array_equal(probs_grad.astype(np.float64), [2 * oracle.f64(x)[0, 0]])


def test_small_values_keep_their_relative_accuracy(rng, dtype):
    x = random_array(rng, (64, 512), dtype, 0.02)
    g = random_array(rng, (64, 256), dtype, 0.02)
    check_weighted(x, g, np.full(64, 1e-3, np.float32))


@pytest.mark.parametrize("special", [0.0, -1.0, np.inf, np.nan])
def test_special_probabilities(rng, dtype, special):
    x, g, probs = weighted_arrays(rng, (4,), 8, dtype)
    probs[1] = special
    results = [to_numpy(t) for t in F.fused_swiglu_weighted_bwd(*map(to_paddle, (x, g, probs)))]
    check_weighted(x, g, probs)
    assert np.isfinite(results[1]).all()  # probs_grad does not contain probs


def test_long_sums_do_not_stall():
    """A half-precision accumulator would stop growing at 2048 terms, or 256."""
    for dtype in numeric.HALVES:
        x = np.ones((2, 2 * 8192), numpy_dtype(dtype))
        g, probs = np.ones((2, 8192), numpy_dtype(dtype)), np.ones(2, np.float32)
        check_weighted(x, g, probs)


def test_result_shares_the_graph():
    x = paddle.ones([2, 4])
    x.stop_gradient = False
    assert not F.swiglu(x).stop_gradient
    assert not F.fused_swiglu_weighted(x, paddle.ones([2])).stop_gradient
