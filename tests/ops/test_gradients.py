"""Gradients without the oracle, their own gradients, and who gets one."""

from __future__ import annotations

import itertools

import numpy as np
import paddle
import pytest

import paddle_fused.nn.functional as F
from helpers import numeric, oracle, second_order
from helpers.arrays import random_array, to_paddle
from helpers.gradient_cases import CASES, EPSILON, ONCE, ROTATIONS, TWICE, W, make_inputs
from helpers.running import as_tuple, check, run

STEP = 2.0**-18


def outputs_of(function, arrays):
    return run(function, arrays)[0]


def make_upstream(rng, function, arrays):
    outs = outputs_of(function, arrays)
    return [random_array(rng, out.shape, numeric.dtype_name(out.dtype)) for out in outs]


def loss(function, arrays, upstream):
    return sum((o * g).sum() for o, g in zip(outputs_of(function, arrays), upstream))


def slope(function, arrays, upstream, index, direction):
    """The central difference of the loss as input number `index` moves along the direction."""
    values = []
    for sign in (1.0, -1.0):
        moved = list(arrays)
        moved[index] = (arrays[index] + sign * STEP * direction).astype(arrays[index].dtype)
        values.append(loss(function, moved, upstream))
    return (values[0] - values[1]) / (2.0 * STEP)


def assert_close(actual, expected, what, rtol=1e-6):
    """Relative to the largest element: a central difference has an absolute error."""
    size = np.abs(expected).max()
    assert size > 0, f"{what}: nothing to compare"
    error = np.abs(actual - expected).max()
    assert error <= rtol * size, f"{what}: off by {error:.3g} of {size:.3g}"


@pytest.mark.parametrize("name", CASES)
def test_central_differences(rng, name):
    function, _ = CASES[name]
    arrays = make_inputs(rng, name)
    upstream = make_upstream(rng, function, arrays)
    for index, grad in enumerate(run(function, arrays, upstream)[1]):
        expected = np.empty(grad.shape)
        for place in np.ndindex(grad.shape):
            unit = np.zeros(grad.shape)
            unit[place] = 1.0
            expected[place] = slope(function, arrays, upstream, index, unit)
        assert_close(grad, expected, f"{name}, input {index}")


@pytest.mark.parametrize("name", CASES)
def test_transposition(rng, name):
    """⟨Jv, g⟩ = ⟨v, Jᵀg⟩, for several upstream gradients and directions."""
    function, _ = CASES[name]
    for _ in range(3):
        arrays = make_inputs(rng, name)
        upstream = make_upstream(rng, function, arrays)
        for index, grad in enumerate(run(function, arrays, upstream)[1]):
            direction = np.sign(random_array(rng, grad.shape, "float64"))
            forward = slope(function, arrays, upstream, index, direction)
            size = np.abs(grad).sum()
            assert abs(forward - (direction * grad).sum()) <= 1e-6 * size, f"{name} {index}"


# Second order


def first_gradients(function, arrays, upstream):
    return run(function, arrays, upstream)[1]


@pytest.mark.parametrize("name", {**TWICE, **ROTATIONS})
def test_second_order_central_differences(rng, name):
    """The gradient of ⟨v, first gradients⟩, in every input and upstream gradient."""
    function, _ = CASES[name]
    arrays = make_inputs(rng, name)
    upstream = make_upstream(rng, function, arrays)
    directions = [random_array(rng, a.shape, "float64") for a in arrays]
    found = second_order.second_order(function, arrays, upstream, directions)

    def projected(group):
        grads = first_gradients(function, *group)
        return sum((v * d).sum() for v, d in zip(directions, grads))

    for which in (0, 1):
        for index, second in enumerate(found[which]):
            ray = np.sign(random_array(rng, (arrays, upstream)[which][index].shape, "float64"))
            values = []
            for sign in (1.0, -1.0):
                moved = [list(arrays), list(upstream)]
                moved[which][index] = moved[which][index] + sign * STEP * ray
                values.append(projected(moved))
            expected = (values[0] - values[1]) / (2.0 * STEP)
            if name in ROTATIONS and which == 0:  # linear: no second derivative in the input
                assert second is None or not second.any()
                continue
            assert second is not None, f"{name}: no gradient for {('input', 'upstream')[which]}"
            size = np.abs(second).sum()
            assert abs((ray * second).sum() - expected) <= 1e-6 * size, f"{name} {which} {index}"


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("width", [1, 7, 16, 33, 1025])
def test_second_order_swiglu(rng, dtype, joined, width):
    a, b, g, v, u = (random_array(rng, (3, width), dtype) for _ in range(5))
    expected = oracle.swiglu_double_grad(a, b, g, v, u)
    scales = second_order.swiglu_scale(a, b, g, v, u)
    if joined:
        pack = [np.concatenate(p, -1) for p in ((a, b), (v, u))]
        (x_grad,), (ddout,) = second_order.second_order(F.swiglu, pack[:1], [g], pack[1:])
        actual = x_grad[:, :width], x_grad[:, width:], ddout
    else:
        inputs, upstream = second_order.second_order(F.swiglu, [a, b], [g], [v, u])
        actual = *inputs, *upstream
    for name, *values in zip(("x", "y", "ddout"), actual, expected, scales):
        check(values[0], values[1], dtype, values[2], 2, name)


