"""RMSNorm, SwiGLUMLP and RotaryEmbedding as layers of a model."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from helpers import numeric, oracle
from helpers.arrays import random_array, to_numpy, to_paddle
from helpers.running import check
from paddle_fused.nn import RMSNorm, RotaryEmbedding, SwiGLUMLP


def set_parameters(layer, rng, dtype="float32"):
    """Random values for every parameter; returns them as arrays by name."""
    values = {n: random_array(rng, p.shape, dtype) for n, p in layer.named_parameters()}
    for name, parameter in layer.named_parameters():
        parameter.set_value(to_paddle(values[name]))
    return values


def test_state_dict_keys():
    assert list(RMSNorm(8).state_dict()) == ["weight"]
    assert not RMSNorm(8, weight_attr=False).state_dict()
    names = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
    assert list(SwiGLUMLP(8, 12).state_dict()) == names
    assert not RotaryEmbedding(8).state_dict()
    biased = SwiGLUMLP(8, 12, bias_attr=None).state_dict()
    assert {n for n in biased if n.endswith("bias")} == {n.replace("weight", "bias") for n in names}


def test_state_dict_shapes():
    shapes = {n: list(p.shape) for n, p in SwiGLUMLP(8, 12).state_dict().items()}
    assert shapes == {
        "gate_proj.weight": [8, 12],
        "up_proj.weight": [8, 12],
        "down_proj.weight": [12, 8],
    }
    assert list(RMSNorm(8).weight.shape) == [8]


# RMSNorm


@pytest.mark.parametrize("mode", ["llama", "gemma"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("residual", [True, False])
def test_rms_norm(rng, dtype, mode, offset, residual):
    x, r = (random_array(rng, (2, 3, 40), dtype) for _ in range(2))
    layer = RMSNorm(40, epsilon=1e-5, offset=offset, casting_mode=mode).to(dtype=dtype)
    weight = set_parameters(layer, rng, dtype)["weight"]
    if residual:
        out, total = layer(to_paddle(x), to_paddle(r))
        expected_total = oracle.residual_sum(x, r)
        x = to_numpy(total)
        np.testing.assert_array_equal(x.astype(np.float64), expected_total)
    else:
        out = layer(to_paddle(x))
    expected = oracle.rms_norm(x, weight, 1e-5, offset)
    assert numeric.dtype_name(to_numpy(out).dtype) == dtype
    numeric.assert_ulp(to_numpy(out), expected, numeric.rms_norm_bound(dtype, mode))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_new_rms_norm_only_normalises(rng, offset):
    x = random_array(rng, (3, 16), "float32")
    layer = RMSNorm(16, offset=offset)
    np.testing.assert_array_equal(to_numpy(layer.weight), 1.0 - offset)
    check(to_numpy(layer(to_paddle(x))), oracle.rms_norm(x), "float32")


WRONG_LAYERS = [
    (lambda: RMSNorm(8, offset=0.5, weight_attr=False), ValueError, "offset"),
    (lambda: RMSNorm(8, casting_mode="bf16"), ValueError, "casting_mode"),
    (lambda: RMSNorm(8, epsilon=float("nan")), ValueError, "epsilon"),
    (lambda: RMSNorm("8"), TypeError, "hidden_size"),
    (lambda: RotaryEmbedding(4, base=-1.0), ValueError, "base"),
    (lambda: RotaryEmbedding(4, base=True), TypeError, "base"),
    (lambda: RotaryEmbedding(4.0), TypeError, "head_dim"),
    (lambda: RotaryEmbedding(4, max_position_embeddings=-1), ValueError, "max_position"),
]


@pytest.mark.parametrize("make, error, argument", WRONG_LAYERS)
def test_wrong_arguments_of_layers(make, error, argument):
    with pytest.raises(error, match=rf"\w+\(\): {argument}"):
        make()


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_without_weight(rng, offset):
    x = random_array(rng, (3, 16), "float32")
    layer = RMSNorm(16, offset=offset, weight_attr=False)
    assert layer.weight is None and not layer.parameters()
    check(to_numpy(layer(to_paddle(x))), oracle.rms_norm(x), "float32")


def test_rms_norm_weight_attr():
    attr = paddle.ParamAttr(initializer=paddle.nn.initializer.Constant(3.0), trainable=False)
    layer = RMSNorm(4, weight_attr=attr)
    assert layer.weight.stop_gradient
    np.testing.assert_array_equal(to_numpy(layer.weight), 3.0)


@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
def test_rms_norm_of_half_with_a_float32_weight(rng, x_dtype):
    """As a layer that stays float32 in a model of mixed precision."""
    x = random_array(rng, (3, 16), x_dtype)
    layer = RMSNorm(16)
    out = layer(to_paddle(x))
    assert numeric.dtype_name(to_numpy(out).dtype) == x_dtype
    out.sum().backward()
    assert layer.weight.grad.dtype == paddle.float32


def test_default_dtype_of_the_weight():
    before = paddle.get_default_dtype()
    try:
        paddle.set_default_dtype("bfloat16")
        assert RMSNorm(4).weight.dtype == paddle.bfloat16
    finally:
        paddle.set_default_dtype(before)


# SwiGLUMLP


def test_swiglu_mlp(rng):
    x = random_array(rng, (2, 5, 8), "float64")
    layer = SwiGLUMLP(8, 12, bias_attr=None).to(dtype="float64")
    p = set_parameters(layer, rng, "float64")

    def linear(value, name):
        return value @ p[f"{name}.weight"] + p[f"{name}.bias"]

    hidden = oracle.swiglu(linear(x, "gate_proj"), linear(x, "up_proj"))
    expected = linear(hidden, "down_proj")
    np.testing.assert_allclose(to_numpy(layer(to_paddle(x))), expected, rtol=1e-11)


# RotaryEmbedding


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("with_ids", [True, False])
def test_rotary_embedding(rng, dtype, interleaved, rotary_dim, with_ids):
    q, k = random_array(rng, (2, 5, 4, 8), dtype), random_array(rng, (2, 5, 1, 8), dtype)
    ids = rng.integers(0, 32, (2, 5)) if with_ids else None
    layer = RotaryEmbedding(8, 32, 100.0, rotary_dim, interleaved)
    outputs = layer(to_paddle(q), to_paddle(k), None if ids is None else to_paddle(ids))
    style = oracle.PAIRS if interleaved else oracle.HALVES_STYLE
    positions = np.arange(5)[None] if ids is None else ids
    cos, sin = (t[:, :, None] for t in oracle.rope_tables(positions, rotary_dim or 8, 100.0, style))
    for out, x in zip(outputs, (q, k)):
        scale = oracle.rope_scale(x, cos, sin, style)
        check(to_numpy(out), oracle.rope(x, cos, sin, style), dtype, scale)
    alone = layer(to_paddle(q), position_ids=None if ids is None else to_paddle(ids))
    numeric.assert_bit_equal(to_numpy(alone), to_numpy(outputs[0]))


def test_rotary_tables_stay_float32_when_cast(rng):
    layer = RotaryEmbedding(8, 4096)
    cos, sin = (to_numpy(t) for t in layer.tables())
    q = to_paddle(random_array(rng, (1, 4096, 1, 8), "bfloat16"))
    before = to_numpy(layer(q))
    layer.to(dtype="bfloat16")
    for table, expected in zip(layer.tables(), (cos, sin)):
        numeric.assert_bit_equal(to_numpy(table), expected)
    numeric.assert_bit_equal(to_numpy(layer(q)), before)


@pytest.mark.parametrize("rotary_dim", [0, 3, 10, -2])
def test_rotary_dim_is_checked(rotary_dim):
    with pytest.raises(ValueError, match=r"RotaryEmbedding\(\): rotary_dim"):
        RotaryEmbedding(8, rotary_dim=rotary_dim)


def test_more_tokens_than_positions():
    with pytest.raises(ValueError, match="cos"):
        RotaryEmbedding(8, 4)(paddle.ones([1, 5, 1, 8]))


# All together


class Block(paddle.nn.Layer):
    """One pre-norm block with rotated attention, small."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = RMSNorm(16), RMSNorm(16, offset=1.0, casting_mode="gemma")
        self.qkv = paddle.nn.Linear(16, 16 + 2 * 8)
        self.rotary = RotaryEmbedding(8, 32)
        self.mlp = SwiGLUMLP(16, 24)

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).reshape([*x.shape[:2], 4, 8])
        q, k = self.rotary(qkv[:, :, :2], qkv[:, :, 2:3])
        weights = paddle.nn.functional.softmax(paddle.einsum("bshd,btgd->bhst", q, k) / 8**0.5)
        mixed = paddle.einsum("bhst,btgd->bshd", weights, qkv[:, :, 3:])
        normed, total = self.mlp_norm(mixed.reshape(x.shape), x)
        return total + self.mlp(normed)


