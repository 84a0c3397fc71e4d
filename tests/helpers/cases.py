"""A call of every public function, for tests that run it in some kind of graph.

A case knows its inputs with unknown sizes, how to draw them, and what comes out: the oracle's
values, the inferred shapes and the dtypes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Callable

import numpy as np

import paddle_fused.nn.functional as F

from . import oracle
from .arrays import random_array

HIDDEN, HEADS, KV_HEADS, DIM, SEQ, ROWS = 6, 3, 2, 8, 5, 11
EPSILON = 1e-5


@dataclass
class Input:
    """One input: its shape with -1 where a graph does not know the size, and how to draw it.

    Args:
        shape: sizes; "B" is the batch.
        hidden: axes whose size a graph does not know, besides the batch.
        dtype: None is the case's dtype.
        trains: whether it wants a gradient.
        draw: (rng, shape) to an array, instead of random values of the dtype.
    """

    shape: tuple
    hidden: tuple = ()
    dtype: str | None = None
    trains: bool = True
    draw: Callable | None = None

    def unknown(self) -> list[int]:
        """The shape as a graph knows it."""
        return [
            -1 if size == "B" or axis in self.hidden else size
            for axis, size in enumerate(self.shape)
        ]

    def array(self, rng, batch: int, dtype: str) -> np.ndarray:
        """An array for a batch of that size."""
        shape = tuple(batch if size == "B" else size for size in self.shape)
        return self.draw(rng, shape) if self.draw else random_array(rng, shape, self.dtype or dtype)


@dataclass
class Output:
    """The inferred shape, the dtype (None: the case's), how many terms it sums that may cancel."""

    shape: list[int]
    dtype: str | None = None
    trains: bool = True
    terms: int = 1


@dataclass
class Case:
    """A call; expected gives the oracle's values from the arrays."""

    name: str
    call: Callable
    inputs: list[Input]
    outputs: list[Output]
    expected: Callable
    family: str = ""

    def arrays(self, rng, batch: int, dtype: str) -> list[np.ndarray]:
        """One array per input."""
        return [one.array(rng, batch, dtype) for one in self.inputs]

    @property
    def differentiable(self) -> bool:
        """Whether some input and some output take part in a gradient."""
        return any(one.trains for one in self.inputs) and any(one.trains for one in self.outputs)


def _ids(dtype: str) -> Callable:
    return lambda rng, shape: rng.integers(0, ROWS, shape).astype(dtype)


def _table(style: str, which: int, rows: int, dim: int, shape: tuple | None = None) -> Callable:
    def draw(rng, _):
        table = oracle.rope_tables(np.arange(rows), dim, 10000.0, style)[which].astype("float32")
        return table.reshape(shape) if shape else table

    return draw


def _swiglu() -> list[Case]:
    packed = Input(("B", 2 * HIDDEN), hidden=(1,))
    known = Input(("B", SEQ, 2 * HIDDEN), hidden=(1,))
    flat = Input(("B",), dtype="float32")
    column = Input(("B", SEQ, 1), hidden=(1,), dtype="float32")
    half = Input(("B", HIDDEN), hidden=(1,))
    fixed = [Input(one.shape, one.hidden, one.dtype, False) for one in (packed, half, flat)]
    fixed_column = [
        Input(("B", SEQ, 2 * HIDDEN), (1,), None, False),
        Input(("B", SEQ, HIDDEN), (1,), None, False),
        Input(column.shape, column.hidden, "float32", False),
    ]

    def backward_outputs(x, probs):
        return [
            Output(x, trains=False, terms=2),
            Output(probs, "float32", trains=False, terms=HIDDEN),
            Output([*x[:-1], x[-1] // 2 if x[-1] > 0 else -1], trains=False),
        ]

    return [
        Case(
            "swiglu",
            F.swiglu,
            [packed],
            [Output([-1, -1])],
            lambda x: [oracle.swiglu(x)],
            "swiglu",
        ),
        Case(
            "swiglu_known_width",
            F.swiglu,
            [known],
            [Output([-1, -1, HIDDEN])],
            lambda x: [oracle.swiglu(x)],
            "swiglu",
        ),
        Case(
            "swiglu_pair",
            F.swiglu,
            [half, half],
            [Output([-1, -1])],
            lambda x, y: [oracle.swiglu(x, y)],
            "swiglu",
        ),
        Case(
            "swiglu_weighted",
            F.fused_swiglu_weighted,
            [packed, flat],
            [Output([-1, -1])],
            lambda x, p: [oracle.fused_swiglu_weighted(x, p)],
            "swiglu",
        ),
        Case(
            "swiglu_weighted_column",
            F.fused_swiglu_weighted,
            [known, column],
            [Output([-1, -1, HIDDEN])],
            lambda x, p: [oracle.fused_swiglu_weighted(x, p)],
            "swiglu",
        ),
        Case(
            "swiglu_weighted_bwd",
            F.fused_swiglu_weighted_bwd,
            fixed,
            backward_outputs([-1, -1], [-1]),
            oracle.fused_swiglu_weighted_bwd,
            "swiglu",
        ),
        Case(
            "swiglu_weighted_bwd_column",
            F.fused_swiglu_weighted_bwd,
            fixed_column,
            backward_outputs([-1, -1, 2 * HIDDEN], [-1, -1, 1]),
            oracle.fused_swiglu_weighted_bwd,
            "swiglu",
        ),
    ]


def _rms_norm() -> list[Case]:
    shape, known = ("B", SEQ, HIDDEN), [-1, -1, HIDDEN]
    x = Input(shape, hidden=(1,))
    cases = []
    weights = {
        "": None,
        "_weight": Input((HIDDEN,)),
        "_float32_weight": Input((HIDDEN,), (), "float32"),
    }
    for (weight_name, weight), with_residual in itertools.product(weights.items(), [False, True]):

        def call(x, *rest, has_weight=weight is not None, has_residual=with_residual):
            rest = list(rest)
            weight = rest.pop(0) if has_weight else None
            residual = rest.pop(0) if has_residual else None
            return F.rms_norm(x, weight, EPSILON, casting_mode="gemma", residual=residual)

        def expected(x, *rest, has_weight=weight is not None, has_residual=with_residual):
            rest = list(rest)
            weight = rest.pop(0) if has_weight else None
            if not has_residual:
                return [oracle.rms_norm(x, weight, EPSILON)]
            total = oracle.residual_sum(x, rest.pop(0))
            return [oracle.rms_norm(total, weight, EPSILON), total]

        cases.append(
            Case(
                f"rms_norm{weight_name}{'_residual' if with_residual else ''}",
                call,
                [x, *([weight] if weight else []), *([x] if with_residual else [])],
                [Output(known)] * (2 if with_residual else 1),
                expected,
                "rms_norm",
            )
        )
    cases.append(
        Case(
            "rms_norm_offset",
            lambda x, w: F.rms_norm(x, w, EPSILON, offset=1.0, casting_mode="gemma"),
            [Input(("B", HIDDEN), hidden=(1,)), Input((HIDDEN,), hidden=(0,))],
            [Output([-1, -1])],
            lambda x, w: [oracle.rms_norm(x, w, EPSILON, 1.0)],
            "rms_norm",
        )
    )
    return cases


def _split(arrays, flags):
    rest = iter(arrays)
    return [next(rest) if flag else None for flag in flags]


def _fused_rms_norm() -> list[Case]:
    cases = []
    x, vector = Input(("B", HIDDEN)), Input((HIDDEN,))
    for flags in itertools.product([False, True], repeat=3):
        has_norm_bias, has_bias, has_residual = flags
        names = [n for n, flag in zip(("norm_bias", "bias", "residual"), flags) if flag]

        def call(x, weight, *rest, flags=flags):
            norm_bias, bias, residual = _split(rest, flags)
            return F.fused_rms_norm(x, weight, norm_bias, EPSILON, 1, bias, residual)

        def expected(x, weight, *rest, flags=flags):
            norm_bias, bias, residual = _split(rest, flags)
            if bias is None and residual is None:
                return [oracle.fused_rms_norm(x, weight, norm_bias, EPSILON)]
            total = oracle.residual_sum(x, residual, bias)
            return [oracle.fused_rms_norm(total, weight, norm_bias, EPSILON), total]

        extra = [vector] * (has_norm_bias + has_bias) + [x] * has_residual
        cases.append(
            Case(
                "_".join(["fused_rms_norm", *names]),
                call,
                [x, vector, *extra],
                [Output([-1, HIDDEN], terms=2)] * (2 if has_bias or has_residual else 1),
                expected,
                "fused_rms_norm",
            )
        )

    deep, deep_vector = Input(("B", 2, 3)), Input((HIDDEN,))

    def deep_call(x, weight, norm_bias, bias, residual):
        return F.fused_rms_norm(x, weight, norm_bias, EPSILON, 1, bias, residual)

    def deep_expected(x, weight, norm_bias, bias, residual):
        total = oracle.residual_sum(x, residual, bias, 1)
        return [oracle.fused_rms_norm(total, weight, norm_bias, EPSILON, 1), total]

    cases.append(
        Case(
            "fused_rms_norm_two_axes",
            deep_call,
            [deep, deep_vector, deep_vector, deep_vector, deep],
            [Output([-1, 2, 3], terms=2)] * 2,
            deep_expected,
            "fused_rms_norm",
        )
    )
    unknown, unknown_vector = Input(("B", 2, 3), hidden=(1,)), Input((HIDDEN,), hidden=(0,))
    cases.append(
        Case(
            "fused_rms_norm_unknown_axes",
            lambda x, w: F.fused_rms_norm(x, w, None, EPSILON, 1)[0],
            [unknown, unknown_vector],
            [Output([-1, -1, 3])],
            lambda x, w: [oracle.fused_rms_norm(x, w, None, EPSILON, 1)],
            "fused_rms_norm",
        )
    )
    late = Input(("B", SEQ, 2, 3), hidden=(1,))
    cases.append(
        Case(
            "fused_rms_norm_late_axes",
            lambda x, w, r: F.fused_rms_norm(x, w, None, EPSILON, 2, None, r),
            [late, deep_vector, late],
            [Output([-1, -1, 2, 3])] * 2,
            lambda x, w, r: [
                oracle.fused_rms_norm(oracle.residual_sum(x, r), w, None, EPSILON, 2),
                oracle.residual_sum(x, r),
            ],
            "fused_rms_norm",
        )
    )
    return cases


def _int8() -> list[Case]:
    scale, maximum = 0.25, 127.0
    x = Input(("B", HIDDEN), trains=False)
    vector = Input((HIDDEN,), trains=False)
    bounds = {
        "quant_scale": scale,
        "quant_round_type": 1,
        "quant_max_bound": maximum,
        "quant_min_bound": -127.0,
    }

    def quantised(values):
        return oracle.quantize_int8(values, scale, 1, maximum, -127.0)

    def expected_sum(x, weight, norm_bias, bias, residual):
        total = oracle.residual_sum(x, residual, bias)
        return [quantised(oracle.fused_rms_norm(total, weight, norm_bias, EPSILON)), total]

    int8 = Output([-1, HIDDEN], "int8", trains=False)
    return [
        Case(
            "fused_rms_norm_int8",
            lambda x, w: F.fused_rms_norm(x, w, None, EPSILON, 1, **bounds),
            [x, vector],
            [int8],
            lambda x, w: [quantised(oracle.fused_rms_norm(x, w, None, EPSILON))],
            "fused_rms_norm",
        ),
        Case(
            "fused_rms_norm_int8_sum",
            lambda x, w, nb, b, r: F.fused_rms_norm(x, w, nb, EPSILON, 1, b, r, **bounds),
            [x, vector, vector, vector, x],
            [int8, Output([-1, HIDDEN], trains=False)],
            expected_sum,
            "fused_rms_norm",
        ),
    ]


def _ext() -> list[Case]:
    x = Input(("B", SEQ, HIDDEN), hidden=(1,))
    scale = Input((HIDDEN,), (), "float32")
    outputs = [Output([-1, -1, HIDDEN], "float32"), Output([-1, -1], "float32", trains=False)]

    def expected(x, scale):
        return oracle.fused_rms_norm_ext(x, scale, EPSILON)

    gradient_inputs = [
        Input(x.shape, x.hidden, None, False),
        Input((HIDDEN,), (), "float32", False),
        Input(
            ("B", SEQ), (1,), "float32", False, lambda rng, s: rng.uniform(0.5, 2, s).astype("f4")
        ),
        Input(x.shape, x.hidden, "float32", False),
    ]
    return [
        Case(
            "fused_rms_norm_ext",
            lambda x, scale: F.fused_rms_norm_ext(x, scale, EPSILON),
            [x, scale],
            outputs,
            expected,
            "ext",
        ),
        Case(
            "fast_rms_norm",
            lambda x, scale: F.fast_rms_norm(x, scale, EPSILON),
            [x, scale],
            outputs,
            expected,
            "ext",
        ),
        Case(
            "fused_rms_norm_ext_grad",
            lambda x, scale, r, g: F.fused_rms_norm_ext_grad(x, scale, r, g, EPSILON),
            gradient_inputs,
            [
                Output([-1, -1, HIDDEN], trains=False, terms=HIDDEN),
                Output([HIDDEN], "float32", trains=False, terms=64),
            ],
            oracle.fused_rms_norm_ext_grad,
            "ext",
        ),
    ]


def _rotated(heads: int, layout: str = "bshd") -> Input:
    sizes = {"b": "B", "s": SEQ, "h": heads, "d": DIM}
    return Input(tuple(sizes[a] for a in layout), hidden=(layout.index("s"), layout.index("h")))


def _shape(one: Input) -> Output:
    return Output(one.unknown(), terms=2)


def _rope() -> list[Case]:
    halves = oracle.HALVES_STYLE
    cases = []
    sin, cos = (
        Input((ROWS, DIM), (0,), "float32", False, _table(halves, which, ROWS, DIM))
        for which in (1, 0)
    )
    ids = Input(("B", SEQ), (1,), "int64", False, _ids("int64"))

    def given(x, sin, cos, ids=None, time_major=False):
        tables = oracle.fused_rope_tables(cos, sin, ids, time_major, SEQ if ids is None else None)
        return oracle.rope(x, *tables, halves)

    for count, with_ids in itertools.product([1, 2, 3], [False, True]):

        def call(*tensors, count=count, with_ids=with_ids):
            q, k, v = [*tensors[:count], None, None][:3]
            rest = tensors[count:]
            out = F.fused_rotary_position_embedding(
                q,
                k,
                v,
                rest[0],
                rest[1],
                rest[2] if with_ids else None,
                use_neox_rotary_style=False,
            )
            return [one for one in out if one is not None]

        def expected(*arrays, count=count):
            return [given(x, *arrays[count:]) for x in arrays[:count]]

        rotated = [_rotated(heads) for heads in (HEADS, KV_HEADS, 1)[:count]]
        cases.append(
            Case(
                f"rope_{'qkv'[:count]}{'_ids' if with_ids else ''}",
                call,
                [*rotated, sin, cos, *([ids] if with_ids else [])],
                [_shape(one) for one in rotated],
                expected,
                "rope",
            )
        )

    major = [_rotated(HEADS, "sbhd"), _rotated(KV_HEADS, "sbhd")]
    cases.append(
        Case(
            "rope_time_major",
            lambda q, k, sin, cos, ids: F.fused_rotary_position_embedding(
                q, k, None, sin, cos, ids, False, True
            )[:2],
            [*major, sin, cos, ids],
            [_shape(one) for one in major],
            lambda q, k, sin, cos, ids: [given(x, sin, cos, ids, True) for x in (q, k)],
            "rope",
        )
    )

    def generated(x, ids=None):
        positions = np.arange(SEQ)[None] if ids is None else ids
        cos, sin = oracle.rope_tables(positions, DIM, 500.0, oracle.PAIRS)
        return oracle.rope(x, cos[:, :, None], sin[:, :, None], oracle.PAIRS)

    q, k = _rotated(HEADS), _rotated(KV_HEADS)
    cases.append(
        Case(
            "rope_generated",
            lambda q, k: F.fused_rotary_position_embedding(q, k, rotary_emb_base=500.0)[:2],
            [q, k],
            [_shape(q), _shape(k)],
            lambda q, k: [generated(q), generated(k)],
            "rope",
        )
    )
    cases.append(
        Case(
            "rope_generated_ids",
            lambda q, ids: F.fused_rotary_position_embedding(
                q, position_ids=ids, rotary_emb_base=500.0
            )[0],
            [Input(q.shape, (1, 2, 3)), ids],
            [Output([-1, -1, -1, -1], terms=2)],
            lambda q, ids: [generated(q, ids)],
            "rope",
        )
    )

    for axis, layout in ((1, "bhsd"), (2, "bshd")):
        pair = [_rotated(HEADS, layout), _rotated(KV_HEADS, layout)]
        int32_ids = Input(ids.shape, ids.hidden, "int32", False, _ids("int32"))
        cases.append(
            Case(
                f"apply_rotary_pos_emb_{axis}",
                lambda q, k, cos, sin, ids, axis=axis: F.apply_rotary_pos_emb(
                    q, k, cos, sin, ids, axis
                ),
                [*pair, cos, sin, int32_ids],
                [_shape(one) for one in pair],
                lambda q, k, cos, sin, ids, axis=axis: [
                    oracle.rope(x, *oracle.applied_rope_tables(cos, sin, ids, axis), halves)
                    for x in (q, k)
                ],
                "rope",
            )
        )

    rotary = DIM // 2
    partial = [
        Input(
            (1, ROWS, 1, rotary),
            (1,),
            "float32",
            False,
            _table(halves, which, ROWS, rotary, (1, ROWS, 1, rotary)),
        )
        for which in (0, 1)
    ]
    cases.append(
        Case(
            "fused_partial_rope",
            F.fused_partial_rope,
            [q, *partial],
            [_shape(q)],
            lambda x, cos, sin: [oracle.partial_rope(x, cos[:, :SEQ], sin[:, :SEQ])],
            "rope",
        )
    )
    return cases


CASES = [*_swiglu(), *_rms_norm(), *_fused_rms_norm(), *_int8(), *_ext(), *_rope()]
BY_NAME = {case.name: case for case in CASES}
