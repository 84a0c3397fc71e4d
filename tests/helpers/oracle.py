"""Every operator and gradient in NumPy float64, from the mathematics and the exact input values.

Inputs are arrays of any float dtype (bfloat16 as ml_dtypes.bfloat16) and are widened exactly;
results are float64 and not rounded, so that a test can measure the error of a rounded result.
Where a definition rounds on the way, a function says so and takes the dtype to round to.

`*_scale` functions give Σ|terms| of a sum that may cancel, for `numeric.assert_ulp`.
"""

from __future__ import annotations

import numpy as np

from .numeric import HALVES, dtype_name, round_to


def f64(array) -> np.ndarray:
    """The exact values in float64."""
    return np.asarray(array).astype(np.float64)


# SwiGLU


def sigmoid(a) -> np.ndarray:
    """1/(1 + e⁻ᵃ), with the exponential of non-positive arguments only."""
    a = f64(a)
    small = np.exp(-np.abs(a))
    return np.where(a >= 0, 1.0, small) / (1.0 + small)


def silu(a) -> np.ndarray:
    """a·sigmoid(a); NaN at −∞, where the product is −∞·0."""
    with np.errstate(invalid="ignore"):
        return f64(a) * sigmoid(a)


def silu_slope(a) -> np.ndarray:
    """silu'(a) = s·(1 + a·(1 − s)); 1 − s is sigmoid(−a), without cancellation."""
    a = f64(a)
    with np.errstate(invalid="ignore"):
        return sigmoid(a) * (1.0 + a * sigmoid(-a))


def silu_curvature(a) -> np.ndarray:
    """silu''(a) = s·(1 − s)·(2 + a·(1 − 2s))."""
    a = f64(a)
    s, rest = sigmoid(a), sigmoid(-a)
    with np.errstate(invalid="ignore"):
        return s * rest * (2.0 + a * (rest - s))


def _halves(x) -> tuple[np.ndarray, np.ndarray]:
    x = f64(x)
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _gate_and_up(x, y):
    return _halves(x) if y is None else (f64(x), f64(y))


def swiglu(x, y=None) -> np.ndarray:
    """silu(x)·y, or of x's halves."""
    a, b = _gate_and_up(x, y)
    return silu(a) * b


def swiglu_grad(x, y, g):
    """(dx, dy), or dx of the joined x when y is None."""
    a, b = _gate_and_up(x, y)
    g = f64(g)
    grads = g * b * silu_slope(a), g * silu(a)
    return np.concatenate(grads, axis=-1) if y is None else grads


def swiglu_grad_scale(x, y, g):
    """Σ|terms| of `swiglu_grad`: the slope 1 + a·(1 − s) cancels near a = −1.28."""
    a, b = _gate_and_up(x, y)
    g = np.abs(f64(g))
    slope = sigmoid(a) * (1.0 + np.abs(a) * sigmoid(-a))
    scales = g * np.abs(b) * slope, g * np.abs(silu(a))
    return np.concatenate(scales, axis=-1) if y is None else scales


def swiglu_double_grad(x, y, g, v, u=None):
    """The gradients of ⟨v, dx⟩ + ⟨u, dy⟩ in x, y and g.

    Args:
        x: gate, or gate and up joined when y is None.
        y: up, or None.
        g: the gradient of the output in the first backward.
        v: the second backward's gradient of dx; joined when y is None.
        u: that of dy; unused when y is None.

    Returns:
        (x_grad, y_grad, ddout), or (x_grad, ddout) with x_grad joined when y is None.
    """
    a, b = _gate_and_up(x, y)
    v, u = _halves(v) if y is None else (f64(v), f64(u))
    g = f64(g)
    slope = silu_slope(a)
    x_grad = v * g * b * silu_curvature(a) + u * g * slope
    y_grad = v * g * slope
    ddout = v * b * slope + u * silu(a)
    if y is None:
        return np.concatenate([x_grad, y_grad], axis=-1), ddout
    return x_grad, y_grad, ddout


def _per_row(probs, rows_shape) -> np.ndarray:
    return f64(probs).reshape((*rows_shape, 1))


def fused_swiglu_weighted(x, probs) -> np.ndarray:
    """silu(gate)·up·prob."""
    return swiglu(x) * _per_row(probs, np.shape(x)[:-1])


def fused_swiglu_weighted_bwd(o1, do2_s, probs):
    """(do1, probs_grad, o2_s); probs_grad has the shape of probs."""
    p = _per_row(probs, np.shape(o1)[:-1])
    g = f64(do2_s)
    do1 = swiglu_grad(o1, None, g * p)
    unweighted = swiglu(o1)
    probs_grad = (g * unweighted).sum(axis=-1).reshape(np.shape(probs))
    return do1, probs_grad, unweighted * p


