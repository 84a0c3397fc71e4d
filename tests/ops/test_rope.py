"""The three RoPE functions in all their forms against the oracle, in ULP."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import paddle_fused.nn.functional as F
from helpers import numeric, oracle
from helpers.arrays import numpy_dtype, random_array, to_numpy, to_paddle
from helpers.layouts import LAYOUTS
from helpers.rotations import (
    STYLES,
    TABLES,
    check_generated,
    check_rotation,
    fused,
    random_tables,
    rows_of,
)
from helpers.running import assert_same, check, run

HEADS = {"q": (4,), "qk": (4, 2), "qv": (4, 1), "qkv": (8, 2, 1)}


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("time_major", [True, False], ids=["SBHD", "BSHD"])
@pytest.mark.parametrize("ids", [None, "int32", "int64"])
@pytest.mark.parametrize("given", HEADS)
@pytest.mark.parametrize("table_dtype", ["same", "float32"])
def test_fused(rng, dtype, pairs, time_major, ids, given, table_dtype):
    """Every table shape, whole and partial heads, other head counts in k and v."""
    lead = (5, 2) if time_major else (2, 5)
    for kind in TABLES:
        for rotary in (8, 4, 2):
            arrays, grads = (
                [random_array(rng, (*lead, heads, 8), dtype) for heads in HEADS[given]]
                for _ in range(2)
            )
            positions = None if ids is None else rng.integers(0, 7, (2, 5)).astype(ids)
            table_kind = dtype if table_dtype == "same" else table_dtype
            cos, sin = random_tables(rng, kind, 7, rotary, table_kind)
            function = fused(given, cos, sin, positions, pairs, time_major)
            expanded = [rows_of(t, positions, 5, time_major) for t in (cos, sin)]
            result = run(function, arrays, grads)
            check_rotation(result, arrays, grads, *expanded, STYLES[pairs])


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "halves"])
def test_the_two_pairings(dtype, pairs):
    x = to_paddle(np.arange(1.0, 5.0).astype(numpy_dtype(dtype)).reshape(1, 1, 1, 4))
    sin, cos = paddle.ones([1, 4]), paddle.zeros([1, 4])
    out, _, _ = F.fused_rotary_position_embedding(x, sin=sin, cos=cos, use_neox_rotary_style=pairs)
    expected = [-2.0, 1.0, -4.0, 3.0] if pairs else [-3.0, -4.0, 1.0, 2.0]
    assert to_numpy(out).astype(np.float64).flatten().tolist() == expected


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "halves"])
def test_head_sizes(rng, dtype, pairs):
    for dim in (*range(2, 67, 2), 96, 128, 130, 256, 1022, 1024):
        for heads in (1, 3):
            arrays, grads = ([random_array(rng, (1, 3, heads, dim), dtype)] for _ in range(2))
            cos, sin = random_tables(rng, "SR", 3, dim, "float32")
            expanded = [rows_of(t, None, 3) for t in (cos, sin)]
            result = run(fused("q", cos, sin, None, pairs), arrays, grads)
            check_rotation(result, arrays, grads, *expanded, STYLES[pairs])


# Many tokens, many heads, one huge head: at most 0.4 million elements each.
@pytest.mark.parametrize("shape", [(1, 200003, 1, 2), (3, 1, 4097, 4), (1, 1, 1, 65538)], ids=str)
def test_large(rng, dtype, shape):
    arrays, grads = ([random_array(rng, shape, dtype)] for _ in range(2))
    cos, sin = random_tables(rng, "SR", shape[1], shape[3], "float32")
    expanded = [rows_of(t, None, shape[1]) for t in (cos, sin)]
    for pairs, style in STYLES.items():
        result = run(fused("q", cos, sin, None, pairs), arrays, grads)
        check_rotation(result, arrays, grads, *expanded, style)


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("positions", ["none", "random", "far"])
@pytest.mark.parametrize("base", [10000.0, 500.0, 1e6])
def test_generated_tables(rng, dtype, pairs, positions, base):
    q, g = (random_array(rng, (2, 16, 3, 32), dtype) for _ in range(2))
    ids = {
        "none": None,
        "random": rng.integers(0, 100000, (2, 16)),
        "far": np.stack([np.arange(65536, 65552), np.arange(1000000, 1000016)]),
    }[positions]
    shown = np.arange(16)[None] if ids is None else ids
    style = STYLES[pairs]
    (out,), (dx,) = run(fused("q", None, None, ids, pairs, rotary_emb_base=base), [q], [g])
    check_generated(out, dx, q, g, shown, base, style)


def test_generated_tables_tell_long_positions_apart(rng):
    q = np.broadcast_to(random_array(rng, (1, 1, 1, 128), "bfloat16"), (1, 4096, 1, 128))
    out = to_numpy(F.fused_rotary_position_embedding(to_paddle(q))[0])
    assert len({row.tobytes() for row in out[0, :, 0]}) == 4096
    for level in ("O1", "O2"):
        with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
            cast = F.fused_rotary_position_embedding(to_paddle(q))[0]
        numeric.assert_bit_equal(to_numpy(cast), out, level)


@pytest.mark.parametrize("time_major", [True, False])
def test_generated_tables_of_all_heads_and_axes(rng, time_major):
    """GQA and time_major agree with the single, batch-major calls."""
    q, k, v = (random_array(rng, (2, 6, heads, 8), "float32") for heads in (4, 2, 1))
    order = (1, 0, 2, 3) if time_major else (0, 1, 2, 3)
    together = F.fused_rotary_position_embedding(
        *(to_paddle(t.transpose(order)) for t in (q, k, v)), time_major=time_major
    )
    for one, t in zip(together, (q, k, v)):
        alone = F.fused_rotary_position_embedding(to_paddle(t))[0]
        numeric.assert_bit_equal(to_numpy(one).transpose(order), to_numpy(alone))


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize(
    "kind, ids", [(k, i) for k in ("SR", "1SR") for i in (None, "int32", "int64")] + [("BSR", None)]
)
@pytest.mark.parametrize("rotary", [8, 6, 2])
@pytest.mark.parametrize("table_dtype", ["same", "float32"])
def test_applied(rng, dtype, unsqueeze_dim, kind, ids, rotary, table_dtype):
    shapes = [(2, h, 5, 8) if unsqueeze_dim == 1 else (2, 5, h, 8) for h in (4, 2)]
    arrays, grads = ([random_array(rng, shape, dtype) for shape in shapes] for _ in range(2))
    positions = None if ids is None else rng.integers(0, 7, (2, 5)).astype(ids)
    cos, sin = random_tables(rng, kind, 7, rotary, dtype if table_dtype == "same" else "float32")

    def function(q, k):
        extra = None if positions is None else to_paddle(positions)
        tables = to_paddle(cos), to_paddle(sin)
        return F.apply_rotary_pos_emb(q, k, *tables, extra, unsqueeze_dim)

    expanded = [rows_of(t, positions, 5, heads_axis=unsqueeze_dim) for t in (cos, sin)]
    result = run(function, arrays, grads)
    check_rotation(result, arrays, grads, *expanded, oracle.HALVES_STYLE)


def test_applied_refuses_ids_with_batched_tables(rng):
    q = to_paddle(random_array(rng, (2, 4, 5, 8), "float32"))
    table, ids = paddle.ones([2, 7, 8]), paddle.zeros([2, 5], "int64")
    with pytest.raises(ValueError, match=r"apply_rotary_pos_emb\(\): position_ids"):
        F.apply_rotary_pos_emb(q, q, table, table, ids)


@pytest.mark.parametrize("rotary", [2, 4, 10, 16])
@pytest.mark.parametrize("rows", [5, 9])
@pytest.mark.parametrize("table_dtype", ["same", "float32"])
def test_partial_rope(rng, dtype, rotary, rows, table_dtype):
    x, g = (random_array(rng, (2, 5, 3, 16), dtype) for _ in range(2))
    table_kind = dtype if table_dtype == "same" else "float32"
    cos, sin = (random_array(rng, (1, rows, 1, rotary), table_kind) for _ in range(2))
    (out,), (dx,) = run(lambda t: F.fused_partial_rope(t, to_paddle(cos), to_paddle(sin)), [x], [g])
    cos, sin = cos[:, :5], sin[:, :5]
    scale = oracle.partial_rope_scale(x, cos, sin)
    check(out, oracle.partial_rope(x, cos, sin), dtype, scale, what="out")
    scale = oracle.partial_rope_grad_scale(g, cos, sin)
    check(dx, oracle.partial_rope_grad(g, cos, sin), dtype, scale, what="dx")
    numeric.assert_bit_equal(out[..., : 16 - rotary], x[..., : 16 - rotary])
    numeric.assert_bit_equal(dx[..., : 16 - rotary], g[..., : 16 - rotary])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "halves"])
def test_layouts(rng, dtype, layout, pairs):
    """Bit-equal to contiguous copies, for views as q, k, v, tables, ids and upstream gradients."""
    view = LAYOUTS[layout]
    arrays, grads = (
        [random_array(rng, (2, 5, heads, 8), dtype) for heads in (4, 2, 1)] for _ in range(2)
    )
    cos, sin = random_tables(rng, "SR", 7, 8, dtype)
    ids = rng.integers(0, 7, (2, 5))

    def function(placed):
        tables = [placed(t) for t in (sin, cos, ids)]
        return lambda q, k, v: F.fused_rotary_position_embedding(
            q, k, v, *tables, use_neox_rotary_style=pairs
        )

    expected = run(function(to_paddle), arrays, grads)
    actual = run(function(view), [view(a) for a in arrays], [view(g) for g in grads])
    assert_same([*actual[0], *actual[1]], [*expected[0], *expected[1]], "fused")

    def other(q, k):
        return (
            *F.apply_rotary_pos_emb(q, k, to_paddle(cos), to_paddle(sin), unsqueeze_dim=2),
            F.fused_partial_rope(q, *(to_paddle(t.reshape(1, 7, 1, 8)) for t in (cos, sin))),
        )

    upstream = [grads[0], grads[1], grads[0]]
    expected = run(other, arrays[:2], upstream)
    actual = run(other, [view(a) for a in arrays[:2]], [view(g) for g in upstream])
    assert_same([*actual[0], *actual[1]], [*expected[0], *expected[1]], "others")


def test_heads_of_a_fused_projection(rng):
    qkv = to_paddle(random_array(rng, (2, 3, 6, 32), "float32"))
    cos, sin = (to_paddle(t) for t in random_tables(rng, "SR", 3, 32, "float32"))
    parts = qkv[:, :, :2], qkv[:, :, 2:4], qkv[:, :, 4:]
    sliced = F.fused_rotary_position_embedding(*parts, sin, cos)
    cloned = F.fused_rotary_position_embedding(*(p.clone() for p in parts), sin, cos)
    assert_same([to_numpy(t) for t in sliced], [to_numpy(t) for t in cloned])


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8)], ids=str)
@pytest.mark.parametrize("tables", ["given", "ids", "generated", "generated ids"])
def test_empty(dtype, shape, tables):
    q = np.zeros(shape, numpy_dtype(dtype))
    given = tables in ("given", "ids")
    cos = sin = np.ones((3, 8), np.float32) if given else None
    ids = np.zeros(shape[:2], np.int64) if "ids" in tables else None
    for pairs in (True, False):
        result = run(fused("qkv", cos, sin, ids, pairs), [q, q, q], [q, q, q])
        assert_same([*result[0], *result[1]], [q] * 6)


def test_empty_others(dtype):
    for shape in ((0, 3, 2, 8), (2, 0, 3, 8), (2, 3, 0, 8)):
        q = np.zeros(shape, numpy_dtype(dtype))
        table = paddle.ones([3, 8])
        outputs, grads = run(
            lambda q, k, t=table: F.apply_rotary_pos_emb(q, k, t, t), [q, q], [q, q]
        )
        assert_same([*outputs, *grads], [q] * 4)
        table = paddle.ones([1, 3, 1, 8])
        outputs, grads = run(lambda x, t=table: F.fused_partial_rope(x, t, t), [q], [q])
        assert_same([*outputs, *grads], [q] * 2)


def test_k_without_heads_leaves_q_alone(rng):
    q = random_array(rng, (2, 3, 4, 8), "float32")
    k = np.zeros((2, 3, 0, 8), np.float32)
    cos, sin = random_tables(rng, "SR", 3, 8, "float32")
    (both, empty), grads = run(fused("qk", cos, sin, None), [q, k], [q, k])
    (alone,), (dq,) = run(fused("q", cos, sin, None), [q], [q])
    assert_same([both, empty, *grads], [alone, k, dq, k])


def test_special_values_stay_in_their_pair(rng, dtype):
    q = random_array(rng, (1, 3, 2, 8), dtype)
    cos, sin = random_tables(rng, "SR", 3, 8, "float32")
    for pairs, partner in ((True, 3), (False, 6)):
        clean = to_numpy(fused("q", cos, sin, None, pairs)(to_paddle(q))[0])
        dirty_q = q.copy()
        dirty_q[0, 1, 1, 2] = np.nan
        dirty = to_numpy(fused("q", cos, sin, None, pairs)(to_paddle(dirty_q))[0])
        touched = np.isnan(dirty.astype(np.float64))
        assert np.argwhere(touched).tolist() == [[0, 1, 1, 2], [0, 1, 1, partner]]
        numeric.assert_bit_equal(dirty[~touched], clean[~touched])


def test_extreme_values(dtype):
    """Subnormals and the largest number, turned by nothing and by a quarter."""
    largest = numeric.largest_value(dtype)
    values = [float(numeric.spacing(0.0, dtype)), largest, -largest, -0.0]
    q = np.array(values).astype(numpy_dtype(dtype)).reshape(1, 1, 1, 4)
    for cos, sin in ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5)):
        tables = [np.full((1, 4), v, np.float32) for v in (cos, sin)]
        expanded = [rows_of(t, None, 1) for t in tables]
        for pairs, style in STYLES.items():
            result = run(fused("q", *tables, None, pairs), [q], [q])
            check_rotation(result, [q], [q], *expanded, style)


def test_repeated_generated_tables_are_not_changed_by_use(rng):
    """The kept tables serve every layer: they must survive gradients and other shapes."""
    q = random_array(rng, (1, 6, 2, 8), "float32")
    first = run(fused("q", None, None, None), [q], [q])
    run(fused("q", None, None, None), [q[:, :3]], [q[:, :3]])
    with paddle.no_grad():
        F.fused_rotary_position_embedding(to_paddle(q))
    again = run(fused("q", None, None, None), [q], [q])
    assert_same([*again[0], *again[1]], [*first[0], *first[1]])