@pytest.mark.parametrize("form", [k for k in TWICE if k.startswith("rms_norm")])
@pytest.mark.parametrize("width", [1, 7, 16, 33, 1025])
def test_second_order_rms_norm(rng, dtype, form, width):
    function, shapes = TWICE[form]
    if "none" in form and dtype in numeric.HALVES:
        width = 1  # one case: its 1/rms is rounded to the half, so the bound is a looser one
    weighted = W in shapes
    arrays = [random_array(rng, (width,) if s == W else (5, width), dtype) for s in shapes]
    g, extra = (random_array(rng, (5, width), dtype) for _ in range(2))
    directions = [random_array(rng, a.shape, dtype) for a in arrays]
    residual = "residual" in form
    upstream = [g, extra] if residual else [g]
    inputs, (ddout, *ddextra) = second_order.second_order(function, arrays, upstream, directions)

    x, v = arrays[0], oracle.f64(directions[0])
    if residual:
        x = oracle.residual_sum(x, arrays[-1])
        v = v + oracle.f64(directions[-1])
        check(ddextra[0], v, dtype, what="gradient of residual_out's gradient")
        numeric.assert_bit_equal(inputs[0], inputs[-1])
    weight, u = (arrays[1], directions[1]) if weighted else (None, None)
    offset = 1.0 if "offset" in form else 0.0
    expected = oracle.rms_norm_double_grad(x, weight, g, v, u, EPSILON, offset)
    scales = second_order.rms_norm_scale(x, weight, g, v, u, EPSILON, offset)
    if "none" in form and dtype in numeric.HALVES:
        assert all(np.isfinite(t.astype(np.float64)).all() for t in (*inputs, ddout))
        return
    terms = max(width, 2)
    check(inputs[0], expected[0], dtype, scales[0], terms, "x")
    check(ddout, expected[2], dtype, scales[2], terms, "ddout")
    if weighted:
        check(inputs[1], expected[1], dtype, scales[1], 5 * terms, "weight")


@pytest.mark.parametrize("name", [n for n in TWICE if len(TWICE[n][1]) > 1])
def test_second_order_of_some_gradients(rng, name):
    """A second loss that uses only one of the first gradients equals one with zeros elsewhere."""
    function, _ = CASES[name]
    arrays = make_inputs(rng, name)
    upstream = make_upstream(rng, function, arrays)
    directions = [random_array(rng, a.shape, "float64") for a in arrays]
    for used in range(len(arrays)):
        some = [d if i == used else None for i, d in enumerate(directions)]
        zeros = [d if i == used else np.zeros_like(d) for i, d in enumerate(directions)]
        actual = second_order.second_order(function, arrays, upstream, some)
        expected = second_order.second_order(function, arrays, upstream, zeros)
        for a, b in zip(itertools.chain(*actual), itertools.chain(*expected)):
            if a is None:
                assert not b.any(), f"{name}, gradient {used}"
            else:
                np.testing.assert_array_equal(a, b, f"{name}, gradient {used}")


