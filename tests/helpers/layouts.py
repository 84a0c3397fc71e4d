"""Tensors with given values whose memory is not one contiguous, aligned block."""

from __future__ import annotations

import numpy as np
import paddle

from .arrays import to_paddle


def transposed(array):
    """A view whose last two axes are swapped in memory; every other element of a vector."""
    if array.ndim < 2:
        return to_paddle(np.repeat(array, 2))[::2]
    order = [*range(array.ndim - 2), array.ndim - 1, array.ndim - 2]
    return to_paddle(array.transpose(order)).transpose(order)


def inner_slice(array):
    """Columns 2 to n + 2 of rows that are longer, as slices of a fused projection are."""
    padded = np.zeros((*array.shape[:-1], array.shape[-1] + 5), array.dtype)
    padded[..., 2:-3] = array
    return to_paddle(padded)[..., 2:-3]


def every_other_row(array):
    """Rows 0, 2, 4, ... of a tensor with twice as many."""
    return to_paddle(np.repeat(array, 2, axis=0))[::2]


def swapped_ends(array):
    """A view whose first and last axes are swapped in memory."""
    order = [array.ndim - 1, *range(1, array.ndim - 1), 0] if array.ndim > 1 else [0]
    return to_paddle(array.transpose(order)).transpose(order)


def offset_by_one(array):
    """Contiguous, but one element past an aligned address."""
    flat = np.concatenate([np.zeros(1, array.dtype), array.reshape(-1)])
    return to_paddle(flat)[1:].reshape(array.shape)


def expanded(array):
    """The first row again and again, without memory of their own: all rows must be equal."""
    if array.ndim == 0 or array.size == 0:
        return to_paddle(array)
    assert (array[:1] == array).all() or np.isnan(array[:1].astype(np.float64)).any()
    row = to_paddle(array[:1])
    strides = [0, *row.strides[1:]]
    return paddle.as_strided(row, list(array.shape), strides)


# Those that need nothing of the values.
LAYOUTS = {
    "transposed": transposed,
    "inner_slice": inner_slice,
    "every_other_row": every_other_row,
    "swapped_ends": swapped_ends,
    "offset_by_one": offset_by_one,
}
