"""Paddle's functions and ours, row by row: defaults, shapes accepted and refused, roundings.

What Paddle does is taken from Paddle where a CPU can ask it, and from a description of 3.3.1
elsewhere. A row in which ours does otherwise names the row of docs/compatibility.md that says so.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paddle
import paddle.incubate.nn.functional as incubate
import pytest

import paddle_fused.nn.functional as F
from helpers import numeric, oracle, paddle_kernels
from helpers.arrays import random_array, to_paddle
from helpers.running import run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "compatibility.md").read_text()
# The first cells of the page's table of differences.
DOCUMENTED = re.findall(r"^\| ([^|]+?) \|", PAGE, re.M)
DRAWN_IN = ("float32", "float16", "bfloat16")

FUNCTIONS = [
    "swiglu",
    "fused_swiglu_weighted_bwd",
    "fused_rms_norm",
    "fused_rms_norm_ext",
    "fast_rms_norm",
    "fused_rotary_position_embedding",
    "fused_partial_rope",
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_and_defaults(name):
    def parameters(function):
        return [
            (p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()
        ]

    assert parameters(getattr(F, name)) == parameters(getattr(incubate, name))


# Shapes and dtypes


class Call(NamedTuple):
    """A call: arguments as (shape, dtype), whether each accepts it, and where the page says why."""

    function: str
    what: str
    arguments: dict
    paddle: bool
    ours: bool
    row: str = ""


def given(**shapes):
    """Arguments from shapes: float32, or the dtype that ends a tuple; other values as they are."""
    return shapes


BF16, F16, F64, I32 = "bfloat16", "float16", "float64", "int32"
Q, TABLE = [2, 5, 4, 8], [5, 8]

WEIGHTED = [
    ("2-D", given(o1=([8, 16], BF16), do2_s=([8, 8], BF16), unzipped_probs=[8, 1]), True, True),
    (
        "3-D",
        given(o1=([2, 4, 16], BF16), do2_s=([2, 4, 8], BF16), unzipped_probs=[2, 4, 1]),
        True,
        True,
    ),
    ("1-D", given(o1=([16], BF16), do2_s=([8], BF16), unzipped_probs=[1]), True, True),
    ("no rows", given(o1=([0, 16], BF16), do2_s=([0, 8], BF16), unzipped_probs=[0, 1]), True, True),
    (
        "1-D probs",
        given(o1=([8, 16], BF16), do2_s=([8, 8], BF16), unzipped_probs=[8]),
        False,
        True,
        "Probabilities without a last axis of 1",
    ),
    (
        "2-D probs of 3-D rows",
        given(o1=([2, 4, 16], BF16), do2_s=([2, 4, 8], BF16), unzipped_probs=[2, 4]),
        False,
        True,
        "Probabilities without a last axis of 1",
    ),
    (
        "flat probs of 3-D rows",
        given(o1=([2, 4, 16], BF16), do2_s=([2, 4, 8], BF16), unzipped_probs=[8, 1]),
        False,
        False,
    ),
    (
        "several probs per row",
        given(o1=([8, 16], BF16), do2_s=([8, 8], BF16), unzipped_probs=[8, 4]),
        True,
        False,
        "Several probabilities per row",
    ),
    (
        "other leading axes of the same product",
        given(o1=([2, 4, 16], BF16), do2_s=([4, 2, 8], BF16), unzipped_probs=[8, 1, 1]),
        True,
        False,
        "Leading axes that differ",
    ),
    ("odd width", given(o1=([8, 15], BF16), do2_s=([8, 7], BF16), unzipped_probs=[8, 1]), 0, 0),
    ("one rank less", given(o1=([8, 16], BF16), do2_s=([8], BF16), unzipped_probs=[8, 1]), 0, 0),
    ("half probs", given(o1=([8, 16], BF16), do2_s=([8, 8], BF16), unzipped_probs=([8, 1], F16)))
    + (False, False),
    ("mixed", given(o1=([8, 16], BF16), do2_s=[8, 8], unzipped_probs=[8, 1]), False, False),
    *(
        (
            dtype,
            given(o1=([8, 16], dtype), do2_s=([8, 8], dtype), unzipped_probs=[8, 1]),
            False,
            True,
            "Dtypes",
        )
        for dtype in ("float32", F64, F16)
    ),
]
NORM = [
    ("last axis", given(x=[4, 16], norm_weight=[16]), True, True),
    ("two axes, flat weight", given(x=[2, 4, 16], norm_weight=[64]), True, True),
    ("negative axis", given(x=[2, 4, 16], norm_weight=[16], begin_norm_axis=-1), True, True),
    ("axis 0", given(x=[4, 16], norm_weight=[64], begin_norm_axis=0), True, True),
    ("weight in the axes' shape", given(x=[2, 4, 16], norm_weight=[4, 16]), False, False),
    ("short weight", given(x=[4, 16], norm_weight=[15]), False, False),
    ("axis beyond", given(x=[2, 4, 16], norm_weight=[16], begin_norm_axis=3), False, False),
    ("axis before", given(x=[2, 4, 16], norm_weight=[16], begin_norm_axis=-4), False, False),
    ("residual", given(x=[4, 16], norm_weight=[16], residual=[4, 16]), True, True),
    (
        "residual of another shape",
        given(x=[4, 16], norm_weight=[16], residual=[4, 8]),
        True,
        False,
        "Arguments that Paddle does not look at",
    ),
    (
        "residual of another dtype",
        given(x=[4, 16], norm_weight=[16], residual=([4, 16], F64)),
        True,
        False,
        "Arguments that Paddle does not look at",
    ),
]
EXT = [
    ("2-D", given(x=[4, 16], scale=[16]), True, True),
    ("3-D", given(x=[2, 3, 16], scale=[16]), True, True),
    ("short scale", given(x=[4, 16], scale=[15]), False, False),
    ("half x, float32 scale", given(x=([4, 16], BF16), scale=[16]), True, True),
    ("float16", given(x=([4, 16], F16), scale=([16], F16)), False, True, "Dtypes"),
    ("float64 scale", given(x=([4, 16], F64), scale=([16], F64)), False, True, "Dtypes"),
]
WITH = {"sin": TABLE, "cos": TABLE}
IDS = ([2, 5], "int64")
ROPE = [
    ("q alone", given(q=Q), True, True),
    ("q and k", given(q=Q, k=[2, 5, 2, 8], **WITH), True, True),
    ("tables of 4 axes", given(q=Q, sin=[1, 5, 1, 8], cos=[1, 5, 1, 8]), True, True),
    ("longer tables", given(q=Q, sin=[9, 8], cos=[9, 8]), True, True),
    ("partial", given(q=Q, sin=[5, 4], cos=[5, 4]), True, True),
    ("ids", given(q=Q, position_ids=IDS, **WITH), True, True),
    ("halves", given(q=Q, use_neox_rotary_style=False, **WITH), True, True),
    ("3-D q", given(q=[5, 4, 8]), False, False),
    ("odd head", given(q=[2, 5, 4, 7]), False, False),
    ("sin without cos", given(q=Q, sin=TABLE, use_neox_rotary_style=False), False, False),
    ("ids of another shape", given(q=Q, position_ids=([2, 4], "int64"), **WITH), False, False),
    ("tables of two shapes", given(q=Q, sin=TABLE, cos=[9, 8]), False, False),
    (
        "halves without tables",
        given(q=Q, use_neox_rotary_style=False),
        False,
        True,
        "Generated RoPE tables",
    ),
    (
        "ids without tables",
        given(q=Q, position_ids=IDS),
        False,
        True,
        "Generated RoPE tables",
    ),
    (
        "float32 tables of a half q",
        given(q=(Q, BF16), **WITH),
        False,
        True,
        "Dtypes of RoPE tables and positions",
    ),
    (
        "int32 positions",
        given(q=Q, position_ids=([2, 5], I32), **WITH),
        False,
        True,
        "Dtypes of RoPE tables and positions",
    ),
    (
        "v of other heads than k",
        given(q=Q, k=[2, 5, 2, 8], v=[2, 5, 1, 8], **WITH),
        False,
        True,
        "Heads of v",
    ),
    *(
        (what, given(**arguments), True, False, "RoPE tables and tensors that do not fit")
        for what, arguments in {
            "short tables": {"q": Q, "sin": [3, 8], "cos": [3, 8]},
            "wide tables": {"q": Q, "sin": [5, 10], "cos": [5, 10]},
            "k of a larger batch": {"q": Q, "k": [3, 5, 2, 8], **WITH},
            "k of another head size": {"q": Q, "k": [2, 5, 2, 6], **WITH},
            "k of another dtype": {"q": Q, "k": ([2, 5, 2, 8], F64), **WITH},
        }.items()
    ),
]
CALLS = [
    Call(function, what, arguments, bool(theirs), bool(ours), *row)
    for function, calls in (
        ("fused_swiglu_weighted_bwd", WEIGHTED),
        ("fused_rms_norm", NORM),
        ("fused_rms_norm_ext", EXT),
        ("fast_rms_norm", EXT[:4]),
        ("fused_rotary_position_embedding", ROPE),
    )
    for what, arguments, theirs, ours, *row in calls
]
EACH_CALL = pytest.mark.parametrize("call", CALLS, ids=lambda c: f"{c.function}-{c.what}")


def keywords(call, make):
    """The call's arguments, tensors made by make(name, shape, dtype)."""
    found = {"norm_bias": None, "epsilon": 1e-6} if call.function == "fused_rms_norm" else {}
    for name, value in call.arguments.items():
        if isinstance(value, list):
            value = make(name, value, "float32")
        elif isinstance(value, tuple):
            value = make(name, *value)
        found[name] = value
    return found


