"""PaddleFormers 1.2.0 as it is: patched with fused flags against unpatched without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from library import (
    FAMILIES,
    FLAGS,
    SIZES,
    build,
    gradients,
    loss_of,
    replaced,
    tokens,
    went_through,
)

import paddle_fused

HERE = Path(__file__).resolve().parent
# Of the loss, and of a gradient's largest element: float32 in two orders of summation.
BOUND = 2e-5
BOTH = pytest.mark.parametrize("flags", ["defaults", "on"])
EACH = pytest.mark.parametrize("name", FAMILIES)


def reference(name):
    """The model without fused functions, where there is nothing of ours."""
    assert paddle_fused.patch_report().replaced == []
    return build(name, "off")


@EACH
@BOTH
def test_loss_and_every_gradient(name, flags):
    plain = reference(name)
    expected_loss, expected = gradients(plain, tokens())
    report = paddle_fused.patch()
    model = build(name, flags, like=plain)
    loss, actual = gradients(model, tokens())
    assert went_through(report, replaced(name, flags)) == replaced(name, flags)
    assert loss == pytest.approx(expected_loss, rel=BOUND)
    assert list(actual) == list(expected)
    for parameter, wanted in expected.items():
        got = actual[parameter]
        assert (got is None) == (wanted is None), parameter
        if wanted is not None:
            largest = np.abs(wanted).max()
            worst = np.abs(got - wanted).max()
            assert worst <= BOUND * largest, f"{parameter}: {worst / largest:.2g}"


def train(model, steps=20):
    """Losses of some steps on one batch."""
    optimizer = paddle.optimizer.AdamW(3e-3, parameters=model.parameters())
    losses = []
    for _ in range(steps):
        loss = loss_of(model, tokens())
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def greedy(model):
    """Eight tokens after a prompt, each the likeliest."""
    model.eval()
    ids, _ = model.generate(
        tokens(2, 5), max_new_tokens=8, decode_strategy="greedy_search", eos_token_id=63
    )
    return ids.numpy().tolist()


# The stock model's own error when it generates.
NO_GENERATION = {
    "DeepSeek-V3": (ValueError, "Broadcast dimension mismatch"),  # its rotation of one token
}


@EACH
def test_twenty_steps_and_the_same_tokens(name):
    plain = reference(name)
    start = build(name, "off", like=plain)
    expected = train(plain)
    expected_tokens = greedy(plain) if name not in NO_GENERATION else None
    with paddle_fused.patched():
        model = build(name, "defaults", like=start)
        losses = train(model)
        np.testing.assert_allclose(losses, expected, rtol=1e-3)
        assert losses[-1] < 0.7 * losses[0]
        if name not in NO_GENERATION:
            assert greedy(model) == expected_tokens


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("name", NO_GENERATION)
def test_stock_models_that_cannot_generate(name, patched):
    model = build(name, "off")
    if patched:
        paddle_fused.patch()
    kind, text = NO_GENERATION[name]
    with pytest.raises(kind, match=text):
        greedy(model)


@EACH
def test_live_model(name):
    """Built, run unpatched without flags, patched, and taken back: bits, keys, parameters."""
    model = reference(name)
    keys, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
    before = gradients(model, tokens())
    with paddle_fused.patched(model=model) as report:
        loss, _ = gradients(model, tokens())
        assert report.hits > 0
        assert loss == pytest.approx(before[0], rel=BOUND)
        assert list(model.state_dict()) == keys
        assert [id(p) for p in model.parameters()] == parameters
    after = gradients(model, tokens())
    assert after[0] == before[0]
    for parameter, wanted in before[1].items():
        if wanted is not None:
            np.testing.assert_array_equal(after[1][parameter], wanted, err_msg=parameter)


# What the library itself cannot do on a CPU; docs/compatibility.md has the same table.

NO_NORM = "The kernel `fused_rms_norm_ext` is not registered"
OWN_NORM = ("Gemma 3", "Qwen3-Next")  # in plain operators, whatever the flags say


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in OWN_NORM])
def test_unpatched_defaults_fail(name):
    with pytest.raises(RuntimeError, match=NO_NORM):
        loss_of(build(name, "defaults"), tokens())


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_fails_patched_or_not(name):
    """Paddle's CPU has no bfloat16 kernel of operators around ours."""
    kernel = "uniform_inplace" if name == "Qwen3-Next" else "matmul"
    error = rf"bfloat16\) of kernel `{kernel}` is not registered"
    for patched in (False, True):
        if patched:
            paddle_fused.patch()
        with pytest.raises(RuntimeError, match=error):
            loss_of(build(name, "defaults" if patched else "off", "bfloat16"), tokens())


def test_ernie_experts_need_a_gpu():
    from paddleformers import transformers

    for flags in ("off", "defaults"):
        if flags == "defaults":
            paddle_fused.patch()
        config = transformers.Ernie4_5_MoeConfig(
            **SIZES, **FLAGS[flags], moe_num_experts=4, moe_k=2, num_nextn_predict_layers=0
        )
        model = transformers.Ernie4_5_MoeForCausalLM(config)
        with pytest.raises(RuntimeError, match=r"kernel .expand_modality_expert_id. is not regist"):
            loss_of(model, tokens())


@pytest.mark.parametrize(
    "model, error",
    [
        ("Qwen2ForCausalLM", "paddlefleet is required for gpt_provider"),
        ("Qwen2MoeForCausalLM", "paddlefleet is required for gpt_provider"),
        ("Qwen3ForCausalLM", "paddlefleet is required for gpt_provider"),
        ("Glm4MoeForCausalLM", "paddlefleet is required for gpt_provider"),
        ("Qwen3MoeForCausalLM", "No module named 'paddlefleet_ops'"),
        ("DeepseekV3ForCausalLM", "No module named 'paddlefleet_ops'"),
        ("Qwen3NextForCausalLM", "No module named 'paddlefleet_ops'"),
    ],
)
def test_models_that_need_paddlefleet(model, error):
    """Without the stand-in, which takes a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", f"from paddleformers.transformers import {model}"],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=120,
    )
    assert result.returncode != 0
    assert error in result.stderr


FIVE_LINES = """
import paddle, paddle_fused
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM
{patch}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48,
                                     num_hidden_layers=2, num_attention_heads=4))
ids = paddle.randint(0, 64, [2, 12])
model(ids, labels=ids)[0].backward()
"""


@pytest.mark.parametrize("patch", [False, True])
def test_five_lines(patch):
    code = FIVE_LINES.format(patch="paddle_fused.patch()" if patch else "")
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=120
    )
    if patch:
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode != 0
        assert NO_NORM in result.stderr
