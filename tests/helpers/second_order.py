"""Second-order gradients of a function, and Σ|terms| of those that the oracle gives."""

from __future__ import annotations

import numpy as np

from . import oracle
from .arrays import to_numpy, to_paddle
from .oracle import f64
from .running import as_tuple, leaf


def second_order(function, inputs, grads, directions):
    """The gradients of Σ⟨direction, input gradient⟩ in the inputs and in the upstream gradients.

    Args:
        function: takes as many tensors as there are inputs.
        inputs: arrays; each gets a first-order gradient.
        grads: an upstream gradient per output.
        directions: one per input, or None where the second loss does not use that gradient.

    Returns:
        (of inputs, of upstream gradients), None where none arrived.
    """
    import paddle

    tensors, upstream = ([leaf(a) for a in arrays] for arrays in (inputs, grads))
    outputs = as_tuple(function(*tensors))
    first = paddle.grad(list(outputs), tensors, upstream, create_graph=True)
    pairs = [(d, to_paddle(v)) for d, v in zip(first, directions) if v is not None]
    paddle.autograd.backward([d for d, _ in pairs], [v for _, v in pairs])
    return tuple(
        [None if t.grad is None else to_numpy(t.grad) for t in group]
        for group in (tensors, upstream)
    )


def swiglu_scale(a, b, g, v, u):
    """Σ|terms| of the split form of `oracle.swiglu_double_grad`."""
    a, b, g, v, u = (f64(t) for t in (a, b, g, v, u))
    s, t = oracle.sigmoid(a), oracle.sigmoid(-a)
    slope = s * (1.0 + np.abs(a) * t)
    curvature = s * t * (2.0 + np.abs(a) * np.abs(t - s))
    v, u, g, b = np.abs(v), np.abs(u), np.abs(g), np.abs(b)
    return v * g * b * curvature + u * g * slope, v * g * slope, v * b * slope + u * np.abs(a) * s


def rms_norm_scale(x, weight, g, v, u, epsilon, offset=0.0):
    """Σ|terms| of `oracle.rms_norm_double_grad`: (x, weight, ddout)."""
    r = oracle.inverse_rms(x, epsilon)
    x, g, v = (np.abs(f64(t)) for t in (x, g, v))
    factor = 1.0 if weight is None else np.abs(offset + f64(weight))
    u = 0.0 if u is None else np.abs(f64(u))
    c = g * factor

    def mean(values):
        return np.mean(values, axis=-1, keepdims=True)

    third = x * mean(v * c) + c * mean(v * x) + v * mean(c * x) + x * mean(u * g * x)
    fifth = 3.0 * x * mean(c * x) * mean(v * x)
    projected = r * v + r**3 * x * mean(v * x)
    weight_scale = (g * projected).reshape(-1, x.shape[-1]).sum(0)
    return r * u * g + r**3 * third + r**5 * fifth, weight_scale, factor * projected + u * x * r
