"""Wrong everything: an argument of any kind, dtype, shape or value gives a result or a clear error.

Never another exception, a crash, or an output of the wrong shape or dtype.
"""

from __future__ import annotations

import math

import numpy as np
import paddle
from drawing import fuzz
from hypothesis import strategies as st

import paddle_fused.nn.functional as F
from helpers.right_calls import RIGHT

DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "bool", "uint8"]
sides = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8])
shapes = st.one_of(
    st.lists(sides, max_size=5),
    # Products beyond int64, in tensors without elements.
    st.permutations([0, 2**40, 2**40, 4]),
    st.permutations([0, 2**31, 2, 1]),
)


@st.composite
def tensors(draw):
    """A tensor that may be wrong in every way."""
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES + ["float32"] * 8))
    tensor = paddle.zeros(shape, dtype) if 0 in shape else paddle.ones(shape, dtype)
    return tensor


numbers = st.one_of(
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 1, 2, 3, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, 10**400]),
)
anything = st.one_of(
    tensors(),
    tensors(),
    numbers,
    st.none(),
    st.booleans(),
    st.text(max_size=4),
    st.sampled_from(["llama", "gemma", "none"]),
    st.builds(np.zeros, st.integers(0, 4)),
    st.lists(st.integers(0, 3), max_size=3),
)
ATTRIBUTES = {
    "rms_norm": ["epsilon", "offset", "casting_mode"],
    "fused_rms_norm": [
        *("epsilon", "begin_norm_axis", "quant_scale", "quant_round_type"),
        *("quant_max_bound", "quant_min_bound"),
    ],
    "fused_rms_norm_ext": ["epsilon"],
    "fast_rms_norm": ["epsilon"],
    "fused_rms_norm_ext_grad": ["epsilon"],
    "fused_rotary_position_embedding": [
        *("use_neox_rotary_style", "time_major", "rotary_emb_base"),
    ],
    "apply_rotary_pos_emb": ["unsqueeze_dim"],
}
# What an output looks like, by the function's first argument.
HALVED = {"fused_swiglu_weighted"}


def check_outputs(function, arguments, outputs):
    """The first output has the first argument's shape, or half of it."""
    first = next(iter(arguments.values()))
    out = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    shape = list(first.shape)
    if function in HALVED or (function == "swiglu" and arguments["y"] is None):
        shape[-1] //= 2
    assert list(out.shape) == shape
    assert out.is_contiguous()


@fuzz(
    function=st.sampled_from(list(RIGHT)),
    wrong=st.lists(st.tuples(st.integers(0, 20), anything), min_size=1, max_size=2),
    share=3.0,
)
def test_any_argument(function, wrong):
    arguments = dict(RIGHT[function])
    places = [*arguments, *ATTRIBUTES.get(function, [])]
    for index, value in wrong:
        arguments[places[index % len(places)]] = value
    try:
        outputs = getattr(F, function)(**arguments)
    except (TypeError, ValueError) as error:
        assert str(error).startswith(f"{function}(): "), error
        assert any(name in str(error) for name in arguments), error
        return
    except MemoryError:  # a table for 2**31 positions, say
        return
    check_outputs(function, arguments, outputs)


positions = st.one_of(st.integers(-3, 8), st.integers(-(2**63), 2**63 - 1))


@fuzz(
    function=st.sampled_from(["fused_rotary_position_embedding", "apply_rotary_pos_emb"]),
    ids=st.lists(positions, min_size=6, max_size=6),
    narrow=st.booleans(),
)
def test_any_position(function, ids, narrow):
    """Inside the tables' five rows: a result; else a ValueError that names one of them."""
    if narrow:
        ids = [(position + 2**31) % 2**32 - 2**31 for position in ids]
    array = np.array(ids, np.int32 if narrow else np.int64).reshape(2, 3)
    arguments = {**RIGHT[function], "position_ids": paddle.to_tensor(array)}
    outside = [position for position in ids if not 0 <= position < 5]
    try:
        getattr(F, function)(**arguments)
    except ValueError as error:
        assert outside and str(error).startswith(f"{function}(): position_ids"), error
        assert any(str(position) in str(error) for position in outside), error
        return
    assert not outside


@fuzz(
    epsilon=st.floats(allow_nan=True, allow_infinity=True),
    offset=st.floats(allow_nan=True, allow_infinity=True),
)
def test_any_number(epsilon, offset):
    """Finite ones compute something; others are refused."""
    x = paddle.ones([2, 8])
    fits = math.isfinite(epsilon) and epsilon >= 0 and math.isfinite(offset)
    try:
        out = F.rms_norm(x, paddle.ones([8]), epsilon, offset=offset)
    except ValueError as error:
        assert not fits and str(error).startswith("rms_norm(): "), error
        return
    assert fits and out.shape == [2, 8]
