"""Rotary position embedding in Paddle's, Hugging Face's and DeepSeek's calls."""

from __future__ import annotations

import functools
import math

import paddle

from paddle_fused import _checks as checks
from paddle_fused._amp import auto_casting, in_float32
from paddle_fused._distributed import is_distributed
from paddle_fused._ops import double_parts, is_dygraph, run, static_unit

# The values of RopePairing in custom_ops/rope/rope.h and of Layout in rope_op.cc.
INTERLEAVED, HALVES, INTERLEAVED_TO_HALVES = 0, 1, 2
BATCH_SEQ_HEADS, SEQ_BATCH_HEADS, BATCH_HEADS_SEQ = 0, 1, 2
# (batch, sequence, heads) axes of each layout.
_AXES = {BATCH_SEQ_HEADS: (0, 1, 2), SEQ_BATCH_HEADS: (1, 0, 2), BATCH_HEADS_SEQ: (0, 2, 1)}

_OPERATORS = {1: "rope", 2: "rope_qk", 3: "rope_qkv"}


def _checked(check, function: str, tensors, *how):
    """(tensors, what the check returns); under auto_cast in float32 where dtypes do not fit."""
    try:
        return tensors, check(function, tensors, *how)
    except TypeError:
        if not auto_casting():
            raise
    tensors = [in_float32(tensor) for tensor in tensors]
    return tensors, check(function, tensors, *how)


def _check_rotated(function: str, tensors, layout: int, names):
    """The rotated tensors fit each other but for their heads; returns their shapes and dtype."""
    first_name = names[0]
    shape, dtype = checks.shape_and_dtype(function, first_name, tensors[0])
    if len(shape) != 4:
        raise checks.wrong_value(function, first_name, "4 axes", f"shape {shape}")
    if shape[3] >= 0 and (shape[3] % 2 or shape[3] == 0):
        raise checks.wrong_value(
            function, first_name, "an even head_dim (last axis) of at least 2", f"shape {shape}"
        )
    shapes = [shape]
    for i in range(1, len(tensors)):
        name = names[i]
        other, _ = checks.shape_and_dtype(function, name, tensors[i], (dtype,))
        if other != shape:
            expected = list(shape)
            expected[_AXES[layout][2]] = -1  # any number of heads
            checks.check_shape(function, name, other, expected, f"{first_name}'s but for the heads")
        shapes.append(other)
    return shapes, dtype


def _check_width(function: str, argument: str, shape, head_dim: int) -> None:
    width = shape[-1] if shape else 0
    if width >= 0 and (width % 2 or width == 0 or 0 <= head_dim < width):
        raise checks.wrong_value(
            function, argument, f"an even last axis of 2 to head_dim ({head_dim})", f"shape {shape}"
        )


def _check_tables(function: str, sin_and_cos, dtype, shape, layout: int, ids) -> None:
    """Sin and cos: [S, R], [1 or B, S, R] or [1 or B, S, 1, R], alike, long enough."""
    sin, cos = sin_and_cos
    batch_axis, seq_axis, _ = _AXES[layout]
    dtypes = (dtype, paddle.float32)
    cos_shape, cos_dtype = checks.shape_and_dtype(function, "cos", cos, dtypes)
    _check_width(function, "cos", cos_shape, shape[3])
    sin_shape, sin_dtype = checks.shape_and_dtype(function, "sin", sin, dtypes)
    if sin_shape != cos_shape:
        _check_width(function, "sin", sin_shape, shape[3])
    if not checks.same_dtype(cos_dtype, sin_dtype):
        raise checks.wrong_type(function, "sin", f"cos's dtype {cos_dtype}", str(sin_dtype))
    checks.check_shape(function, "sin", sin_shape, cos_shape, "cos's")
    rank = len(cos_shape)
    if rank == 2:
        fits, rows = True, cos_shape[0]
    else:
        fits = (
            3 <= rank <= 4
            and (rank < 4 or checks.same_size(cos_shape[2], 1))
            and (cos_shape[0] == 1 or checks.same_size(cos_shape[0], shape[batch_axis]))
        )
        rows = cos_shape[1] if fits else 0
    if not fits or (ids is None and 0 <= rows < shape[seq_axis]):
        raise checks.wrong_value(
            function,
            "cos",
            "shape [S, R], [1 or B, S, R] or [1 or B, S, 1, R] with S at least the sequence length "
            f"{shape[seq_axis]} and B the batch {shape[batch_axis]}",
            cos_shape,
        )


def check_base(function: str, argument: str, base) -> float:
    """The base of generated tables: positive and finite."""
    if type(base) is float and 0.0 < base < math.inf:
        return base
    base = checks.check_finite(function, argument, base)
    if base <= 0:
        raise checks.wrong_value(function, argument, "a positive number", base)
    return base


