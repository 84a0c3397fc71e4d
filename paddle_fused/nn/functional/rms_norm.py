"""RMSNorm: rms_norm, and Paddle's fused_rms_norm, fused_rms_norm_ext and fast_rms_norm."""

from __future__ import annotations

import functools
import math
import operator

import paddle

from paddle_fused import _checks as checks
from paddle_fused._amp import in_one_dtype
from paddle_fused._ops import double_parts, run, static_unit

# The values of CastingMode in custom_ops/rms_norm/rms_norm.h.
CASTING_MODES = {"llama": 0, "gemma": 1, "none": 2}


def _check_x(function: str, x):
    """Its shape and dtype."""
    shape, dtype = checks.shape_and_dtype(function, "x", x)
    checks.check_rank_at_least_one(function, "x", shape)
    return shape, dtype


def _check_vector(function: str, argument: str, value, size: int, dtypes=checks.FLOAT_DTYPES):
    """A float vector with one element per normalised element."""
    shape, dtype = checks.shape_and_dtype(function, argument, value, dtypes)
    checks.check_shape(function, argument, shape, [size], "one per element of a row")
    return dtype


def _check_like_x(function: str, argument: str, value, dtype, shape) -> None:
    own, _ = checks.shape_and_dtype(function, argument, value, (dtype,))
    checks.check_shape(function, argument, own, shape, "x's")


def check_casting_mode(function: str, casting_mode) -> int:
    """The operator's number for a casting mode's name."""
    if not isinstance(casting_mode, str):
        raise checks.wrong_type(function, "casting_mode", "a str", type(casting_mode).__name__)
    if casting_mode not in CASTING_MODES:
        raise checks.wrong_value(
            function, "casting_mode", f"one of {sorted(CASTING_MODES)}", repr(casting_mode)
        )
    return CASTING_MODES[casting_mode]


@functools.lru_cache(maxsize=256)
def _checked_numbers(epsilon: float, offset: float, casting_mode: str):
    """Operator's attributes for rms_norm's: kept, as a model asks with the same ones every time."""
    function = "rms_norm"
    epsilon = double_parts(checks.check_epsilon(function, epsilon))
    offset = checks.check_finite(function, "offset", offset)
    # -0.0 and 0.0 are one key of the cache.
    return epsilon, double_parts(offset + 0.0), check_casting_mode(function, casting_mode)


def _trains(weight) -> bool:
    """Whether a backward pass will want the weight's gradient; a frozen weight costs no work."""
    return not weight.stop_gradient


@static_unit
def rms_norm(
    x,
    weight=None,
    epsilon=1e-6,
    *,
    offset=0.0,
    casting_mode="llama",
    residual=None,
    name=None,
):
    r"""RMSNorm over the last axis, with the residual addition before it if wanted.

    .. math:: out = x \cdot r \cdot (offset + weight), \quad r = 1 / \sqrt{mean(x^2) + epsilon}

    Sums are in float32 (float64 for float64 x). ``casting_mode`` says where half precision is
    rounded; its names and meaning are Liger-Kernel's:

    - ``"llama"``: x r is rounded to x's dtype, multiplied by (offset + weight), rounded again, as
      Hugging Face's LlamaRMSNorm does;
    - ``"gemma"``: everything in float32, one rounding;
    - ``"none"``: every step is rounded to x's dtype, as a chain of plain operators on x would; in
      float16 the squares overflow above 255.

    Differentiable in x, weight and residual, twice; also through residual_out. The gradient is the
    formula's, accumulated in float32, without derivatives of roundings; in "llama" mode the
    weight's gradient uses the rounded x r. Formula: Zhang and Sennrich, "Root Mean Square Layer
    Normalization", 2019.

    Args:
        x (Tensor): float32, float64, float16 or bfloat16; shape ``[..., H]``.
        weight (Tensor, optional): any of these dtypes, shape ``[H]``; None: a factor of 1.
        epsilon (float, optional): Added to the mean of squares; finite, at least 0.
        offset (float, optional): Added to the weight; 1.0 for models that keep weight - 1. Without
            a weight only 0.0 and 1.0 make sense, and neither changes anything.
        casting_mode (str, optional): "llama", "gemma" or "none".
        residual (Tensor, optional): dtype and shape of x; added to x first, rounded to x's dtype.
        name (str, optional): Unused; for likeness with Paddle.

    Returns:
        Tensor: shape and dtype of x. With a residual a tuple (out, residual_out), with residual_out
        = x + residual.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: a shape does not fit, epsilon is negative or not finite, the mode is unknown, or
            an offset other than 0 or 1 comes without a weight.

    Examples:
        >>> import paddle
        >>> import paddle_fused.nn.functional as F
        >>> x = paddle.to_tensor([[3.0, 4.0]])
        >>> weight = paddle.to_tensor([1.0, 2.0])
        >>> print(F.rms_norm(x, weight).numpy().round(4))
        [[0.8485 2.2627]]
        >>> out, total = F.rms_norm(x, weight, residual=paddle.ones([1, 2]))
        >>> print(total.numpy())
        [[4. 5.]]
    """
    function = "rms_norm"
    if residual is not None:
        x, residual = in_one_dtype(x, residual)
    shape, dtype = _check_x(function, x)
    epsilon = checks.check_real(function, "epsilon", epsilon)
    if type(offset) is not float or type(casting_mode) is not str:
        checks.check_epsilon(function, epsilon)  # is blamed first
        offset = checks.check_finite(function, "offset", offset)
        check_casting_mode(function, casting_mode)
    epsilon, offset_parts, mode = _checked_numbers(epsilon, offset, casting_mode)
    if residual is not None:
        _check_like_x(function, "residual", residual, dtype, shape)
    if weight is not None:
        _check_vector(function, "weight", weight, shape[-1])
    if checks.MANY_DEVICES:
        checks.check_devices(function, x=x, weight=weight, residual=residual)
    if weight is None:
        if offset not in (0.0, 1.0):
            raise checks.wrong_value(function, "offset", "0.0 or 1.0 without a weight", offset)
        if residual is None:
            return run("rms_norm_unweighted", x, epsilon, mode)
        out, residual_out = run("add_rms_norm_unweighted", x, residual, epsilon, mode)
        return out, residual_out
    trains = _trains(weight)
    if residual is None:
        return run("rms_norm", x, weight, epsilon, offset_parts, mode, trains)
    out, residual_out = run(
        "add_rms_norm", x, residual, weight, epsilon, offset_parts, mode, trains
    )
    return out, residual_out


