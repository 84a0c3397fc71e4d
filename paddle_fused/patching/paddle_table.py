"""Paddle's own functions: the public ones, and the operators that hand-written passes call."""

from __future__ import annotations

import math

import paddle
import paddle.incubate.nn.functional

from paddle_fused import _checks as checks
from paddle_fused._amp import in_one_dtype
from paddle_fused.nn import functional as F
from paddle_fused.patching.routes import Row
from paddle_fused.patching.support import first_reason, unsupported_number, unsupported_tensor

_INCUBATE = "paddle.incubate.nn.functional"
_NN = "paddle.nn.functional"
_OPERATORS = "paddle._C_ops"


def _swiglu_unsupported(x, y=None, name=None):
    return first_reason(unsupported_tensor("x", x), unsupported_tensor("y", y))


def _swiglu_grad(x, y, dout):
    """(dx, dy) of swiglu; dy is None without y, where Paddle returns an uninitialised tensor."""
    packed = x if y is None else paddle.concat([x, y], axis=-1)
    rows = checks.shape_of(packed)[:-1]
    ones = paddle.ones(rows, dtype="float32")
    dx, _, _ = F.fused_swiglu_weighted_bwd(packed, dout, ones)
    return (dx, None) if y is None else tuple(paddle.split(dx, 2, axis=-1))


def _swiglu_grad_unsupported(x, y, dout):
    if not paddle.in_dynamic_mode():
        return "a static program"  # the weights of 1 need the number of rows
    return first_reason(
        unsupported_tensor("x", x), unsupported_tensor("y", y), unsupported_tensor("dout", dout)
    )


def _weighted_bwd_unsupported(o1, do2_s, unzipped_probs, name=None):
    return first_reason(
        unsupported_tensor("o1", o1),
        unsupported_tensor("do2_s", do2_s),
        unsupported_tensor("unzipped_probs", unzipped_probs),
    )


def _fused_rms_norm_unsupported(
    x,
    norm_weight,
    norm_bias,
    epsilon,
    begin_norm_axis=1,
    bias=None,
    residual=None,
    quant_scale=-1,
    quant_round_type=0,
    quant_max_bound=0,
    quant_min_bound=0,
):
    if quant_scale > 0 and abs(quant_max_bound) != 127:
        return "quantises to another type than int8"
    if norm_weight is None:
        return "norm_weight is None"
    named = zip(
        ("x", "norm_weight", "norm_bias", "bias", "residual"),
        (x, norm_weight, norm_bias, bias, residual),
    )
    return first_reason(
        unsupported_number("epsilon", epsilon),
        *(unsupported_tensor(name, value) for name, value in named),
    )


def _ext_unsupported(x, scale, epsilon=1e-5, name=None):
    return first_reason(
        unsupported_tensor("x", x),
        unsupported_tensor("scale", scale),
        unsupported_number("epsilon", epsilon),
    )


def _fast_unsupported(x, scale, epsilon=1e-5):
    return _ext_unsupported(x, scale, epsilon)


def _ext_grad_unsupported(x, scale, invvar, y_grad, epsilon):
    return first_reason(
        unsupported_tensor("x", x),
        unsupported_tensor("scale", scale),
        unsupported_tensor("invvar", invvar),
        unsupported_tensor("y_grad", y_grad),
    )


def _rms_norm(input, normalized_shape, weight=None, eps=1e-5, name=None):
    """``paddle.nn.functional.rms_norm`` of Paddle 3.3: (out, invvar)."""
    axes = list(normalized_shape)
    shape = checks.shape_of(input)
    if not axes or axes != shape[len(shape) - len(axes) :]:
        raise checks.wrong_value("rms_norm", "normalized_shape", f"last sizes of {shape}", axes)
    if weight is None:
        weight = paddle.ones(axes, dtype=input.dtype)
    else:
        input, weight = in_one_dtype(input, weight)
        checks.check_tensor("rms_norm", "weight", weight, (input.dtype,))
        checks.check_shape("rms_norm", "weight", checks.shape_of(weight), axes, "normalized_shape")
    if len(axes) == 1:
        return F.fused_rms_norm_ext(input, weight, eps)
    size = math.prod(axes)
    rows = paddle.reshape(input, [*shape[: len(shape) - len(axes)], size])
    out, invvar = F.fused_rms_norm_ext(rows, paddle.reshape(weight, [size]), eps)
    return paddle.reshape(out, shape), invvar