def probs_grad_scale(o1, do2_s, probs) -> np.ndarray:
    """Σ|terms| of probs_grad."""
    return np.abs(f64(do2_s) * swiglu(o1)).sum(axis=-1).reshape(np.shape(probs))


# RMSNorm


def inverse_rms(x, epsilon) -> np.ndarray:
    """1/√(mean(x²) + epsilon) over the last axis, `[..., 1]`."""
    with np.errstate(divide="ignore"):
        return 1.0 / np.sqrt(np.mean(f64(x) ** 2, axis=-1, keepdims=True) + epsilon)


def _factor(weight, offset):
    return 1.0 if weight is None else offset + f64(weight)


def normalized(x, epsilon) -> np.ndarray:
    """x·r."""
    with np.errstate(invalid="ignore"):
        return f64(x) * inverse_rms(x, epsilon)


def rms_norm(x, weight=None, epsilon=1e-6, offset=0.0) -> np.ndarray:
    """x·r·(offset + weight), or x·r without a weight. Not rounded anywhere."""
    return normalized(x, epsilon) * _factor(weight, offset)


def rms_norm_rounded(x, weight, epsilon, offset, casting_mode, dtype) -> np.ndarray:
    """`rms_norm` with the intermediate roundings of the casting mode; the last is not done.

    "gemma" has none, and so have float32 and float64, which the modes do not concern. A float32
    computation may fall on the other side of a tie than this one, which moves its result by an
    ULP or two of the half dtype: compare with `rms_norm` for the bound, with this for the mean.
    """
    name = dtype_name(dtype)
    if name not in HALVES or casting_mode == "gemma":
        return rms_norm(x, weight, epsilon, offset)
    if casting_mode == "llama":
        return round_to(normalized(x, epsilon), name) * _factor(weight, offset)
    x = f64(x)
    mean_square = round_to(np.mean(round_to(x * x, name), axis=-1, keepdims=True), name)
    r = round_to(1.0 / np.sqrt(round_to(mean_square + epsilon, name)), name)
    if weight is None:
        return x * r
    return round_to(x * r, name) * round_to(_factor(weight, offset), name)


def _sum_rows(values) -> np.ndarray:
    return values.sum(axis=tuple(range(values.ndim - 1)))


def rms_norm_grad(x, weight, g, epsilon=1e-6, offset=0.0, casting_mode="gemma", dtype=None):
    """(dx, dweight) of `rms_norm`; dweight is None without a weight.

    dx never contains a rounding. In "llama" mode of a half dtype, dweight sums g times the x·r
    that was rounded to dtype, since that is what the forward multiplied.
    """
    xhat, g = normalized(x, epsilon), f64(g)
    c = g * _factor(weight, offset)
    dx = inverse_rms(x, epsilon) * (c - xhat * np.mean(c * xhat, axis=-1, keepdims=True))
    if weight is None:
        return dx, None
    if casting_mode == "llama" and dtype is not None:
        xhat = round_to(xhat, dtype)
    return dx, _sum_rows(g * xhat)


def rms_norm_grad_scale(x, weight, g, epsilon=1e-6, offset=0.0):
    """Σ|terms| of dx and of dweight."""
    xhat, g = np.abs(normalized(x, epsilon)), np.abs(f64(g))
    c = g * np.abs(_factor(weight, offset))
    dx = inverse_rms(x, epsilon) * (c + xhat * np.mean(c * xhat, axis=-1, keepdims=True))
    return dx, _sum_rows(g * xhat)


def rms_norm_double_grad(x, weight, g, v, u=None, epsilon=1e-6, offset=0.0):
    """The gradients of ⟨v, dx⟩ + ⟨u, dweight⟩ in x, weight and g.

    With c = g·(offset + weight), each row of dx is r·c − r³·x·mean(c·x), and dr/dx = −r³·x/H.

    Args:
        x: `[..., H]`.
        weight: `[H]` or None.
        g: the gradient of out in the first backward (dOut).
        v: the second backward's gradient of dx (ddX).
        u: that of dweight (ddW), or None for zero.
        epsilon: the forward's.
        offset: the forward's.

    Returns:
        (x_grad, weight_grad, ddout); weight_grad is None without a weight.
    """
    x, g, v = f64(x), f64(g), f64(v)
    factor = _factor(weight, offset)
    u = 0.0 if u is None or weight is None else f64(u)
    r = inverse_rms(x, epsilon)
    c = g * factor

    def mean(values) -> np.ndarray:
        return np.mean(values, axis=-1, keepdims=True)

    first_power = r * u * g
    third_power = x * mean(v * c) + c * mean(v * x) + v * mean(c * x) + x * mean(u * g * x)
    fifth_power = 3.0 * x * mean(c * x) * mean(v * x)
    x_grad = first_power - r**3 * third_power + r**5 * fifth_power
    projected = r * v - r**3 * x * mean(v * x)
    ddout = factor * projected + u * x * r
    weight_grad = None if weight is None else _sum_rows(g * projected)
    return x_grad, weight_grad, ddout