def _check_ids(function: str, position_ids, shape, layout: int) -> None:
    if position_ids is None:
        return
    own, _ = checks.shape_and_dtype(function, "position_ids", position_ids, checks.INDEX_DTYPES)
    batch_axis, seq_axis, _ = _AXES[layout]
    expected = [shape[batch_axis], shape[seq_axis]]
    checks.check_shape(function, "position_ids", own, expected, "batch, sequence")


def _first_rows(table, length: int):
    """A table cut to the sequence, so that it can be sharded with it."""
    axis = 0 if len(table.shape) == 2 else 1
    if length < 0 or checks.same_size(checks.shape_of(table)[axis], length):
        return table
    return paddle.slice(table, [axis], [0], [length])


def _rotate(function: str, names, tensors, shapes, sin, cos, ids, pairing: int, layout: int):
    """One launch for all tensors; inputs are checked. Returns a list."""
    if checks.MANY_DEVICES:
        named = dict(zip(names, tensors))
        checks.check_devices(function, **named, sin=sin, cos=cos, position_ids=ids)
    if any(map(is_distributed, tensors)):
        sizes = []  # those of the parts that a process has are not known here
        if ids is None:
            length = shapes[0][_AXES[layout][1]]
            sin, cos = _first_rows(sin, length), _first_rows(cos, length)
    else:
        # What a gradient has to look like; a size beyond an int attribute counts as unknown.
        sizes = []
        for shape in shapes:
            sizes += shape
        if max(sizes) >= 2**31:
            sizes = [size if size < 2**31 else -1 for size in sizes]
    out = run(_OPERATORS[len(tensors)], *tensors, sin, cos, ids, pairing, layout, sizes, function)
    return list(out) if len(tensors) > 1 else [out]


def _generate_tables(like, ids, seq_axis: int, dim: int, base, pairing: int):
    cos, sin = run("rope_table", like, ids, seq_axis, dim, double_parts(base), pairing)
    # A static backward pass would look for the operator's gradient and fail: there is none.
    cos.stop_gradient = sin.stop_gradient = True
    return cos, sin


@functools.lru_cache(maxsize=8)
def _cached_tables(length: int, dim: int, base: float, pairing: int):
    """Tables of positions 0 to length - 1, kept: a model asks for the same ones in every layer.

    On the CPU only: they are not keyed by a device.
    """
    like = paddle.empty([length]).cpu()  # made on the current device, which may be another one
    return _generate_tables(like, None, 0, dim, base, pairing)


def rotary_tables(length: int, dim: int, base: float, interleaved: bool):
    """(cos, sin) of positions 0 to length - 1: float32, shape ``[length, dim]``, for layers."""
    like = paddle.empty([length])
    return _generate_tables(like, None, 0, dim, base, INTERLEAVED if interleaved else HALVES)


def _tables(like, shape, ids, layout: int, base: float, pairing: int):
    """(cos, sin) for the positions of a call that brings no tables: float32, angles in float64."""
    seq_axis = _AXES[layout][1]
    if ids is None and is_dygraph() and like.place.is_cpu_place():
        return _cached_tables(shape[seq_axis], shape[3], base, pairing)
    if ids is None and is_distributed(like) and shape[seq_axis] >= 0:
        # From the length: to ask `like` for it would gather a sharded sequence.
        return rotary_tables(shape[seq_axis], shape[3], base, pairing == INTERLEAVED)
    return _generate_tables(like, ids, seq_axis, shape[3], base, pairing)


