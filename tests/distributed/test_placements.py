"""Where the outputs and gradients of every operator lie, by where its inputs lie.

On a mesh of one process, where Paddle asks the same rules as on a large one and moves nothing;
test_two_processes.py has values and communication.
"""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.distributed.auto_parallel.api import dtensor_from_local

import paddle_fused.nn.functional as F

MESH = dist.ProcessMesh([[0]], dim_names=["x", "y"])


def placements(text: str):
    """The placements of a word for each mesh dimension: an axis number, R or P (partial sum)."""
    words = text.split()
    special = {"R": dist.Replicate(), "P": dist.Partial()}
    found = [special.get(word) or dist.Shard(int(word)) for word in words]
    return found + [dist.Replicate()] * (2 - len(found))


def describe(tensor) -> str | None:
    """The reverse of placements()."""
    if tensor is None:
        return None
    words = []
    for placement in tensor.placements:
        if placement.is_shard():
            words.append(str(placement.get_dim()))
        else:
            words.append("P" if placement.is_partial() else "R")
    return " ".join(words)


def place(shape, text: str, dtype="float32"):
    """A random distributed leaf."""
    values = np.random.default_rng(sum(shape)).standard_normal(shape)
    local = paddle.to_tensor(values.astype("float32")).astype(dtype)
    tensor = dtensor_from_local(local, MESH, placements(text)).detach()
    tensor.stop_gradient = not dtype.startswith("float")
    return tensor


def full(text: str) -> str:
    """A placement text with R for each mesh dimension that it leaves out."""
    return " ".join([*text.split(), "R", "R"][:2])


def check(function, inputs, out, grads) -> None:
    """Outputs lie where `out` says, gradients of the inputs where `grads` says."""
    results = function(*inputs)
    results = results if isinstance(results, (tuple, list)) else [results]
    results = [one for one in results if one is not None]
    assert [describe(one) for one in results] == [full(text) for text in out]
    if grads is not None:
        used = [one for one in results if not one.stop_gradient]
        paddle.autograd.backward([one.sum() for one in used])
        reached = [describe(one.grad) for one in inputs]
        assert reached == [None if text is None else full(text) for text in grads]


# Placements of [B, S, n] rows: given, and as the operators take them.
ROWS = [
    ("R", "R"),
    ("0", "0"),
    ("1", "1"),
    ("0 1", "0 1"),
    ("1 0", "1 0"),
    ("2", "R"),  # gathered
    ("0 2", "0 R"),
    ("P", "R"),  # summed
    ("P 1", "R 1"),
]


def total(rows: str) -> str:
    """Where a sum over rows lies: partial wherever the rows are cut."""
    return " ".join("P" if word.isdigit() else "R" for word in full(rows).split())


@pytest.mark.parametrize("given,taken", ROWS)
def test_swiglu_packed(given, taken):
    check(F.swiglu, [place([4, 6, 8], given)], [taken], [taken])


@pytest.mark.parametrize("given", ["R", "0", "1", "2", "0 2", "2 1"])
def test_swiglu_pair_is_elementwise(given):
    inputs = [place([4, 6, 8], given), place([4, 6, 8], given)]
    check(F.swiglu, inputs, [given], [given, given])


def test_swiglu_pair_follows_the_one_that_is_cut():
    inputs = [place([4, 6, 8], "R"), place([4, 6, 8], "2")]
    check(F.swiglu, inputs, ["2"], ["2", "2"])


@pytest.mark.parametrize("shape", [[4, 6], [4, 6, 1]])
@pytest.mark.parametrize("given,taken", ROWS)
def test_weighted(given, taken, shape):
    inputs = [place([4, 6, 8], given), place(shape, "R")]
    check(F.fused_swiglu_weighted, inputs, [taken], [taken, taken])


def test_weighted_rows_follow_the_probs():
    inputs = [place([4, 6, 8], "R"), place([4, 6], "0 1")]
    check(F.fused_swiglu_weighted, inputs, ["0 1"], ["0 1", "0 1"])


