"""Recompute, accumulation, hooks and hand-written layers: the same gradients, bit for bit."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils import recompute

import paddle_fused.nn.functional as F
from helpers.arrays import random_array, to_numpy, to_paddle
from helpers.numeric import assert_bit_equal
from paddle_fused import reference


def block(x, probs, weight, packed, q, k):
    """All kinds of operator, each with a gradient to its own inputs; outputs are tensors only."""
    out, total = F.rms_norm(x, weight, residual=x * 0.5)
    gated = F.fused_swiglu_weighted(packed, probs)
    q, k, _ = F.fused_rotary_position_embedding(q, k, use_neox_rotary_style=False)
    return out, total, F.swiglu(out, total), gated, q, k


SHAPES = [(4, 8), (4,), (8,), (4, 12), (2, 3, 4, 6), (2, 3, 2, 6)]
NAMES = ["x", "probs", "weight", "packed", "q", "k"]


def leaves(rng, frozen=()):
    """The inputs of a block."""
    arrays = [random_array(rng, shape, "float32") for shape in SHAPES]
    return [to_paddle(a, stop_gradient=NAMES[i] in frozen) for i, a in enumerate(arrays)]


def again(inputs):
    """The same values as new leaves."""
    return [to_paddle(to_numpy(one), stop_gradient=one.stop_gradient) for one in inputs]


def loss_of(outputs):
    """One number that all outputs have a share in, none with a constant gradient."""
    return sum((one.astype("float32") ** 2).sum() for one in outputs)


def assert_same_gradients(some, others):
    """The two lists of leaves have the same gradients."""
    for name, a, b in zip(NAMES, some, others):
        assert (a.grad is None) == (b.grad is None) == a.stop_gradient, name
        if a.grad is not None:
            assert_bit_equal(to_numpy(a.grad), to_numpy(b.grad), name)


@pytest.mark.parametrize("frozen", [[], ["weight"], ["x", "weight"], ["probs", "k"], ["packed"]])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute(rng, reentrant, frozen):
    plain = leaves(rng, frozen)
    kept = again(plain)
    loss_of(block(*plain)).backward()
    loss_of(recompute(block, *kept, use_reentrant=reentrant)).backward()
    assert_same_gradients(plain, kept)


def test_recompute_of_an_output_that_is_none(rng):
    """Paddle's reentrant form refuses None among outputs; the other one does not."""
    q, k = leaves(rng)[4:]

    def rotate(q, k):
        return F.fused_rotary_position_embedding(q, k)

    out_q, out_k, none = recompute(rotate, q, k, use_reentrant=False)
    assert none is None
    (out_q.sum() + out_k.sum()).backward()
    assert q.grad is not None and k.grad is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_accumulation(rng, reentrant):
    """Three backward passes add up as they do without recompute."""
    plain = leaves(rng)
    kept = again(plain)
    for scale in (1.0, 0.5, -2.0):
        (loss_of(block(*plain)) * scale).backward()
        (loss_of(recompute(block, *kept, use_reentrant=reentrant)) * scale).backward()
    assert_same_gradients(plain, kept)
    once = again(plain)
    loss_of(block(*once)).backward()
    assert not np.array_equal(to_numpy(once[0].grad), to_numpy(plain[0].grad))


def test_no_grad_inside(rng):
    """A teacher under no_grad leaves the student's gradients alone."""
    plain = leaves(rng)
    mixed = again(plain)
    loss_of(block(*plain)).backward()
    with paddle.no_grad():
        teacher = block(*mixed)
    assert all(one.stop_gradient for one in teacher)
    loss_of(block(*mixed)).backward()
    assert_same_gradients(plain, mixed)


