"""RMSNorm in its several forms, in plain Paddle operators."""

from __future__ import annotations

import math

import paddle

_CASTING_MODES = ("llama", "gemma", "none")


def _check_epsilon(function: str, epsilon: float) -> None:
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"{function}: epsilon must be finite and >= 0, got {epsilon}")


def _compute_dtype(x: paddle.Tensor):
    """float64 is computed in float64, every other float dtype in float32."""
    return paddle.float64 if x.dtype == paddle.float64 else paddle.float32


def _cast(x: paddle.Tensor, dtype) -> paddle.Tensor:
    return x if x.dtype == dtype else x.astype(dtype)


def _inverse_rms(x: paddle.Tensor, epsilon: float, axes=-1) -> paddle.Tensor:
    return paddle.rsqrt(x.square().mean(axis=axes, keepdim=True) + epsilon)


def _round_keeping_gradient(x: paddle.Tensor, dtype) -> paddle.Tensor:
    """X rounded to a half dtype and widened again, with the gradient of the identity.

    A plain pair of casts would also round the gradient to the half dtype, where the gradient of
    a mean square (it grows with r³) overflows float16 for rows of ordinary size.
    """
    rounded = x.astype(dtype).astype(x.dtype)
    # Where nothing was rounded, x itself: inf - inf would turn an overflowed sum into NaN.
    return paddle.where(rounded == x, x, x + (rounded - x).detach())


def _norm_in_own_dtype(x: paddle.Tensor, factor: paddle.Tensor | None, epsilon: float):
    """Casting mode "none" on halves: every operator rounds its result to x's dtype."""

    def rounded(value: paddle.Tensor) -> paddle.Tensor:
        return _round_keeping_gradient(value, x.dtype)

    wide = x.astype(paddle.float32)
    mean_square = rounded(rounded(wide * wide).mean(axis=-1, keepdim=True))
    xhat = wide * rounded(paddle.rsqrt(rounded(mean_square + epsilon)))
    if factor is not None:
        xhat = rounded(xhat) * rounded(factor)
    return xhat.astype(x.dtype)


def _norm(x: paddle.Tensor, factor: paddle.Tensor | None, epsilon: float, casting_mode: str):
    """RMSNorm over the last axis; factor is offset + weight in the computing dtype, or None."""
    dtype, compute_dtype = x.dtype, _compute_dtype(x)
    if casting_mode == "none" and dtype != compute_dtype:
        return _norm_in_own_dtype(x, factor, epsilon)
    wide = _cast(x, compute_dtype)
    xhat = wide * _inverse_rms(wide, epsilon)
    if factor is None:
        return _cast(xhat, dtype)
    if casting_mode == "llama":
        xhat = _cast(_cast(xhat, dtype), compute_dtype)
    return _cast(xhat * factor, dtype)


def rms_norm(
    x: paddle.Tensor,
    weight: paddle.Tensor | None = None,
    epsilon: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
    residual: paddle.Tensor | None = None,
    name: str | None = None,
):
    """x·r·(offset + weight) over the last axis, with r = 1/√(mean(x²) + epsilon).

    Args:
        x: `[..., H]`.
        weight: `[H]` of any float dtype; None multiplies by 1 (offset must then be 0 or 1).
        epsilon: finite, at least 0.
        offset: added to weight, in float32 (float64 for float64).
        casting_mode: "llama" rounds x·r to x's dtype, multiplies by (offset + weight) in float32
            and rounds again; "gemma" rounds once, at the end; "none" rounds the result of each
            operator to x's dtype (the sum is accumulated in float32 and rounded once).
        residual: x's shape and dtype; added first.
        name: ignored.

    Returns:
        out in x's shape and dtype; with a residual (out, residual_out), where residual_out is
        x + residual rounded to x's dtype and out is the norm of that rounded sum.
    """
    _check_epsilon("rms_norm", epsilon)
    if casting_mode not in _CASTING_MODES:
        raise ValueError(
            f"rms_norm: casting_mode must be one of {_CASTING_MODES}, got {casting_mode!r}"
        )
    if weight is None and offset not in (0.0, 1.0):
        raise ValueError(f"rms_norm: offset must be 0 or 1 without a weight, got {offset}")

    factor = None
    if weight is not None:
        factor = _cast(weight, _compute_dtype(x))
        if offset != 0.0:
            factor = factor + offset
    if residual is None:
        return _norm(x, factor, epsilon, casting_mode)
    residual_out = _add_bias_and_residual(x, None, residual)
    return _norm(residual_out, factor, epsilon, casting_mode), residual_out


def _add_bias_and_residual(x, bias, residual, axis: int = -1):
    """X + bias + residual in the computing dtype, rounded once to x's dtype."""
    total = _cast(x, _compute_dtype(x))
    if residual is not None:
        total = total + _cast(residual, total.dtype)
    if bias is not None:
        total = total + _cast(_like_normalized(bias, x, axis), total.dtype)
    return _cast(total, x.dtype)


def _like_normalized(flat: paddle.Tensor, x: paddle.Tensor, axis: int) -> paddle.Tensor:
    """A parameter given flat over the normalized axes, in the shape of those axes."""
    if axis == len(x.shape) - 1 or len(flat.shape) != 1:
        return flat
    return flat.reshape(x.shape[axis:])