def accepts(function, arguments) -> bool:
    try:
        function(**arguments)
    except (TypeError, ValueError):
        return False
    return True


@EACH_CALL
def test_call(call):
    arguments = keywords(call, lambda _, shape, dtype: paddle.zeros(shape, dtype=dtype))
    assert accepts(getattr(F, call.function), arguments) == call.ours
    assert (call.paddle != call.ours) == bool(call.row)
    assert not call.row or call.row in DOCUMENTED


@pytest.mark.parametrize(
    "call", [c for c in CALLS if c.function == "fused_rms_norm"], ids=lambda c: c.what
)
def test_what_paddle_accepts(call):
    """Asked of Paddle itself: its check of shapes runs when a program is built."""
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            arguments = keywords(call, paddle.static.data)
            assert accepts(incubate.fused_rms_norm, arguments) == call.paddle
    finally:
        paddle.disable_static()


# Roundings


def assert_rounds_alike(got, wanted, scale=None, equal=0.99, what=""):
    """Half precision: the same but where float32 errors cross a tie. float32: a few ULP."""
    wanted = np.asarray(wanted)
    name = numeric.dtype_name(got.dtype)
    assert got.dtype == wanted.dtype, what
    if name in numeric.HALVES:
        numeric.assert_ulp(got, oracle.f64(wanted), 1.0, scale, what)
        assert (got == wanted).mean() >= equal, what
    else:
        bound = 4 * numeric.sum_bound("float32", max(wanted.shape[-1:] or (1,)))
        numeric.assert_ulp(got, oracle.f64(wanted), bound, scale, what)


