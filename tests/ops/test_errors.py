"""Wrong calls: the exception, and a text that names the function and the argument."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import paddle_fused
import paddle_fused.nn.functional as F
from helpers import oracle
from helpers.arrays import random_array, to_numpy, to_paddle
from helpers.right_calls import RIGHT, ones
from helpers.running import check

T, V = TypeError, ValueError


ARGUMENTS = [
    (function, argument)
    for function, arguments in RIGHT.items()
    for argument, value in arguments.items()
    if isinstance(value, paddle.Tensor)
]
# Where None is a value.
OPTIONAL = ("y", "weight", "residual", "bias", "norm_bias", "k", "v", "position_ids")
NEEDED = [a for a in ARGUMENTS if a[1] not in OPTIONAL or a == ("apply_rotary_pos_emb", "k")]


def raises(error, function, argument, **changes):
    """The call with changed arguments raises, naming both; a right one works afterwards."""
    with pytest.raises(error, match=rf"^{function}\(\): .*{argument}"):
        getattr(F, function)(**{**RIGHT[function], **changes})
    getattr(F, function)(**RIGHT[function])


@pytest.mark.parametrize("function", RIGHT)
def test_right_calls_work(function):
    outputs = getattr(F, function)(**RIGHT[function])
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    assert all(np.isfinite(out.numpy()).all() for out in outputs)


@pytest.mark.parametrize("function, argument", ARGUMENTS)
@pytest.mark.parametrize("kind", ["numpy", "list", "str", "float", "tuple of tensors"])
def test_wrong_kind(function, argument, kind):
    tensor = RIGHT[function][argument]
    value = {
        "numpy": tensor.numpy(),
        "list": tensor.tolist(),
        "str": "tensor",
        "float": 1.0,
        "tuple of tensors": (tensor, tensor),
    }[kind]
    raises(T, function, argument, **{argument: value})


@pytest.mark.parametrize("function, argument", ARGUMENTS)
def test_wrong_kind_where_devices_are_compared(monkeypatch, function, argument):
    """As in a CUDA build, which compares the devices of all tensors: kinds come first."""
    monkeypatch.setattr(paddle_fused._checks, "MANY_DEVICES", True)
    raises(T, function, argument, **{argument: [1.0]})


@pytest.mark.parametrize("function, argument", NEEDED)
def test_none(function, argument):
    if argument in ("sin", "cos") and function == "fused_rotary_position_embedding":
        return raises(V, function, argument, **{argument: None})
    return raises(T, function, argument, **{argument: None})


@pytest.mark.parametrize("function", RIGHT)
def test_none_for_every_tensor(function):
    """The first is blamed, whatever may be None beside it."""
    nothing = {name: None for other, name in ARGUMENTS if other == function}
    raises(T, function, next(iter(nothing)), **nothing)


@pytest.mark.parametrize("function, argument", ARGUMENTS)
@pytest.mark.parametrize("kind", ["int32", "int64", "uint8", "bool", "complex64", "complex128"])
def test_wrong_dtype(function, argument, kind):
    if argument == "position_ids" and kind in ("int32", "int64"):
        wrong = RIGHT[function][argument].astype("float32")  # of ids, those are the right ones
    else:
        wrong = RIGHT[function][argument].astype(kind)
    raises(T, function, argument, **{argument: wrong})


# Which arguments have to have another's dtype: (function, argument).
FOLLOWERS = [
    ("swiglu", "y"),
    ("fused_swiglu_weighted", "probs"),
    ("fused_swiglu_weighted_bwd", "do2_s"),
    ("fused_swiglu_weighted_bwd", "unzipped_probs"),
    ("rms_norm", "residual"),
    ("fused_rms_norm", "residual"),
    ("fused_rms_norm", "bias"),
    ("fused_rms_norm_ext_grad", "invvar"),
    ("fused_rms_norm_ext_grad", "y_grad"),
    ("fused_rotary_position_embedding", "k"),
    ("fused_rotary_position_embedding", "v"),
    ("fused_rotary_position_embedding", "sin"),
    ("fused_rotary_position_embedding", "cos"),
    ("apply_rotary_pos_emb", "k"),
    ("apply_rotary_pos_emb", "sin"),
    ("apply_rotary_pos_emb", "cos"),
    ("fused_partial_rope", "sin"),
    ("fused_partial_rope", "cos"),
]


@pytest.mark.parametrize("function, argument", FOLLOWERS)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64"])
def test_mixed_dtypes(function, argument, kind):
    # A wrong cos may be told by way of sin, which then differs from it.
    named = "sin|cos" if argument in ("sin", "cos") else argument
    raises(T, function, f"({named})", **{argument: RIGHT[function][argument].astype(kind)})


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_x_with_float32_rest(kind):
    """Only tables, probabilities and the norm's weights may be float32 then."""
    for function, argument in (
        ("swiglu", "y"),
        ("rms_norm", "residual"),
        ("fused_rms_norm", "(bias|residual)"),
    ):
        raises(T, function, argument, x=ones(3, 8, dtype=kind))
    raises(T, "fused_swiglu_weighted_bwd", "do2_s", o1=ones(3, 8, dtype=kind))
    raises(T, "apply_rotary_pos_emb", "k", q=ones(2, 2, 3, 8, dtype=kind))


