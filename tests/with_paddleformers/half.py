"""bfloat16 where Paddle's CPU has no kernel of it: computed in float32, the result rounded.

That is what the kernels of a GPU do, so a model takes the roundings that it would take there. The
operators of paddle_fused are not touched: they take bfloat16 as it is.
"""

from __future__ import annotations

import contextlib
import functools

import paddle

from paddle_fused.patching.places import replace_copies

# They cast, make nothing of a tensor's values, or write into one.
_LEFT = (
    "cast",
    "_run_custom_op",
    "assign",
    "assign_out_",
    "share_data",
    "memcpy_d2h",
    "view_dtype",
)
_IN_PLACE = ("index_add_", "uniform_inplace_")
_METHODS = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "__matmul__", "__pow__", "__rpow__", "__neg__", "__getitem__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
)


def _half(value) -> bool:
    return isinstance(value, paddle.Tensor) and value.dtype == paddle.bfloat16


def _tensors(values):
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, paddle.Tensor):
            yield value


def _widened(value, cast):
    if isinstance(value, (list, tuple)):
        return type(value)(_widened(one, cast) for one in value)
    return cast(value, paddle.float32) if _half(value) else value


def _rounded(value, cast):
    if isinstance(value, (list, tuple)):
        return type(value)(_rounded(one, cast) for one in value)
    single = isinstance(value, paddle.Tensor) and value.dtype == paddle.float32
    return cast(value, paddle.bfloat16) if single else value


def _in_float32(function, cast):
    @functools.wraps(function)
    def call(*args, **kwargs):
        given = list(_tensors([*args, *kwargs.values()]))
        if not any(map(_half, given)):
            return function(*args, **kwargs)
        result = function(
            *_widened(args, cast), **{k: _widened(v, cast) for k, v in kwargs.items()}
        )
        # bfloat16 beside float32 gives float32, as Paddle promotes it.
        mixed = any(one.dtype == paddle.float32 for one in given)
        return result if mixed else _rounded(result, cast)

    return call


def _in_place(function, cast):
    """On a float32 copy, which is then written into the tensor."""

    @functools.wraps(function)
    def call(x, *args, **kwargs):
        if not _half(x):
            return function(x, *args, **kwargs)
        changed = function(cast(x, paddle.float32), *_widened(args, cast), **kwargs)
        x[...] = cast(changed, paddle.bfloat16)
        return x

    return call


@contextlib.contextmanager
def computed_in_float32():
    """For a block, in this process."""
    ops, cast = paddle._C_ops, paddle._C_ops.cast
    originals = {
        name: function
        for name, function in vars(ops).items()
        if callable(function)
        and not name.startswith("__")
        and not name.endswith("_")
        and name not in _LEFT
    }
    changed = {name: _in_float32(function, cast) for name, function in originals.items()}
    for name in _IN_PLACE:
        originals[name] = getattr(ops, name)
        changed[name] = _in_place(originals[name], cast)
    methods = {name: getattr(paddle.Tensor, name) for name in _METHODS}
    pairs = [(originals[name], changed[name]) for name in originals]
    bound = {
        name: value
        for name, value in vars(paddle.Tensor).items()
        if any(value is original for original in originals.values())
    }
    try:
        for name, function in changed.items():
            setattr(ops, name, function)
        replace_copies(pairs)
        for name, method in methods.items():
            setattr(paddle.Tensor, name, _in_float32(method, cast))
        for name, value in bound.items():
            setattr(paddle.Tensor, name, changed[value.__name__])
        yield
    finally:
        for name, function in originals.items():
            setattr(ops, name, function)
        replace_copies([(new, old) for old, new in pairs])
        for name, method in {**methods, **bound}.items():
            setattr(paddle.Tensor, name, method)
