"""SwiGLU, plain and weighted by a probability per row."""

from __future__ import annotations

import paddle

from paddle_fused import _checks as checks
from paddle_fused._amp import in_float32, in_one_dtype
from paddle_fused._ops import run, static_unit

_PROBS_DTYPES = (paddle.float32,)


def _check_packed(function: str, argument: str, x):
    """A float tensor whose last axis holds gate and up; returns its shape and dtype."""
    shape, dtype = checks.shape_and_dtype(function, argument, x)
    checks.check_rank_at_least_one(function, argument, shape)
    if shape[-1] >= 0 and shape[-1] % 2:
        raise checks.wrong_value(
            function, argument, "an even size of the last axis (gate, then up)", shape
        )
    return shape, dtype


def _halved(shape: list[int]) -> list[int]:
    return [*shape[:-1], shape[-1] // 2 if shape[-1] >= 0 else -1]


def _check_probs(function: str, argument: str, probs, rows: list[int]) -> None:
    """float32, one value per row, shape ``rows`` or ``[*rows, 1]``."""
    shape, _ = checks.shape_and_dtype(function, argument, probs, _PROBS_DTYPES)
    if not checks.same_shape(shape, rows) and not checks.same_shape(shape, [*rows, 1]):
        raise checks.wrong_value(
            function, argument, f"one value per row, shape {rows} or {[*rows, 1]}", shape
        )


@static_unit
def swiglu(x, y=None, name=None):
    r"""SwiGLU: silu(x) multiplied by y, or by the second half of x.

    .. math:: out = x \cdot \sigma(x) \cdot y

    Computed in float32 (float64 for float64 inputs) with one rounding at the end. Differentiable in
    both inputs, twice. Same call as ``paddle.incubate.nn.functional.swiglu``; formula: Shazeer,
    "GLU Variants Improve Transformer", 2020.

    Args:
        x (Tensor): float32, float64, float16 or bfloat16; shape ``[..., n]``, or ``[..., 2n]``
            without y: the gate, then what it multiplies.
        y (Tensor, optional): dtype and shape of x.
        name (str, optional): Unused; for likeness with Paddle.

    Returns:
        Tensor: shape ``[..., n]``, dtype of x.

    Raises:
        TypeError: an input is not a tensor, has another dtype, or y's dtype is not x's.
        ValueError: x has no axis, an odd last axis without y, or y another shape.

    Examples:
        >>> import paddle
        >>> import paddle_fused.nn.functional as F
        >>> x = paddle.to_tensor([[0.0, 1.0, 3.0, 2.0]])
        >>> print(F.swiglu(x).numpy().round(4))
        [[0.     1.4621]]
        >>> print(F.swiglu(x, y=paddle.full([1, 4], 2.0)).shape)
        paddle.Size([1, 4])
    """
    if y is None:
        _check_packed("swiglu", "x", x)
        return run("swiglu", x)
    x, y = in_one_dtype(x, y)
    shape, dtype = checks.shape_and_dtype("swiglu", "x", x)
    y_shape, _ = checks.shape_and_dtype("swiglu", "y", y, (dtype,))
    checks.check_rank_at_least_one("swiglu", "x", shape)
    checks.check_shape("swiglu", "y", y_shape, shape, "x's")
    if checks.MANY_DEVICES:
        checks.check_devices("swiglu", x=x, y=y)
    return run("swiglu_pair", x, y)


@static_unit
def fused_swiglu_weighted(x, probs, name=None):
    r"""SwiGLU of a packed tensor, each row multiplied by a probability.

    .. math:: out = a \cdot \sigma(a) \cdot b \cdot p, \qquad [a, b] = x

    The activation of a mixture-of-experts layer whose router weights are applied before the second
    matrix product. Computed in float32 (float64 for float64 x), one rounding. Saves x and probs for
    the backward pass and nothing else. Differentiable in x and probs, once: differentiating the
    gradient again raises ``NotImplementedError``. The forward that
    ``paddle.incubate.nn.functional.fused_swiglu_weighted_bwd`` belongs to.

    Args:
        x (Tensor): float32, float64, float16 or bfloat16; shape ``[..., 2I]``, the gate first.
        probs (Tensor): float32, one value per row; shape ``[...]`` or ``[..., 1]``.
        name (str, optional): Unused; for likeness with Paddle.

    Returns:
        Tensor: shape ``[..., I]``, dtype of x.

    Raises:
        TypeError: an input is not a tensor or has another dtype.
        ValueError: x has no axis or an odd last one, or probs another shape.

    Examples:
        >>> import paddle
        >>> import paddle_fused.nn.functional as F
        >>> x = paddle.to_tensor([[0.0, 1.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
        >>> probs = paddle.to_tensor([0.5, 0.25])
        >>> print(F.fused_swiglu_weighted(x, probs).numpy().round(4))
        [[0.     0.7311]
         [0.1828 0.1828]]
    """
    probs = in_float32(probs)
    shape, _ = _check_packed("fused_swiglu_weighted", "x", x)
    _check_probs("fused_swiglu_weighted", "probs", probs, shape[:-1])
    if checks.MANY_DEVICES:
        checks.check_devices("fused_swiglu_weighted", x=x, probs=probs)
    return run("swiglu_weighted", x, probs)


@static_unit
def fused_swiglu_weighted_bwd(o1, do2_s, unzipped_probs, name=None):
    r"""The gradients of weighted SwiGLU, and its forward result again.

    With a the gate, b the up half of o1, s = sigmoid(a), g = do2_s and p the row's probability:

    .. math::
        do1 &= [\,g p b s (1 + a (1 - s)),\; g p a s\,] \\
        probs\_grad &= \sum g a s b \\
        o2\_s &= a s b p

    Same call as ``paddle.incubate.nn.functional.fused_swiglu_weighted_bwd``, which takes bfloat16
    on a GPU only. All in float32 (float64 for float64 o1), one rounding at each output. This is a
    gradient itself: its results are not differentiable.

    Args:
        o1 (Tensor): float32, float64, float16 or bfloat16; shape ``[..., 2I]``: the forward's
            input, gate half first.
        do2_s (Tensor): dtype of o1, shape ``[..., I]``: gradient of the weighted output.
        unzipped_probs (Tensor): float32, one value per row; shape ``[...]`` or ``[..., 1]``.
        name (str, optional): Unused; for likeness with Paddle.

    Returns:
        tuple: (do1 with o1's shape and dtype, probs_grad float32 in the shape of unzipped_probs,
        o2_s with do2_s's shape and dtype).

    Raises:
        TypeError: an input is not a tensor or has another dtype.
        ValueError: o1 has no axis or an odd last one, or the shapes do not fit.

    Examples:
        >>> import paddle
        >>> import paddle_fused.nn.functional as F
        >>> o1 = paddle.randn([32, 128, 4096]).astype('bfloat16')
        >>> do2_s = paddle.randn([32, 128, 2048]).astype('bfloat16')
        >>> probs = paddle.rand([32, 128, 1], dtype='float32')
        >>> do1, probs_grad, o2_s = F.fused_swiglu_weighted_bwd(o1, do2_s, probs)
        >>> print(do1.shape, probs_grad.shape, o2_s.shape)
        paddle.Size([32, 128, 4096]) paddle.Size([32, 128, 1]) paddle.Size([32, 128, 2048])
    """
    function = "fused_swiglu_weighted_bwd"
    (o1, do2_s), unzipped_probs = in_one_dtype(o1, do2_s), in_float32(unzipped_probs)
    shape, dtype = _check_packed(function, "o1", o1)
    grad_shape, _ = checks.shape_and_dtype(function, "do2_s", do2_s, (dtype,))
    checks.check_shape(function, "do2_s", grad_shape, _halved(shape), "o1's, last axis halved")
    _check_probs(function, "unzipped_probs", unzipped_probs, shape[:-1])
    if checks.MANY_DEVICES:
        checks.check_devices(function, o1=o1, do2_s=do2_s, unzipped_probs=unzipped_probs)
    do1, probs_grad, o2_s = run("swiglu_weighted_bwd", o1, do2_s, unzipped_probs)
    return do1, probs_grad, o2_s
