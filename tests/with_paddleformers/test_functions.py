"""PaddleFormers' own eager functions as second opinions, forward and gradient."""

from __future__ import annotations

import importlib

import numpy as np
import paddle
import pytest
import stand_in

import paddle_fused
import paddle_fused.nn.functional as F
from helpers import numeric, oracle
from helpers.arrays import random_array, to_numpy, to_paddle
from helpers.running import run

HEADS_FIRST, SEQUENCE_FIRST = 1, 2
# Model, width of the rotary part of 8 features, table width, whether a head's rest is copied.
ROTATIONS = {
    "llama": 8,
    "qwen2": 8,
    "qwen2_moe": 8,
    "qwen3": 8,
    "qwen3_moe": 8,
    "gemma3_text": 8,
    "phi3": 4,
    "glm4_moe": 4,
    "gpt_oss": 4,
    "ernie4_5": 8,
}


def module_of(model):
    stand_in.install()
    return importlib.import_module(f"paddleformers.transformers.{model}.modeling")


def compare(actual, reference, dtype, what, scale=None):
    """Our result against the library's: theirs in float64, or rounded like ours."""
    bound = numeric.elementwise_bound(dtype)
    numeric.assert_ulp(actual, oracle.f64(reference), bound + 0.5, scale=scale, what=what)


def rotated(function, arrays, tables, grads, unsqueeze_dim):
    """(outputs, gradients of q and k)."""
    cos, sin = (to_paddle(table) for table in tables)
    arguments = {"unsqueeze_dim": unsqueeze_dim} if unsqueeze_dim else {"position_ids": None}
    return run(lambda q, k: function(q, k, cos, sin, **arguments), arrays, grads)


def magnitude(arrays):
    """What each result is a sum of at most."""
    return [np.full(a.shape, 2 * np.abs(oracle.f64(a)).max() * 3) for a in arrays]


@pytest.mark.parametrize("model", ROTATIONS)
@pytest.mark.parametrize("batch_of_tables", [1, 2])
@pytest.mark.parametrize("unsqueeze_dim", [HEADS_FIRST, SEQUENCE_FIRST])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_rotation(rng, model, batch_of_tables, unsqueeze_dim, dtype):
    if model == "ernie4_5" and unsqueeze_dim == SEQUENCE_FIRST:
        pytest.skip("left to the original: no ERNIE model calls it so")
    module = module_of(model)
    shapes = [(2, 4, 5, 8), (2, 2, 5, 8)]
    if unsqueeze_dim == SEQUENCE_FIRST:
        shapes = [(2, 5, 4, 8), (2, 5, 2, 8)]
    arrays = [random_array(rng, shape, dtype) for shape in shapes]
    grads = [random_array(rng, shape, dtype) for shape in shapes]
    tables = [random_array(rng, (batch_of_tables, 5, ROTATIONS[model]), dtype) for _ in range(2)]
    # Where Paddle's CPU has no bfloat16, theirs runs on the same values in float64; Llama and ERNIE
    # compute in float32 whatever comes.
    wide = [[a.astype("float64") for a in group] for group in (arrays, tables, grads)]
    expected = rotated(module.apply_rotary_pos_emb, *wide, unsqueeze_dim)
    with paddle_fused.patched() as report:
        got = rotated(module.apply_rotary_pos_emb, arrays, tables, grads, unsqueeze_dim)
    assert report.hits == 1
    theirs = "float32" if model in ("llama", "ernie4_5") and dtype == "float64" else dtype
    for group, wanted, values in zip(got, expected, (arrays, grads)):
        for one, other, scale in zip(group, wanted, magnitude(values)):
            assert numeric.dtype_name(one.dtype) == dtype
            other = other.astype("float64")
            if theirs == dtype:
                compare(one, other, dtype, model, scale)
            else:
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_rotation_of_deepseek(rng, with_ids, batch, dtype):
    module = module_of("deepseek_v3")
    arrays = [random_array(rng, (batch, 5, heads, 8), dtype) for heads in (4, 1)]
    grads = [random_array(rng, a.shape, dtype) for a in arrays]
    tables = [random_array(rng, (batch, 5, 1, 8), dtype) for _ in range(2)]
    ids = paddle.zeros([batch, 5], dtype="int64") if with_ids else None
    wide = [[a.astype("float64") for a in group] for group in (arrays, tables, grads)]

    def function(q, k, cos, sin, position_ids):
        return module.apply_rotary_pos_emb(q, k, cos, sin, ids)

    expected = rotated(function, *wide, None)
    with paddle_fused.patched() as report:
        got = rotated(function, arrays, tables, grads, None)
    assert report.hits == 1
    for group, wanted, values in zip(got, expected, (arrays, grads)):
        for one, other, scale in zip(group, wanted, magnitude(values)):
            compare(one, other, dtype, "deepseek_v3", scale)


class Config(dict):
    """As much of a configuration as a norm looks at."""

    hidden_size = 48
    rms_norm_eps = 1e-6


