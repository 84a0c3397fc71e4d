"""Random calls of every function against the oracle: values, gradients, layouts, special values."""

from __future__ import annotations

import drawing
import numpy as np
from drawing import fuzz
from hypothesis import assume
from hypothesis import strategies as st

import paddle_fused.nn.functional as F
from helpers import fused_norms, norms, numeric, oracle, rotations
from helpers.arrays import DTYPES, to_paddle
from helpers.running import assert_same, run
from helpers.swiglus import check_swiglu, check_weighted

weight_dtypes = st.sampled_from([None, *DTYPES])
epsilons = st.sampled_from([1e-6, 1e-5, 0.0, 1e-12, 1e-3, 1.0])


def check_empty(function, inputs, view, sums=()):
    """Outputs of the right shapes, zero gradients; sums: which inputs get a sum over nothing."""
    outputs, _ = run(function, [view(a) for a in inputs])
    upstream = [np.ones_like(o) for o in outputs]
    _, grads = run(function, [view(a) for a in inputs], [view(g) for g in upstream])
    for index, (array, grad) in enumerate(zip(inputs, grads)):
        if array.size == 0 or index in sums:
            numeric.assert_bit_equal(grad, np.zeros_like(array), f"gradient {index}")


def gates(array):
    """float64 gates whose exponential is a normal number: below, the oracle loses bits, too."""
    return np.maximum(array, -700.0) if array.dtype == np.float64 else array


@fuzz(
    size=drawing.sizes(),
    dtype=drawing.dtypes,
    joined=st.booleans(),
    recipe=drawing.values(3),
    view=drawing.views,
    data=st.data(),
)
def test_swiglu(size, dtype, joined, recipe, view, data):
    (rows, width), (recipe, place) = size, drawing.placed(recipe, view)
    lead = data.draw(drawing.leads(rows))
    g = recipe.array(2, (*lead, width), dtype)
    x = gates(recipe.array(0, (*lead, 2 * width if joined else width), dtype))
    y = None if joined else recipe.array(1, (*lead, width), dtype)
    if g.size == 0:
        return check_empty(F.swiglu, [x] if joined else [x, y], place)
    check_swiglu(x, y, g, view=place)


@fuzz(
    size=drawing.sizes(),
    dtype=drawing.dtypes,
    keep=st.booleans(),
    recipe=drawing.values(3),
    view=drawing.views,
    data=st.data(),
)
def test_weighted(size, dtype, keep, recipe, view, data):
    (rows, width), (recipe, place) = size, drawing.placed(recipe, view)
    lead = data.draw(drawing.leads(rows))
    x = gates(recipe.array(0, (*lead, 2 * width), dtype))
    g = recipe.array(1, (*lead, width), dtype)
    probs = recipe.array(2, (*lead, 1) if keep else lead, "float32")
    if g.size == 0:
        return check_empty(F.fused_swiglu_weighted, [x, probs], place, sums=(1,))
    # A partial sum may leave float32's range where the magnitudes of its terms together do.
    assume(oracle.probs_grad_scale(x, g, probs).max() < numeric.largest_value("float32"))
    check_weighted(x, g, probs, view=place)


@fuzz(
    size=drawing.sizes(),
    dtype=drawing.dtypes,
    weight_dtype=weight_dtypes,
    mode=st.sampled_from(["llama", "gemma", "none"]),
    offset=st.sampled_from([0.0, 1.0]),
    epsilon=epsilons,
    recipe=drawing.values(3),
    view=drawing.views,
    data=st.data(),
)
def test_rms_norm(size, dtype, weight_dtype, mode, offset, epsilon, recipe, view, data):
    (rows, width), (recipe, place) = size, drawing.placed(recipe, view)
    if dtype == "float64":  # squares of the others leave the oracle's own range
        recipe = recipe.only("zero")
    elif mode == "none":  # rounds squares and 1/rms to x's dtype, whose normal range is narrow
        recipe = recipe.only("zero")
        assume(recipe.scale == 1.0 and epsilon >= 1e-6 and (width >= 8 or dtype != "float16"))
    # 1/rms and the sums of g·w·x, unlike those of x², have to be normal numbers.
    recipe = recipe.only("zero", arrays=(1, 2))
    if epsilon == 0.0:
        recipe = recipe.only("zero", "largest")
    lead = data.draw(drawing.leads(rows))
    x, g = recipe.array(0, (*lead, width), dtype), recipe.array(1, (*lead, width), dtype)
    weight = None if weight_dtype is None else recipe.array(2, (width,), weight_dtype)

    def function(x, *weight):
        return F.rms_norm(x, *weight, epsilon=epsilon, offset=offset, casting_mode=mode)

    inputs = [x] if weight is None else [x, weight]
    if x.size == 0:
        return check_empty(function, inputs, place, sums=(1,))
    (out,), grads = run(function, [place(a) for a in inputs], [place(g)])
    norms.check_output(out, x, weight, epsilon, offset, mode, ordinary=False)
    norms.check_gradients((*grads, None)[:2], x, weight, g, epsilon, offset, mode)


