"""What must not change a result, whatever the input: bits are compared, any NaN with any NaN."""

from __future__ import annotations

import drawing
import numpy as np
import paddle
from drawing import fuzz
from hypothesis import strategies as st

import paddle_fused
import paddle_fused.nn.functional as F
from helpers.arrays import to_numpy, to_paddle
from helpers.calls import CALLS, check_nothing_written, digest, make_call, one_nan
from helpers.running import assert_same

names = st.sampled_from(list(CALLS))
narrow = st.one_of(st.sampled_from([8, 9, 15, 16, 17, 31, 33, 64, 67]), st.integers(8, 150))
call_arguments = {
    "name": names,
    "dtype": drawing.dtypes,
    "rows": st.one_of(st.sampled_from([0, 1, 2, 33, 64, 65]), st.integers(0, 90)),
    "width": st.one_of(narrow, st.sampled_from([1023, 1025, 2053])),
    "recipe": drawing.any_values(5),
}


def same(actual, expected, what=""):
    """Bit-equal lists of arrays, one NaN being as good as another."""
    assert_same([one_nan(a) for a in actual], [one_nan(b) for b in expected], what)


def flat(results):
    return [array for group in results for array in group]


def dirty(arrays):
    """Leaves NaN in the allocator's free blocks of the arrays' sizes."""
    blocks = [paddle.full([max(a.nbytes // 4, 1)], float("nan")) for a in arrays for _ in range(2)]
    del blocks


@fuzz(**call_arguments, threads=st.sampled_from([2, 3, 8]), big=st.booleans())
def test_repeats_and_threads(name, dtype, rows, width, recipe, threads, big):
    """Again, over dirty memory, with other numbers of threads."""
    if big:  # enough for threads to start
        rows, width = 40 * rows, min(width, 150)
    call = make_call(name, dtype, rows, width, values=recipe)
    before = paddle_fused.get_num_threads()
    try:
        paddle_fused.set_num_threads(1)
        expected = flat(call.results())
        for count in (1, threads):
            paddle_fused.set_num_threads(count)
            dirty(expected)
            same(flat(call.results()), expected, f"{count} threads")
    finally:
        paddle_fused.set_num_threads(before)


@fuzz(**call_arguments, view=drawing.views, data=st.data())
def test_batch_and_layout(name, dtype, rows, width, recipe, view, data):
    """Some of the rows, in any order, in any layout, give those rows of the results."""
    recipe, place = drawing.placed(recipe, view)
    call = make_call(name, dtype, rows, width, values=recipe)
    expected, sums = call.results()
    if recipe.constant:
        chosen = list(range(rows))
    elif rows:
        chosen = data.draw(st.lists(st.integers(0, rows - 1), max_size=2 * rows))
    else:
        chosen = []
    some = call.rows(np.array(chosen, dtype=np.int64))
    rowwise, some_sums = some.results(place)
    same(rowwise, [e[np.array(chosen, dtype=np.int64)] for e in expected], view)
    if chosen == list(range(rows)):
        same(some_sums, sums, view)


@fuzz(**call_arguments)
def test_instruction_sets(name, dtype, rows, width, recipe, other_targets):
    """The kernels of every instruction set of this machine compute the same bits."""
    here = flat(make_call(name, dtype, rows, width, values=recipe).results())
    expected = [digest([array]) for array in here]
    for target in other_targets:
        found = target.digests(name, dtype, rows, width, 0, recipe)
        assert found == expected, target.active


@fuzz(**call_arguments, view=drawing.views)
def test_nothing_is_written_but_outputs(name, dtype, rows, width, recipe, view):
    recipe, place = drawing.placed(recipe, view)
    check_nothing_written(make_call(name, dtype, rows, width, values=recipe), place, same)


@fuzz(
    dtype=drawing.dtypes,
    rows=st.integers(1, 9),
    width=st.integers(1, 200),
    cut=st.integers(0, 200),
    recipe=drawing.any_values(3),
)
def test_a_column_does_not_depend_on_its_place(dtype, rows, width, cut, recipe):
    """Elementwise results of the first columns alone: in full vectors here, in a tail there."""
    cut = cut % width + 1
    gate, up, g = (recipe.array(i, (rows, width), dtype) for i in range(3))
    whole = make_swiglu(gate, up, g)
    part = make_swiglu(*(np.ascontiguousarray(a[:, :cut]) for a in (gate, up, g)))
    same(part, [a[:, :cut] for a in whole])
    heads, tables = (gate.reshape(1, rows, 1, width), np.repeat(up[:, : width // 2], 2, axis=1))
    rotary = 2 * (min(cut, width) // 2)
    if width % 2 or rotary == 0:
        return
    table = to_paddle(np.ascontiguousarray(tables[:, :rotary]))

    def rotate(x):
        out, _, _ = F.fused_rotary_position_embedding(to_paddle(x), sin=table, cos=table)
        return to_numpy(out)[..., :rotary]

    same([rotate(heads)], [rotate(np.ascontiguousarray(heads[..., :rotary]))], "rotation")


def make_swiglu(gate, up, g):
    """The elementwise results of the weighted form, gate and up apart."""
    probs = np.full(len(gate), 0.75, np.float32)
    packed = np.concatenate([gate, up], axis=1)
    do1, _, o2_s = F.fused_swiglu_weighted_bwd(*map(to_paddle, (packed, g, probs)))
    do1, width = to_numpy(do1), gate.shape[1]
    pair = to_numpy(F.swiglu(to_paddle(gate), to_paddle(up)))
    return [do1[:, :width], do1[:, width:], to_numpy(o2_s), pair]
