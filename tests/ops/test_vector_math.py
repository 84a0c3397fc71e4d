"""The exponentials and conversions that the CPU kernels are made of, on every instruction set.

Compiled here from the kernels' own sources, since the library does not export them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from paddle_fused._runtime import CPU_TARGETS, cpu_target

ROOT = Path(__file__).resolve().parents[2]
EXP_RANGE = 87.0  # kExpRange of custom_ops/common/cpu_math.inc

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the test compiles all x86 instruction sets"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """vector_math.cc, compiled with the flags of setup.py."""
    (flags,) = re.findall(r"^CXX_FLAGS = \[(.*?)\]$", (ROOT / "setup.py").read_text(), re.M | re.S)
    path = tmp_path_factory.mktemp("vector_math") / "vector_math.so"
    command = [os.environ.get("CXX", "c++"), *re.findall(r'"(.*?)"', flags), f"-I{ROOT}", "-shared"]
    command += ["-fPIC", str(ROOT / "tests/helpers/vector_math.cc"), "-o", str(path)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture(params=CPU_TARGETS)
def target(request):
    if CPU_TARGETS.index(request.param) > CPU_TARGETS.index(cpu_target()):
        pytest.skip(f"this processor has no {request.param}")
    return request.param


def apply(library, name, target, values, dtype):
    """A function of the library on an array; 3 elements longer than vectors divide."""
    out = np.empty(values.shape, dtype)
    function = getattr(library, f"{name}_{target}")
    function(
        ctypes.c_void_p(values.ctypes.data),
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(values.size),
    )
    return out


def ulp_from(actual, expected):
    """Errors in units in the last place of float32 against float64 values in its normal range."""
    unit = 2.0 ** (np.floor(np.log2(expected)) - 23)
    return np.abs(actual.astype(np.float64) - expected) / unit


def all_of(dtype):
    """Every finite value of a 16-bit type, as float32, that ExpOfMinus takes."""
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    return np.ascontiguousarray(values[np.abs(values) <= EXP_RANGE])


def spread(low, high, count=1_000_003):
    """Evenly spread values, and as many close to zero."""
    values = np.linspace(low, high, count).astype(np.float32)
    return np.concatenate([values, values * np.float32(1e-3), values * np.float32(1e-20)])


@pytest.mark.parametrize("name, bound", [("float32", 1.5), ("bfloat16", 3.0), ("float16", 3.0)])
def test_exp_of_minus(library, target, name, bound):
    dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}.get(name)
    values = spread(-EXP_RANGE, EXP_RANGE) if dtype is None else all_of(dtype)
    out = apply(library, f"exp_{name}", target, values, np.float32)
    error = ulp_from(out, np.exp(-values.astype(np.float64)))
    assert error.max() <= bound, (error.max(), values[error.argmax()])


def test_exp_non_positive(library, target):
    """Down to where the result is subnormal, and NaN."""
    values = spread(-EXP_RANGE, 0.0)
    out = apply(library, "exp_non_positive", target, values, np.float32)
    assert ulp_from(out, np.exp(values.astype(np.float64))).max() <= 1.5
    deep = np.array([-88.0, -95.5, -103.0, -200.0, -np.inf, np.nan, 0.0], np.float32)
    out = apply(library, "exp_non_positive", target, deep, np.float32)
    expected = np.exp(deep.astype(np.float64))
    # One unit of the subnormal numbers.
    np.testing.assert_allclose(out, expected, rtol=2.0**-22, atol=1.4e-45)


def hard_floats():
    """float32 bits: random ones, ties of both kinds and their neighbours, subnormals, specials."""
    rng = np.random.default_rng(0)
    bits = [rng.integers(0, 1 << 32, 300_007, dtype=np.uint32)]
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    bits += [upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]  # ties of bfloat16
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    exact = halves.view(np.uint32)
    bits += [exact + low for low in (0, 0xFFF, 0x1000, 0x1001)]  # ties of normal float16
    tiny = (np.arange(-4099, 4100) * 2.0**-26).astype(np.float32)  # ties of subnormal float16
    bits.append(tiny.view(np.uint32))
    return np.concatenate(bits).view(np.float32)


@pytest.mark.parametrize("name, dtype", [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
def test_rounding_to_16_bits(library, target, name, dtype):
    values = hard_floats()
    # A NaN that no arithmetic has made quiet does not reach a store.
    bits = values.view(np.uint32)
    bits[np.isnan(values)] |= 0x00400000
    out = apply(library, f"to_{name}", target, values, np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(dtype)
    nan = np.isnan(values)
    assert np.isnan(out.view(dtype)[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(out[~nan], expected.view(np.uint16)[~nan])


def test_rounding_zipped_pairs(library, target):
    """Two columns at a time, without the care for NaN that have bits in the lower half."""
    values = hard_floats()
    values = np.ascontiguousarray(values[: values.size // 32 * 32])
    bits, nan = values.view(np.uint32), np.isnan(values)
    bits[nan] = bits[nan] & 0xFFFF0000 | 0x00400000
    out = apply(library, "pack_bfloat16", target, values, np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    assert np.isnan(out.view(ml_dtypes.bfloat16)[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(out[~nan], expected.view(np.uint16)[~nan])


def test_widening_zipped_pairs(library, target):
    """All 65536 values, bit by bit."""
    values = np.arange(1 << 16, dtype=np.uint16)
    out = apply(library, "unpack_bfloat16", target, values, np.float32)
    np.testing.assert_array_equal(out.view(np.uint32), values.astype(np.uint32) << 16)


@pytest.mark.parametrize("name, dtype", [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
def test_widening_from_16_bits(library, target, name, dtype):
    """All 65536 values; subnormals stay what they are."""
    values = np.arange(1 << 16, dtype=np.uint16)
    out = apply(library, f"from_{name}", target, values, np.float32)
    expected = values.view(dtype).astype(np.float32)
    nan = np.isnan(expected)
    assert np.isnan(out[nan]).all()
    np.testing.assert_array_equal(out.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
