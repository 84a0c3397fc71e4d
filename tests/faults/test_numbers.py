"""Faults of width, dtype, range and rounding that kernels of this kind have had."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import paddle
import pytest

import paddle_fused.nn.functional as F
from helpers import norms, numeric, oracle
from helpers.arrays import DTYPES, numpy_dtype, random_array, to_numpy, to_paddle
from helpers.calls import CALLS, digest, make_call
from helpers.right_calls import RIGHT
from helpers.running import check, run
from helpers.swiglus import check_swiglu, check_weighted
from helpers.targets import TARGETS, Target
from helpers.values import SPECIAL, Values


def check_rms(x, weight, g, epsilon=1e-6, mode="llama"):
    """Forward and gradients of rms_norm."""

    def function(x, weight):
        return F.rms_norm(x, weight, epsilon, casting_mode=mode)

    (out,), grads = run(function, [x, weight], [g])
    norms.check_output(out, x, weight, epsilon, 0.0, mode)
    norms.check_gradients(grads, x, weight, g, epsilon, 0.0, mode)


def rms_arrays(rng, shape, dtype):
    x, g = (random_array(rng, shape, dtype) for _ in range(2))
    return x, random_array(rng, shape[-1:], dtype), g


def test_gradient_with_a_subnormal_product():
    x, g = np.float32([[1.92e-38, -2.06e-5]]), np.float32([[0.0, -6.7e-4]])
    check_rms(x, np.float32([0.35, -3.6e-4]), g)


@pytest.mark.parametrize("width", [8192, 12288, 16384, 32768, 65536, 131072])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_wider_than_fast_memory(rng, dtype, width):
    check_rms(*rms_arrays(rng, (2, width), dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_gates(rng, dtype):
    x, g = random_array(rng, (2, 2 * 65536), dtype), random_array(rng, (2, 65536), dtype)
    check_weighted(x, g, random_array(rng, (2,), "float32"))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 17, 33, 34, 1234, 3420])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_second_half_of_a_row_off_alignment(rng, dtype, width):
    x, g = random_array(rng, (3, 2 * width), dtype), random_array(rng, (3, width), dtype)
    check_weighted(x, g, random_array(rng, (3,), "float32"))


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 33, 100, 1023, 1025, 3584, 3588])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_widths_without_a_common_vector(rng, dtype, width):
    check_rms(*rms_arrays(rng, (5, width), dtype))


@pytest.mark.parametrize("shape", [(8096, 32), (12288, 1), (2048, 64, 16), (2048, 2)], ids=str)
def test_many_narrow_rows(rng, shape):
    check_rms(*rms_arrays(rng, shape, "float32"))


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 33])
def test_fewer_rows_than_partial_sums(rng, rows):
    check_rms(*rms_arrays(rng, (rows, 16), "float32"))


@pytest.mark.parametrize("rows", [32768])
def test_weight_gradient_of_many_half_rows(rng, rows):
    x, g = (random_array(rng, (rows, 128), "bfloat16") for _ in range(2))
    check_rms(x, np.ones(128, np.float32), g, mode="gemma")


def test_probability_gradient_of_a_wide_half_row(rng):
    x, g = random_array(rng, (2, 16384), "bfloat16"), random_array(rng, (2, 8192), "bfloat16")
    check_weighted(x, g, random_array(rng, (2,), "float32"))


def test_full_vectors_and_tails_round_alike(rng):
    """Width 8, then the same columns without the last of each half: bits of the shared ones."""
    x, g = random_array(rng, (16, 2, 8), "bfloat16"), random_array(rng, (16, 8), "bfloat16")
    probs = random_array(rng, (16,), "float32")

    def results(x, g):
        packed = np.ascontiguousarray(x).reshape(16, -1)
        do1, dprob, out = F.fused_swiglu_weighted_bwd(*map(to_paddle, (packed, g, probs)))
        return to_numpy(do1).reshape(x.shape), to_numpy(dprob), to_numpy(out)

    wide, narrow = results(x, g), results(x[..., :7], np.ascontiguousarray(g[:, :7]))
    numeric.assert_bit_equal(np.ascontiguousarray(wide[0][..., :7]), narrow[0])
    numeric.assert_bit_equal(np.ascontiguousarray(wide[2][:, :7]), narrow[2])
    last = oracle.f64(g[:, 7]) * oracle.swiglu(x[:, 0, 7], x[:, 1, 7])
    np.testing.assert_allclose(wide[1] - narrow[1], last, rtol=1e-3, atol=1e-5)


# ---- dtypes

FLOATS = ["float32", "float64", "float16", "bfloat16"]
OTHERS = ["int32", "int64", "bool", "complex64", "uint8", "int8"]
FIRST = {name: next(iter(arguments)) for name, arguments in RIGHT.items()}


@pytest.mark.parametrize("name", RIGHT)
def test_documented_dtypes_are_those_that_work(name):
    """What the docstring lists of the first argument works, forward and backward; no other does."""
    # fused_rms_norm_ext_grad takes "the forward's input": that of fused_rms_norm_ext.
    documented = F.fused_rms_norm_ext if name == "fused_rms_norm_ext_grad" else getattr(F, name)
    line = re.search(rf"{FIRST[name]} \(Tensor\): ([^;]*);", documented.__doc__).group(1)
    listed = set(re.findall(r"float\d+|bfloat16", line))
    assert listed == set(FLOATS)
    for dtype in FLOATS:
        arguments = dict(RIGHT[name])
        for argument, value in arguments.items():
            keeps = argument in ("probs", "unzipped_probs", "invvar", "position_ids")
            if isinstance(value, paddle.Tensor) and not keeps:
                arguments[argument] = value.astype(dtype).detach()
                arguments[argument].stop_gradient = False
        outputs = getattr(F, name)(**arguments)
        out = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        assert str(out.dtype) == str(arguments[FIRST[name]].dtype)
        assert np.isfinite(oracle.f64(to_numpy(out))).all()
        if not out.stop_gradient:
            paddle.autograd.backward([out], [out.detach()])
            grad = arguments[FIRST[name]].grad
            assert grad.dtype == out.dtype and np.isfinite(oracle.f64(to_numpy(grad))).all()
    for dtype in OTHERS:
        wrong = {**RIGHT[name], FIRST[name]: RIGHT[name][FIRST[name]].astype(dtype)}
        with pytest.raises(TypeError, match=rf"^{name}\(\): {FIRST[name]}: expected dtype"):
            getattr(F, name)(**wrong)


@pytest.mark.parametrize("shape", [(2, 3, 64), (6, 64)], ids=str)
def test_half_rows_with_a_float32_weight(rng, shape):
    """The output keeps the row's dtype, the weight's gradient the weight's."""
    x, g = (random_array(rng, shape, "bfloat16") for _ in range(2))
    weight = random_array(rng, (64,), "float32")
    (out,), (dx, dw) = run(F.rms_norm, [x, weight], [g])
    assert [numeric.dtype_name(a.dtype) for a in (out, dx, dw)] == ["bfloat16"] * 2 + ["float32"]
    check_rms(x, weight, g)


