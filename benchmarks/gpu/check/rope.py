"""RoPE: pairings, layouts, positions, generated tables."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from helpers import oracle
from helpers.arrays import random_array

from .. import library as lib
from .arrays import KERNELS, close, cpu, dt, empty, gpu, twice_and_shifted


def rope(tensors, cos, sin, layout, pairing, ids=None, adjoint=False):
    """The rotated tensors; layout is of "bshd", "sbhd" or "bhsd"."""
    given = [gpu(t) for t in tensors]
    outs = [empty(t.shape, t.dtype) for t in given]
    c, s, i = gpu(cos), gpu(sin), gpu(ids)
    shape = given[0].shape
    axis = {name: layout.index(name) for name in "bsh"}
    p = lib.Rope(
        dt(given[0]), dt(c), pairing, adjoint, shape[axis["b"]], shape[axis["s"]], shape[3]
    )
    p.rotary_dim = c.shape[-1]
    p.rotary_begin = shape[3] - c.shape[-1] if pairing == lib.INTERLEAVED_TO_HALVES else 0
    p.cos, p.sin, p.position_ids = c.data_ptr(), s.data_ptr(), lib.data(i)
    p.table_rows, p.table_batch_stride = (
        c.shape[-2],
        c.shape[-1] * c.shape[-2] if c.dim() == 3 else 0,
    )
    p.position_ids_int32 = i is not None and i.dtype == torch.int32
    p.tensor_count = len(given)
    for k, (t, o) in enumerate(zip(given, outs)):
        stride = t.stride()
        p.tensors[k] = lib.RopeTensor(
            t.data_ptr(),
            o.data_ptr(),
            t.shape[axis["h"]],
            stride[axis["b"]],
            stride[axis["s"]],
            stride[axis["h"]],
        )
    KERNELS.launch("rope", p)
    return [cpu(o) for o in outs]


HEADS = [
    *(((32, 8), 128, 128), ((3, 1, 2), 64, 64), ((5,), 96, 64), ((2, 2), 10, 6)),
    *(((7, 2), 80, 80), ((2,), 6000, 6000), ((1,), 1026, 1026)),
]
PAIRINGS = (lib.INTERLEAVED, lib.HALVES, lib.INTERLEAVED_TO_HALVES)


def expected(x, cos, sin, pairing, adjoint):
    """The oracle's values and their scale, in the layout [B, S, heads, D]."""
    if pairing == lib.INTERLEAVED_TO_HALVES:
        if adjoint:
            return oracle.partial_rope_grad(x, cos, sin), oracle.partial_rope_grad_scale(
                x, cos, sin
            )
        return oracle.partial_rope(x, cos, sin), oracle.partial_rope_scale(x, cos, sin)
    arguments = x, cos, sin, oracle.PAIRS if pairing == lib.INTERLEAVED else oracle.HALVES_STYLE
    if adjoint:
        return oracle.rope_grad(*arguments), oracle.rope_grad_scale(*arguments)
    return oracle.rope(*arguments), oracle.rope_scale(*arguments)


def check_form(rng, tensors, rotary, layout, table_dtype, pairing, use_ids):
    """One form on random tables, forward and backward."""
    batch, seq = tensors[0].shape[:2]

    def place(array):
        return np.ascontiguousarray(np.transpose(array, ["bshd".index(a) for a in layout]))

    cos, sin = (random_array(rng, (20, rotary), table_dtype) for _ in "cs")
    kind = np.int32 if pairing == lib.HALVES else np.int64
    ids = rng.integers(0, 20, (batch, seq)).astype(kind) if use_ids else None
    c, s = oracle.fused_rope_tables(cos, sin, ids, length=seq)
    placed = [place(t) for t in tensors]
    for adjoint in (False, True):
        got = twice_and_shifted(rope, placed, cos, sin, layout, pairing, ids, adjoint)
        for t, y in zip(tensors, got):
            want, scale = expected(t, c, s, pairing, adjoint)
            close(y, place(want), place(scale), what=f"rope {layout} {pairing}")


def check_rope(rng, dtype):
    """Pairings, layouts, partial rotation, position ids, tables of another dtype."""
    for heads, dim, rotary in HEADS:
        tensors = [random_array(rng, (2, 9, h, dim), dtype) for h in heads]
        forms = itertools.product(
            ("bshd", "sbhd", "bhsd"), dict.fromkeys((dtype, "float32")), PAIRINGS, (False, True)
        )
        for form in forms:
            check_form(rng, tensors, rotary, *form)
    q = random_array(rng, (1, 4, 2, 128), dtype)
    cos, sin = (random_array(rng, (20, 128), dtype) for _ in "cs")
    ids = np.array([[3, -1, 20, 19]])
    (y,) = rope([q], cos, sin, "bshd", lib.HALVES, ids)
    assert (np.isnan(oracle.f64(y)).all((0, 2, 3)) == [False, True, True, False]).all(), "bad ids"


def check_rope_table(rng, dtype):
    """Large positions."""
    if dtype != "float32":
        return
    for pairing, style in ((lib.INTERLEAVED, oracle.PAIRS), (lib.HALVES, oracle.HALVES_STYLE)):
        ids = rng.integers(0, 1_000_000, (50,))
        for positions in (None, ids):
            i = gpu(positions)
            cos, sin = empty((50, 128), torch.float32), empty((50, 128), torch.float32)
            p = lib.RopeTable(
                pairing, 10000.0, 50, 128, lib.data(i), False, cos.data_ptr(), sin.data_ptr()
            )
            KERNELS.launch("rope_table", p)
            want = oracle.rope_tables(
                np.arange(50) if positions is None else ids, 128, 10000.0, style
            )
            for got, w in zip((cos, sin), want):
                error = np.abs(oracle.f64(cpu(got)) - w).max()
                assert error < 1.3e-7, f"table {error}"