@pytest.mark.parametrize(
    "name", ["rms_norm residual", "rms_norm unweighted residual", "rope qk ids"]
)
@pytest.mark.parametrize("used", [0, 1])
def test_second_order_of_one_output(rng, name, used):
    """A first loss that uses one output equals one whose other upstream gradient is zero."""
    function, _ = CASES[name]
    arrays = make_inputs(rng, name)
    upstream = make_upstream(rng, function, arrays)
    upstream[1 - used] = np.zeros_like(upstream[1 - used])
    directions = [random_array(rng, a.shape, "float64") for a in arrays]
    reached = first_gradients(lambda *t: function(*t)[used], arrays, [upstream[used]])
    inputs = [i for i, grad in enumerate(reached) if grad is not None]

    def one_output(*tensors):
        all_tensors = [to_paddle(a) for a in arrays]
        for index, tensor in zip(inputs, tensors):
            all_tensors[index] = tensor
        return function(*all_tensors)[used]

    chosen = [arrays[i] for i in inputs], [upstream[used]], [directions[i] for i in inputs]
    alone = second_order.second_order(one_output, *chosen)
    zeroed = [d if i in inputs else np.zeros_like(d) for i, d in enumerate(directions)]
    full = second_order.second_order(function, arrays, upstream, zeroed)
    pairs = [*zip(alone[0], (full[0][i] for i in inputs)), (alone[1][0], full[1][used])]
    for a, b in pairs:
        zero = np.zeros(1)
        np.testing.assert_array_equal(zero if a is None else a, zero if b is None else b, name)


@pytest.mark.parametrize("name", [n for n in TWICE if len(TWICE[n][1]) > 1])
def test_second_order_with_frozen_inputs(rng, name):
    """Each set of frozen inputs: what is left has the gradients of zero directions elsewhere."""
    function, shapes = CASES[name]
    arrays = make_inputs(rng, name)
    upstream = make_upstream(rng, function, arrays)
    directions = [random_array(rng, a.shape, "float64") for a in arrays]
    for count in range(1, len(shapes)):
        for live in itertools.combinations(range(len(shapes)), count):

            def partly_frozen(*tensors, live=live):
                frozen = [to_paddle(a) for a in arrays]
                for index, tensor in zip(live, tensors):
                    frozen[index] = tensor
                return function(*frozen)

            chosen = [arrays[i] for i in live], upstream, [directions[i] for i in live]
            inputs, ddout = second_order.second_order(partly_frozen, *chosen)
            zeroed = [d if i in live else np.zeros_like(d) for i, d in enumerate(directions)]
            expected = second_order.second_order(function, arrays, upstream, zeroed)
            for a, b in zip([*inputs, *ddout], [*(expected[0][i] for i in live), *expected[1]]):
                actual = np.zeros_like(b) if a is None else a
                np.testing.assert_array_equal(actual, b, f"{name}, {live} live")


@pytest.mark.parametrize("magnitude", [1e-18, 1e15, 1e18, 1e19])
def test_second_order_of_rows_whose_squares_leave_the_range(rng, magnitude):
    x = (rng.uniform(0.25, 1.0, (2, 40)) * magnitude).astype(np.float32)
    g, v = (random_array(rng, (2, 40), "float32") for _ in range(2))
    weight, u = (random_array(rng, (40,), "float32") for _ in range(2))
    inputs, ddout = second_order.second_order(
        lambda x, w: F.rms_norm(x, w, 0.0), [x, weight], [g], [v, u]
    )
    expected = oracle.rms_norm_double_grad(x, weight, g, v, u, 0.0)
    scales = second_order.rms_norm_scale(x, weight, g, v, u, 0.0)
    for actual, *values in zip((*inputs, *ddout), expected, scales):
        check(actual, values[0], "float32", values[1], 40)


# Without position ids, which are made for the batch of the table of cases.
@pytest.mark.parametrize("name", [n for n in {**TWICE, **ROTATIONS} if "ids" not in n])
def test_second_order_of_no_rows(name):
    function, shapes = CASES[name]
    arrays = [np.zeros(shape if shape == W else (0, *shape[1:])) for shape in shapes]
    upstream = [np.zeros_like(out) for out in outputs_of(function, arrays)]
    directions = [np.ones_like(a) for a in arrays]
    found = second_order.second_order(function, arrays, upstream, directions)
    for given, results in zip((arrays, upstream), found):
        for array, result in zip(given, results):
            if result is not None:
                numeric.assert_bit_equal(result, np.zeros_like(array))