# ---- ranges and rounding


def test_default_epsilon_is_one_constant():
    """The same numbers in float32 and bfloat16 are normalised by the same epsilon."""
    exact = np.full((1, 64), 2.0**-10)
    results = [
        oracle.f64(to_numpy(F.rms_norm(to_paddle(exact.astype(numpy_dtype(d))))))
        for d in ("float32", "bfloat16", "float64")
    ]
    expected = 2.0**-10 / np.sqrt(2.0**-20 + 1e-6)
    np.testing.assert_allclose(results[2], expected, rtol=1e-14)
    np.testing.assert_allclose(results[0], results[2], rtol=1e-6)
    np.testing.assert_allclose(results[1], results[2], rtol=2.0**-8)


def test_epsilon_stands_inside_the_root():
    x = to_paddle(np.full((1, 64), 1e-3, np.float32))
    np.testing.assert_allclose(F.rms_norm(x, epsilon=1e-6).numpy(), 0.70710678, rtol=1e-6)


def test_weight_is_applied_once():
    x, weight = paddle.ones([1, 4]), paddle.to_tensor([1.0, 2.0, 3.0, 4.0])
    out = F.rms_norm(x, weight, 1e-12)
    np.testing.assert_allclose(out.numpy(), [[1.0, 2.0, 3.0, 4.0]], rtol=1e-6)