def _quantize(value: paddle.Tensor, scale: float, round_type: int, low: float, high: float):
    """clip(round(high·scale·value), low, high) as int8; ties to even (0) or away from zero (1).

    Ties are settled by hand, since which of the two `paddle.round` does depends on its version.
    """
    scaled = (value * (high * scale)).clip(low, high)
    whole = paddle.trunc(scaled)
    fraction = (scaled - whole).abs()
    up = fraction >= 0.5
    if round_type == 0:
        is_even = paddle.floor(whole * 0.5) * 2.0 == whole
        up = paddle.logical_and(up, paddle.logical_not((fraction == 0.5) & is_even))
    return (whole + up.astype(scaled.dtype) * paddle.sign(scaled)).astype(paddle.int8)


def fused_rms_norm(
    x: paddle.Tensor,
    norm_weight: paddle.Tensor | None,
    norm_bias: paddle.Tensor | None,
    epsilon: float,
    begin_norm_axis: int = 1,
    bias: paddle.Tensor | None = None,
    residual: paddle.Tensor | None = None,
    quant_scale: float = -1,
    quant_round_type: int = 0,
    quant_max_bound: float = 0,
    quant_min_bound: float = 0,
):
    """Paddle's fused_rms_norm: RMSNorm of x + bias + residual over several trailing axes.

    Args:
        x: any rank of at least 1.
        norm_weight: `[n]`, n being the size of the normalized axes together, or None.
        norm_bias: `[n]`, added after scaling, or None.
        epsilon: finite, at least 0.
        begin_norm_axis: the first normalized axis; may be negative.
        bias: `[n]`, added to x first, or None.
        residual: x's shape, added to x first, or None.
        quant_scale: quantises to int8 when positive.
        quant_round_type: 0 rounds ties to even, 1 away from zero.
        quant_max_bound: the largest quantised value.
        quant_min_bound: the smallest quantised value.

    Returns:
        (out, residual_out). residual_out is x + residual + bias, added in float32 and rounded once
        to x's dtype, or None when neither was given; out is the norm of it, all in float32 and
        rounded once to x's dtype, or int8.
    """
    _check_epsilon("fused_rms_norm", epsilon)
    rank = len(x.shape)
    axis = begin_norm_axis + rank if begin_norm_axis < 0 else begin_norm_axis
    if not 0 <= axis < rank:
        raise ValueError(
            f"fused_rms_norm: begin_norm_axis must be in [{-rank}, {rank}), got {begin_norm_axis}"
        )

    residual_out = None
    if bias is not None or residual is not None:
        x = residual_out = _add_bias_and_residual(x, bias, residual, axis)
    wide = _cast(x, _compute_dtype(x))
    out = wide * _inverse_rms(wide, epsilon, axes=list(range(axis, rank)))
    if norm_weight is not None:
        out = out * _cast(_like_normalized(norm_weight, x, axis), out.dtype)
    if norm_bias is not None:
        out = out + _cast(_like_normalized(norm_bias, x, axis), out.dtype)
    if quant_scale > 0:
        bounds = (quant_min_bound, quant_max_bound)
        return _quantize(out, quant_scale, quant_round_type, *bounds), residual_out
    return _cast(out, x.dtype), residual_out


def fused_rms_norm_ext(
    x: paddle.Tensor, scale: paddle.Tensor, epsilon: float = 1e-5, name: str | None = None
):
    """Paddle's fused_rms_norm_ext: RMSNorm over the last axis, and the inverse RMS.

    Args:
        x: `[..., H]`.
        scale: `[H]` of any float dtype.
        epsilon: finite, at least 0.
        name: ignored.

    Returns:
        (y, invvar): y `[..., H]` in **scale's** dtype, computed in float32 (float64 for float64 x)
        and rounded once; invvar float32 `[...]`.
    """
    _check_epsilon("fused_rms_norm_ext", epsilon)
    wide = _cast(x, _compute_dtype(x))
    inverse = _inverse_rms(wide, epsilon)
    y = wide * inverse * _cast(scale, wide.dtype)
    return _cast(y, scale.dtype), _cast(inverse.squeeze(-1), paddle.float32)


def fast_rms_norm(x: paddle.Tensor, scale: paddle.Tensor, epsilon: float = 1e-5):
    """Paddle's fast_rms_norm: the results of `fused_rms_norm_ext`."""
    return fused_rms_norm_ext(x, scale, epsilon)


def fused_rms_norm_ext_grad(
    x: paddle.Tensor,
    scale: paddle.Tensor,
    invvar: paddle.Tensor,
    y_grad: paddle.Tensor,
    epsilon: float,
):
    """The gradients of `fused_rms_norm_ext`'s y, from the inverse RMS that the forward returned.

    Args:
        x: `[..., H]`.
        scale: `[H]`.
        invvar: float32 `[...]`.
        y_grad: `[..., H]`.
        epsilon: the forward's; invvar already contains it.

    Returns:
        (x_grad, scale_grad) in x's and scale's shapes and dtypes, each rounded once.
    """
    _check_epsilon("fused_rms_norm_ext_grad", epsilon)
    wide = _cast(x, _compute_dtype(x))
    grad = _cast(y_grad, wide.dtype)
    inverse = _cast(invvar, wide.dtype).unsqueeze(-1)
    xhat = wide * inverse
    scaled = grad * _cast(scale, wide.dtype)
    x_grad = inverse * (scaled - xhat * (scaled * xhat).mean(axis=-1, keepdim=True))
    scale_grad = grad * xhat
    if len(x.shape) > 1:
        scale_grad = scale_grad.sum(axis=list(range(len(x.shape) - 1)))
    return _cast(x_grad, x.dtype), _cast(scale_grad, scale.dtype)
