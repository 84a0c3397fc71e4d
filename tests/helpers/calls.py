"""Every operator as a call on random arrays with a given number of rows, for invariance tests."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field

import numpy as np
import paddle

import paddle_fused.nn.functional as F

from .arrays import DTYPES, random_array, to_numpy, to_paddle
from .gradient_cases import TWICE
from .running import as_tuple, assert_same, run
from .second_order import second_order
from .values import Values


@dataclass
class Call:
    """A function, its inputs, and which of them have a row per row of the output.

    Attributes:
        function: takes the inputs as tensors.
        inputs: arrays; those of dtype int64 get no gradient.
        rowwise: indices of inputs whose first axis is the rows.
        upstream: gradients of the outputs, rowwise, None for one without; empty: no backward pass.
        sums: indices of outputs that are sums over rows.
    """

    function: object
    inputs: list
    rowwise: tuple = (0,)
    upstream: list = field(default_factory=list)
    sums: tuple = ()

    def results(self, view=lambda array: array):
        """(outputs and gradients of the rowwise inputs, what is a sum over rows)."""
        inputs = [view(a) if i in self.rowwise else a for i, a in enumerate(self.inputs)]
        frozen = [i for i, a in enumerate(self.inputs) if a.dtype == np.int64]
        grads = [None if g is None else view(g) for g in self.upstream] or None
        outputs, reached = run(self.function, inputs, grads, frozen)
        rowwise = [o for i, o in enumerate(outputs) if i not in self.sums]
        others = [outputs[i] for i in self.sums]
        for index, grad in enumerate(reached):
            if grad is not None:
                (rowwise if index in self.rowwise else others).append(grad)
        return rowwise, others

    def rows(self, chosen) -> Call:
        """The same call with only the chosen rows."""
        inputs = [a[chosen] if i in self.rowwise else a for i, a in enumerate(self.inputs)]
        upstream = [None if g is None else g[chosen] for g in self.upstream]
        return Call(self.function, inputs, self.rowwise, upstream, self.sums)


def _swiglu_joined(array, width):
    return Call(F.swiglu, [array(2 * width)], upstream=[array(width)])


def _swiglu_pair(array, width):
    return Call(F.swiglu, [array(width), array(width)], (0, 1), [array(width)])


def _weighted(array, width):
    probs = array(dtype="float32")
    return Call(F.fused_swiglu_weighted, [array(2 * width), probs], (0, 1), [array(width)])


def _weighted_bwd(array, width):
    inputs = [array(2 * width), array(width), array(dtype="float32")]
    return Call(F.fused_swiglu_weighted_bwd, inputs, (0, 1, 2))


def _rms_norm(mode, weighted=True):
    def make(array, width):
        weight = [array(width, rows=False)] if weighted else []

        def function(x, weight=None):
            return F.rms_norm(x, weight, casting_mode=mode)

        return Call(function, [array(width), *weight], upstream=[array(width)])

    return make


def _rms_norm_residual(array, width):
    inputs = [array(width), array(width), array(width, rows=False)]
    upstream = [array(width), array(width)]
    return Call(lambda x, r, w: F.rms_norm(x, w, residual=r), inputs, (0, 1), upstream)


def _fused_rms_norm(array, width):
    vectors = [array(width, rows=False) for _ in range(3)]

    def function(x, residual, weight, norm_bias, bias):
        return F.fused_rms_norm(x, weight, norm_bias, 1e-6, 1, bias, residual)

    upstream = [array(width), array(width)]
    return Call(function, [array(width), array(width), *vectors], (0, 1), upstream)


def _int8(array, width):
    def function(x, weight):
        return F.fused_rms_norm(x, weight, None, 1e-6, 1, None, None, 0.5, 0, 127, -127)

    return Call(function, [array(width), array(width, rows=False)])


def _ext(array, width):
    inputs = [array(width), array(width, rows=False)]
    return Call(F.fused_rms_norm_ext, inputs, upstream=[array(width), None])


def _ext_grad(array, width):
    inputs = [array(width), array(dtype="float32"), array(width), array(width, rows=False)]
    return Call(
        lambda x, invvar, g, scale: F.fused_rms_norm_ext_grad(x, scale, invvar, g, 1e-5),
        inputs,
        (0, 1, 2),
        sums=(1,),
    )


def _rope(function, shape_table=lambda table: table):
    """Of q and k with positions; every function takes (q, k, ids, cos, sin)."""

    def make(array, width):
        dim = 2 * (width // 8 + 1)
        q, k = array(3, 2, dim), array(3, 1, dim)
        ids = np.arange(3 * len(q)).reshape(len(q), 3) % 11
        tables = [shape_table(array(11, dim, rows=False)) for _ in range(2)]
        on_device = {}

        def call(q, k, ids):
            place = str(q.place)
            if place not in on_device:  # once: the capture of a CUDA graph must not copy them
                on_device[place] = [to_paddle(table) for table in tables]
            return function(q, k, ids, *on_device[place])

        return Call(call, [q, k, ids], (0, 1, 2), [array(3, 2, dim), array(3, 1, dim)])

    return make


def _fused(q, k, ids, cos, sin):
    return F.fused_rotary_position_embedding(q, k, None, sin, cos, ids)


def _generated(q, k, ids, _cos, _sin):
    return F.fused_rotary_position_embedding(
        q, k, position_ids=ids, use_neox_rotary_style=False, rotary_emb_base=500.0
    )


def _applied(q, k, ids, cos, sin):
    return F.apply_rotary_pos_emb(q, k, cos, sin, ids, unsqueeze_dim=2)


def _partial(q, k, _ids, cos, sin):
    return F.fused_partial_rope(q, cos, sin), F.fused_partial_rope(k, cos, sin)


def _narrower(table):
    return np.ascontiguousarray(table[:, :-2]).reshape(1, 11, 1, -1)


CALLS = {
    "swiglu joined": _swiglu_joined,
    "swiglu pair": _swiglu_pair,
    "fused_swiglu_weighted": _weighted,
    "fused_swiglu_weighted_bwd": _weighted_bwd,
    "rms_norm llama": _rms_norm("llama"),
    "rms_norm gemma": _rms_norm("gemma"),
    "rms_norm none": _rms_norm("none"),
    "rms_norm unweighted": _rms_norm("llama", weighted=False),
    "rms_norm residual": _rms_norm_residual,
    "fused_rms_norm": _fused_rms_norm,
    "fused_rms_norm int8": _int8,
    "fused_rms_norm_ext": _ext,
    "fused_rms_norm_ext_grad": _ext_grad,
    "fused_rotary_position_embedding": _rope(_fused),
    "fused_rotary_position_embedding generated": _rope(_generated),
    "apply_rotary_pos_emb": _rope(_applied),
    "fused_partial_rope": _rope(_partial, _narrower),
}


def make_call(
    name: str, dtype: str, rows: int, width: int, seed: int = 0, values: Values | None = None
) -> Call:
    """The call of that name on new arrays, random or by recipe.

    width is at least 8 for fused_partial_rope.
    """
    rng = np.random.default_rng((seed, rows, width))
    numbers = itertools.count()

    def array(*shape, dtype=dtype, rows=rows):
        shape = shape if rows is False else (rows, *shape)
        if values is not None:
            return values.array(next(numbers), shape, dtype)
        return random_array(rng, shape, dtype)

    return CALLS[name](array, width)


def check_nothing_written(call: Call, place=to_paddle, same=assert_same) -> None:
    """Inputs and upstream gradients keep their bits; outputs are contiguous, own their memory.

    Args:
        call: what to compute.
        place: makes the tensor of a rowwise array.
        same: compares two lists of arrays.
    """
    tensors = [place(a) if i in call.rowwise else to_paddle(a) for i, a in enumerate(call.inputs)]
    upstream = [None if g is None else place(g) for g in call.upstream]
    wanted = [t for t in tensors if t.dtype != paddle.int64]
    for tensor in wanted:
        tensor.stop_gradient = not call.upstream
    outputs = as_tuple(call.function(*tensors))
    pairs = [(out, g) for out, g in zip(outputs, upstream) if g is not None]
    grads = paddle.grad([o for o, _ in pairs], wanted, [g for _, g in pairs]) if pairs else []
    same([to_numpy(t) for t in tensors], call.inputs, "inputs")
    given = [(t, g) for t, g in zip(upstream, call.upstream) if t is not None]
    same([to_numpy(t) for t, _ in given], [g for _, g in given], "upstream gradients")
    computed = [t for t in (*outputs, *grads) if t.size]
    assert all(t.is_contiguous() for t in computed)
    others = [t for t in (*tensors, *(t for t, _ in given)) if t.size]
    addresses = [t.data_ptr() for t in (*computed, *others)]
    assert len(set(addresses)) == len(addresses), "an output shares memory"


def one_nan(array) -> np.ndarray:
    """A copy whose NaNs are all the same one: which of two an operation passes on is free."""
    array = np.array(array, order="C")
    if array.dtype.kind not in "iu":
        array[np.isnan(array)] = np.nan
    return array


def digest(arrays) -> str:
    """A hash of shapes, dtypes and bytes; any NaN counts as one."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.shape} {array.dtype}".encode())
        found.update(one_nan(array).tobytes())
    return found.hexdigest()


def all_digests() -> dict[str, str]:
    """A hash per call, dtype and shape of everything that the call computes, second order too."""
    found = {}
    for name, dtype in itertools.product(CALLS, DTYPES):
        for rows, width in ((3, 9), (64, 67), (2, 1025)):
            rowwise, sums = make_call(name, dtype, rows, width).results()
            found[f"{name} {dtype} {rows}x{width}"] = digest([*rowwise, *sums])
    for (name, (function, shapes)), dtype in itertools.product(TWICE.items(), DTYPES):
        if "two axes" in name:  # the same kernels as without
            continue
        rng = np.random.default_rng(3)
        arrays, directions = ([random_array(rng, s, dtype) for s in shapes] for _ in range(2))
        upstream = [random_array(rng, o.shape, dtype) for o in run(function, arrays)[0]]
        groups = second_order(function, arrays, upstream, directions)
        found[f"{name} {dtype}, second order"] = digest([a for g in groups for a in g])
    return found