@fuzz(
    size=drawing.sizes(smallest=1),
    dtype=drawing.dtypes,
    weight_dtype=st.sampled_from(DTYPES),
    given=st.sets(st.sampled_from(fused_norms.OPTIONAL)),
    seed=st.integers(0, 2**32 - 1),
    axes=st.integers(1, 3),
)
def test_fused_rms_norm(size, dtype, weight_dtype, given, seed, axes):
    rows, width = size
    shape = (max(rows, 1), *[1] * (axes - 1), width)
    rng = np.random.default_rng(seed)
    values = fused_norms.arrays(rng, shape, 1, dtype, tuple(given), weight_dtype)
    fused_norms.check_all(values, 1, dtype)


@fuzz(
    size=drawing.sizes(smallest=1),
    dtype=drawing.dtypes,
    scale=st.floats(1e-3, 10.0),
    kind=st.sampled_from([0, 1]),
    low=st.sampled_from([-127, -128]),
    recipe=drawing.values(2),
    view=drawing.views,
    share=0.5,
)
def test_int8(size, dtype, scale, kind, low, recipe, view):
    if dtype == "float64":  # squares of the others leave the oracle's own range
        recipe = recipe.only("zero")
    recipe, place = drawing.placed(recipe, view)
    x, weight = recipe.array(0, size, dtype), recipe.array(1, size[1:], "float32")

    def function(x, weight):
        return F.fused_rms_norm(
            x,
            weight,
            None,
            1e-6,
            1,
            quant_scale=scale,
            quant_round_type=kind,
            quant_max_bound=127,
            quant_min_bound=low,
        )

    (out,), _ = run(function, [place(x), place(weight)], frozen=(0, 1))
    assert out.dtype == np.int8
    if not x.size:
        return
    exact = oracle.rms_norm(x, weight, 1e-6)
    expected = oracle.quantize_int8(exact, np.float32(scale), kind, 127, low).astype(int)
    scaled = exact * 127 * float(np.float32(scale))
    to_tie = np.abs(np.abs(scaled - np.floor(scaled)) - 0.5)
    near = to_tie <= np.maximum(16 * numeric.spacing(scaled, "float32"), 1e-30)
    assert (np.abs(out.astype(int) - expected) <= near).all()


def rotated_arrays(recipe, lead, heads, dim, dtype):
    """(arrays, upstream gradients)."""
    shapes = [(*lead, count, dim) for count in heads]
    numbers = range(len(shapes))
    return (
        [recipe.array(i, shape, dtype) for i, shape in zip(numbers, shapes)],
        [recipe.array(3 + i, shape, dtype) for i, shape in zip(numbers, shapes)],
    )


rope_sizes = {
    "batch": st.integers(0, 3),
    "length": st.one_of(st.sampled_from([0, 1, 2, 3, 17, 64]), st.integers(0, 40)),
    "half": st.one_of(st.sampled_from([1, 2, 3, 5, 8, 16, 17, 33, 64]), st.integers(1, 70)),
}


@fuzz(
    **rope_sizes,
    dtype=drawing.dtypes,
    pairs=st.booleans(),
    time_major=st.booleans(),
    heads=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    kind=st.sampled_from(list(rotations.TABLES)),
    half_tables=st.booleans(),
    extra_rows=st.integers(0, 3),
    ids_dtype=st.sampled_from([None, "int32", "int64"]),
    recipe=drawing.values(6),
    view=drawing.views,
    data=st.data(),
)
def test_rope(
    batch,
    length,
    half,
    dtype,
    pairs,
    time_major,
    heads,
    kind,
    half_tables,
    extra_rows,
    ids_dtype,
    recipe,
    view,
    data,
):
    recipe, place = drawing.placed(recipe, view)
    dim, rotary = 2 * half, 2 * data.draw(st.integers(1, half))
    lead = (length, batch) if time_major else (batch, length)
    arrays, grads = rotated_arrays(recipe, lead, heads, dim, dtype)
    rng = np.random.default_rng(recipe.seed)
    rows = length + extra_rows or 1
    if batch != 2:  # the kinds with a table per sequence are made for two
        kind = kind.replace("B", "1")
    table_dtype = "float32" if half_tables else dtype
    cos, sin = rotations.random_tables(rng, kind, rows, rotary, table_dtype)
    ids = None if ids_dtype is None else rng.integers(0, rows, (batch, length)).astype(ids_dtype)
    function = rotations.fused("qkv"[: len(heads)], cos, sin, ids, pairs, time_major)
    outputs, gradients = run(function, [place(a) for a in arrays], [place(g) for g in grads])
    if batch * length == 0:
        return assert_same([*outputs, *gradients], [*arrays, *arrays])
    expanded = [rotations.rows_of(t, ids, length, time_major) for t in (cos, sin)]
    full = [i for i, a in enumerate(arrays) if a.size]
    result = [[group[i] for i in full] for group in (outputs, gradients)]
    chosen = [arrays[i] for i in full], [grads[i] for i in full]
    rotations.check_rotation(result, *chosen, *expanded, rotations.STYLES[pairs])