def norm_layer(kind, dtype):
    """(layer of the library, offset of its weight)."""
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        if kind in ("fused", "unfused"):
            norm = importlib.import_module("paddleformers.nn.norm")
            return norm.Norm.create(Config(fuse_rms_norm=kind == "fused")), 0.0
        if kind == "Gemma3RMSNorm":
            return module_of("gemma3_text").Gemma3RMSNorm(48), 1.0
        return module_of("qwen3_next").Qwen3NextRMSNorm(48), 1.0
    finally:
        paddle.set_default_dtype(before)


@pytest.mark.parametrize("kind", ["fused", "unfused", "Gemma3RMSNorm", "Qwen3NextRMSNorm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm(rng, kind, dtype):
    """Patched against the library's unfused path in float32, on the same values."""
    x, weight = random_array(rng, (4, 48), dtype), random_array(rng, (48,), dtype)
    g = random_array(rng, (4, 48), dtype)

    def through(layer, cast):
        layer.weight.set_value(to_paddle(weight.astype(cast)))
        out, (dx,) = run(layer, [x.astype(cast)], [g.astype(cast)])
        return out[0], dx, to_numpy(layer.weight.grad)

    plain, offset = norm_layer("unfused" if kind == "fused" else kind, "float32")
    expected = through(plain, "float32")
    with paddle_fused.patched() as report:
        got = through(norm_layer(kind, dtype)[0], numeric_type(dtype))
    assert report.hits == 1
    mode = "llama" if kind == "unfused" else "gemma"
    bound = numeric.rms_norm_bound(dtype, mode) + (0.5 if dtype == "float32" else 0.01)
    numeric.assert_ulp(got[0], oracle.f64(expected[0]), bound, what=kind)
    dx_scale, dw_scale = oracle.rms_norm_grad_scale(x, weight, g, 1e-6, offset)
    sums = numeric.sum_bound(dtype, 48) + 1
    numeric.assert_ulp(got[1], oracle.f64(expected[1]), sums, dx_scale, "dx")
    if mode == "gemma":
        numeric.assert_ulp(got[2], oracle.f64(expected[2]), sums, dw_scale, "dweight")


def numeric_type(dtype):
    """The NumPy type of a name."""
    return random_array(np.random.default_rng(0), (1,), dtype).dtype


def test_unfused_norm_in_bfloat16_is_equal_to_the_bit(rng):
    """The library rounds x r to bfloat16, then the product: "llama" is that to the bit."""
    x, weight = random_array(rng, (64, 48), "bfloat16"), random_array(rng, (48,), "bfloat16")
    layer, _ = norm_layer("unfused", "bfloat16")
    layer.weight.set_value(to_paddle(weight))
    expected = to_numpy(layer(to_paddle(x)))
    with paddle_fused.patched(model=layer):
        got = to_numpy(layer(to_paddle(x)))
    # 1 / rms is summed in another order: now and then x r falls to the other side of a tie.
    assert (got == expected).mean() >= 0.995
    numeric.assert_ulp(got, oracle.f64(expected), 2.0)


@pytest.mark.parametrize("weighted_before", [True, False])
def test_experts(rng, weighted_before):
    """MoeExperts weighs after its second product; `fused_swiglu_weighted` does before it."""
    from paddleformers.nn.experts import MoeExperts

    class Sizes:
        num_experts, hidden_size, moe_intermediate_size, hidden_act = 3, 8, 6, "silu"

    layer = MoeExperts(Sizes)
    x = random_array(rng, (10, 8), "float32")
    index = to_paddle(np.array([[0, 2]] * 4 + [[2, 0]] * 6))  # expert 1 gets no token
    weights = np.abs(random_array(rng, (10, 2), "float32")) + 0.1
    g = random_array(rng, (10, 8), "float32")

    def ours(hidden, top_k_weights):
        out = paddle.zeros_like(hidden)
        for expert in range(3):
            for place in range(2):
                rows = paddle.nonzero(index[:, place] == expert).flatten()
                o1 = paddle.matmul(paddle.gather(hidden, rows), layer.gate_up_proj[expert])
                probs = paddle.gather(top_k_weights[:, place], rows)
                if weighted_before:
                    o2 = F.fused_swiglu_weighted(o1, probs)
                    o3 = paddle.matmul(o2, layer.down_proj[expert])
                else:
                    o3 = paddle.matmul(F.swiglu(o1), layer.down_proj[expert]) * probs[:, None]
                if o3.shape[0]:  # Paddle cannot add no rows
                    out = paddle.scatter_nd_add(out, rows[:, None], o3)
        return out

    found = []
    for function in (lambda h, w: layer(h, index, w), ours):
        out, inputs = run(function, [x, weights], [g])
        found.append([*out, *inputs, *(to_numpy(p.grad) for p in layer.parameters())])
        layer.clear_gradients()
    for expected, got in zip(*found):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-5)