def test_tensor_hooks(rng):
    """A hook that doubles a gradient in the middle doubles all that lie behind it."""
    plain, hooked = leaves(rng), None
    hooked = again(plain)
    seen = []
    loss = 0
    for inputs, hook in ((plain, False), (hooked, True)):
        outputs = block(*inputs)
        if hook:
            for one in outputs:
                one.register_hook(lambda grad: seen.append(grad.shape) or grad * 2)
        loss = loss_of(outputs[3:])
        loss.backward()
    assert len(seen) == 3
    for name in ("probs", "packed", "q", "k"):
        index = NAMES.index(name)
        assert_bit_equal(to_numpy(hooked[index].grad), to_numpy(plain[index].grad * 2), name)


def test_layer_hooks():
    from paddle_fused.nn import RMSNorm

    norm, seen = RMSNorm(8), []
    norm.register_forward_pre_hook(lambda layer, inputs: seen.append("before"))
    norm.register_forward_post_hook(lambda layer, inputs, out: seen.append("after") or out * 2)
    x = paddle.ones([2, 8])
    assert_bit_equal(norm(x).numpy(), (F.rms_norm(x, norm.weight) * 2).numpy())
    assert seen == ["before", "after"]


class WeightedByHand(paddle.autograd.PyLayer):
    """What ERNIE's expert does: our backward operator inside a layer of its own."""

    @staticmethod
    def forward(ctx, x, probs):
        ctx.save_for_backward(x, probs)
        return F.fused_swiglu_weighted(x, probs)

    @staticmethod
    def backward(ctx, grad):
        x, probs = ctx.saved_tensor()
        x_grad, probs_grad, _ = F.fused_swiglu_weighted_bwd(x, grad, probs)
        return x_grad, probs_grad


class NormByHand(paddle.autograd.PyLayer):
    """The same with fused_rms_norm_ext and its gradient."""

    @staticmethod
    def forward(ctx, x, scale):
        y, invvar = F.fused_rms_norm_ext(x, scale, 1e-6)
        ctx.save_for_backward(x, scale, invvar)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, scale, invvar = ctx.saved_tensor()
        return F.fused_rms_norm_ext_grad(x, scale, invvar, grad, 1e-6)


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("layer", ["weighted", "norm"])
def test_layers_written_by_hand(rng, layer, reentrant):
    shapes = [(5, 12), (5,)] if layer == "weighted" else [(5, 12), (12,)]
    by_hand, plain = (
        (WeightedByHand.apply, F.fused_swiglu_weighted)
        if layer == "weighted"
        else (NormByHand.apply, lambda x, scale: F.fused_rms_norm_ext(x, scale, 1e-6)[0])
    )
    one = [to_paddle(random_array(rng, shape, "float32"), stop_gradient=False) for shape in shapes]
    two = again(one)
    (plain(*one) ** 2).sum().backward()
    out = (
        by_hand(*two)
        if reentrant is None
        else recompute(lambda *a: by_hand(*a), *two, use_reentrant=reentrant)
    )
    (out**2).sum().backward()
    for a, b in zip(one, two):
        assert_bit_equal(to_numpy(a.grad), to_numpy(b.grad))


# ---- memory


def saved_bytes(function, rows: int, inner: int, dtype: str) -> float:
    """Bytes per row that the backward pass keeps, each memory counted once."""
    x = paddle.ones([rows, 2 * inner]).astype(dtype)
    probs = paddle.ones([rows])
    x.stop_gradient = probs.stop_gradient = False
    saved = {}

    def pack(tensor):
        saved[tensor.data_ptr()] = tensor.size * tensor.element_size()
        return tensor

    with paddle.autograd.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(x, probs)
    assert out.shape == [rows, inner]
    return sum(saved.values()) / rows


@pytest.mark.parametrize("dtype,size", [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_weighted_saves_its_inputs_only(dtype, size):
    """The packed input and one prob per row: the figures in docs/amp.md."""
    assert saved_bytes(F.fused_swiglu_weighted, 16, 64, dtype) == 2 * 64 * size + 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_saves_more(dtype):
    """Four float32 tensors of the inner width, whatever x's dtype."""
    assert saved_bytes(reference.fused_swiglu_weighted, 16, 64, dtype) == 4 * 64 * 4 + 4
