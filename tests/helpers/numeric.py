"""Errors in units in the last place (ULP) of the output dtype, and the bounds on them.

One ULP at a value is the distance between the dtype's neighbouring numbers in the value's binade;
below the smallest normal number it stays at the subnormal spacing.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

# (explicit mantissa bits, smallest normal exponent, largest finite value)
_FORMATS = {
    "float64": (52, -1022, float(np.finfo(np.float64).max)),
    "float32": (23, -126, float(np.finfo(np.float32).max)),
    "float16": (10, -14, 65504.0),
    "bfloat16": (7, -126, float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)),
}
HALVES = ("float16", "bfloat16")

MAX_ULP_HALF = 1.0
MAX_ULP_FLOAT32 = 4.0
# One product more than SwiGLU: about one element in 10⁹ is beyond 4, found by search.
MAX_ULP_WEIGHTED_FLOAT32 = 5.0
MAX_ULP_LLAMA_HALF = 1.5
# An oracle in float64 has errors of this order itself, so this only guards against a computation
# in float32.
MAX_ULP_FLOAT64 = 64.0
# What accumulating a sum in float32 may cost: 4·(1 + log2 n) with 2**15 terms, on either side.
CANCELLATION_ULP_FLOAT32 = 128.0


def elementwise_bound(dtype) -> float:
    """The largest allowed error of an elementwise output, in ULP of its dtype."""
    name = dtype_name(dtype)
    if name in HALVES:
        return MAX_ULP_HALF
    return MAX_ULP_FLOAT32 if name == "float32" else MAX_ULP_FLOAT64


def rms_norm_bound(dtype, casting_mode: str) -> float:
    """As `elementwise_bound`; "llama" rounds halves twice by definition."""
    if casting_mode == "llama" and dtype_name(dtype) in HALVES:
        return MAX_ULP_LLAMA_HALF
    return elementwise_bound(dtype)


def sum_bound(dtype, terms: int) -> float:
    """The largest allowed error of a float32 sum, in ULP of Σ|terms| (pass that as `scale`).

    A sum that is rounded to a half dtype keeps `elementwise_bound`.
    """
    name = dtype_name(dtype)
    if name in HALVES:
        return MAX_ULP_HALF
    factor = 4.0 * (1.0 + math.log2(max(terms, 1)))
    return factor if name == "float32" else factor * MAX_ULP_FLOAT64 / MAX_ULP_FLOAT32


def dtype_name(dtype) -> str:
    """The name of a NumPy dtype, an ml_dtypes type or a string such as "bfloat16"."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in _FORMATS:
        raise TypeError(f"dtype must be one of {sorted(_FORMATS)}, got {name}")
    return name


def smallest_exponent(dtype) -> int:
    """The exponent of the smallest normal number: below 2 to its power, numbers are subnormal."""
    return _FORMATS[dtype_name(dtype)][1]


def largest_value(dtype) -> float:
    """The largest finite number."""
    return _FORMATS[dtype_name(dtype)][2]


def spacing(values, dtype) -> np.ndarray:
    """One ULP of dtype at each value, float64. Infinities and NaN get the largest finite's."""
    mantissa, min_exponent, largest = _FORMATS[dtype_name(dtype)]
    magnitude = np.abs(np.asarray(values, dtype=np.float64))
    magnitude = np.where(magnitude <= largest, magnitude, largest)
    exponent = np.frexp(magnitude)[1] - 1  # frexp gives [0.5, 1)
    exponent = np.where(magnitude == 0, min_exponent, np.maximum(exponent, min_exponent))
    return np.ldexp(1.0, exponent - mantissa)


def round_to(values, dtype) -> np.ndarray:
    """Float64 values rounded once (nearest, ties to even) to dtype, as float64 again.

    Written with integers instead of a cast, since some casts from float64 to a half go through
    float32 and round twice.
    """
    _, _, largest = _FORMATS[dtype_name(dtype)]
    values = np.asarray(values, dtype=np.float64)
    if dtype_name(dtype) == "float64":
        return values
    finite = np.where(np.isfinite(values), values, 0.0)
    unit = spacing(finite, dtype)
    rounded = np.rint(finite / unit) * unit
    rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, rounded), rounded)
    rounded = np.where(np.isfinite(values), rounded, values)
    return np.copysign(rounded, values)