@pytest.mark.parametrize("given,taken", ROWS)
def test_weighted_bwd(given, taken):
    inputs = [place([4, 6, 8], given), place([4, 6, 4], "R"), place([4, 6, 1], "R")]
    check(F.fused_swiglu_weighted_bwd, inputs, [taken] * 3, None)


@pytest.mark.parametrize("given,taken", ROWS)
@pytest.mark.parametrize("weight", ["R", "0"])
def test_rms_norm(given, taken, weight):
    """A sharded weight, as sharded training keeps it, is gathered for the call."""
    inputs = [place([4, 6, 8], given), place([8], weight)]
    check(F.rms_norm, inputs, [taken], [taken, total(taken)])


@pytest.mark.parametrize("given,taken", ROWS)
def test_rms_norm_unweighted(given, taken):
    check(F.rms_norm, [place([4, 6, 8], given)], [taken], [taken])


@pytest.mark.parametrize("given,taken", ROWS)
def test_rms_norm_residual(given, taken):
    inputs = [place([4, 6, 8], given), place([4, 6, 8], given), place([8], "R")]
    check(
        lambda x, residual, weight: F.rms_norm(x, weight, residual=residual),
        inputs,
        [taken, taken],
        [taken, taken, total(taken)],
    )


@pytest.mark.parametrize("given,taken", ROWS)
def test_rms_norm_residual_unweighted(given, taken):
    inputs = [place([4, 6, 8], given), place([4, 6, 8], "R")]
    check(lambda x, r: F.rms_norm(x, residual=r), inputs, [taken, taken], [taken, taken])


def test_sequence_parallel_sum_is_scattered():
    """Row-parallel projections leave partial sums: the residual says how to cut their total."""
    inputs = [place([4, 6, 8], "P"), place([4, 6, 8], "1"), place([8], "R")]
    check(lambda x, r, w: F.rms_norm(x, w, residual=r), inputs, ["1", "1"], ["1", "1", "P"])


@pytest.mark.parametrize("given,taken", ROWS)
@pytest.mark.parametrize("extra", ["", "norm_bias", "bias", "residual", "norm_bias bias residual"])
def test_fused_rms_norm(given, taken, extra):
    names = extra.split()
    inputs = [place([4, 6, 8], given), place([8], "R")]
    inputs += [place([4, 6, 8], given) if name == "residual" else place([8], "R") for name in names]

    def function(x, weight, *others):
        optional = dict(zip(names, others))
        norm_bias = optional.pop("norm_bias", None)
        return F.fused_rms_norm(x, weight, norm_bias, 1e-6, begin_norm_axis=2, **optional)

    summed = {"bias", "residual"} & set(names)
    out = [taken, taken] if summed else [taken]
    grads = [taken if name == "residual" else total(taken) for name in names]
    check(function, inputs, out, [taken, total(taken), *grads])


@pytest.mark.parametrize("given,taken", ROWS)
@pytest.mark.parametrize("residual", [False, True])
def test_fused_rms_norm_int8(given, taken, residual):
    inputs = [place([4, 6, 8], given), place([8], "R")]
    inputs += [place([4, 6, 8], given)] if residual else []
    quantise = {"quant_scale": 0.1, "quant_max_bound": 127, "quant_min_bound": -127}

    def function(x, weight, r=None):
        return F.fused_rms_norm(x, weight, None, 1e-6, 2, residual=r, **quantise)

    check(function, inputs, [taken, taken] if residual else [taken], None)


@pytest.mark.parametrize("given,taken", ROWS)
def test_fused_rms_norm_ext(given, taken):
    inputs = [place([4, 6, 8], given), place([8], "R")]
    check(F.fused_rms_norm_ext, inputs, [taken, taken], [taken, total(taken)])


@pytest.mark.parametrize("given,taken", ROWS)
def test_fused_rms_norm_ext_grad(given, taken):
    inputs = [place([4, 6, 8], given), place([8], "R"), place([4, 6], "R"), place([4, 6, 8], given)]
    check(lambda *a: F.fused_rms_norm_ext_grad(*a, 1e-5), inputs, [taken, total(taken)], None)


