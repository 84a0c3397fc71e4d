"""Automatic mixed precision: which mixtures of dtypes the functions take, and what comes out.

On a CPU paddle.amp.auto_cast changes nothing, not even its own flag, which these tests set
themselves. They bring what auto_cast leaves on a GPU: activations in half precision, weights and
tables in float32.
"""

from __future__ import annotations

import contextlib

import numpy as np
import paddle
import pytest

import paddle_fused.nn.functional as F
from helpers.amp import LEVELS, auto_cast
from helpers.arrays import random_array, to_numpy, to_paddle
from helpers.numeric import assert_bit_equal
from paddle_fused.nn import RMSNorm, RotaryEmbedding, SwiGLUMLP

HALVES = ["bfloat16", "float16"]


def draw(rng, shape, dtype):
    """A random leaf."""
    return to_paddle(random_array(rng, shape, dtype), stop_gradient=False)


def rope(q, k, v=None, sin=None, cos=None):
    """All that was rotated."""
    out = F.fused_rotary_position_embedding(q, k, v, sin, cos, use_neox_rotary_style=False)
    return [one for one in out if one is not None]


def mixtures(rng, half):
    """name: (function, inputs, dtype of the outputs without auto_cast, or None for TypeError)."""

    def d(dtype, *shape):
        return draw(rng, shape, dtype)

    single = "float32"
    return {
        "norm weight": (F.rms_norm, [d(half, 3, 8), d(single, 8)], half),
        "norm weight half": (F.rms_norm, [d(single, 3, 8), d(half, 8)], single),
        "fused_rms_norm weight, norm_bias": (
            lambda x, w, b: F.fused_rms_norm(x, w, b, 1e-6)[0],
            [d(half, 3, 8), d(single, 8), d(single, 8)],
            half,
        ),
        "ext scale": (
            lambda x, w: F.fused_rms_norm_ext(x, w)[0],
            [d(half, 3, 8), d(single, 8)],
            single,
        ),
        "probs": (F.fused_swiglu_weighted, [d(half, 3, 8), d(single, 3)], half),
        "tables": (
            lambda q, k, s, c: rope(q, k, None, s.detach(), c.detach()),
            [d(half, 1, 3, 2, 4), d(half, 1, 3, 1, 4), d(single, 3, 4), d(single, 3, 4)],
            half,
        ),
        "residual": (
            lambda x, w, r: F.rms_norm(x, w, residual=r),
            [d(half, 3, 8), d(single, 8), d(single, 3, 8)],
            None,
        ),
        "fused_rms_norm bias": (
            lambda x, w, b: F.fused_rms_norm(x, w, None, 1e-6, bias=b),
            [d(half, 3, 8), d(half, 8), d(single, 8)],
            None,
        ),
        "gate and up": (F.swiglu, [d(half, 3, 8), d(single, 3, 8)], None),
        "half probs": (F.fused_swiglu_weighted, [d(half, 3, 8), d(half, 3)], None),
        "half probs of float32": (F.fused_swiglu_weighted, [d(single, 3, 8), d(half, 3)], None),
        "q and k": (rope, [d(half, 1, 3, 2, 4), d(single, 1, 3, 1, 4)], None),
        "q, k and v": (
            rope,
            [d(single, 1, 3, 2, 4), d(half, 1, 3, 1, 4), d(half, 1, 3, 1, 4)],
            None,
        ),
        "apply q and k": (
            lambda q, k, c, s: F.apply_rotary_pos_emb(q, k, c.detach(), s.detach()),
            [d(half, 1, 2, 3, 4), d(single, 1, 1, 3, 4), d(half, 3, 4), d(single, 3, 4)],
            None,
        ),
        "half tables of float32": (
            lambda q, k, s, c: rope(q, k, None, s.detach(), c.detach()),
            [d(single, 1, 3, 2, 4), d(single, 1, 3, 1, 4), d(half, 3, 4), d(half, 3, 4)],
            None,
        ),
        "partial rope, sin and cos": (
            lambda x, c, s: F.fused_partial_rope(x, c.detach(), s.detach()),
            [d(half, 1, 3, 2, 4), d(half, 1, 3, 1, 4), d(single, 1, 3, 1, 4)],
            None,
        ),
    }


NAMES = list(mixtures(np.random.default_rng(0), "bfloat16"))


def outputs(function, inputs):
    """The outputs as a list."""
    out = function(*inputs)
    out = list(out) if isinstance(out, (tuple, list)) else [out]
    return [one for one in out if one is not None]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", NAMES)
def test_mixture_outside_auto_cast(rng, name, half):
    """Taken as the dtype rules say, or refused; never cast."""
    function, inputs, expected = mixtures(rng, half)[name]
    if expected is None:
        with pytest.raises(TypeError, match="expected"):
            function(*inputs)
        return
    out = outputs(function, inputs)
    assert {str(one.dtype) for one in out} == {f"paddle.{expected}"}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", NAMES)