def ulp_error(actual, expected64, dtype, scale=None) -> np.ndarray:
    """The error of each element in ULP of dtype, float64, of the broadcast shape.

    NaN must meet NaN and infinity the same infinity, else the error is infinite. Where a finite
    expected value was rounded up to infinity, infinity counts as the number that would follow the
    largest, so that the step is judged by its distance like any other rounding.

    Args:
        actual: the result, in any float dtype.
        expected64: the oracle's value.
        dtype: whose ULP is the unit.
        scale: Σ|terms| where the result is a sum, which may cancel. Of float32 and float64, the
            unit is then the ULP of the sum of magnitudes. A half's sum was accumulated in
            float32, so its unit stays the half's ULP at the expected value unless the sum
            cancels so far that this falls below `CANCELLATION_ULP_FLOAT32` float32 ULP of scale.
    """
    name = dtype_name(dtype)
    _, _, largest = _FORMATS[name]
    actual = np.asarray(actual).astype(np.float64)
    expected = np.asarray(expected64, dtype=np.float64)
    actual, expected = np.broadcast_arrays(actual, expected)

    unit = spacing(expected, name)
    if scale is not None and name in HALVES:
        unit = np.maximum(unit, CANCELLATION_ULP_FLOAT32 * spacing(scale, "float32"))
    elif scale is not None:
        unit = np.maximum(unit, spacing(scale, name))

    same_special = (np.isnan(actual) & np.isnan(expected)) | (actual == expected)
    # Float64 has nothing beyond its largest number to measure with.
    beyond = largest + float(spacing(largest, name)) if name != "float64" else np.inf
    reached = np.where(np.isinf(actual), np.copysign(beyond, actual), actual)
    overflowed = np.isinf(actual) & (np.abs(expected) >= beyond)
    overflowed &= np.signbit(actual) == np.signbit(expected)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(overflowed, 0.0, np.abs(reached - expected) / unit)
    comparable = np.isfinite(expected) & ~np.isnan(actual)
    return np.where(comparable, error, np.where(same_special, 0.0, np.inf))


def assert_ulp(actual, expected64, max_ulp: float, scale=None, what: str = "", dtype=None) -> None:
    """Asserts that every element of actual is within max_ulp of the float64 oracle.

    Args:
        actual: array in the output dtype (bfloat16 as ml_dtypes.bfloat16).
        expected64: the oracle, of actual's exact shape.
        max_ulp: the bound; infinities and NaN must match whatever it is.
        scale: Σ|terms| of a sum, broadcast against it; see `ulp_error`.
        what: names the checked output in the failure message.
        dtype: the dtype whose ULP counts, if not actual's.
    """
    actual = np.asarray(actual)
    expected = np.asarray(expected64, dtype=np.float64)
    what = what or "result"
    assert actual.shape == expected.shape, (
        f"{what}: shape {actual.shape}, expected {expected.shape}"
    )
    if actual.size == 0:
        return
    name = dtype_name(actual.dtype if dtype is None else dtype)
    error = ulp_error(actual, expected, name, scale)
    worst = np.unravel_index(np.argmax(error), error.shape)
    if error[worst] <= max_ulp:
        return
    finite = error[np.isfinite(error)]
    mean = finite.mean() if finite.size else np.inf
    raise AssertionError(
        f"{what}: {error[worst]:.4g} ULP of {name} at index {tuple(int(i) for i in worst)}, "
        f"allowed {max_ulp:.4g}; got {float(actual[worst])!r}, "
        f"expected {float(expected[worst])!r}; "
        f"{int((error > max_ulp).sum())} of {error.size} elements beyond, mean {mean:.4g} ULP"
    )


def assert_bit_equal(a, b, what: str = "") -> None:
    """Asserts equal shape, dtype and bytes; -0 differs from 0, NaN equals the same NaN."""
    a, b = np.asarray(a), np.asarray(b)
    what = what or "arrays"
    assert a.dtype == b.dtype, f"{what}: dtype {a.dtype} and {b.dtype}"
    assert a.shape == b.shape, f"{what}: shape {a.shape} and {b.shape}"
    bits = np.dtype(f"u{a.dtype.itemsize}")
    differs = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
    if not differs.any():
        return
    differs = differs.reshape(a.shape)
    first = np.unravel_index(np.argmax(differs), a.shape)
    raise AssertionError(
        f"{what}: {int(differs.sum())} of {a.size} elements differ, first at "
        f"{tuple(int(i) for i in first)}: {a[first]!r} and {b[first]!r}"
    )