def residual_sum(x, residual=None, bias=None, begin_norm_axis=-1, dtype=None) -> np.ndarray:
    """X + residual + bias, rounded once to dtype (x's by default).

    bias is flat over the axes from begin_norm_axis on.
    """
    total = f64(x)
    if residual is not None:
        total = total + f64(residual)
    if bias is not None:
        total = total + f64(bias).reshape(np.shape(x)[begin_norm_axis:])
    return round_to(total, dtype_name(np.asarray(x).dtype if dtype is None else dtype))


def _flatten_from(x, axis) -> np.ndarray:
    x = f64(x)
    return x.reshape((*x.shape[:axis], int(np.prod(x.shape[axis:]))))


def fused_rms_norm(x, norm_weight, norm_bias, epsilon, begin_norm_axis=1) -> np.ndarray:
    """RMSNorm over the axes from begin_norm_axis on, times norm_weight, plus norm_bias.

    Of `residual_sum`, if there is a bias or residual.
    """
    axis = begin_norm_axis % np.ndim(x)
    out = rms_norm(_flatten_from(x, axis), norm_weight, epsilon)
    if norm_bias is not None:
        out = out + f64(norm_bias)
    return out.reshape(np.shape(x))


def fused_rms_norm_grad(x, norm_weight, g, epsilon, begin_norm_axis=1, residual_out_grad=None):
    """(dx, dweight, dnorm_bias, dbias) of `fused_rms_norm` of `residual_sum` x.

    dx is also the gradient of the residual. residual_out_grad is what reaches residual_out from
    elsewhere.
    """
    axis = begin_norm_axis % np.ndim(x)
    g = _flatten_from(g, axis)
    dx, dweight = rms_norm_grad(_flatten_from(x, axis), norm_weight, g, epsilon)
    if residual_out_grad is not None:
        dx = dx + _flatten_from(residual_out_grad, axis)
    return dx.reshape(np.shape(x)), dweight, _sum_rows(g), _sum_rows(dx)


def quantize_int8(values, scale, round_type, max_bound, min_bound) -> np.ndarray:
    """clip(round(max_bound·scale·values)) as int8; ties to even (0) or away from zero (1).

    values are the unrounded results. A float32 computation may round a value next to a tie the
    other way.
    """
    scaled = f64(values) * (max_bound * scale)
    if round_type == 0:
        rounded = np.rint(scaled)
    else:
        rounded = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    return np.clip(rounded, min_bound, max_bound).astype(np.int8)


def fused_rms_norm_ext(x, scale, epsilon=1e-5):
    """(y, invvar) with invvar `[...]`; `fast_rms_norm` too."""
    return rms_norm(x, scale, epsilon), inverse_rms(x, epsilon)[..., 0]


def fused_rms_norm_ext_grad(x, scale, invvar, y_grad):
    """(x_grad, scale_grad) from the given inverse RMS, whatever its relation to x."""
    r = f64(invvar)[..., None]
    xhat, g = f64(x) * r, f64(y_grad)
    c = g * f64(scale)
    x_grad = r * (c - xhat * np.mean(c * xhat, axis=-1, keepdims=True))
    return x_grad, _sum_rows(g * xhat)


# RoPE

PAIRS, HALVES_STYLE = "pairs", "halves"


def _partner(rotary: int, style: str) -> tuple[np.ndarray, np.ndarray]:
    """For each feature the index of its partner, and the sign of the partner's term."""
    index = np.arange(rotary)
    if style == PAIRS:
        return index ^ 1, np.where(index % 2 == 0, -1.0, 1.0)
    half = rotary // 2
    return (index + half) % rotary, np.where(index < half, -1.0, 1.0)


def rope(x, cos, sin, style) -> np.ndarray:
    """Rotates the first R features: x·cos ± x[partner]·sin, each with its own index's sine.

    Args:
        x: `[..., D]`.
        cos: `[..., R]`, broadcasting against x except in the last axis; R ≤ D.
        sin: likewise.
        style: "pairs" or "halves".
    """
    x, cos, sin = f64(x), f64(cos), f64(sin)
    rotary = cos.shape[-1]
    partner, sign = _partner(rotary, style)
    head = x[..., :rotary]
    out = head * cos + sign * head[..., partner] * sin
    return np.concatenate([out, x[..., rotary:]], axis=-1)


