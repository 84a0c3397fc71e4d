"""Distributed tensors of Paddle's auto-parallel engine: what is needed around a custom operator.

The placements themselves are the operators' own, see custom_ops/paddle/spmd.h.
"""

from __future__ import annotations

import copy

import paddle
from paddle.autograd import PyLayer

_Tensor = paddle.Tensor
_KNOWN = hasattr(paddle.Tensor, "is_dist")  # Paddle 2.5 and older have no such tensors


def is_distributed(tensor) -> bool:
    """Whether a tensor, or a variable of a static graph, is one of the auto-parallel engine."""
    if isinstance(tensor, _Tensor):
        return _KNOWN and tensor.is_dist()
    is_dist = getattr(tensor, "is_dist", None)
    return is_dist is not None and is_dist()


def any_distributed(arguments) -> bool:
    """Whether one of an operator's arguments is a distributed tensor, or a list that has one.

    Inputs stand before attributes, so the first attribute ends the search.
    """
    if not _KNOWN:
        return False
    for argument in arguments:
        if isinstance(argument, _Tensor):
            if argument.is_dist():
                return True
        elif isinstance(argument, list) and argument and isinstance(argument[0], _Tensor):
            if any_distributed(argument):
                return True
        elif argument is not None:
            return False
    return False


def without_none(arguments) -> list:
    """The arguments with an empty tensor for each absent one.

    Paddle 3.3 reads the shape of absent inputs of distributed operators and ends the process. To
    a kernel an empty optional input is an absent one.
    """
    return [paddle.empty([0], "int64") if one is None else one for one in arguments]


def _tensor(local, like):
    """A distributed tensor placed like another one, from this process's part of it."""
    return paddle.Tensor(
        local,
        dims=like.shape,
        process_mesh=like.process_mesh,
        placements=like.placements,
        place=local.place,
    )


class AllGradients(PyLayer):
    """Passes the outputs of an operator on; backward, zeros where no gradient came for one.

    Paddle 3.3 reads the shape of absent gradients of distributed operators and ends the process.
    """

    @staticmethod
    def forward(ctx, *outputs):
        """Other tensors with the same memory, since a PyLayer takes its own inputs for in-place."""
        ctx.set_materialize_grads(False)  # those would be as large as the whole tensor
        ctx.outputs = [_Placed(output) for output in outputs]
        return tuple(_tensor(output._local_value(), output) for output in outputs)

    @staticmethod
    def backward(ctx, *grads):
        """The gradients, every one defined."""
        return tuple(
            _tensor(paddle.zeros(placed.local_shape, placed.dtype), placed)
            if grad is None
            else grad
            for grad, placed in zip(grads, ctx.outputs)
        )


class _Placed:
    """What to know of a distributed tensor to make another, without keeping its memory."""

    def __init__(self, tensor):
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.local_shape = tensor._local_shape
        # Copies: the tensor's own are gone when its memory is.
        self.process_mesh = copy.deepcopy(tensor.process_mesh)
        self.placements = copy.deepcopy(tensor.placements)
