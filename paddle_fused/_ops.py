"""Calls an operator of the library by name, in dygraph and in static graphs."""

from __future__ import annotations

import functools
import math
import re

import numpy as np
import paddle
from paddle import _C_ops

from paddle_fused._distributed import AllGradients, any_distributed, without_none

# to_static should record our operators, not look into the wrappers that call them.
try:
    from paddle.jit.marker import unified as static_unit
except ImportError:

    def static_unit(function):
        """Marks nothing: this Paddle has no such marker."""
        return function


_Tensor = paddle.Tensor

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
    distributed = any_distributed(arguments)
    if distributed:
        arguments = without_none(arguments)
    if not paddle.is_grad_enabled() and is_dygraph():
        # Paddle records a custom operator whatever no_grad says, if it sees inputs that train.
        arguments = [_detached(argument) for argument in arguments]
    try:
        out = _run("paddle_fused_" + name, *arguments)
    except ValueError as error:
        # Found out only by the kernel, such as a position outside a table. Paddle wraps the text in
        # its own class name and a source location.
        text = re.sub(r"^\(InvalidArgument\) |\s*\(at [^()]*\)\s*$", "", str(error))
        raise ValueError(text) from None
    if distributed and len(out) > 1 and not all(tensor.stop_gradient for tensor in out):
        out = AllGradients.apply(*out)
    return out[0] if isinstance(out, (list, tuple)) and len(out) == 1 else out


def _detached(argument):
    if isinstance(argument, _Tensor):
        return argument if argument.stop_gradient else argument.detach()
    if isinstance(argument, list) and argument and isinstance(argument[0], _Tensor):
        return [_detached(tensor) for tensor in argument]
    return argument


@functools.lru_cache(maxsize=256)
def double_parts(value: float) -> list[float]:
    """A finite double as floats [a, b, c, e] with value = (a + b + c) * 2**e.

    For attributes, which only hold floats in every Paddle version; FromParts in
    custom_ops/paddle/tensor.h is the way back. The list is shared: do not change it.
    """
    rest, exponent = math.frexp(value)
    parts = []
    for _ in range(3):
        parts.append(float(np.float32(rest)))
        rest -= parts[-1]
    return [*parts, float(exponent)]


def is_dygraph() -> bool:
    """Whether tensors hold values now, and no static graph is being recorded."""
    return paddle.in_dynamic_mode()
