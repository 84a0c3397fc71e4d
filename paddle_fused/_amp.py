"""Mixed dtypes under paddle.amp.auto_cast.

Paddle casts nothing for a custom operator. Where a function takes one dtype for several tensors and
auto_cast has left some in float32, the rule here is that of Paddle's operators on neither list: all
in float32. Outside auto_cast a mixture stays what it is, and raises TypeError.
"""

from __future__ import annotations

import paddle

_HALVES = (paddle.float16, paddle.bfloat16)
_FLOAT32 = paddle.float32
_is_autocast_enabled = getattr(paddle, "is_autocast_enabled", None)  # since Paddle 3


def auto_casting() -> bool:
    """Whether this code runs under auto_cast; it has no effect on a CPU."""
    return _is_autocast_enabled is not None and _is_autocast_enabled()


def in_float32(tensor):
    """A half-precision tensor in float32, if under auto_cast."""
    dtype = getattr(tensor, "dtype", None)
    if dtype is _FLOAT32:  # the common case; Paddle is slow to find two dtypes unequal
        return tensor
    if auto_casting() and dtype in _HALVES:
        return tensor.astype(paddle.float32)
    return tensor


def in_one_dtype(first, *others):
    """The tensors, in float32 where half precision meets another dtype under auto_cast.

    Anything else comes back as it is: None, what is no tensor, and all of it outside auto_cast.
    """
    tensors = (first, *others)
    dtype = getattr(first, "dtype", None)
    for other in others:
        if other is not None and getattr(other, "dtype", None) is not dtype:
            break
    else:
        return tensors
    if not auto_casting():
        return tensors
    dtypes = [getattr(tensor, "dtype", None) for tensor in tensors if tensor is not None]
    if all(dtype == dtypes[0] for dtype in dtypes):
        return tensors
    return tuple(in_float32(tensor) for tensor in tensors)
