"""Whether a call is one that this package computes: a reason why not, or None.

Looked at before each call, so cheap. Only what another device, dtype or kind of tensor is: a wrong
shape or value is an error, and ours says what is wrong.
"""

from __future__ import annotations

import paddle

from paddle_fused import _checks as checks
from paddle_fused._library import has_cuda


def unsupported_tensor(name: str, value, dtypes=checks.FLOAT_DTYPES) -> str | None:
    """Why this argument is not for us. None for what is no tensor: the call raises."""
    if not checks.is_tensor(value):
        return None
    if value.dtype not in dtypes:
        return f"{name} is {checks.dtype_name(value.dtype)}"
    if isinstance(value, paddle.Tensor):
        return _unsupported_kind(name, value)
    if isinstance(value, paddle.static.Variable):
        return "a static program of Paddle's old representation"
    return None


def unsupported_number(name: str, value) -> str | None:
    """Why this argument is not for us: Paddle takes a tensor for some numbers."""
    return f"{name} is a tensor" if checks.is_tensor(value) else None


def _unsupported_kind(name: str, tensor) -> str | None:
    if not tensor.is_dense() and not tensor.is_dist():
        return f"{name} is sparse"
    place = tensor.place
    if place.is_cpu_place() or (place.is_gpu_place() and _has_cuda()):
        return None
    return f"{name} is on {place}"


def _has_cuda() -> bool:
    global _cuda
    if _cuda is None:
        _cuda = has_cuda()
    return _cuda


_cuda: bool | None = None


def first_reason(*reasons: str | None) -> str | None:
    """The first that is one."""
    return next((reason for reason in reasons if reason is not None), None)