def test_ties_go_to_the_even_neighbour():
    """Sums that lie half-way between two halves: 1 + 1/2 ULP down, 1 + 3/2 ULP up."""
    for dtype, ulp in (("bfloat16", 2.0**-7), ("float16", 2.0**-10)):
        x = np.array([[1.0, 1.0 + ulp, -1.0, -1.0 - ulp]]).astype(numpy_dtype(dtype))
        half = np.array([[ulp / 2, ulp / 2, -ulp / 2, -ulp / 2]]).astype(numpy_dtype(dtype))
        _, total = F.rms_norm(to_paddle(x), residual=to_paddle(half))
        expected = [[1.0, 1.0 + 2 * ulp, -1.0, -1.0 - 2 * ulp]]
        assert oracle.f64(to_numpy(total)).tolist() == expected, dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000])
def test_every_nan_stays_nan(dtype, bits):
    """Also those that a rounding of their bits would carry into another number."""
    x = np.ones((1, 32), numpy_dtype(dtype))
    probs = np.array([bits], np.uint32).view(np.float32)
    out = to_numpy(F.fused_swiglu_weighted(to_paddle(x), to_paddle(probs)))
    assert np.isnan(oracle.f64(out)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_half_number_passes_through(dtype):
    """All 65536 bit patterns, through a rotation by nothing: load, arithmetic, store."""
    values = np.arange(65536, dtype=np.uint16).view(numpy_dtype(dtype)).reshape(1, 256, 1, 256)
    values = values[np.isfinite(oracle.f64(values)).all(-1)].reshape(1, -1, 1, 256)
    cos, sin = np.ones((256, 256), np.float32), np.zeros((256, 256), np.float32)
    out, _, _ = F.fused_rotary_position_embedding(
        to_paddle(values), sin=to_paddle(sin), cos=to_paddle(cos)
    )
    np.testing.assert_array_equal(oracle.f64(to_numpy(out)), oracle.f64(values))


# Every special value of both signs in two inputs, in full vectors and in the tail.
SPECIALS = Values(
    specials=tuple(
        (array, (7 * place + 5 * array) / 90, name, bool(place % 2))
        for array in (0, 1)
        for place, name in enumerate(2 * SPECIAL)
    )
)


@pytest.mark.parametrize("name", TARGETS)
def test_special_values_on_every_instruction_set(name):
    target = Target(name)
    try:
        for call, dtype in itertools.product(CALLS, DTYPES):
            here = make_call(call, dtype, 3, 33, values=SPECIALS).results()
            expected = [digest([array]) for group in here for array in group]
            found = target.digests(call, dtype, 3, 33, 0, SPECIALS)
            assert found == expected, f"{call} {dtype} on {target.active}"
    finally:
        target.close()


def test_small_values_are_measured_relatively(rng):
    x = random_array(rng, (64, 1024), "bfloat16", 0.02)
    g = random_array(rng, (64, 512), "bfloat16", 0.02)
    check_weighted(x, g, np.full(64, 1e-3, np.float32))


def test_rotation_and_norm_of_one_small_half_case(rng):
    """One rounding each: the order of multiply and add is fixed by the documentation."""
    q = random_array(rng, (7, 3, 96), "bfloat16")
    (out,), _ = run(lambda t: F.rms_norm(t, casting_mode="gemma"), [q])
    check(out, oracle.rms_norm(q), "bfloat16")
    check_swiglu(q, q, q)


def test_no_test_rests_on_an_absolute_tolerance():
    """An atol in the tests is at most 1e-5: data are of size 1, wrong kernels were that close."""
    loose = []
    for path in sorted(Path(__file__).resolve().parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "atol":
                value = node.value.value if isinstance(node.value, ast.Constant) else None
                if value is None or value > 1e-5:
                    loose.append(f"{path.name}:{node.value.lineno}")
    assert loose == []


def test_bfloat16_of_the_oracle_is_that_of_the_tensors():
    """0x3f81 is 1.0078125 on both sides of the conversion."""
    array = np.array([0x3F81], np.uint16).view(ml_dtypes.bfloat16)
    assert to_paddle(array).astype("float32").tolist() == [1.0078125]