def rope_grad(g, cos, sin, style) -> np.ndarray:
    """The transposed rotation: the partner's sine, with the sign of the partner's term."""
    g, cos, sin = f64(g), f64(cos), f64(sin)
    rotary = cos.shape[-1]
    partner, sign = _partner(rotary, style)
    head = g[..., :rotary]
    dx = head * cos + (sign * head * sin)[..., partner]
    return np.concatenate([dx, g[..., rotary:]], axis=-1)


def rope_scale(x, cos, sin, style) -> np.ndarray:
    """Σ|terms| of `rope`."""
    x, cos, sin = np.abs(f64(x)), np.abs(f64(cos)), np.abs(f64(sin))
    rotary = cos.shape[-1]
    head = x[..., :rotary]
    out = head * cos + head[..., _partner(rotary, style)[0]] * sin
    return np.concatenate([out, x[..., rotary:]], axis=-1)


def rope_grad_scale(g, cos, sin, style) -> np.ndarray:
    """Σ|terms| of `rope_grad`."""
    g, cos, sin = np.abs(f64(g)), np.abs(f64(cos)), np.abs(f64(sin))
    rotary = cos.shape[-1]
    head = g[..., :rotary]
    dx = head * cos + (head * sin)[..., _partner(rotary, style)[0]]
    return np.concatenate([dx, g[..., rotary:]], axis=-1)


def rope_tables(positions, features: int, base: float, style: str):
    """(cos, sin), `[*positions.shape, features]`: float64 angles, rounded once to float32."""
    pair = np.arange(features // 2)
    angle = f64(positions)[..., None] / np.power(float(base), 2.0 * pair / features)
    angle = np.repeat(angle, 2, -1) if style == PAIRS else np.concatenate([angle, angle], -1)
    return round_to(np.cos(angle), "float32"), round_to(np.sin(angle), "float32")


def fused_rope_tables(cos, sin, position_ids=None, time_major=False, length=None):
    """The tables of the fused call, broadcasting against q: cos and sin `[S, R]` or `[1, S, 1, R]`.

    position_ids is `[B, S]`; without it the first `length` rows (all of them by default) count.
    """
    result = []
    for table in (cos, sin):
        table = f64(table).reshape((-1, np.shape(table)[-1]))
        table = table[None, :length] if position_ids is None else table[np.asarray(position_ids)]
        table = table[:, :, None, :]
        result.append(np.swapaxes(table, 0, 1) if time_major else table)
    return tuple(result)


def applied_rope_tables(cos, sin, position_ids=None, unsqueeze_dim=1):
    """The tables of `apply_rotary_pos_emb`, broadcasting against q."""
    result = []
    for table in (cos, sin):
        table = f64(table)
        if position_ids is not None:
            table = table.reshape(table.shape[-2:])[np.asarray(position_ids)]
        if table.ndim == 2:
            table = table[None]
        result.append(np.expand_dims(table, unsqueeze_dim))
    return tuple(result)


def _gather_pairs(rotary: int) -> np.ndarray:
    """Where each feature of the halves layout comes from in the pairs layout: 0, 2, …, 1, 3, …."""
    return np.concatenate([np.arange(0, rotary, 2), np.arange(1, rotary, 2)])


def partial_rope(x, cos, sin) -> np.ndarray:
    """`fused_partial_rope`: the trailing R features, pairs on the way in, halves on the way out."""
    x = f64(x)
    start, order = x.shape[-1] - np.shape(cos)[-1], _gather_pairs(np.shape(cos)[-1])
    out = rope(x[..., start:][..., order], cos, sin, HALVES_STYLE)
    return np.concatenate([x[..., :start], out], axis=-1)


def partial_rope_scale(x, cos, sin) -> np.ndarray:
    """Σ|terms| of `partial_rope`."""
    return partial_rope(np.abs(f64(x)), *_magnitudes(cos, sin))


def partial_rope_grad(g, cos, sin) -> np.ndarray:
    """The adjoint of `partial_rope`."""
    g = f64(g)
    start, order = g.shape[-1] - np.shape(cos)[-1], _gather_pairs(np.shape(cos)[-1])
    rotated = rope_grad(g[..., start:], cos, sin, HALVES_STYLE)
    dx = np.empty_like(rotated)
    dx[..., order] = rotated
    return np.concatenate([g[..., :start], dx], axis=-1)


def partial_rope_grad_scale(g, cos, sin) -> np.ndarray:
    """Σ|terms| of `partial_rope_grad`."""
    return partial_rope_grad(np.abs(f64(g)), *_magnitudes(cos, sin))


def _magnitudes(cos, sin):
    """|cos|, and |sin| with the signs that make every term of the halves rotation positive."""
    sin = np.abs(f64(sin))
    return np.abs(f64(cos)), sin * _partner(sin.shape[-1], HALVES_STYLE)[1]
