"""Routed experts as ERNIE's pre-training computes them, patched.

All tokens of all experts stand below each other in one matrix; forward and backward are written by
hand, under no_grad, and weight gradients are added to a float32 `main_grad`. Paddle's CPU has no
grouped product and no half-precision one: here it is one product per expert, in float32, rounded.
"""

from __future__ import annotations

import numpy as np
import paddle
import paddle.incubate.nn.functional as incubate
import pytest

import paddle_fused
from helpers import numeric, oracle
from helpers.arrays import random_array, to_numpy, to_paddle

HIDDEN, INNER = 12, 10
COUNTS = [5, 0, 7, 4]  # tokens of each expert


def product(x, weights, counts, transposed=False):
    """Each expert's rows times its weight, rounded to x's dtype."""
    parts = paddle.split(x.astype("float32"), [c for c in counts if c])
    weights = [w for w, c in zip(weights, counts) if c]
    products = [
        paddle.matmul(part, w.astype("float32"), transpose_y=transposed)
        for part, w in zip(parts, weights)
    ]
    return paddle.concat(products).astype(x.dtype)


class Experts:
    """The node: forward keeps o1, backward computes the activation again.

    Attributes:
        fused: whether backward calls fused_swiglu_weighted_bwd or spells it out.
        rows_at_once: how many rows backward takes at a time; None for all.
    """

    def __init__(self, w1, w2, counts, fused=True, rows_at_once=None):
        self.w1, self.w2, self.counts = w1, w2, counts
        self.fused, self.rows_at_once = fused, rows_at_once
        self.gradients = [
            [paddle.zeros(w.shape, dtype="float32") for w in weights] for weights in (w1, w2)
        ]

    @paddle.no_grad()
    def forward(self, x, probs):
        self.x = x
        if x.shape[0] == 0:
            return paddle.zeros([0, HIDDEN], dtype=x.dtype)
        self.o1 = product(x, self.w1, self.counts)
        o2 = paddle.nn.functional.swiglu(self.o1).astype("float32") * probs.unsqueeze(-1)
        return product(o2.astype(x.dtype), self.w2, self.counts)

    @paddle.no_grad()
    def backward(self, grad, probs):
        """(dx, gradient of the probabilities)."""
        probs = probs.unsqueeze(-1)
        if grad.shape[0] == 0:
            return paddle.zeros_like(grad), paddle.zeros_like(probs).squeeze(-1)
        do2_s = product(grad, self.w2, self.counts, transposed=True)
        size = self.rows_at_once or grad.shape[0]
        starts = range(0, grad.shape[0], size)
        parts = [
            self.activation(*(t[s : s + size] for t in (self.o1, do2_s, probs))) for s in starts
        ]
        do1, probs_grad, o2_s = (paddle.concat(list(part)) for part in zip(*parts))
        self.add(0, self.x, do1)
        self.add(1, o2_s, grad)
        return product(do1, self.w1, self.counts, transposed=True), probs_grad.reshape([-1])

    def activation(self, o1, do2_s, probs):
        if self.fused:
            return incubate.fused_swiglu_weighted_bwd(o1, do2_s, probs)
        o2 = paddle.nn.functional.swiglu(o1).astype("float32")
        wide = do2_s.astype("float32")
        do1, _ = paddle._C_ops.swiglu_grad(o1, None, (wide * probs).astype(o1.dtype))
        return do1, (wide * o2).sum(axis=-1), (o2 * probs).astype(o1.dtype)

    def add(self, which, left, right):
        """The weight gradients, in float32."""
        start = 0
        for index, count in enumerate(self.counts):
            rows = slice(start, start + count)
            start += count
            if count:
                step = paddle.matmul(
                    left[rows].astype("float32"), right[rows].astype("float32"), transpose_x=True
                )
                self.gradients[which][index] += step


class Node(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, x, probs, experts):
        ctx.experts = experts
        ctx.save_for_backward(probs)
        return experts.forward(x, probs)

    @staticmethod
    def backward(ctx, grad):
        (probs,) = ctx.saved_tensor()
        return ctx.experts.backward(grad, probs)


