"""Random inputs, and the way between NumPy arrays and Paddle tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = ["float32", "float16", "bfloat16", "float64"]


def numpy_dtype(dtype) -> np.dtype:
    """The NumPy dtype of a name, with bfloat16 from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if str(dtype) == "bfloat16" else np.dtype(dtype)


def random_array(rng: np.random.Generator, shape, dtype, scale: float = 1.0) -> np.ndarray:
    """Random values of both signs whose distribution is not symmetric about zero.

    Their mean is about 0.3·scale and the positive tail is the longer one, so that a wrong sign or
    two swapped arguments do not cancel in a sum.
    """
    values = rng.standard_normal(shape) + 0.5 * rng.exponential(1.0, shape) - 0.2
    return np.asarray(values * scale).astype(numpy_dtype(dtype))


def to_paddle(array, stop_gradient: bool = True):
    """A tensor on the current device with the array's exact values; bfloat16 goes as uint16."""
    import paddle

    array = np.asarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        # Paddle reads uint16 as the bits of bfloat16.
        array = np.array(array, order="C").view(np.uint16)
    return paddle.to_tensor(array, stop_gradient=stop_gradient)


def to_numpy(tensor) -> np.ndarray:
    """The tensor's exact values; bfloat16 as ml_dtypes.bfloat16."""
    array = tensor.detach().numpy()
    if array.dtype == np.uint16:
        array = array.view(ml_dtypes.bfloat16)
    return array
