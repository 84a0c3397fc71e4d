"""Paddle 3.3.1's fused kernels in NumPy: where they compute in float32, and where they round.

Their CPU has none of these kernels; what they compute is written here from a description of them.
A function takes arrays of one of the float dtypes and returns what Paddle's would.
"""

from __future__ import annotations

import numpy as np

F32 = np.float32


def wide(array):
    """As the kernels load it: every dtype becomes float32."""
    return np.asarray(array).astype(F32)


def sigmoid(a):
    with np.errstate(over="ignore"):
        return F32(1) / (F32(1) + np.exp(-a))


def fused_swiglu_weighted_bwd(o1, do2_s, probs):
    """(do1, probs_grad, o2_s): nothing is rounded but the three results."""
    gate, up = np.split(wide(o1), 2, axis=-1)
    g, p = wide(do2_s), wide(probs).reshape((*gate.shape[:-1], 1))
    s = sigmoid(gate)
    silu = s * gate
    weighted = g * p
    d_gate = weighted * up * s * (F32(1) + gate - silu)
    do1 = np.concatenate([d_gate, weighted * silu], axis=-1)
    probs_grad = (g * (silu * up)).sum(axis=-1, dtype=F32).reshape(np.shape(probs))
    return do1.astype(o1.dtype), probs_grad, (silu * up * p).astype(o1.dtype)


def inverse_rms(x, epsilon):
    mean = (x * x).sum(axis=-1, keepdims=True, dtype=F32) / F32(x.shape[-1])
    return F32(1) / np.sqrt(mean + F32(epsilon))


def fused_rms_norm(x, weight, norm_bias=None, epsilon=1e-6, axis=1, bias=None, residual=None):
    """(out, residual_out): x + residual is rounded, + bias again; without residual no bias."""
    total = x
    if residual is not None:
        total = (wide(x) + wide(residual)).astype(x.dtype)
        if bias is not None:
            total = (wide(total) + wide(bias)).astype(x.dtype)
    rows = wide(total).reshape((*x.shape[:axis], -1))
    out = rows * inverse_rms(rows, epsilon) * wide(weight)
    out = out if norm_bias is None else out + wide(norm_bias)
    return out.reshape(x.shape).astype(x.dtype), None if residual is None else total


def fused_rms_norm_ext(x, scale, epsilon=1e-5):
    """(y, invvar): the scale's dtype, one rounding."""
    inverse = inverse_rms(wide(x), epsilon)
    return ((wide(scale) * inverse) * wide(x)).astype(scale.dtype), inverse[..., 0]


def fused_rms_norm_ext_grad(x, scale, invvar, y_grad):
    """(x_grad, scale_grad)."""
    n, inverse = F32(x.shape[-1]), wide(invvar)[..., None]
    xs, c = wide(x), wide(y_grad) * wide(scale)
    total = (c * xs * inverse).sum(axis=-1, keepdims=True, dtype=F32)
    x_grad = (n * c - xs * inverse * total) * (inverse / n)
    scale_grad = (wide(y_grad) * xs * inverse).reshape(-1, x.shape[-1]).sum(axis=0, dtype=F32)
    return x_grad.astype(x.dtype), scale_grad.astype(scale.dtype)


def _rotate(x, sin, pairs, sign):
    """The partner's term of each feature; sign is 1 forward and -1 backward."""
    turned = np.empty_like(x)
    if pairs:
        first, second = np.s_[..., 0::2], np.s_[..., 1::2]
    else:
        half = x.shape[-1] // 2
        first, second = np.s_[..., :half], np.s_[..., half:]
    own = (sin[first], sin[second]) if sign == 1 else (sin[second], sin[first])
    turned[first] = -sign * x[second] * own[0]
    turned[second] = sign * x[first] * own[1]
    return turned


def _tables(table, ids, length, time_major):
    rows = wide(table).reshape(-1, table.shape[-1])
    rows = rows[None, :length] if ids is None else rows[ids]
    rows = rows[:, :, None, :]
    return np.swapaxes(rows, 0, 1) if time_major else rows


def rope(x, sin, cos, ids=None, pairs=True, time_major=False, sign=1):
    """One of q, k and v; with sign -1 the gradient. Features beyond the tables are copied."""
    length = x.shape[0 if time_major else 1]
    sin, cos = (_tables(table, ids, length, time_major) for table in (sin, cos))
    rotary = sin.shape[-1]
    head = wide(x[..., :rotary])
    sin = np.broadcast_to(sin, head.shape)
    out = head * cos + _rotate(head, sin, pairs, sign)
    return np.concatenate([out.astype(x.dtype), x[..., rotary:]], axis=-1)


def default_tables(length, width, base=10000.0):
    """(sin, cos) that the kernel computes itself, in float32, for adjacent pairs."""
    exponent = F32(2) * (np.arange(width) // 2).astype(F32) / F32(width)
    inverse = F32(1) / np.power(F32(base), exponent)
    angle = np.arange(length, dtype=F32)[:, None] * inverse
    return np.sin(angle), np.cos(angle)
