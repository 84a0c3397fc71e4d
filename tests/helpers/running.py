"""Runs a function on arrays, forward and backward, and compares a result with the oracle."""

from __future__ import annotations

from . import numeric
from .arrays import to_numpy, to_paddle


def as_tuple(value) -> tuple:
    """The outputs of a function as a tuple, without those that are None."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(one for one in values if one is not None)


def leaf(value, stop_gradient: bool = False):
    """A tensor that collects a gradient, from an array or from a tensor, whose strides it keeps."""
    if value is None:
        return None
    if not hasattr(value, "stop_gradient"):
        return to_paddle(value, stop_gradient=stop_gradient)
    value = value.detach()
    value.stop_gradient = stop_gradient
    return value


def run(function, inputs, grads=None, frozen=()):
    """Outputs and input gradients of a function, as arrays.

    Args:
        function: takes as many tensors as there are inputs.
        inputs: arrays, tensors (kept as they are in memory) or None.
        grads: an array or tensor per output that is not None, None for an output that the loss
            does not use; or None for no backward pass at all.
        frozen: indices of inputs that want no gradient.

    Returns:
        (outputs, gradients): gradients has an entry per input, None where none arrived.
    """
    import paddle

    tensors = [leaf(value, index in frozen) for index, value in enumerate(inputs)]
    outputs = as_tuple(function(*tensors))
    if grads is not None:
        pairs = [(o, leaf(g, True)) for o, g in zip(outputs, grads) if g is not None]
        paddle.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    reached = [None if t is None or t.grad is None else to_numpy(t.grad) for t in tensors]
    return [to_numpy(out) for out in outputs], reached


def check(actual, expected, dtype, scale=None, terms: int = 1, what: str = "") -> None:
    """The right dtype, and within the bound: elementwise, or that of a sum of so many terms."""
    assert numeric.dtype_name(actual.dtype) == dtype, f"{what}: {actual.dtype}, expected {dtype}"
    bound = numeric.elementwise_bound(dtype) if terms == 1 else numeric.sum_bound(dtype, terms)
    numeric.assert_ulp(actual, expected, bound, scale=scale, what=what)


def assert_same(actual, expected, what: str = "") -> None:
    """Two lists of arrays (or None) are bit-equal, entry by entry."""
    assert len(actual) == len(expected), what
    for index, (a, b) in enumerate(zip(actual, expected)):
        assert (a is None) == (b is None), f"{what} {index}: one is None"
        if a is not None:
            numeric.assert_bit_equal(a, b, f"{what} {index}")