WRONG_SHAPES = [
    ("swiglu", "y", ones(3, 7)),
    ("swiglu", "y", ones(1, 8)),
    ("swiglu", "y", ones(8)),
    ("swiglu", "y", ones(3, 8, 1)),
    ("fused_swiglu_weighted", "x", ones(3, 7)),
    ("fused_swiglu_weighted", "x", paddle.to_tensor(1.0)),
    ("fused_swiglu_weighted", "probs", ones(3, 4)),
    ("fused_swiglu_weighted", "probs", ones(1)),
    ("fused_swiglu_weighted", "probs", ones(4)),
    ("fused_swiglu_weighted", "probs", ones(1, 3)),
    ("fused_swiglu_weighted", "probs", ones(3, 1, 1)),
    ("fused_swiglu_weighted", "probs", paddle.to_tensor(1.0)),
    ("fused_swiglu_weighted_bwd", "o1", ones(3, 7)),
    ("fused_swiglu_weighted_bwd", "o1", paddle.to_tensor(1.0)),
    ("fused_swiglu_weighted_bwd", "do2_s", ones(3, 8)),
    ("fused_swiglu_weighted_bwd", "do2_s", ones(4, 4)),
    ("fused_swiglu_weighted_bwd", "do2_s", ones(12)),
    ("fused_swiglu_weighted_bwd", "unzipped_probs", ones(3, 4)),
    ("fused_swiglu_weighted_bwd", "unzipped_probs", paddle.to_tensor(1.0)),
    ("rms_norm", "x", paddle.to_tensor(1.0)),
    ("rms_norm", "weight", ones(7)),
    ("rms_norm", "weight", ones(1)),
    ("rms_norm", "weight", ones(1, 8)),
    ("rms_norm", "weight", paddle.to_tensor(1.0)),
    ("rms_norm", "residual", ones(8)),
    ("rms_norm", "residual", ones(1, 8)),
    ("rms_norm", "residual", ones(3, 1, 8)),
    ("fused_rms_norm", "x", paddle.to_tensor(1.0)),
    ("fused_rms_norm", "norm_weight", ones(3)),
    ("fused_rms_norm", "norm_weight", ones(8, 1)),
    ("fused_rms_norm", "norm_bias", ones(7)),
    ("fused_rms_norm", "bias", ones(1)),
    ("fused_rms_norm", "bias", ones(3, 8)),
    ("fused_rms_norm", "residual", ones(3)),
    ("fused_rms_norm_ext", "x", paddle.to_tensor(1.0)),
    ("fused_rms_norm_ext", "scale", ones(9)),
    ("fast_rms_norm", "scale", ones(8, 1)),
    ("fused_rms_norm_ext_grad", "scale", ones(3)),
    ("fused_rms_norm_ext_grad", "invvar", ones(3, 1)),
    ("fused_rms_norm_ext_grad", "invvar", ones(8)),
    ("fused_rms_norm_ext_grad", "y_grad", ones(3, 4)),
    ("fused_rotary_position_embedding", "q", ones(2, 3, 16)),
    ("fused_rotary_position_embedding", "q", ones(2, 3, 2, 1, 8)),
    ("fused_rotary_position_embedding", "q", ones(8)),
    ("fused_rotary_position_embedding", "q", ones(2, 3, 2, 7)),
    ("fused_rotary_position_embedding", "q", ones(2, 3, 2, 0)),
    ("fused_rotary_position_embedding", "q", ones(2, 3, 2, 1)),
    ("fused_rotary_position_embedding", "k", ones(1, 3, 1, 8)),
    ("fused_rotary_position_embedding", "k", ones(0, 3, 1, 8)),
    ("fused_rotary_position_embedding", "k", ones(2, 4, 1, 8)),
    ("fused_rotary_position_embedding", "k", ones(2, 3, 1, 6)),
    ("fused_rotary_position_embedding", "k", ones(2, 3, 8)),
    ("fused_rotary_position_embedding", "v", ones(3, 3, 1, 8)),
    ("fused_rotary_position_embedding", "sin", ones(5, 6)),
    ("fused_rotary_position_embedding", "cos", ones(4, 8)),
    ("fused_rotary_position_embedding", "position_ids", paddle.zeros([3, 2], "int64")),
    ("fused_rotary_position_embedding", "position_ids", paddle.zeros([6], "int64")),
    ("fused_rotary_position_embedding", "position_ids", paddle.zeros([1, 3], "int64")),
    ("apply_rotary_pos_emb", "q", ones(2, 3, 8)),
    ("apply_rotary_pos_emb", "k", ones(2, 1, 4, 8)),
    ("apply_rotary_pos_emb", "position_ids", paddle.zeros([2, 4], "int64")),
    ("fused_partial_rope", "x", ones(3, 2, 8)),
    ("fused_partial_rope", "x", ones(2, 3, 2, 5)),
]