# ---- RoPE: [B, S, heads, D]

ROTATED = [
    ("R", "R"),
    ("0", "0"),
    ("1", "1"),
    ("2", "2"),
    ("0 1", "0 1"),
    ("0 2", "0 2"),
    ("1 2", "1 2"),
    ("3", "R"),  # a process needs both features of a pair: gathered
    ("1 3", "1 R"),
    ("P", "R"),
]


def rotate(q, k=None, v=None, **keywords):
    """All that was rotated."""
    return F.fused_rotary_position_embedding(q, k, v, use_neox_rotary_style=False, **keywords)


@pytest.mark.parametrize("given,taken", ROTATED)
@pytest.mark.parametrize("heads", [[4], [4, 2], [4, 2, 2]])
def test_rope_with_generated_tables(given, taken, heads):
    inputs = [place([2, 6, count, 8], given) for count in heads]
    check(rotate, inputs, [taken] * len(heads), [taken] * len(heads))


@pytest.mark.parametrize("given,taken", ROTATED)
@pytest.mark.parametrize("rows", [6, 16])
def test_rope_with_tables(given, taken, rows):
    """As long as the sequence, or longer: cut to it, and then over the processes with it."""
    sin, cos = (place([rows, 8], "R").detach() for _ in range(2))
    inputs = [place([2, 6, 4, 8], given), place([2, 6, 2, 8], given)]
    check(lambda q, k: rotate(q, k, sin=sin, cos=cos), inputs, [taken] * 2, [taken] * 2)


@pytest.mark.parametrize(
    "given,taken", [("R", "1"), ("3", "1"), ("0", "0"), ("2", "1"), ("1", "1")]
)
def test_rope_with_a_table_that_is_cut(given, taken):
    """It cuts the sequence, unless the batch is cut over the same processes."""
    sin, cos = (place([6, 8], "0").detach() for _ in range(2))
    inputs = [place([2, 6, 4, 8], given), place([2, 6, 2, 8], given)]
    check(lambda q, k: rotate(q, k, sin=sin, cos=cos), inputs, [taken] * 2, [taken] * 2)


@pytest.mark.parametrize("given,taken", ROTATED)
@pytest.mark.parametrize("tables", [False, True])
def test_rope_with_position_ids(given, taken, tables):
    ids = dtensor_from_local(paddle.arange(6).expand([2, 6]).contiguous(), MESH, placements("R"))
    keywords = {"position_ids": ids}
    if tables:
        keywords.update(sin=place([32, 8], "R").detach(), cos=place([32, 8], "R").detach())
    inputs = [place([2, 6, 4, 8], given), place([2, 6, 2, 8], given)]
    check(lambda q, k: rotate(q, k, **keywords), inputs, [taken] * 2, [taken] * 2)


@pytest.mark.parametrize("given,taken", [("0", "0"), ("1", "1"), ("2", "2"), ("0 1", "0 1")])
def test_rope_time_major(given, taken):
    inputs = [place([6, 2, 4, 8], given), place([6, 2, 2, 8], given)]
    check(lambda q, k: rotate(q, k, time_major=True), inputs, [taken] * 2, [taken] * 2)


@pytest.mark.parametrize("given,taken", [("0", "0"), ("1", "1"), ("2", "2"), ("0 2", "0 2")])
@pytest.mark.parametrize("batch", [1, 2])
def test_apply_rotary_pos_emb(given, taken, batch):
    """[B, heads, S, D], with a table that all sequences share or one for each."""
    cos, sin = (place([batch, 6, 8], "R").detach() for _ in range(2))
    inputs = [place([2, 4, 6, 8], given), place([2, 2, 6, 8], given)]
    check(lambda q, k: F.apply_rotary_pos_emb(q, k, cos, sin), inputs, [taken] * 2, [taken] * 2)


@pytest.mark.parametrize("given,taken", ROTATED)
def test_fused_partial_rope(given, taken):
    cos, sin = (place([1, 6, 1, 4], "R").detach() for _ in range(2))
    check(
        lambda x: F.fused_partial_rope(x, cos, sin), [place([2, 6, 4, 8], given)], [taken], [taken]
    )


