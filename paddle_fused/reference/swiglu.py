"""SwiGLU and its weighted form in plain Paddle operators.

Paddle's own silu sets the limits: on CPU it underflows to 0, and its gradient is NaN, for gates
below −88, where exp(88) leaves float32.
"""

from __future__ import annotations

import paddle


def _widen(x: paddle.Tensor) -> paddle.Tensor:
    """X in the dtype that sums and products are computed in: float64 stays, others float32."""
    return x if x.dtype in (paddle.float32, paddle.float64) else x.astype(paddle.float32)


def _narrow(x: paddle.Tensor, dtype) -> paddle.Tensor:
    return x if x.dtype == dtype else x.astype(dtype)


def _per_row(probs: paddle.Tensor, x: paddle.Tensor) -> paddle.Tensor:
    """Probs `[...]` or `[..., 1]` as `[..., 1]`, in x's dtype."""
    if len(probs.shape) < len(x.shape):
        probs = probs.unsqueeze(-1)
    return _narrow(probs, x.dtype)


def swiglu(x: paddle.Tensor, y: paddle.Tensor | None = None, name: str | None = None):
    """silu(x)·y, or silu(gate)·up of x's two halves when y is None.

    Args:
        x: `[..., I]`, or `[..., 2I]` with the gate half first when y is None.
        y: `[..., I]` in x's dtype.
        name: ignored.

    Returns:
        `[..., I]` in x's dtype, computed in float32 (float64 for float64) and rounded once.
    """
    if y is None:
        x, y = paddle.chunk(x, 2, axis=-1)
    return _narrow(paddle.nn.functional.silu(_widen(x)) * _widen(y), x.dtype)


def fused_swiglu_weighted(x: paddle.Tensor, probs: paddle.Tensor, name: str | None = None):
    """silu(gate)·up·prob, one probability for each row.

    Args:
        x: `[..., 2I]`, gate half first.
        probs: float32 `[...]` or `[..., 1]`.
        name: ignored.

    Returns:
        `[..., I]` in x's dtype, computed in float32 (float64 for float64) and rounded once.
    """
    gate, up = paddle.chunk(_widen(x), 2, axis=-1)
    out = paddle.nn.functional.silu(gate) * up * _per_row(probs, up)
    return _narrow(out, x.dtype)


def fused_swiglu_weighted_bwd(
    o1: paddle.Tensor, do2_s: paddle.Tensor, unzipped_probs: paddle.Tensor, name: str | None = None
):
    """The gradients of `fused_swiglu_weighted`, and its output again.

    Args:
        o1: `[..., 2I]`, gate half first.
        do2_s: `[..., I]` in o1's dtype, the gradient of the weighted output.
        unzipped_probs: float32 `[...]` or `[..., 1]`.
        name: ignored.

    Returns:
        (do1, probs_grad, o2_s): `[..., 2I]` in o1's dtype, float32 in the shape of unzipped_probs,
        `[..., I]` in do2_s's dtype. Each is rounded once, from float32 (float64 for float64).
    """
    gate, up = paddle.chunk(_widen(o1), 2, axis=-1)
    grad = _widen(do2_s)
    prob = _per_row(unzipped_probs, gate)

    sigmoid = paddle.nn.functional.sigmoid(gate)
    # 1 - sigmoid without its cancellation, which a large gate would magnify.
    complement = paddle.nn.functional.sigmoid(-gate)
    silu = gate * sigmoid
    unweighted = silu * up
    grad_unweighted = grad * prob

    dgate = grad_unweighted * up * sigmoid * (1.0 + gate * complement)
    dup = grad_unweighted * silu
    do1 = paddle.concat([dgate, dup], axis=-1)
    keep = len(unzipped_probs.shape) == len(o1.shape)
    probs_grad = (grad * unweighted).sum(axis=-1, keepdim=keep)
    return (
        _narrow(do1, o1.dtype),
        _narrow(probs_grad, paddle.float32),
        _narrow(unweighted * prob, do2_s.dtype),
    )