@pytest.mark.parametrize("function, argument, value", WRONG_SHAPES, ids=str)
def test_wrong_shape(function, argument, value):
    named = "(sin|cos)" if argument in ("sin", "cos") else argument
    raises(V, function, named, **{argument: value})


WRONG_TABLES = {
    "too short": (2, 8),
    "no rows": (0, 8),
    "odd width": (5, 7),
    "wider than a head": (5, 10),
    "no width": (5, 0),
    "one axis": (8,),
    "five axes": (1, 5, 1, 1, 8),
    "another batch": (3, 5, 8),
    "an axis of heads": (1, 5, 2, 8),
}


@pytest.mark.parametrize("shape", WRONG_TABLES.values(), ids=list(WRONG_TABLES))
@pytest.mark.parametrize("function", [f for f in RIGHT if "rope" in f or "rotary" in f])
def test_wrong_tables(function, shape):
    changes = {"cos": ones(*shape), "sin": ones(*shape)}
    if "position_ids" in RIGHT[function]:
        changes["position_ids"] = None
    raises(V, function, "(cos|sin)", **changes)


@pytest.mark.parametrize("function", ["fused_rotary_position_embedding", "apply_rotary_pos_emb"])
@pytest.mark.parametrize("position", [-1, 5, 2**31 - 1, 2**40, -(2**40)])
@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_position_outside_the_tables(function, position, kind):
    if kind == "int32" and abs(position) >= 2**31:
        position = np.sign(position) * (2**31 - 1)
    ids = np.zeros((2, 3), kind)
    ids[1, 2] = position
    raises(V, function, "position", position_ids=to_paddle(ids))