def test_heads_of_q_and_k_are_cut_apart():
    """Grouped-query attention: too few key heads to cut stay whole on every process."""
    inputs = [place([2, 6, 4, 8], "2"), place([2, 6, 1, 8], "R")]
    check(rotate, inputs, ["2", "R"], ["2", "R"])


def test_batch_of_one_tensor_decides_for_the_others():
    inputs = [place([2, 6, 4, 8], "2"), place([2, 6, 2, 8], "0")]
    check(rotate, inputs, ["0", "0"], ["0", "0"])


# ---- what is around an operator


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_without_gradient_counts_as_zero(used):
    x, r, w = place([4, 6, 8], "1"), place([4, 6, 8], "1"), place([8], "R")
    F.rms_norm(x, w, residual=r)[used].sum().backward()
    assert [describe(t.grad) for t in (x, r, w)] == ["1 R", "1 R", "P R"]
    q, k = place([2, 6, 4, 8], "1"), place([2, 6, 2, 8], "1")
    rotate(q, k)[used].sum().backward()
    assert [describe(t.grad) for t in (q, k)] == ["1 R", "1 R"]
    unused = (q, k)[1 - used]
    assert (unused.grad.numpy() == 0).all()


def test_dense_tensors_beside_distributed_ones_are_replicated():
    weight = paddle.ones([8])
    out = F.rms_norm(place([4, 6, 8], "1"), weight)
    assert describe(out) == "1 R"


def test_no_grad():
    with paddle.no_grad():
        out, total_ = F.rms_norm(place([4, 8], "0"), place([8], "R"), residual=place([4, 8], "0"))
    assert out.stop_gradient and total_.stop_gradient
    assert describe(out) == describe(total_) == "0 R"


SECOND = {
    "swiglu": (F.swiglu, [([4, 6, 8], "0 1")]),
    "swiglu pair": (F.swiglu, [([4, 6, 8], "0 2"), ([4, 6, 8], "0 2")]),
    "rms_norm": (F.rms_norm, [([4, 6, 8], "0 1"), ([8], "R R")]),
    "rms_norm unweighted": (F.rms_norm, [([4, 6, 8], "0 1")]),
    "rope": (rotate, [([2, 6, 4, 8], "1 2")]),
}


def differentiate_twice(function, described):
    """The inputs, after a backward pass through all of their gradients."""
    inputs = [place(shape, text) for shape, text in described]
    results = function(*inputs)
    results = results if isinstance(results, (tuple, list)) else [results]
    loss = sum((one * one).sum() for one in results if one is not None)
    grads = paddle.grad([loss], inputs, create_graph=True)
    sum((one * one).sum() for one in grads).backward()
    return inputs


@pytest.mark.parametrize("name", SECOND)
def test_second_order(name):
    """The weight's is a total by now: Paddle has added two partial ones."""
    function, described = SECOND[name]
    inputs = differentiate_twice(function, described)
    assert [describe(one.grad) for one in inputs] == [text for _, text in described]


def test_second_order_of_several_outputs_is_refused():
    described = [([2, 6, 4, 8], "1 2"), ([2, 6, 2, 8], "1 2")]
    with pytest.raises(NotImplementedError):
        differentiate_twice(rotate, described)


def test_second_order_of_one_gradient_alone_is_refused():
    """Paddle would end the process."""
    x, w = place([4, 8], "0"), place([8], "R")
    (grad,) = paddle.grad([(F.rms_norm(x, w) ** 2).sum()], [x], create_graph=True)
    with pytest.raises(NotImplementedError, match="all gradients"):
        grad.sum().backward()


def test_interleaved_shards_are_refused():
    """A split factor deals blocks in turn: rows of two tensors would not be the same ones."""
    placement = dist.Shard(0)
    placement.set_split_factor(2)
    x = dist.shard_tensor(paddle.ones([8, 8]), MESH, [placement, dist.Replicate()])
    with pytest.raises(NotImplementedError, match="split_factor"):
        F.swiglu(x)
