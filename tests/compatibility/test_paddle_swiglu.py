"""Ours beside Paddle's own swiglu, as far as that exists on a CPU: float32 and float64."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import paddle_fused.nn.functional as F
from helpers import numeric, oracle
from helpers.arrays import random_array, to_paddle
from helpers.running import run

DTYPE = pytest.mark.parametrize("dtype", ["float32", "float64"])
JOINED = pytest.mark.parametrize("joined", [True, False])
# What both may be off by, together.
BOUND = {"float32": 8.0, "float64": 64.0}
# Below this gate Paddle's exponential of -gate overflows, and the result is 0.
OVERFLOW = {"float32": -88.0, "float64": -709.0}


def paddle_swiglu(x, y=None):
    """Looked up at the call: a patched Paddle would not be the original."""
    return paddle.nn.functional.swiglu(x, y)


def both(inputs, grads, frozen=()):
    """([outputs, gradients] of Paddle, those of ours)."""
    return [run(function, inputs, grads, frozen) for function in (paddle_swiglu, F.swiglu)]


def make(rng, shape, dtype, joined, gates=None):
    """(inputs, upstream gradient); the gates lie in an interval."""
    gate, up, g = (random_array(rng, shape, dtype) for _ in range(3))
    if gates is not None:
        gate = rng.uniform(*gates, shape).astype(dtype)
    return ([np.concatenate([gate, up], axis=-1)] if joined else [gate, up]), g


def compare(theirs, ours, dtype, scales):
    """Same shapes and dtypes; equal to the bound, in ULP of the sum of the absolute terms."""
    for wanted, got, scale in zip([*theirs[0], *theirs[1]], [*ours[0], *ours[1]], scales):
        assert got.shape == wanted.shape
        assert got.dtype == wanted.dtype
        numeric.assert_ulp(got, oracle.f64(wanted), BOUND[dtype], scale)


def scales_of(inputs, g):
    """What out and the gradients are sums of.

    Paddle has the slope's 1 + a (1 - s) as 1 + a - a s, which loses digits in proportion to a.
    """
    x, y = (*inputs, None)[:2]
    grads = oracle.swiglu_grad_scale(x, y, g)
    gate = np.abs(oracle.f64(x))[..., : np.shape(g)[-1]]
    out = np.abs(oracle.swiglu(x, y))
    if y is None:
        return [out, grads * (1 + np.concatenate([gate, gate], axis=-1))]
    return [out, *(scale * (1 + gate) for scale in grads)]


@DTYPE
@JOINED
@pytest.mark.parametrize(
    "shape", [(1,), (5,), (7, 16), (2, 3, 33), (2, 1, 3, 4), (1, 1, 1, 1, 9), (64, 257)], ids=str
)
def test_shapes(rng, dtype, joined, shape):
    inputs, g = make(rng, shape, dtype, joined)
    theirs, ours = both(inputs, [g])
    compare(theirs, ours, dtype, scales_of(inputs, g))


@DTYPE
@JOINED
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 0, 4), (0,)], ids=str)
def test_empty(rng, dtype, joined, shape):
    inputs, g = make(rng, shape, dtype, joined)
    theirs, ours = both(inputs, [g])
    compare(theirs, ours, dtype, scales_of(inputs, g))


@DTYPE
@JOINED
@pytest.mark.parametrize("gates", [(-10, 10), (-80, -10), (10, 1000)], ids=str)
def test_gates(rng, dtype, joined, gates):
    inputs, g = make(rng, (64, 33), dtype, joined, gates)
    theirs, ours = both(inputs, [g])
    compare(theirs, ours, dtype, scales_of(inputs, g))


@DTYPE
def test_gates_whose_exponential_overflows(rng, dtype):
    """Paddle's result is 0; ours keeps what the format can hold. docs/compatibility.md says so."""
    limit = OVERFLOW[dtype]
    inputs, g = make(rng, (64, 8), dtype, False, (limit - 10, limit - 2))
    inputs[1] = np.full_like(inputs[1], 1e30)
    theirs, ours = both(inputs, [g])
    expected = oracle.swiglu(*inputs)
    assert (theirs[0][0] == 0).all()
    assert (ours[0][0] != 0).all()
    # A float64 gate below -708 has a subnormal exponential, of fewer digits.
    np.testing.assert_allclose(ours[0][0], expected, rtol=1e-6 if dtype == "float32" else 0.2)


@DTYPE
def test_special_values(dtype):
    """Every pair of special gate and up, with the one difference that the page names."""
    gates = [0.0, -0.0, 1.0, -1.0, 200.0, -200.0, np.inf, -np.inf, np.nan]
    ups = [0.0, -0.0, 1.0, -2.0, np.inf, -np.inf, np.nan]
    x = np.array([[a, b] for a in gates for b in ups], dtype)
    theirs, ours = both([x], [np.ones((len(x), 1), dtype)])
    underflowed = (x[:, 0] == -200) & np.isinf(x[:, 1]) & (dtype == "float32")
    assert np.isnan(theirs[0][0][underflowed]).all()
    np.testing.assert_array_equal(ours[0][0][underflowed, 0], -x[underflowed, 1])
    for wanted, got in zip([*theirs[0], *theirs[1]], [*ours[0], *ours[1]]):
        np.testing.assert_allclose(got[~underflowed], wanted[~underflowed], rtol=1e-5, atol=1e-37)


