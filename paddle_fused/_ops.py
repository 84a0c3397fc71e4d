"""Calls an operator of the library by name, in dygraph and in static graphs."""

from __future__ import annotations

import functools
import re

import paddle
from paddle import _C_ops

# to_static should record our operators, not look into the wrappers that call them.
try:
    from paddle.jit.marker import unified as static_unit
except ImportError:

    def static_unit(function):
        """Marks nothing: this Paddle has no such marker."""
        return function


if hasattr(_C_ops, "_run_custom_op"):
    _run = _C_ops._run_custom_op
else:  # Paddle 2.x
    _run = paddle.base.core.eager._run_custom_op


def run(name: str, *arguments):
    """Runs ``paddle_fused_<name>``; inputs, then attributes, in the order of its registration.

    Arguments must have been checked: a None in the place of a tensor, or one too few, ends the
    process.

    Returns:
        The output, or a list of the outputs.
    """
    try:
        out = _run("paddle_fused_" + name, *arguments)
    except ValueError as error:
        # Found out only by the kernel, such as a position outside a table. Paddle wraps the text in
        # its own class name and a source location.
        text = re.sub(r"^\(InvalidArgument\) |\s*\(at [^()]*\)\s*$", "", str(error))
        raise ValueError(text) from None
    return out[0] if isinstance(out, (list, tuple)) and len(out) == 1 else out


@functools.lru_cache(maxsize=256)
def double_parts(value: float) -> list[float]:
    """A double as two floats whose sum it is, for attributes that only hold floats.

    The list is shared: do not change it.
    """
    import numpy as np

    high = float(np.float32(value))
    if high == value or abs(high) == float("inf"):
        return [high, 0.0]
    return [high, float(np.float32(value - high))]


def is_dygraph() -> bool:
    """Whether tensors hold values now, and no static graph is being recorded."""
    return paddle.in_dynamic_mode()