def _check_axis(begin_norm_axis, rank: int) -> int:
    axis = checks.check_int("fused_rms_norm", "begin_norm_axis", begin_norm_axis)
    if not -rank <= axis < rank:
        raise checks.wrong_value(
            "fused_rms_norm", "begin_norm_axis", f"an axis in [{-rank}, {rank})", axis
        )
    return axis % rank


_NO_QUANTISATION = (-1, 0, 0, 0)


def _check_quantisation(scale, round_type, max_bound, min_bound) -> bool:
    """True for int8 output, False for none."""
    given = (scale, round_type, max_bound, min_bound)
    if all(map(operator.is_, given, _NO_QUANTISATION)):  # the defaults: nothing to check
        return False
    function = "fused_rms_norm"
    scale = checks.check_finite(function, "quant_scale", scale)
    round_type = checks.check_real(function, "quant_round_type", round_type)
    max_bound = checks.check_finite(function, "quant_max_bound", max_bound)
    min_bound = checks.check_finite(function, "quant_min_bound", min_bound)
    if scale <= 0:
        return False
    if scale > 3.4e38:
        raise checks.wrong_value(function, "quant_scale", "a number that float32 can hold", scale)
    if round_type not in (0, 1):
        raise checks.wrong_value(
            function, "quant_round_type", "0 (half to even) or 1 (half away from 0)", round_type
        )
    if max_bound != 127 or min_bound not in (-127, -128):
        raise checks.wrong_value(
            function,
            "quant_max_bound, quant_min_bound",
            "the bounds of int8, 127 and -127 or -128",
            (max_bound, min_bound),
        )
    return True


def _normalise_sum(x, weight, norm_bias, bias, residual, epsilon):
    """(out, residual_out) of a 2-D or last-axis problem, without quantisation."""
    if bias is None and norm_bias is None:
        attributes = (epsilon, double_parts(0.0), CASTING_MODES["gemma"], _trains(weight))
        if residual is None:
            return run("rms_norm", x, weight, *attributes), None
        out, residual_out = run("add_rms_norm", x, residual, weight, *attributes)
        return out, residual_out
    if bias is None and residual is None:
        return run("rms_norm_affine", x, weight, norm_bias, epsilon), None
    inputs = [tensor for tensor in (x, weight, norm_bias, bias, residual) if tensor is not None]
    flags = [tensor is not None for tensor in (norm_bias, bias, residual)]
    out, residual_out = run("add_rms_norm_affine", inputs, epsilon, *flags)
    return out, residual_out