def test_mixture_under_auto_cast(rng, name, half, level):
    """As outside if it is taken there, else all in float32; gradients in their leaves' dtypes."""
    function, inputs, expected = mixtures(rng, half)[name]
    with auto_cast(level, half):
        out = outputs(function, inputs)
    single = [one.astype("float32").detach() for one in inputs]
    if expected is None and name not in ("half probs", "partial rope, sin and cos"):
        assert {str(one.dtype) for one in out} == {"paddle.float32"}
        for got, want in zip(out, outputs(function, single)):
            assert_bit_equal(to_numpy(got), to_numpy(want))
    else:
        assert {str(one.dtype) for one in out} == {f"paddle.{expected or half}"}
    paddle.autograd.backward(out, [paddle.ones_like(one) for one in out])
    reached = [one for one in inputs if one.grad is not None]
    assert inputs[0].grad is not None
    for one in reached:
        assert one.grad.dtype == one.dtype
        assert paddle.isfinite(one.grad.astype("float32")).all()


@pytest.mark.parametrize("half", HALVES)
def test_bwd_under_auto_cast(rng, half):
    o1, do2 = draw(rng, (3, 8), half), draw(rng, (3, 4), "float32")
    probs = draw(rng, (3,), half)
    with pytest.raises(TypeError):
        F.fused_swiglu_weighted_bwd(o1, do2, probs)
    with auto_cast(dtype=half):
        got = F.fused_swiglu_weighted_bwd(o1, do2, probs)
    want = F.fused_swiglu_weighted_bwd(o1.astype("float32"), do2, probs.astype("float32"))
    for a, b in zip(got, want):
        assert_bit_equal(to_numpy(a), to_numpy(b))


def test_other_dtypes_are_refused_under_auto_cast_too(rng):
    x, y = draw(rng, (3, 8), "float64"), draw(rng, (3, 8), "float32")
    with auto_cast(), pytest.raises(TypeError):
        F.swiglu(x, y)
    with auto_cast(), pytest.raises(TypeError):
        F.fused_swiglu_weighted(y, paddle.ones([3], "int64"))
    with auto_cast(), pytest.raises(TypeError):
        F.swiglu([1.0, 2.0], y)


# ---- training


class Chain(paddle.nn.Layer):
    """Our layers around products that are cast as auto_cast's white list does on a GPU.

    The products themselves run in float32: Paddle's CPU has none in half precision.
    """

    def __init__(self, half):
        super().__init__()
        paddle.seed(7)
        self.half = half
        self.embed = paddle.nn.Linear(8, 16)
        self.norm, self.post_norm = RMSNorm(16), RMSNorm(16)
        self.rotary = RotaryEmbedding(8, max_position_embeddings=16)
        self.mlp = SwiGLUMLP(16, 24)
        self.gate = paddle.nn.Linear(16, 32)

    def cast(self, x):
        """To half precision, as a product's output comes."""
        return x.astype(self.half) if self.half else x

    def forward(self, x):
        h = self.embed(x)  # float32: the residual stream
        mixed = self.cast(self.norm(h)).reshape([*x.shape[:2], 2, 8])
        mixed = self.rotary(mixed).reshape(h.shape)
        out, h = self.post_norm(mixed, residual=h)  # half precision meets float32
        probs = paddle.nn.functional.sigmoid(h.mean(-1))
        packed = self.cast(self.gate(out.astype("float32")))
        return (h + F.fused_swiglu_weighted(packed, probs).astype("float32")).sum(-1)


def losses(half, steps=20):
    """Training losses, with the scaler that Paddle has on this device."""
    model = Chain(half)
    optimizer = paddle.optimizer.AdamW(0.02, parameters=model.parameters())
    model, optimizer = paddle.amp.decorate(model, optimizer, level="O2", dtype=half or "bfloat16")
    scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)
    rng = np.random.default_rng(3)
    x = paddle.to_tensor(rng.standard_normal((2, 4, 8)).astype("float32"))
    y = paddle.to_tensor(rng.standard_normal((2, 4)).astype("float32"))
    found = []
    for _ in range(steps):
        with auto_cast(dtype=half) if half else contextlib.nullcontext():
            loss = ((model(x) - y) ** 2).mean()
        scaler.scale(loss).backward()
        for parameter in model.parameters():
            assert parameter.grad is None or parameter.grad.dtype == parameter.dtype
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        found.append(float(loss))
    return found


@pytest.mark.filterwarnings("ignore:.*can only be enabled on CUDAPlace")
@pytest.mark.parametrize("half", HALVES)
def test_training_follows_float32(half):
    mixed, single = losses(half), losses(None)
    assert mixed[-1] < 0.2 * mixed[0]
    assert np.abs(np.subtract(mixed, single)).max() <= 0.03 * single[0]


@pytest.mark.filterwarnings("ignore:.*can only be enabled on CUDAPlace")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_paddles_own_auto_cast_changes_nothing_on_a_cpu(rng, level):
    x, w = draw(rng, (3, 8), "bfloat16"), draw(rng, (8,), "float32")
    plain = F.rms_norm(x, w)
    with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
        assert_bit_equal(to_numpy(F.rms_norm(x, w)), to_numpy(plain))