@pytest.mark.parametrize("dtype", DRAWN_IN)
def test_rounding_of_weighted_swiglu(rng, dtype):
    o1, g = random_array(rng, (64, 48), dtype, 2.0), random_array(rng, (64, 24), dtype)
    probs = random_array(rng, (64, 1), "float32")
    outputs, _ = run(F.fused_swiglu_weighted_bwd, [o1, g, probs], frozen=(0, 1, 2))
    p = oracle.f64(probs)
    scales = [
        oracle.swiglu_grad_scale(o1, None, oracle.f64(g) * p),
        oracle.probs_grad_scale(o1, g, probs),
        np.abs(oracle.swiglu(o1) * p),
    ]
    wanted = paddle_kernels.fused_swiglu_weighted_bwd(o1, g, probs)
    for got, one, scale, what in zip(outputs, wanted, scales, ("do1", "probs_grad", "o2_s")):
        assert_rounds_alike(got, one, scale, what=what)


def test_paddles_own_test_of_weighted_swiglu(rng):
    """Its spelled-out form, rounded to bfloat16 on the way, and its tolerance."""
    o1, g = (rng.random(shape).astype("float32") for shape in ((4, 16, 64), (4, 16, 32)))
    probs = rng.random((4, 16, 1)).astype("float32")
    o1, g = (array.astype(random_array(rng, (1,), "bfloat16").dtype) for array in (o1, g))
    outputs, _ = run(F.fused_swiglu_weighted_bwd, [o1, g, probs], frozen=(0, 1, 2))
    o2 = numeric.round_to(oracle.swiglu(o1), "bfloat16")
    do2 = numeric.round_to(oracle.f64(g) * probs, "bfloat16")
    wanted = (
        numeric.round_to(oracle.swiglu_grad(o1, None, do2), "bfloat16"),
        (oracle.f64(g) * o2).sum(axis=-1, keepdims=True),
        o2 * probs,
    )
    for got, one in zip(outputs, wanted):
        assert (np.abs(got.astype("float64") - one) <= 1e-2 * (1 + np.abs(one))).all()