@pytest.mark.parametrize("name", ONCE)
def test_second_order_that_does_not_exist_raises(rng, name):
    function, _ = CASES[name]
    arrays = make_inputs(rng, name)
    upstream = make_upstream(rng, function, arrays)
    for used in range(len(arrays)):
        directions = [np.ones_like(a) if i == used else None for i, a in enumerate(arrays)]
        with pytest.raises(NotImplementedError, match="second-order"):
            second_order.second_order(function, arrays, upstream, directions)


@pytest.mark.parametrize("name", ROTATIONS)
def test_second_order_of_a_rotation_is_the_rotation(rng, name):
    function, _ = CASES[name]
    arrays = make_inputs(rng, name)
    upstream = make_upstream(rng, function, arrays)
    tensors, g, v = (
        [to_paddle(a, stop_gradient=False) for a in group] for group in (arrays, upstream, arrays)
    )
    first = paddle.grad(list(as_tuple(function(*tensors))), tensors, g, create_graph=True)
    second = paddle.grad(first, g, v)
    for actual, expected in zip(second, outputs_of(function, arrays)):
        numeric.assert_bit_equal(actual.numpy(), expected, name)


# Who gets a gradient


@pytest.mark.parametrize("name", CASES)
def test_stop_gradient(rng, name):
    """Every combination: needed gradients as if all were needed, None for the others."""
    function, _ = CASES[name]
    arrays = make_inputs(rng, name)
    upstream = make_upstream(rng, function, arrays)
    every = run(function, arrays, upstream)[1]
    for size in range(1, len(arrays)):
        for frozen in itertools.combinations(range(len(arrays)), size):
            grads = run(function, arrays, upstream, frozen)[1]
            for index, (grad, expected) in enumerate(zip(grads, every)):
                assert (grad is None) == (index in frozen), f"{name}: {frozen}, {index}"
                if grad is not None:
                    numeric.assert_bit_equal(grad, expected, f"{name}: {frozen}, {index}")
    outputs = as_tuple(function(*(to_paddle(a) for a in arrays)))
    assert all(out.stop_gradient for out in outputs), "nothing needs a gradient"


@pytest.mark.parametrize("name", CASES)
def test_some_outputs_used(rng, name):
    """An output that the loss does not use counts as one whose gradient is zero."""
    function, _ = CASES[name]
    arrays = make_inputs(rng, name)
    upstream = make_upstream(rng, function, arrays)
    for used in itertools.product([True, False], repeat=len(upstream)):
        if not any(used):
            continue
        some = [g if use else None for g, use in zip(upstream, used)]
        zeros = [g if use else np.zeros_like(g) for g, use in zip(upstream, used)]
        actual, expected = (run(function, arrays, grads)[1] for grads in (some, zeros))
        for a, b in zip(actual, expected):
            if a is None:
                assert not b.any(), f"{name}: {used}"
            else:
                np.testing.assert_array_equal(a, b, f"{name}: {used}")


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_used_twice_adds_its_gradients(rng, name):
    function, _ = CASES[name]
    arrays = make_inputs(rng, name)
    upstream = make_upstream(rng, function, arrays)
    once = run(function, arrays, upstream)[1]
    twice = run(
        lambda *t: (*as_tuple(function(*t)), *as_tuple(function(*t))), arrays, upstream * 2
    )[1]
    for a, b in zip(once, twice):
        np.testing.assert_array_equal(2 * a, b)


def test_gradients_that_are_not_differentiable():
    x = paddle.ones([2, 4])
    x.stop_gradient = False
    results = F.fused_swiglu_weighted_bwd(x, paddle.ones([2, 2]), paddle.ones([2]))
    y, invvar = F.fused_rms_norm_ext(x, paddle.ones([4]))
    results += F.fused_rms_norm_ext_grad(x, paddle.ones([4]), invvar, paddle.ones([2, 4]), 1e-5)
    assert all(r.stop_gradient for r in (*results, invvar))
    assert not y.stop_gradient