WRONG_VALUES = [
    (f, "epsilon", value, T if isinstance(value, (str, bool, list, type(None))) else V)
    for f in RIGHT
    if "norm" in f
    for value in (float("nan"), float("inf"), -1e-6, -float("inf"), "1e-6", True, None, [1e-6])
] + [
    ("rms_norm", "offset", float("nan"), V),
    ("rms_norm", "offset", float("inf"), V),
    ("rms_norm", "offset", "1", T),
    ("rms_norm", "casting_mode", "LLAMA", V),
    ("rms_norm", "casting_mode", "", V),
    ("rms_norm", "casting_mode", None, T),
    ("rms_norm", "casting_mode", 0, T),
    ("fused_rms_norm", "begin_norm_axis", 2, V),
    ("fused_rms_norm", "begin_norm_axis", -3, V),
    ("fused_rms_norm", "begin_norm_axis", 1.0, T),
    ("fused_rms_norm", "begin_norm_axis", True, T),
    ("fused_rms_norm", "begin_norm_axis", None, T),
    ("fused_rms_norm", "quant_scale", float("nan"), V),
    ("fused_rms_norm", "quant_scale", "1", T),
    ("fused_rotary_position_embedding", "rotary_emb_base", 0.0, V),
    ("fused_rotary_position_embedding", "rotary_emb_base", -1.0, V),
    ("fused_rotary_position_embedding", "rotary_emb_base", float("nan"), V),
    ("fused_rotary_position_embedding", "rotary_emb_base", float("inf"), V),
    ("fused_rotary_position_embedding", "rotary_emb_base", "10000", T),
    ("fused_rotary_position_embedding", "use_neox_rotary_style", 1, T),
    ("fused_rotary_position_embedding", "use_neox_rotary_style", None, T),
    ("fused_rotary_position_embedding", "time_major", "False", T),
    ("apply_rotary_pos_emb", "unsqueeze_dim", 0, V),
    ("apply_rotary_pos_emb", "unsqueeze_dim", 3, V),
    ("apply_rotary_pos_emb", "unsqueeze_dim", -1, V),
    ("apply_rotary_pos_emb", "unsqueeze_dim", 1.0, T),
    ("apply_rotary_pos_emb", "unsqueeze_dim", True, T),
]


@pytest.mark.parametrize("function, argument, value, error", WRONG_VALUES)
def test_wrong_value(function, argument, value, error):
    raises(error, function, argument, **{argument: value})


@pytest.mark.parametrize(
    "argument, changes",
    [
        ("quant_round_type", {"quant_round_type": 2}),
        ("quant_round_type", {"quant_round_type": -1}),
        ("quant_round_type", {"quant_round_type": 0.5}),
        ("quant_max_bound", {"quant_max_bound": 0}),
        ("quant_max_bound", {"quant_max_bound": 128}),
        ("quant_max_bound", {"quant_max_bound": float("nan")}),
        ("quant_min_bound", {"quant_min_bound": 0}),
        ("quant_min_bound", {"quant_min_bound": -129}),
        ("quant_min_bound", {"quant_min_bound": float("-inf")}),
        ("quant_max_bound", {"quant_max_bound": -127, "quant_min_bound": 127}),
    ],
)
def test_quantisation_bounds(argument, changes):
    bounds = {"quant_round_type": 0, "quant_max_bound": 127, "quant_min_bound": -127}
    raises(V, "fused_rms_norm", argument, quant_scale=0.5, **{**bounds, **changes})


def test_generated_tables_of_a_huge_empty_head():
    q = paddle.zeros([0, 1, 1, 2**33])
    raises(V, "fused_rotary_position_embedding", "q", q=q, k=None, v=None, sin=None, cos=None)


def test_offset_without_a_weight():
    raises(V, "rms_norm", "offset", weight=None, offset=0.5)
    assert F.rms_norm(ones(3, 8), offset=1.0).shape == [3, 8]


def test_an_odd_last_axis_needs_a_second_input():
    raises(V, "swiglu", "x", x=ones(3, 7), y=None)
    assert F.swiglu(ones(3, 7), ones(3, 7)).shape == [3, 7]
    raises(V, "swiglu", "x", x=paddle.to_tensor(1.0), y=None)
    raises(V, "swiglu", "x", x=paddle.to_tensor(1.0), y=paddle.to_tensor(1.0))


def test_unknown_keywords_are_refused():
    for function, argument in (("fused_swiglu_weighted", "clamp"), ("rms_norm", "axis")):
        with pytest.raises(T, match=argument):
            getattr(F, function)(**RIGHT[function], **{argument: 1})


@pytest.mark.parametrize(
    "count, error", [(0, V), (-1, V), (1.5, T), ("2", T), (True, T), (None, T)]
)
def test_thread_counts(count, error):
    before = paddle_fused.get_num_threads()
    with pytest.raises(error, match=r"set_num_threads\(\): count"):
        paddle_fused.set_num_threads(count)
    assert paddle_fused.get_num_threads() == before


def test_the_process_still_computes(rng):
    """After all of the above, the numbers are right."""
    x, weight = random_array(rng, (3, 40), "float32"), random_array(rng, (40,), "float32")
    out = F.rms_norm(to_paddle(x), to_paddle(weight))
    check(to_numpy(out), oracle.rms_norm(x, weight), "float32")
    check(to_numpy(F.swiglu(to_paddle(x))), oracle.swiglu(x), "float32")