@static_unit
def fused_rms_norm(
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
    r"""RMSNorm over the axes from begin_norm_axis on: Paddle's fused_rms_norm.

    .. math:: out = s \cdot r \cdot norm\_weight + norm\_bias, \quad s = x + residual + bias

    with r = 1 / sqrt(mean(s^2) + epsilon). All in float32 (float64 for float64 x), one rounding for
    residual_out = s and one for out; s is rounded before it is normalised. Where this differs from
    ``paddle.incubate.nn.functional.fused_rms_norm`` of Paddle 3.3: the sum is rounded once, not
    twice; a bias without a residual is added, not ignored; the gradient exists with norm_bias, bias
    and residual too. Not quantising, it is differentiable in all five tensors; twice when there is
    neither norm_bias nor bias, else a second time raises ``NotImplementedError``.

    Args:
        x (Tensor): float32, float64, float16 or bfloat16, any shape with an axis.
        norm_weight (Tensor): any of these dtypes; shape ``[n]``, n the product of the normalised
            axes.
        norm_bias (Tensor, optional): as norm_weight, or None.
        epsilon (float): Added to the mean of squares; finite, at least 0.
        begin_norm_axis (int, optional): First normalised axis; may be negative.
        bias (Tensor, optional): dtype of x, shape ``[n]``.
        residual (Tensor, optional): dtype and shape of x.
        quant_scale (float, optional): Above 0: int8 output,
            clip(round(quant_max_bound * quant_scale * out)).
        quant_round_type (int, optional): 0 rounds half to even, 1 half away from zero.
        quant_max_bound (float, optional): 127 for int8.
        quant_min_bound (float, optional): -127 or -128 for int8; a NaN comes out as it, too.

    Returns:
        tuple: (out, residual_out); residual_out is None when neither bias nor residual is given.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: a shape, the axis, epsilon or the quantisation is not as above.

    Examples:
        >>> import paddle
        >>> import paddle_fused.nn.functional as F
        >>> x = paddle.to_tensor([[3.0, 4.0]])
        >>> out, _ = F.fused_rms_norm(x, paddle.ones([2]), paddle.ones([2]), 1e-6)
        >>> print(out.numpy().round(4))
        [[1.8485 2.1314]]
    """
    function = "fused_rms_norm"
    if bias is not None or residual is not None:
        x, bias, residual = in_one_dtype(x, bias, residual)
    shape, dtype = _check_x(function, x)
    axis = _check_axis(begin_norm_axis, len(shape))
    epsilon = double_parts(checks.check_epsilon(function, epsilon))
    tail = shape[axis:]
    size = -1 if min(tail) < 0 else math.prod(tail)
    _check_vector(function, "norm_weight", norm_weight, size)
    if norm_bias is not None:
        _check_vector(function, "norm_bias", norm_bias, size)
    if bias is not None:
        _check_vector(function, "bias", bias, size, (dtype,))
    if residual is not None:
        _check_like_x(function, "residual", residual, dtype, shape)
    quantise = _check_quantisation(quant_scale, quant_round_type, quant_max_bound, quant_min_bound)
    if checks.MANY_DEVICES:
        others = {"norm_weight": norm_weight, "norm_bias": norm_bias, "bias": bias}
        checks.check_devices(function, x=x, **others, residual=residual)
    flat = axis != len(shape) - 1
    rows, residual_rows = x, residual
    if flat:
        # flatten has no second-order gradient, and reshape needs to know an empty tensor's sizes.
        if min(shape) >= 0:
            join = functools.partial(paddle.reshape, shape=[*shape[:axis], size])
        else:
            join = functools.partial(paddle.flatten, start_axis=axis)
        rows = join(x)
        residual_rows = None if residual is None else join(residual)
    if quantise:
        bounds = (float(quant_scale), int(quant_round_type), float(quant_max_bound))
        out, residual_out = run(
            "rms_norm_int8",
            *(rows, norm_weight, norm_bias, bias, residual_rows),
            *(epsilon, *bounds, float(quant_min_bound)),
        )
        if bias is None and residual is None:
            residual_out = None
    else:
        out, residual_out = _normalise_sum(
            rows, norm_weight, norm_bias, bias, residual_rows, epsilon
        )
    if flat:
        full = shape if min(shape) >= 0 else paddle.shape(x)
        out = paddle.reshape(out, full)
        residual_out = None if residual_out is None else paddle.reshape(residual_out, full)
    return out, residual_out


def _ext(function: str, x, scale, epsilon):
    shape, _ = _check_x(function, x)
    epsilon = double_parts(checks.check_epsilon(function, epsilon))
    _check_vector(function, "scale", scale, shape[-1])
    if checks.MANY_DEVICES:
        checks.check_devices(function, x=x, scale=scale)
    y, invvar = run("rms_norm_ext", x, scale, epsilon)
    # The operator's gradient goes through y; a pass through invvar alone would give zeros.
    invvar.stop_gradient = True
    return y, invvar


@static_unit
def fused_rms_norm_ext(x, scale, epsilon=1e-5, name=None):
    r"""RMSNorm over the last axis that also returns 1 / rms: Paddle's fused_rms_norm_ext.

    .. math:: invvar = 1 / \sqrt{mean(x^2) + epsilon}, \quad y = x \cdot invvar \cdot scale

    In float32 (float64 as soon as x or scale is float64), one rounding. Same call as
    ``paddle.incubate.nn.functional.fused_rms_norm_ext``. Differentiable in x and scale, through y;
    a second time raises ``NotImplementedError`` (:func:`rms_norm` can).

    Args:
        x (Tensor): float32, float64, float16 or bfloat16; shape ``[..., H]``.
        scale (Tensor): any of these dtypes, shape ``[H]``.
        epsilon (float, optional): Added to the mean of squares; finite, at least 0.
        name (str, optional): Unused; for likeness with Paddle.

    Returns:
        tuple: (y, invvar); y has x's shape and **scale's** dtype, as in Paddle; invvar is float32
        with x's shape less the last axis.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: a shape or epsilon is not as above.

    Examples:
        >>> import paddle
        >>> import paddle_fused.nn.functional as F
        >>> y, invvar = F.fused_rms_norm_ext(paddle.to_tensor([[3.0, 4.0]]), paddle.ones([2]))
        >>> print(y.numpy().round(4), invvar.numpy().round(4))
        [[0.8485 1.1314]] [0.2828]
    """
    return _ext("fused_rms_norm_ext", x, scale, epsilon)


@static_unit
def fast_rms_norm(x, scale, epsilon=1e-5):
    """The function of :func:`fused_rms_norm_ext` under Paddle's other name, for any width.

    Args:
        x (Tensor): float32, float64, float16 or bfloat16; shape ``[..., H]``.
        scale (Tensor): any of these dtypes, shape ``[H]``.
        epsilon (float, optional): Added to the mean of squares; finite, at least 0.

    Returns:
        tuple: (y, invvar), as :func:`fused_rms_norm_ext`.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: a shape or epsilon is not as above.

    Examples:
        >>> import paddle
        >>> import paddle_fused.nn.functional as F
        >>> y, invvar = F.fast_rms_norm(paddle.to_tensor([[3.0, 4.0]]), paddle.ones([2]))
        >>> print(y.numpy().round(4))
        [[0.8485 1.1314]]
    """
    return _ext("fast_rms_norm", x, scale, epsilon)


@static_unit
def fused_rms_norm_ext_grad(x, scale, invvar, y_grad, epsilon):
    r"""The gradients of fused_rms_norm_ext, for backward passes written by hand.

    With z = x invvar and m = y_grad scale:

    .. math:: x\_grad = invvar (m - z\, mean(m z)), \quad scale\_grad = \sum_{rows} y\_grad\, z

    In float32 (float64 as soon as x or scale is float64), one rounding. Same call as
    ``paddle._C_ops.fused_rms_norm_ext_grad``. Not differentiable.

    Args:
        x (Tensor): the forward's input, shape ``[..., H]``.
        scale (Tensor): the forward's scale, shape ``[H]``.
        invvar (Tensor): float32, the forward's second result; one value per row.
        y_grad (Tensor): dtype of scale, shape of x.
        epsilon (float): The forward's; kept for likeness, since invvar holds its effect.

    Returns:
        tuple: (x_grad with x's shape and dtype, scale_grad with scale's).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: a shape or epsilon is not as above.

    Examples:
        >>> import paddle
        >>> import paddle_fused.nn.functional as F
        >>> x, scale = paddle.to_tensor([[3.0, 4.0]]), paddle.ones([2])
        >>> y, invvar = F.fused_rms_norm_ext(x, scale)
        >>> y_grad = paddle.ones([1, 2])
        >>> x_grad, scale_grad = F.fused_rms_norm_ext_grad(x, scale, invvar, y_grad, 1e-5)
        >>> print(x_grad.numpy().round(4), scale_grad.numpy().round(4))
        [[ 0.0453 -0.0339]] [0.8485 1.1314]
    """
    function = "fused_rms_norm_ext_grad"
    scale, y_grad = in_one_dtype(scale, y_grad)
    shape, _ = _check_x(function, x)
    epsilon = double_parts(checks.check_epsilon(function, epsilon))
    dtype = _check_vector(function, "scale", scale, shape[-1])
    own, _ = checks.shape_and_dtype(function, "invvar", invvar, (paddle.float32,))
    checks.check_shape(function, "invvar", own, shape[:-1], "one per row of x")
    own, _ = checks.shape_and_dtype(function, "y_grad", y_grad, (dtype,))
    checks.check_shape(function, "y_grad", own, shape, "x's")
    if checks.MANY_DEVICES:
        checks.check_devices(function, x=x, scale=scale, invvar=invvar, y_grad=y_grad)
    x_grad, scale_grad = run("rms_norm_ext_bwd", x, scale, invvar, y_grad, epsilon)
    return x_grad, scale_grad
