"""Rotary position embedding in its several forms, in plain Paddle operators.

Every form is x·cos + partner(x)·sin over the first R features of a head, where partner(x) is
(−x₁, x₀) of each rotated pair (x₀, x₁). The forms differ in which features make a pair.
"""

from __future__ import annotations

import math

import paddle


def _cast(x: paddle.Tensor, dtype) -> paddle.Tensor:
    return x if x.dtype == dtype else x.astype(dtype)


def _constant(table: paddle.Tensor) -> paddle.Tensor:
    """The table without a gradient."""
    return table if table.stop_gradient else table.detach()


def _partner_of_halves(x: paddle.Tensor) -> paddle.Tensor:
    """(−x[h:], x[:h]): feature i pairs with feature i + h."""
    first, second = paddle.chunk(x, 2, axis=-1)
    return paddle.concat([-second, first], axis=-1)


def _partner_of_pairs(x: paddle.Tensor) -> paddle.Tensor:
    """(−x[1], x[0], −x[3], x[2], …): feature 2i pairs with feature 2i + 1."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return paddle.stack([-odd, even], axis=-1).flatten(-2)


def _widen(x: paddle.Tensor) -> paddle.Tensor:
    """X in the dtype that products are computed in: float64 stays, others float32."""
    return x if x.dtype == paddle.float64 else _cast(x, paddle.float32)


def _rotate(x: paddle.Tensor, cos: paddle.Tensor, sin: paddle.Tensor, partner) -> paddle.Tensor:
    """Rotates the first R = cos.shape[-1] features of x and copies the rest.

    Computed in float32 (float64 for float64 x), rounded once to x's dtype. The tables broadcast
    against x.
    """
    rotary = cos.shape[-1]
    wide = _widen(x)
    head = wide if rotary == x.shape[-1] else wide[..., :rotary]
    out = head * _cast(cos, wide.dtype) + partner(head) * _cast(sin, wide.dtype)
    if head is not wide:
        # Joined before the cast: Paddle's CPU concat has no bfloat16 gradient.
        out = paddle.concat([out, wide[..., rotary:]], axis=-1)
    return _cast(out, x.dtype)


def _size(x: paddle.Tensor, axis: int):
    """The length of an axis, as a tensor where a static graph does not know it.

    There the shape holds -1, or a tensor already where `to_static` rewrote the access.
    """
    size = x.shape[axis]
    return paddle.shape(x)[axis] if isinstance(size, int) and size < 0 else size


def _generate_tables(positions: paddle.Tensor, features: int, base: float, pairs: bool):
    """(cos, sin), float32 `[*positions.shape, features]`: pair i turns by position·base^(−2i/D).

    The angles are float64, so that large positions keep their accuracy.
    """
    pair = paddle.arange(features // 2, dtype="int64").astype(paddle.float64)
    exponent = pair * (2.0 / features)
    frequency = 1.0 / paddle.pow(paddle.full_like(exponent, base), exponent)
    angle = positions.astype(paddle.float64).unsqueeze(-1) * frequency
    tables = []
    for value in (paddle.cos(angle), paddle.sin(angle)):
        value = value.astype(paddle.float32)
        if pairs:
            tables.append(paddle.stack([value, value], axis=-1).flatten(-2))
        else:
            tables.append(paddle.concat([value, value], axis=-1))
    return tuple(tables)


def _rows_of(table: paddle.Tensor, position_ids: paddle.Tensor) -> paddle.Tensor:
    """The rows `[B, S, R]` of a table `[S', R]` for position_ids `[B, S]`."""
    # Widened first: Paddle's CPU gather_nd has no bfloat16.
    return paddle.gather_nd(_widen(table), position_ids.unsqueeze(-1))


def _sequence_rows(table: paddle.Tensor, position_ids, length) -> paddle.Tensor:
    """The rows `[B, S, R]` of tables `[B, S', R]`: position_ids `[B, S]`, or the first ones."""
    if position_ids is None:
        return table[:, :length]
    index = position_ids.astype("int64").unsqueeze(-1).tile([1, 1, table.shape[-1]])
    return paddle.take_along_axis(_widen(table), index, axis=1, broadcast=False)


def _first_rows(table: paddle.Tensor, length) -> paddle.Tensor:
    """The first rows of a table that may be longer than the sequence."""
    rows = table.shape[0]
    same = isinstance(rows, int) and isinstance(length, int) and rows == length
    return table if same else table[:length]


def _fused_tables(q, sin, cos, position_ids, pairs: bool, seq_axis: int, base: float):
    """(cos, sin), `[S, D]` or `[B, S, D]`, of the fused call: the caller's, or generated ones."""
    if (sin is None) != (cos is None):
        raise ValueError(
            "fused_rotary_position_embedding: sin and cos must be given together, got only "
            + ("cos" if sin is None else "sin")
        )
    if sin is None:
        if not (math.isfinite(base) and base > 0):
            raise ValueError(
                "fused_rotary_position_embedding: rotary_emb_base must be finite and > 0, "
                f"got {base}"
            )
        positions = position_ids
        if positions is None:
            positions = paddle.arange(_size(q, seq_axis), dtype="int64")
        return _generate_tables(positions, q.shape[-1], base, pairs)
    tables = []
    for table in (cos, sin):
        table = _constant(table)
        if len(table.shape) == 4:
            table = table.squeeze(2)
        if len(table.shape) == 3 and table.shape[0] == 1:
            table = table.squeeze(0)
        if len(table.shape) == 3:  # one table per sequence
            tables.append(_sequence_rows(table, position_ids, _size(q, seq_axis)))
        elif position_ids is None:
            tables.append(_first_rows(table, _size(q, seq_axis)))
        else:
            tables.append(_rows_of(table, position_ids))
    return tuple(tables)