def _rms_norm_unsupported(input, normalized_shape, weight=None, eps=1e-5, name=None):
    if not isinstance(normalized_shape, (list, tuple)):
        return "normalized_shape is no list"
    if len(normalized_shape) > 1 and -1 in checks.shape_of(input):
        return "several normalised axes of an unknown shape"
    return first_reason(unsupported_tensor("input", input), unsupported_tensor("weight", weight))


def _rope_unsupported(
    q,
    k=None,
    v=None,
    sin=None,
    cos=None,
    position_ids=None,
    use_neox_rotary_style=True,
    time_major=False,
    rotary_emb_base=10000.0,
):
    return first_reason(
        unsupported_tensor("q", q),
        unsupported_tensor("k", k),
        unsupported_tensor("v", v),
        unsupported_tensor("sin", sin),
        unsupported_tensor("cos", cos),
        unsupported_tensor("position_ids", position_ids, checks.INDEX_DTYPES),
    )


def _partial_rope_unsupported(x, cos, sin):
    return first_reason(
        unsupported_tensor("x", x), unsupported_tensor("cos", cos), unsupported_tensor("sin", sin)
    )


def _row(module, attribute, op, replacement, unsupported, versions=("2.6", None)):
    parameters = None
    if module != _OPERATORS:
        code = unsupported.__code__
        parameters = code.co_varnames[: code.co_argcount]
    return Row(
        "paddle", module, attribute, op, replacement, unsupported, parameters, versions=versions
    )


_NEW = ("3.3", None)

ROWS = (
    _row(_INCUBATE, "swiglu", "swiglu", F.swiglu, _swiglu_unsupported),
    _row(_NN, "swiglu", "swiglu", F.swiglu, _swiglu_unsupported),
    _row(
        _INCUBATE,
        "fused_swiglu_weighted_bwd",
        "swiglu",
        F.fused_swiglu_weighted_bwd,
        _weighted_bwd_unsupported,
    ),
    _row(
        _INCUBATE, "fused_rms_norm", "rms_norm", F.fused_rms_norm, _fused_rms_norm_unsupported, _NEW
    ),
    _row(_INCUBATE, "fused_rms_norm_ext", "rms_norm", F.fused_rms_norm_ext, _ext_unsupported),
    _row(_INCUBATE, "fast_rms_norm", "rms_norm", F.fast_rms_norm, _fast_unsupported),
    _row(_NN, "rms_norm", "rms_norm", _rms_norm, _rms_norm_unsupported),
    _row(
        _INCUBATE,
        "fused_rotary_position_embedding",
        "rope",
        F.fused_rotary_position_embedding,
        _rope_unsupported,
    ),
    _row(_INCUBATE, "fused_partial_rope", "rope", F.fused_partial_rope, _partial_rope_unsupported),
    # What PyLayers with a backward pass written by hand call. The arguments are positional.
    _row(_OPERATORS, "swiglu_grad", "swiglu", _swiglu_grad, _swiglu_grad_unsupported),
    _row(
        _OPERATORS,
        "fused_swiglu_weighted_bwd",
        "swiglu",
        F.fused_swiglu_weighted_bwd,
        _weighted_bwd_unsupported,
    ),
    _row(_OPERATORS, "fused_rms_norm_ext", "rms_norm", F.fused_rms_norm_ext, _ext_unsupported),
    _row(
        _OPERATORS,
        "fused_rms_norm_ext_grad",
        "rms_norm",
        F.fused_rms_norm_ext_grad,
        _ext_grad_unsupported,
    ),
)