@pytest.mark.parametrize("dtype", DRAWN_IN)
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_rounding_of_fused_rms_norm(rng, dtype, with_residual, with_bias):
    """Without a bias of the sum both round at the same places."""
    x, residual = (random_array(rng, (64, 48), dtype) for _ in range(2))
    weight, bias = (random_array(rng, (48,), dtype) for _ in range(2))
    inputs = [x, weight, bias if with_bias else None, residual if with_residual else None]

    def ours(x, weight, norm_bias, residual):
        return F.fused_rms_norm(x, weight, norm_bias, 1e-6, residual=residual)

    (out, *sums), _ = run(ours, inputs)
    wanted, total = paddle_kernels.fused_rms_norm(*inputs[:3], residual=inputs[3])
    normed = oracle.rms_norm(x if total is None else total, weight, 1e-6)
    scale = np.abs(normed) + (np.abs(oracle.f64(bias)) if with_bias else 0)
    assert_rounds_alike(out, wanted, scale)
    if with_residual:
        numeric.assert_bit_equal(sums[0], total)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sum_of_three_is_nearer_than_paddles(rng, dtype):
    """Row "Residual and bias": ours rounds the sum once, Paddle twice."""
    x, residual = (random_array(rng, (64, 48), dtype) for _ in range(2))
    bias, weight = (random_array(rng, (48,), dtype) for _ in range(2))

    def ours(x, weight, bias, residual):
        return F.fused_rms_norm(x, weight, None, 1e-6, bias=bias, residual=residual)

    (_, total), _ = run(ours, [x, weight, bias, residual])
    _, theirs = paddle_kernels.fused_rms_norm(x, weight, bias=bias, residual=residual)
    exact = oracle.f64(x) + oracle.f64(residual) + oracle.f64(bias)
    unit = numeric.spacing(exact, dtype)
    worst = [np.abs(oracle.f64(one) - exact) / unit for one in (total, theirs)]
    assert worst[0].max() <= 0.51 < worst[1].max()
    assert "Residual and bias" in DOCUMENTED


