"""Argument checks: TypeError for a wrong kind or dtype, ValueError for a wrong shape or value.

The text names the function, the argument, what was expected and what came. Checks run before every
call and must stay cheaper than the call: each property of a tensor is read once (a tenth of a
microsecond each), dtypes are compared by identity first (Paddle takes half a microsecond to find
two unequal), text is composed only when raising. Unknown sizes of static variables (-1) pass.
"""

from __future__ import annotations

import math
import numbers

import paddle

from paddle_fused._distributed import is_distributed

FLOAT_DTYPES = (paddle.float32, paddle.float64, paddle.float16, paddle.bfloat16)
INDEX_DTYPES = (paddle.int64, paddle.int32)
# Dtypes of Paddle 2's tensors are equal to these, not the very objects: here by their numbers.
_DTYPES = {getattr(dtype, "value", dtype): dtype for dtype in FLOAT_DTYPES + INDEX_DTYPES}

_TENSOR_TYPES = tuple(
    kind
    for kind in (
        paddle.Tensor,
        getattr(getattr(paddle, "pir", None), "Value", None),
        paddle.static.Variable,
    )
    if kind is not None
)
_Tensor = paddle.Tensor
MANY_DEVICES = paddle.is_compiled_with_cuda()


def dtype_name(dtype) -> str:
    """As users write it: "float32" for paddle.float32."""
    return str(dtype).rpartition(".")[2].lower()


def _names(dtypes) -> str:
    names = list(dict.fromkeys(dtype_name(dtype) for dtype in dtypes))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _kind(value) -> str:
    """The type's name, with its module unless it is built in: bool is not numpy.bool."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def wrong_type(function: str, argument: str, expected: str, got: str) -> TypeError:
    """The TypeError of this package's form."""
    return TypeError(f"{function}(): {argument}: expected {expected}, got {got}")


def wrong_value(function: str, argument: str, expected: str, got) -> ValueError:
    """The ValueError of this package's form."""
    return ValueError(f"{function}(): {argument}: expected {expected}, got {got}")


def is_tensor(value) -> bool:
    """Whether this is a tensor or a static variable."""
    return isinstance(value, _TENSOR_TYPES)


def _is_very_one_of(dtype, dtypes) -> bool:
    """Whether a dtype is one of these objects; Paddle is slow to find two dtypes unequal."""
    for each in dtypes:
        if dtype is each:
            return True
    return False


def _is_one_of(dtype, dtypes) -> bool:
    """Whether a dtype equals one of these, as those of static variables and of Paddle 2 do."""
    return _is_very_one_of(dtype, dtypes) or dtype in dtypes


def same_dtype(a, b) -> bool:
    """Whether two dtypes are equal."""
    return a is b or a == b


def check_tensor(function: str, argument: str, value, dtypes=FLOAT_DTYPES) -> None:
    """Value is a tensor, or a static variable, of one of the dtypes."""
    if not is_tensor(value):
        raise wrong_type(function, argument, "a paddle.Tensor", type(value).__name__)
    dtype = value.dtype
    if not _is_one_of(dtype, dtypes):
        raise wrong_type(function, argument, f"dtype {_names(dtypes)}", dtype_name(dtype))
    if isinstance(value, _Tensor) and not (value.is_dense() or is_distributed(value)):
        raise wrong_type(function, argument, "a dense tensor", "a sparse one")


def shape_and_dtype(function: str, argument: str, value, dtypes=FLOAT_DTYPES):
    """check_tensor(), then shape_of() and the dtype: for a right tensor, each is read once."""
    if isinstance(value, _Tensor):
        dtype = value.dtype
        if not _is_very_one_of(dtype, dtypes):
            dtype = _DTYPES.get(getattr(dtype, "value", None), dtype)
        if _is_very_one_of(dtype, dtypes) and value.is_dense():
            return list(value.shape), dtype
    check_tensor(function, argument, value, dtypes)
    return shape_of(value), value.dtype


def shape_of(value) -> list[int]:
    """The shape as a list of ints, -1 for what is unknown."""
    if isinstance(value, _Tensor):
        return list(value.shape)
    return [size if isinstance(size, int) else -1 for size in value.shape]


def same_size(a: int, b: int) -> bool:
    """Whether two sizes agree as far as they are known."""
    return a == b or a < 0 or b < 0


def same_shape(a, b) -> bool:
    """Whether two shapes agree as far as they are known."""
    return a == b or (len(a) == len(b) and all(map(same_size, a, b)))


def check_shape(function: str, argument: str, shape, expected, meaning: str) -> None:
    """Shape equals expected; ``meaning`` names the expected shape in words."""
    if shape != expected and not same_shape(shape, expected):
        raise wrong_value(function, argument, f"shape {list(expected)} ({meaning})", list(shape))


def check_rank_at_least_one(function: str, argument: str, shape) -> None:
    """The tensor has a last axis."""
    if not shape:
        raise wrong_value(function, argument, "at least one axis", "a 0-D tensor")


def check_devices(function: str, **tensors) -> None:
    """All tensors given lie on one device. Call it if MANY_DEVICES: else there is one."""
    if not paddle.in_dynamic_mode():
        return
    first_name = first = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        place = tensor.place
        if first is None:
            first_name, first = name, place
        elif not place._equals(first) and str(place) != str(first):
            raise wrong_value(function, name, f"{first_name}'s device {first}", f"{place}")


def check_epsilon(function: str, value) -> float:
    """A finite number of at least 0."""
    value = check_real(function, "epsilon", value)
    if not 0.0 <= value < math.inf:
        raise wrong_value(function, "epsilon", "a finite number of at least 0", value)
    return value


def check_real(function: str, argument: str, value) -> float:
    """A real number, bool excepted."""
    if type(value) is float:
        return value
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_type(function, argument, "a number", _kind(value))
    try:
        return float(value)
    except OverflowError:
        raise wrong_value(function, argument, "a finite number", "an int beyond them") from None


def check_finite(function: str, argument: str, value) -> float:
    """A finite real number."""
    value = check_real(function, argument, value)
    if not math.isfinite(value):
        raise wrong_value(function, argument, "a finite number", value)
    return value


def check_int(function: str, argument: str, value) -> int:
    """An integer, bool excepted."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise wrong_type(function, argument, "an int", _kind(value))
    return int(value)


def check_bool(function: str, argument: str, value) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise wrong_type(function, argument, "a bool", _kind(value))
    return value