@static_unit
def fused_rotary_position_embedding(
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
    r"""Rotary position embedding of q, k and v in one launch: Paddle's function.

    A pair (x1, x2) becomes (x1 c1 - x2 s1, x2 c2 + x1 s2) with the tables at each one's own index.
    ``use_neox_rotary_style=True`` pairs **adjacent** features (2i, 2i + 1); False pairs the two
    **halves** (i, i + R/2). That is the reverse of what the name means elsewhere: models of the
    Llama kind pass False. x = [1, 2, 3, 4] with sin = 1, cos = 0 gives [-2, 1, -4, 3] for True and
    [-3, -4, 1, 2] for False.

    Computed in float32 (float64 for float64 q), one rounding. Differentiable in q, k and v,
    twice: the gradient is the transposed rotation with the tables as given. Same call as
    ``paddle.incubate.nn.functional.fused_rotary_position_embedding``; what Paddle refuses works:
    position_ids or halves without tables, other head counts in k and v, float32 tables with half
    q, one table per sequence. Formula: Su et al., "RoFormer", 2021.

    Args:
        q (Tensor): float32, float64, float16 or bfloat16; ``[B, S, heads, D]``, or ``[S, B, heads,
            D]`` with time_major; D even.
        k (Tensor, optional): as q; may have another number of heads.
        v (Tensor, optional): as q; may have another number of heads. It is rotated, too.
        sin (Tensor, optional): dtype of q or float32; ``[S', R]`` or ``[1 or B, S', 1, R]``, S' at
            least S. R below D rotates the first R features of a head and copies the others. None:
            generated, like cos.
        cos (Tensor, optional): as sin.
        position_ids (Tensor, optional): int64 or int32, ``[B, S]``, rows of the tables; None: 0, 1,
            ...
        use_neox_rotary_style (bool, optional): True: adjacent pairs; False: halves.
        time_major (bool, optional): Whether the sequence is the first axis of q, k and v.
        rotary_emb_base (float, optional): For generated tables: the angle of pair i at position p
            is p * base^(-2i/D), in float64, its cosine and sine rounded once to float32.

    Returns:
        tuple: (out_q, out_k, out_v), None for what was not given; shape and dtype of the input.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: shapes do not fit, only one of sin and cos is given, the base is not positive
            and finite, or (on the CPU) a position lies outside the tables. On a GPU such a token
            comes out as NaN.

    Examples:
        >>> import paddle
        >>> import paddle_fused.nn.functional as F
        >>> q = paddle.to_tensor([1.0, 2.0, 3.0, 4.0]).reshape([1, 1, 1, 4])
        >>> sin, cos = paddle.ones([1, 4]), paddle.zeros([1, 4])
        >>> out_q, _, _ = F.fused_rotary_position_embedding(q, sin=sin, cos=cos)
        >>> print(out_q.flatten().numpy())
        [-2.  1. -4.  3.]
        >>> out_q, _, _ = F.fused_rotary_position_embedding(
        ...     q, sin=sin, cos=cos, use_neox_rotary_style=False)
        >>> print(out_q.flatten().numpy())
        [-3. -4.  1.  2.]
    """
    function = "fused_rotary_position_embedding"
    adjacent = checks.check_bool(function, "use_neox_rotary_style", use_neox_rotary_style)
    major = checks.check_bool(function, "time_major", time_major)
    base = check_base(function, "rotary_emb_base", rotary_emb_base)
    layout = SEQ_BATCH_HEADS if major else BATCH_SEQ_HEADS
    pairing = INTERLEAVED if adjacent else HALVES
    names, tensors = ["q"], [q]
    if k is not None:
        names.append("k")
        tensors.append(k)
    if v is not None:
        names.append("v")
        tensors.append(v)
    tensors, (shapes, dtype) = _checked(_check_rotated, function, tensors, layout, names)
    shape = shapes[0]
    _check_ids(function, position_ids, shape, layout)
    if (sin is None) != (cos is None):
        missing, given = ("sin", "cos") if sin is None else ("cos", "sin")
        raise checks.wrong_value(function, missing, f"a tensor, since {given} is given", None)
    if sin is None:
        if shape[3] >= 2**31:  # beyond an int attribute
            raise checks.wrong_value(function, "q", "a head_dim below 2**31 without tables", shape)
        cos, sin = _tables(tensors[0], shape, position_ids, layout, base, pairing)
        position_ids = None  # the tables are in the order of the tokens
    else:
        (sin, cos), _ = _checked(
            _check_tables, function, (sin, cos), dtype, shape, layout, position_ids
        )
    out = iter(_rotate(function, names, tensors, shapes, sin, cos, position_ids, pairing, layout))
    return next(out), None if k is None else next(out), None if v is None else next(out)


@static_unit
def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, name=None):
    r"""Rotary position embedding of q and k in Hugging Face's, PaddleFormers' and Liger's call.

    Pairs the two halves of the rotary part: out = x cos + [-x2, x1] sin. Reads and writes
    ``[B, heads, S, D]`` in place of its axes: nothing is transposed. float32 arithmetic (float64
    for float64 q), one rounding. Differentiable in q and k, twice.

    Args:
        q (Tensor): float32, float64, float16 or bfloat16; ``[B, heads, S, D]``, or with
            unsqueeze_dim=2 ``[B, S, heads, D]``; D even.
        k (Tensor): as q; may have another number of heads.
        cos (Tensor): dtype of q or float32; ``[S', R]`` or ``[1 or B, S', R]``, S' at least S, R
            even. R below D rotates the first R features of a head and copies the others.
        sin (Tensor): as cos.
        position_ids (Tensor, optional): int64 or int32, ``[B, S]``: rows of a table that all
            sequences share.
        unsqueeze_dim (int, optional): 1 or 2: the axis of the heads.
        name (str, optional): Unused; for likeness with Paddle.

    Returns:
        tuple: (q_out, k_out), shapes and dtypes of q and k.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: shapes do not fit, position_ids come with tables of several sequences, or (on
            the CPU) a position lies outside the tables.

    Examples:
        >>> import paddle
        >>> import paddle_fused.nn.functional as F
        >>> q, k = paddle.ones([1, 2, 3, 4]), paddle.ones([1, 1, 3, 4])
        >>> cos, sin = paddle.zeros([3, 4]), paddle.ones([3, 4])
        >>> q_out, k_out = F.apply_rotary_pos_emb(q, k, cos, sin)
        >>> print(q_out[0, 0, 0].numpy(), k_out.shape)
        [-1. -1.  1.  1.] paddle.Size([1, 1, 3, 4])
    """
    function = "apply_rotary_pos_emb"
    if checks.check_int(function, "unsqueeze_dim", unsqueeze_dim) not in (1, 2):
        raise checks.wrong_value(function, "unsqueeze_dim", "1 or 2", unsqueeze_dim)
    layout = BATCH_HEADS_SEQ if unsqueeze_dim == 1 else BATCH_SEQ_HEADS
    names = ("q", "k")
    tensors, (shapes, dtype) = _checked(_check_rotated, function, (q, k), layout, names)
    shape = shapes[0]
    _check_ids(function, position_ids, shape, layout)
    (sin, cos), _ = _checked(
        _check_tables, function, (sin, cos), dtype, shape, layout, position_ids
    )
    if position_ids is not None and len(cos.shape) > 2 and cos.shape[0] not in (1, -1):
        raise checks.wrong_value(
            function,
            "position_ids",
            "None with one table per sequence, whose rows are already in order",
            f"position_ids and cos of shape {checks.shape_of(cos)}",
        )
    q_out, k_out = _rotate(function, names, tensors, shapes, sin, cos, position_ids, HALVES, layout)
    return q_out, k_out


