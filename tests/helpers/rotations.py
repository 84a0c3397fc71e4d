"""Calls of the RoPE functions, and checks against the oracle, forward and backward."""

from __future__ import annotations

import numpy as np

import paddle_fused.nn.functional as F

from . import numeric, oracle
from .arrays import random_array, to_paddle
from .norms import towards
from .running import check

STYLES = {True: oracle.PAIRS, False: oracle.HALVES_STYLE}
# The tables' shapes: how many tables, and whether there is an axis for the heads.
TABLES = {"SR": (1, 2), "1SR": (1, 3), "BSR": (2, 3), "1S1R": (1, 4), "BS1R": (2, 4)}


def check_rotation(result, arrays, grads, cos, sin, style):
    """Outputs and gradients, with tables that broadcast against the arrays."""
    for out, dx, x, g in zip(*result, arrays, grads):
        name, rotary = numeric.dtype_name(x.dtype), cos.shape[-1]
        scale = oracle.rope_scale(x, cos, sin, style)
        check(out, oracle.rope(x, cos, sin, style), name, scale, what="out")
        scale = oracle.rope_grad_scale(g, cos, sin, style)
        check(dx, oracle.rope_grad(g, cos, sin, style), name, scale, what="dx")
        numeric.assert_bit_equal(out[..., rotary:], x[..., rotary:], "copied features")
        numeric.assert_bit_equal(dx[..., rotary:], g[..., rotary:], "copied gradients")


def random_tables(rng, kind, rows, rotary, dtype):
    """(cos, sin) of one of TABLES; cos and sin and the halves of each are unrelated."""
    count, rank = TABLES[kind]
    shape = {2: (rows, rotary), 3: (count, rows, rotary), 4: (count, rows, 1, rotary)}[rank]
    return [random_array(rng, shape, dtype) for _ in range(2)]


def rows_of(table, ids, length, time_major=False, heads_axis=2):
    """The table's rows of each token, broadcasting against q."""
    rotary = table.shape[-1]
    count = table.shape[0] if table.ndim > 2 else 1
    table = oracle.f64(table).reshape(count, -1, rotary)
    if ids is None:
        table = table[:, :length]
    else:
        table = table[np.arange(len(ids))[:, None] % count, ids]
    table = np.expand_dims(table, heads_axis)
    return np.swapaxes(table, 0, 1) if time_major else table


def fused(names, cos, sin, ids, pairs=True, time_major=False, **rest):
    """The fused call as a function of the tensors that names lists."""

    def function(*tensors):
        named = dict(zip(names, tensors))
        results = F.fused_rotary_position_embedding(
            **named,
            sin=None if sin is None else to_paddle(sin),
            cos=None if cos is None else to_paddle(cos),
            position_ids=None if ids is None else to_paddle(ids),
            use_neox_rotary_style=pairs,
            time_major=time_major,
            **rest,
        )
        assert [r is not None for r in results] == [name in named for name in "qkv"]
        return results

    return function


def table_slack(x, positions, base, style):
    """What a table entry may add whose float64 value lies next to a tie of float32.

    A float64 angle of 10⁶ is itself some 10⁻¹⁰ off.
    """
    dim = x.shape[-1]
    pair = np.arange(dim // 2)
    angle = oracle.f64(positions)[..., None] / np.power(base, 2.0 * pair / dim)
    angle = np.repeat(angle, 2, -1) if style == oracle.PAIRS else np.concatenate([angle] * 2, -1)
    error, steps = 8 * 2.0**-53 * angle, []
    for value in (np.cos(angle), np.sin(angle)):
        unit = numeric.spacing(value, "float32")
        to_tie = np.abs(np.abs(value / unit - np.floor(value / unit)) - 0.5) * unit
        steps.append(np.where(to_tie < error, unit + error, 0.0)[:, :, None])
    return oracle.rope_scale(x, *steps, style)


def check_generated(out, dx, q, g, positions, base, style):
    """Output and gradient of a call without tables, for positions `[1 or B, S]`."""
    name, bound = numeric.dtype_name(q.dtype), numeric.elementwise_bound(q.dtype)
    cos, sin = (t[:, :, None] for t in oracle.rope_tables(positions, q.shape[-1], base, style))
    for actual, x, rotate, magnitude, what in (
        (out, q, oracle.rope, oracle.rope_scale, "out"),
        (dx, g, oracle.rope_grad, oracle.rope_grad_scale, "dx"),
    ):
        expected, scale = rotate(x, cos, sin, style), magnitude(x, cos, sin, style)
        moved = towards(actual, expected, table_slack(x, positions, base, style))
        numeric.assert_ulp(moved, expected, bound, scale, what, name)