def fused_rotary_position_embedding(
    q: paddle.Tensor,
    k: paddle.Tensor | None = None,
    v: paddle.Tensor | None = None,
    sin: paddle.Tensor | None = None,
    cos: paddle.Tensor | None = None,
    position_ids: paddle.Tensor | None = None,
    use_neox_rotary_style: bool = True,
    time_major: bool = False,
    rotary_emb_base: float = 10000.0,
):
    """Paddle's fused_rotary_position_embedding.

    Args:
        q: `[B, S, heads, D]`, or `[S, B, heads, D]` when time_major.
        k: likewise, with its own number of heads, or None.
        v: likewise.
        sin: `[S, R]` or `[1 or B, S, 1, R]` with R ≤ D; both tables None generates them.
        cos: likewise.
        position_ids: int64 or int32 `[B, S]` (batch first in both layouts), or None for 0, 1, ….
        use_neox_rotary_style: True rotates adjacent pairs, False the two halves.
        time_major: the layout of q, k and v.
        rotary_emb_base: of the generated tables; finite and positive.

    Returns:
        (out_q, out_k, out_v) in the shapes and dtypes of q, k and v, None for what was not given.
        Computed in float32 (float64 for float64), rounded once. Generated tables have float64
        angles and are rounded once to float32.
    """
    seq_axis = 0 if time_major else 1
    cos, sin = _fused_tables(
        q, sin, cos, position_ids, use_neox_rotary_style, seq_axis, rotary_emb_base
    )
    if len(cos.shape) == 2:  # [S, R] to [1, S, 1, R] or [S, 1, 1, R]
        axes = [1, 2] if time_major else [0, 2]
        cos, sin = cos.unsqueeze(axes), sin.unsqueeze(axes)
    else:  # [B, S, R] to [B, S, 1, R] or [S, B, 1, R]
        if time_major:
            cos, sin = cos.transpose([1, 0, 2]), sin.transpose([1, 0, 2])
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    partner = _partner_of_pairs if use_neox_rotary_style else _partner_of_halves
    return tuple(None if x is None else _rotate(x, cos, sin, partner) for x in (q, k, v))


def apply_rotary_pos_emb(
    q: paddle.Tensor,
    k: paddle.Tensor,
    cos: paddle.Tensor,
    sin: paddle.Tensor,
    position_ids: paddle.Tensor | None = None,
    unsqueeze_dim: int = 1,
    name: str | None = None,
):
    """The Hugging Face call: rotates the two halves of the first R features of q and k.

    Args:
        q: `[B, heads, S, D]`, or `[B, S, heads, D]` for unsqueeze_dim=2.
        k: likewise, with its own number of heads.
        cos: `[S, R]` or `[1 or B, S, R]`, R ≤ D.
        sin: likewise.
        position_ids: int64 or int32 `[B, S]`: the rows of a table `[S', R]` or `[1, S', R]`.
        unsqueeze_dim: where the tables get their heads axis, 1 or 2.
        name: ignored.

    Returns:
        (q_out, k_out) in the shapes and dtypes of q and k, rounded once from float32 (float64).
    """
    tables = []
    for table in (cos, sin):
        table = _constant(table)
        if position_ids is not None:
            if len(table.shape) == 3:
                if table.shape[0] != 1:
                    raise ValueError(
                        "apply_rotary_pos_emb: position_ids select from one table, [S, R] or "
                        f"[1, S, R], got tables of shape {list(table.shape)}"
                    )
                table = table.squeeze(0)
            table = _rows_of(table, position_ids)
        if len(table.shape) == 2:
            table = table.unsqueeze(0)
        tables.append(table.unsqueeze(unsqueeze_dim))
    cos, sin = tables
    return tuple(_rotate(x, cos, sin, _partner_of_halves) for x in (q, k))


def fused_partial_rope(x: paddle.Tensor, cos: paddle.Tensor, sin: paddle.Tensor):
    """Paddle's fused_partial_rope: rotates the trailing R features of each head.

    The input pairs are adjacent, (2i, 2i + 1); the output has the two halves layout, so a pair
    lands on i and i + R/2. The leading D − R features are copied.

    Args:
        x: `[B, S, heads, D]`.
        cos: `[1, S, 1, R]`, R ≤ D, indexed by the output's layout.
        sin: likewise.

    Returns:
        x's shape and dtype, rounded once from float32 (float64 for float64).
    """
    start = x.shape[-1] - cos.shape[-1]
    wide = _widen(x)
    tail = wide[..., start:]
    tail = paddle.concat([tail[..., 0::2], tail[..., 1::2]], axis=-1)
    out = _rotate(tail, _constant(cos), _constant(sin), _partner_of_halves)
    if start > 0:
        out = paddle.concat([wide[..., :start], out], axis=-1)
    return _cast(out, x.dtype)