def arrays(rng, dtype, counts=COUNTS):
    rows, experts = sum(counts), len(counts)
    w1 = random_array(rng, (experts, HIDDEN, 2 * INNER), dtype, 0.3)
    w2 = random_array(rng, (experts, INNER, HIDDEN), dtype, 0.3)
    x, g = (random_array(rng, (rows, HIDDEN), dtype) for _ in range(2))
    return x, np.abs(random_array(rng, (rows,), "float32")), w1, w2, g


def step(values, counts=COUNTS, **options):
    """(out, dx, dprobs, dw1, dw2) through autograd, as arrays."""
    x, probs, w1, w2, g = values
    weights = [[to_paddle(one) for one in group] for group in (w1, w2)]
    experts = Experts(*weights, counts, **options)
    leaves = [to_paddle(a, stop_gradient=False) for a in (x, probs)]
    out = Node.apply(*leaves, experts)
    paddle.autograd.backward([out], [to_paddle(g)])
    sums = [np.stack([to_numpy(t) for t in group]) for group in experts.gradients]
    return [to_numpy(t) for t in (out, *(leaf.grad for leaf in leaves))] + sums


def exact(values):
    """The same in float64, without a rounding."""
    x, probs, w1, w2, g = (oracle.f64(a) for a in values)
    found = [np.zeros_like(x), np.zeros_like(x), np.zeros_like(probs), w1 * 0, w2 * 0]
    start = 0
    for index, count in enumerate(COUNTS):
        rows = slice(start, start + count)
        start += count
        o1, do2_s = x[rows] @ w1[index], g[rows] @ w2[index].T
        do1, found[2][rows], o2_s = oracle.fused_swiglu_weighted_bwd(o1, do2_s, probs[rows])
        found[0][rows], found[1][rows] = o2_s @ w2[index], do1 @ w1[index].T
        found[3][index], found[4][index] = x[rows].T @ do1, o2_s.T @ g[rows]
    return found


def assert_near(got, wanted, relative):
    for one, other, what in zip(got, wanted, ("out", "dx", "dprobs", "dw1", "dw2")):
        worst = np.abs(oracle.f64(one) - oracle.f64(other)).max()
        assert worst <= relative * np.abs(oracle.f64(other)).max(), what


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype, relative", [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_forward_and_backward(rng, dtype, relative, fused):
    values = arrays(rng, dtype)
    with paddle_fused.patched() as report:
        got = step(values, fused=fused)
    assert report.hits == 2 + (not fused)
    assert report.fall_throughs == 0
    assert_near(got, exact(values), relative)
    assert numeric.dtype_name(got[0].dtype) == dtype
    assert numeric.dtype_name(got[2].dtype) == "float32"
    assert (got[3][1] == 0).all() and (got[4][1] == 0).all()  # the expert without tokens


def test_some_rows_at_a_time_are_equal_to_the_bit(rng):
    values = arrays(rng, "bfloat16")
    with paddle_fused.patched():
        for whole, parts in zip(step(values), step(values, rows_at_once=3)):
            numeric.assert_bit_equal(parts, whole)


def test_no_tokens_at_all(rng):
    with paddle_fused.patched():
        out, dx, dprobs, dw1, dw2 = step(arrays(rng, "bfloat16", [0, 0]), [0, 0])
        empty = [paddle.zeros(shape, dtype="bfloat16") for shape in ([0, 2 * INNER], [0, INNER])]
        results = incubate.fused_swiglu_weighted_bwd(*empty, paddle.zeros([0, 1]))
    assert (out.shape, dx.shape, dprobs.shape) == ((0, HIDDEN), (0, HIDDEN), (0,))
    assert not dw1.any() and not dw2.any()
    assert [r.shape for r in results] == [[0, 2 * INNER], [0, 1], [0, INNER]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unpatched_it_cannot_run(rng, dtype):
    with pytest.raises((RuntimeError, OSError), match="is not registered"):
        step(arrays(rng, dtype))