@DTYPE
@pytest.mark.parametrize("frozen", [(0,), (1,)], ids=["x", "y"])
def test_one_input_wants_no_gradient(rng, dtype, frozen):
    inputs, g = make(rng, (5, 6), dtype, False)
    theirs, ours = both(inputs, [g], frozen)
    for result in (theirs, ours):
        assert result[1][frozen[0]] is None
    kept = 1 - frozen[0]
    scales = scales_of(inputs, g)
    compare(
        (theirs[0], [theirs[1][kept]]),
        (ours[0], [ours[1][kept]]),
        dtype,
        [scales[0], scales[1 + kept]],
    )


@DTYPE
@JOINED
@pytest.mark.parametrize("view", ["transposed", "strided", "sliced"])
def test_views(rng, dtype, joined, view):
    def viewed(array):
        if view == "transposed":
            return to_paddle(np.ascontiguousarray(array.T)).t()
        if view == "strided":
            return to_paddle(np.repeat(array, 2, axis=-1))[:, ::2]
        return to_paddle(np.pad(array, ((1, 0), (3, 0))))[1:, 3:]

    inputs, g = make(rng, (6, 8), dtype, joined)
    theirs, ours = both([viewed(a) for a in inputs], [g])
    compare(theirs, ours, dtype, scales_of(inputs, g))


@DTYPE
@JOINED
def test_static_program(rng, dtype, joined):
    """Built with an unknown number of rows, and its gradient."""
    inputs, _ = make(rng, (5, 8), dtype, joined)
    found = []
    paddle.enable_static()
    try:
        for function in (paddle_swiglu, F.swiglu):
            program = paddle.static.Program()
            with paddle.static.program_guard(program):
                data = [
                    paddle.static.data(f"x{i}", [-1, *a.shape[1:]], dtype)
                    for i, a in enumerate(inputs)
                ]
                for one in data:
                    one.stop_gradient = False
                out = function(*data)
                assert list(out.shape) == [-1, 8]
                fetched = [out, *paddle.static.gradients(out, data)]
                feed = {f"x{i}": a for i, a in enumerate(inputs)}
                found.append(paddle.static.Executor().run(program, feed=feed, fetch_list=fetched))
    finally:
        paddle.disable_static()
    scales = scales_of(inputs, np.ones((5, 8)))
    for wanted, got, scale in zip(*found, scales):
        assert got.dtype == wanted.dtype
        numeric.assert_ulp(got, oracle.f64(wanted), BOUND[dtype], scale)


@DTYPE
def test_gradient_operator(rng, dtype):
    """paddle._C_ops.swiglu_grad, which backward passes written by hand call."""
    (x, y), g = make(rng, (5, 6), dtype, False)
    theirs = [t.numpy() for t in paddle._C_ops.swiglu_grad(*(to_paddle(a) for a in (x, y, g)))]
    ours = run(F.swiglu, [x, y], [g])[1]
    for wanted, got, scale in zip(theirs, ours, scales_of([x, y], g)[1:]):
        numeric.assert_ulp(got, oracle.f64(wanted), BOUND[dtype], scale)


def test_gradient_of_the_gradient(rng):
    """Ours exists."""
    x = to_paddle(random_array(rng, (3, 8), "float32"), stop_gradient=False)
    with pytest.raises(RuntimeError, match="doesn't have any grad op"):
        paddle.grad(paddle_swiglu(x).sum(), x, create_graph=True)
    (dx,) = paddle.grad(F.swiglu(x).sum(), x, create_graph=True)
    (second,) = paddle.grad(dx.sum(), x)
    assert np.abs(second.numpy()).max() > 0


def tensor(*shape, dtype="float32"):
    return paddle.ones(shape).astype(dtype)


# Call, Paddle's error (None: a result), ours.
REFUSALS = {
    "odd last axis": (lambda: [tensor(5)], ValueError, ValueError),
    "last axis of 1": (lambda: [tensor(3, 1)], ValueError, ValueError),
    "0-D": (lambda: [tensor()], ValueError, ValueError),
    "0-D pair": (lambda: [tensor(), tensor()], None, ValueError),
    "y broadcasts over rows": (lambda: [tensor(3, 4), tensor(4)], ValueError, ValueError),
    "y of one row": (lambda: [tensor(3, 4), tensor(1, 4)], ValueError, ValueError),
    "y of another width": (lambda: [tensor(3, 4), tensor(3, 2)], ValueError, ValueError),
    "y of another dtype": (
        lambda: [tensor(2, 4), tensor(2, 4, dtype="float64")],
        ValueError,
        TypeError,
    ),
    "integers": (lambda: [tensor(2, 4, dtype="int32")], RuntimeError, TypeError),
    "an array": (lambda: [np.ones((2, 4), "float32")], ValueError, TypeError),
    "float16": (lambda: [tensor(2, 4, dtype="float16")], RuntimeError, None),
    "bfloat16": (lambda: [tensor(2, 4, dtype="bfloat16")], RuntimeError, None),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    arguments, theirs, ours = REFUSALS[case]
    for function, error in ((paddle_swiglu, theirs), (F.swiglu, ours)):
        if error is None:
            function(*arguments())
        else:
            with pytest.raises(error):
                function(*arguments())