@pytest.mark.parametrize("dtype, scale_dtype", [*zip(DRAWN_IN, DRAWN_IN), ("bfloat16", "float32")])
@pytest.mark.parametrize("name", ["fused_rms_norm_ext", "fast_rms_norm"])
def test_rounding_of_fused_rms_norm_ext(rng, dtype, scale_dtype, name):
    x, scale = random_array(rng, (64, 48), dtype), random_array(rng, (48,), scale_dtype)
    g = random_array(rng, (64, 48), scale_dtype)
    (y, invvar), _ = run(getattr(F, name), [x, scale])
    wanted, inverse = paddle_kernels.fused_rms_norm_ext(x, scale)
    assert_rounds_alike(y, wanted, np.abs(oracle.rms_norm(x, scale, 1e-5)))
    numeric.assert_ulp(invvar, oracle.f64(inverse), 16.0)

    def gradient(x, scale, invvar, g):
        return F.fused_rms_norm_ext_grad(x, scale, invvar, g, 1e-5)

    grads, _ = run(gradient, [x, scale, inverse, g], frozen=(0, 1, 2, 3))
    scales = oracle.rms_norm_grad_scale(x, scale, g, 1e-5)
    for got, one, size in zip(
        grads, paddle_kernels.fused_rms_norm_ext_grad(x, scale, inverse, g), scales
    ):
        assert_rounds_alike(got, one, size)


@pytest.mark.parametrize("dtype", DRAWN_IN)
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("time_major", [True, False], ids=["SBHD", "BSHD"])
@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("rotary", [16, 8])
def test_rounding_of_rope(rng, dtype, pairs, time_major, with_ids, rotary):
    """Forward and gradient; the two halves of sin, and neighbours, are unrelated."""
    shape = (7, 3, 4, 16) if time_major else (3, 7, 4, 16)
    q, g = (random_array(rng, shape, dtype) for _ in range(2))
    sin, cos = (random_array(rng, (9, rotary), dtype) for _ in range(2))
    ids = rng.integers(0, 9, (3, 7)) if with_ids else None

    def ours(q):
        return F.fused_rotary_position_embedding(
            q,
            sin=to_paddle(sin),
            cos=to_paddle(cos),
            position_ids=None if ids is None else to_paddle(ids),
            use_neox_rotary_style=pairs,
            time_major=time_major,
        )

    (out,), (dq,) = run(ours, [q], [g])
    for got, one, sign in ((out, q, 1), (dq, g, -1)):
        wanted = paddle_kernels.rope(one, sin, cos, ids, pairs, time_major, sign)
        scale = paddle_kernels.rope(
            np.abs(one), np.abs(sin), np.abs(cos), ids, pairs, time_major, sign
        ).astype("float64")
        assert_rounds_alike(got, wanted, np.abs(scale) + 8)


def test_generated_tables_are_those_of_short_sequences(rng):
    """At short positions Paddle's float32 angles are right too; not so far out."""
    q = random_array(rng, (1, 64, 2, 16), "float32")
    (out,), _ = run(F.fused_rotary_position_embedding, [q])
    sin, cos = paddle_kernels.default_tables(64, 16)
    # A float32 angle is off by a few of its own roundings, and so are its sine and cosine.
    angle_error = 4 * (1 + np.arange(64)) * 2.0**-24
    sums = oracle.rope_scale(q, np.ones((64, 1, 16)), np.ones((64, 1, 16)), oracle.PAIRS)
    difference = np.abs(out - oracle.f64(paddle_kernels.rope(q, sin, cos)))
    assert (difference <= angle_error[:, None, None] * sums).all()
    far = paddle_kernels.default_tables(200_001, 16)[0][-1]
    exact = np.sin(200_000.0 / np.power(10000.0, 2.0 * (np.arange(16) // 2) / 16))
    assert np.abs(far - exact).max() > 5e-4
    assert "Generated RoPE tables" in DOCUMENTED


def test_float64_is_float64(rng):
    """Row "float64": Paddle's RoPE goes through float32."""
    q = random_array(rng, (2, 5, 3, 8), "float64")
    sin, cos = (random_array(rng, (5, 8), "float64") for _ in range(2))

    def ours(q):
        return F.fused_rotary_position_embedding(q, sin=to_paddle(sin), cos=to_paddle(cos))

    (out,), _ = run(ours, [q])
    exact = oracle.rope(q, cos[:, None], sin[:, None], oracle.PAIRS)
    assert np.abs(out - exact).max() < 1e-14
    assert np.abs(paddle_kernels.rope(q, sin, cos) - exact).max() > 1e-8
    assert "float64" in DOCUMENTED