def train(model, x, target, steps=12):
    """The losses of some Adam steps."""
    optimizer = paddle.optimizer.Adam(learning_rate=0.01, parameters=model.parameters())
    losses = []
    for _ in range(steps):
        loss = ((model(x).astype("float32") - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


# Paddle's own matmul has no kernel for halves on a CPU, so the projections train in these two.
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_training_decreases_the_loss(rng, kind):
    paddle.seed(3)
    model = Block().to(dtype=kind)
    x = to_paddle(random_array(rng, (2, 6, 16), kind))
    target = to_paddle(random_array(rng, (2, 6, 16), "float32"))
    before = {n: to_numpy(p).copy() for n, p in model.named_parameters()}
    losses = train(model, x, target)
    assert losses[-1] < 0.8 * losses[0], losses
    assert all(np.isfinite(losses))
    for name, parameter in model.named_parameters():
        assert (to_numpy(parameter) != before[name]).any(), f"{name} did not train"
        assert numeric.dtype_name(to_numpy(parameter).dtype) == kind


def test_state_dict_round_trip(rng, tmp_path):
    model, other = Block(), Block()
    set_parameters(model, rng)
    x = to_paddle(random_array(rng, (2, 6, 16), "float32"))
    paddle.save(model.state_dict(), str(tmp_path / "model.pdparams"))
    missing, unexpected = other.set_state_dict(paddle.load(str(tmp_path / "model.pdparams")))
    assert not missing and not unexpected
    numeric.assert_bit_equal(to_numpy(other(x)), to_numpy(model(x)))


def test_cast_to_bfloat16(rng):
    """Parameters follow; the layers without a matmul run, which Paddle has no CPU kernel for."""
    model = Block().to(dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {paddle.bfloat16}
    x, residual = (random_array(rng, (2, 6, 16), "bfloat16") for _ in range(2))
    out, total = model.mlp_norm(to_paddle(x), to_paddle(residual))
    total = to_numpy(total)
    check(to_numpy(out), oracle.rms_norm(total, np.zeros(16), 1e-6, 1.0), "bfloat16")
    q = to_paddle(x.reshape(2, 6, 2, 8))
    assert model.rotary(q).dtype == paddle.bfloat16


def test_repr_tells_the_settings():
    text = repr(RMSNorm(8, epsilon=1e-5, offset=1.0, casting_mode="gemma"))
    assert all(part in text for part in ("8", "1e-05", "offset=1.0", "gemma"))
    assert "base=500.0" in repr(RotaryEmbedding(8, base=500.0))
