"""Arrays on the device, poisoned and off their alignment on demand, and comparisons."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from helpers import numeric

from .. import library as lib

NAMES = {"float32": torch.float32, "float64": torch.float64}
NAMES |= {"float16": torch.float16, "bfloat16": torch.bfloat16}
KERNELS = lib.Kernels()
SHIFT = [0]  # elements by which every tensor is moved off its 16-byte boundary


def gpu(array) -> torch.Tensor | None:
    """On the device, SHIFT elements off a 16-byte boundary."""
    if array is None:
        return None
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        flat = torch.from_numpy(array.view(np.int16).reshape(-1)).view(torch.bfloat16)
    else:
        flat = torch.from_numpy(array.reshape(-1))
    room = torch.empty(flat.numel() + SHIFT[0], dtype=flat.dtype, device="cuda")
    room[SHIFT[0] :] = flat.cuda()
    return room[SHIFT[0] :].view(array.shape)


def empty(shape, dtype) -> torch.Tensor:
    """Poisoned memory: whatever is not written shows."""
    count = int(np.prod(shape))
    room = torch.empty(count + SHIFT[0], dtype=dtype, device="cuda")
    room.fill_(float("nan") if dtype.is_floating_point else 77)
    return room[SHIFT[0] :].view(shape)


def cpu(tensor) -> np.ndarray:
    """Exact values in NumPy."""
    tensor = tensor.contiguous().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def dt(tensor) -> int:
    """Its dtype as the params structs count."""
    return 0 if tensor is None else lib.DTYPES[tensor.dtype]


def bits(array) -> np.ndarray:
    """For comparisons that see the sign of zero; NaN counts as equal to NaN."""
    array = np.array(array)
    if array.dtype.kind != "i":
        array[array != array] = np.nan
    return array.view(f"u{array.dtype.itemsize}")


def close(actual, expected, scale=None, terms=1, bound=None, what="") -> None:
    """Within the bound of its dtype."""
    dtype = numeric.dtype_name(actual.dtype)
    if bound is None:
        bound = numeric.sum_bound(dtype, terms) if terms > 1 else numeric.elementwise_bound(dtype)
    error = numeric.ulp_error(actual, expected, dtype, scale)
    worst = float(np.max(error)) if error.size else 0.0
    assert worst <= bound, f"{what}: {worst} ULP of {dtype}, allowed {bound}"


def same(a, b, what="") -> None:
    """Bit-equal."""
    for index, (x, y) in enumerate(zip(a, b)):
        assert (bits(x) == bits(y)).all(), f"{what}: output {index} differs"


def twice_and_shifted(function, *arguments, **named):
    """The result, after comparing a repeat and the scalar path with it."""
    first = function(*arguments, **named)
    same(first, function(*arguments, **named), "repeat")
    SHIFT[0] = 1
    try:
        same(first, function(*arguments, **named), "scalar path")
    finally:
        SHIFT[0] = 0
    return first