def rotate_pairs_heads_first(q, k, cos, sin):
    """(q_out, k_out) of adjacent pairs in ``[B, heads, S, D]``, for `paddle_fused.patching`.

    The one combination that no public call has; tables as `apply_rotary_pos_emb` takes them.
    """
    function = "apply_rotary_pos_emb"
    pairing, layout = INTERLEAVED, BATCH_HEADS_SEQ
    names, tensors = ("q", "k"), (q, k)
    shapes, dtype = _check_rotated(function, tensors, layout, names)
    _check_tables(function, (sin, cos), dtype, shapes[0], layout, None)
    q_out, k_out = _rotate(function, names, tensors, shapes, sin, cos, None, pairing, layout)
    return q_out, k_out


@static_unit
def fused_partial_rope(x, cos, sin):
    r"""Rotates the last R features of each head: Paddle's fused_partial_rope, DeepSeek's layout.

    The rotary part comes in adjacent pairs and goes out in halves: with h = R/2 and x its R
    features,

    .. math::
        out[i] &= x[2i] cos[i] - x[2i+1] sin[i] \\
        out[i + h] &= x[2i+1] cos[i+h] + x[2i] sin[i+h]

    The features before them are copied. float32 arithmetic (float64 for float64 x), one rounding.
    Differentiable in x, twice. Same call as
    ``paddle.incubate.nn.functional.fused_partial_rope``, which takes bfloat16 on a GPU only.

    Args:
        x (Tensor): float32, float64, float16 or bfloat16; ``[B, S, heads, D]``, D even.
        cos (Tensor): dtype of x or float32; ``[1, S', 1, R]``, S' at least S, R even and up to D.
        sin (Tensor): as cos.

    Returns:
        Tensor: shape and dtype of x.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: shapes do not fit.

    Examples:
        >>> import paddle
        >>> import paddle_fused.nn.functional as F
        >>> x = paddle.to_tensor([7.0, 8.0, 1.0, 2.0, 3.0, 4.0]).reshape([1, 1, 1, 6])
        >>> cos, sin = paddle.ones([1, 1, 1, 4]), paddle.zeros([1, 1, 1, 4])
        >>> print(F.fused_partial_rope(x, cos, sin).flatten().numpy())
        [7. 8. 1. 3. 2. 4.]
    """
    function = "fused_partial_rope"
    pairing, layout = INTERLEAVED_TO_HALVES, BATCH_SEQ_HEADS
    names, tensors = ("x",), (x,)
    shapes, dtype = _check_rotated(function, tensors, layout, names)
    (sin, cos), _ = _checked(_check_tables, function, (sin, cos), dtype, shapes[0], layout, None)
    (out,) = _rotate(function, names, tensors, shapes, sin, cos, None, pairing, layout)
    return out