@fuzz(
    **rope_sizes,
    dtype=drawing.dtypes,
    unsqueeze_dim=st.sampled_from([1, 2]),
    kind=st.sampled_from(["SR", "1SR"]),
    with_ids=st.booleans(),
    recipe=drawing.values(6),
    view=drawing.views,
    data=st.data(),
)
def test_applied_rope(
    batch, length, half, dtype, unsqueeze_dim, kind, with_ids, recipe, view, data
):
    recipe, place = drawing.placed(recipe, view)
    dim, rotary = 2 * half, 2 * data.draw(st.integers(1, half))
    arrays, grads = rotated_arrays(recipe, (batch, length), (3, 1), dim, dtype)
    if unsqueeze_dim == 1:
        arrays, grads = (
            [np.ascontiguousarray(a.swapaxes(1, 2)) for a in group] for group in (arrays, grads)
        )
        if recipe.constant:
            arrays, grads = ([np.repeat(a[:1], len(a), 0) for a in g] for g in (arrays, grads))
    rng = np.random.default_rng(recipe.seed)
    rows = length + 2
    cos, sin = rotations.random_tables(rng, kind, rows, rotary, dtype)
    ids = rng.integers(0, rows, (batch, length)) if with_ids else None

    def function(q, k):
        extra = None if ids is None else to_paddle(ids)
        return F.apply_rotary_pos_emb(q, k, to_paddle(cos), to_paddle(sin), extra, unsqueeze_dim)

    result = run(function, [place(a) for a in arrays], [place(g) for g in grads])
    if arrays[0].size == 0:
        return assert_same([*result[0], *result[1]], [*arrays, *arrays])
    expanded = [rotations.rows_of(t, ids, length, heads_axis=unsqueeze_dim) for t in (cos, sin)]
    rotations.check_rotation(result, arrays, grads, *expanded, oracle.HALVES_STYLE)


@fuzz(
    **rope_sizes,
    dtype=drawing.dtypes,
    heads=st.integers(0, 4),
    recipe=drawing.values(4),
    view=drawing.views,
    data=st.data(),
)
def test_partial_rope(batch, length, half, dtype, heads, recipe, view, data):
    recipe, place = drawing.placed(recipe, view)
    dim, rotary = 2 * half, 2 * data.draw(st.integers(1, half))
    (x,), (g,) = rotated_arrays(recipe, (batch, length), (heads,), dim, dtype)
    rng = np.random.default_rng(recipe.seed)
    cos, sin = rotations.random_tables(rng, "1S1R", length + 1, rotary, "float32")
    (out,), (dx,) = run(
        lambda t: F.fused_partial_rope(t, to_paddle(cos), to_paddle(sin)), [place(x)], [place(g)]
    )
    if x.size == 0:
        return assert_same([out, dx], [x, x])
    cos, sin = cos[:, :length], sin[:, :length]
    bound = numeric.elementwise_bound(dtype)
    scale = oracle.partial_rope_scale(x, cos, sin)
    numeric.assert_ulp(out, oracle.partial_rope(x, cos, sin), bound, scale, "out")
    scale = oracle.partial_rope_grad_scale(g, cos, sin)
    numeric.assert_ulp(dx, oracle.partial_rope_grad(g, cos, sin), bound, scale, "dx")


@fuzz(
    **rope_sizes,
    dtype=drawing.dtypes,
    pairs=st.booleans(),
    base=st.floats(1.0, 1e7),
    largest=st.sampled_from([0, 10, 5000, 10**6]),
    seed=st.integers(0, 2**32 - 1),
    share=0.5,
)
def test_generated_tables(batch, length, half, dtype, pairs, base, largest, seed):
    rng = np.random.default_rng(seed)
    q, g = (drawing.Values(seed + i).array(0, (batch, length, 2, 2 * half), dtype) for i in (0, 1))
    ids = rng.integers(0, largest, (batch, length)) if largest else None
    function = rotations.fused("q", None, None, ids, pairs, rotary_emb_base=base)
    (out,), (dx,) = run(function, [q], [g])
    if q.size == 0:
        return assert_same([out, dx], [q, q])
    shown = np.arange(length)[None] if ids is None else ids
    rotations.check_generated(out, dx, q, g, shown, base, rotations.STYLES[pairs])
