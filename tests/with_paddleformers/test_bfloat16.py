"""Whole models in bfloat16: patched and plain beside the same weights in float32.

Paddle's CPU has no bfloat16 kernel of the operators around ours; `half` lends them.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from half import computed_in_float32
from library import FAMILIES, build, gradients, loss_of, replaced, tokens, went_through

import paddle_fused

EACH = pytest.mark.parametrize("name", FAMILIES)


def models(name):
    """(float32, plain bfloat16, patched bfloat16), of the same weights."""
    with computed_in_float32():
        plain = build(name, "off", "bfloat16")
        with paddle_fused.patched():
            patched = build(name, "on", "bfloat16", like=plain)
    return build(name, "off", like=plain), plain, patched


def distance(found, exact):
    """The error of all gradients together, relative to their size."""
    names = [name for name in exact if exact[name] is not None]
    error = sum(((found[name] - exact[name]) ** 2).sum() for name in names)
    return float(np.sqrt(error / sum((exact[name] ** 2).sum() for name in names)))


@EACH
def test_loss_and_every_gradient(name):
    reference, plain, patched = models(name)
    exact_loss, exact = gradients(reference, tokens())
    with computed_in_float32():
        _, expected = gradients(plain, tokens())
        with paddle_fused.patched() as report:
            loss, found = gradients(patched, tokens())
    assert went_through(report, replaced(name, "on")) == replaced(name, "on")
    assert loss == pytest.approx(exact_loss, rel=2**-8)
    assert list(found) == list(expected)
    assert [k for k in found if found[k] is None] == [k for k in exact if exact[k] is None]
    # A router may send a token elsewhere than in float32, in either run: that is the distance of
    # the plain one.
    assert distance(found, exact) <= 1.5 * distance(expected, exact) + 0.01
    names = [k for k in exact if exact[k] is not None and np.abs(exact[k]).max() > 0]
    worst = max(distance({k: expected[k]}, {k: exact[k]}) for k in names)
    for k in names:
        assert distance({k: found[k]}, {k: exact[k]}) <= 2 * worst + 0.02, k


def descend(model, steps=20):
    """The losses of gradient descent: Paddle's optimizers have no bfloat16 on a CPU either."""
    losses = []
    for _ in range(steps):
        loss = loss_of(model, tokens())
        loss.backward()
        losses.append(float(loss))
        with paddle.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    wide = parameter.astype("float32") - 0.005 * parameter.grad.astype("float32")
                    parameter.set_value(wide.astype(parameter.dtype))
        model.clear_gradients()
    return losses


@EACH
def test_twenty_steps(name):
    _, plain, patched = models(name)
    with computed_in_float32():
        expected = descend(plain)
        with paddle_fused.patched():
            losses = descend(patched)
    np.testing.assert_allclose(losses, expected, rtol=0.03)
    assert losses[-1] < 0.8 * losses[0]
