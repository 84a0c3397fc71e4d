"""Faults that kernels of this kind have had on GPUs: sizes, races, warps, devices."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from test_gpu_operators import close, on, run

from helpers import devices, numeric, oracle
from helpers.arrays import random_array, to_numpy

GIB = 1 << 30


def free_memory() -> int:
    """Bytes free on the device."""
    import paddle

    return paddle.device.cuda.get_device_properties(0).total_memory - int(
        paddle.device.cuda.memory_reserved(0)
    )


def needs(gib: float):
    """Skips a test whose tensors do not fit."""
    if free_memory() < gib * GIB:
        pytest.skip(f"needs {gib} GiB on the device")


def synchronize():
    import paddle

    paddle.device.synchronize()


def many_zeros(rows, width, last):
    """A bfloat16 array of zeros with the given last rows."""
    array = np.zeros((rows, width), ml_dtypes.bfloat16)
    array[-len(last) :] = last
    return array


def operators(rng, rows, dtype="float32", width=32):
    """Every operator on so many rows: name to (function, arrays, upstream gradients)."""
    import paddle_fused.nn.functional as F

    def array(*shape):
        return random_array(rng, (rows, *shape), dtype)

    weight, probs = random_array(rng, (width,), dtype), random_array(rng, (rows,), "float32")
    table = random_array(rng, (3, width), "float32")

    def rotate(q, k):
        return F.fused_rotary_position_embedding(
            q, k, None, on("gpu", table), on("gpu", table), use_neox_rotary_style=False
        )

    return {
        "swiglu": (F.swiglu, [array(2 * width)], [array(width)]),
        "weighted": (F.fused_swiglu_weighted, [array(2 * width), probs], [array(width)]),
        "rms_norm": (F.rms_norm, [array(width), weight], [array(width)]),
        "rope": (
            rotate,
            [array(3, 2, width), array(3, 1, width)],
            [array(3, 2, width), array(3, 1, width)],
        ),
    }


@pytest.mark.parametrize("name", ["swiglu", "weighted", "rms_norm", "rope"])
def test_no_rows_leave_no_error_behind(rng, name):
    """A launch of nothing would fail, and the next operator would be told."""
    if not devices.empty_outputs_work():
        pytest.skip("needs Paddle 3")
    function, arrays, grads = operators(rng, 0)[name]
    outputs, gradients = run(function, arrays, grads)
    synchronize()
    assert all(out.size == 0 for out in outputs)
    assert not any(g.any() for g in gradients)
    function, arrays, grads = operators(rng, 4)[name]
    first, second = run(function, arrays, grads), run(function, arrays, grads)
    synchronize()
    for a, b in zip([*first[0], *first[1]], [*second[0], *second[1]]):
        numeric.assert_bit_equal(a, b)
        assert np.isfinite(oracle.f64(a)).all() and a.any()


def test_more_than_2_to_31_elements_of_gates(rng):
    import paddle_fused.nn.functional as F

    needs(14)
    width = 3584
    rows = (1 << 31) // (2 * width) + 3
    last, g = (random_array(rng, (3, n), "bfloat16") for n in (2 * width, width))
    probs = np.zeros(rows, np.float32)
    probs[-3:] = random_array(rng, (3,), "float32")
    x, do2 = many_zeros(rows, 2 * width, last), many_zeros(rows, width, g)
    many = F.fused_swiglu_weighted_bwd(*(on("gpu", a) for a in (x, do2, probs)))
    alone = F.fused_swiglu_weighted_bwd(*(on("gpu", a) for a in (last, g, probs[-3:])))
    for a, b in zip(many, alone):
        numeric.assert_bit_equal(to_numpy(a)[-3:], to_numpy(b))


def test_more_than_2_to_31_elements_of_rows(rng):
    import paddle_fused.nn.functional as F

    needs(24)
    rows, width = 299594, 7168
    last, g = (random_array(rng, (3, width), "bfloat16") for _ in range(2))
    weight = random_array(rng, (width,), "bfloat16")

    def results(x, g):
        outputs, grads = run(F.rms_norm, [x, weight], [g], frozen=(1,))
        return [outputs[0][-3:], grads[0][-3:]]

    many = results(many_zeros(rows, width, last), many_zeros(rows, width, g))
    for a, b in zip(many, results(last, g)):
        numeric.assert_bit_equal(a, b)


def test_more_than_2_to_31_elements_of_heads(rng):
    import paddle_fused.nn.functional as F

    needs(10)
    tokens, heads, dim = 131073, 128, 128
    last = random_array(rng, (1, 1, heads, dim), "bfloat16")
    q = np.zeros((1, tokens, heads, dim), ml_dtypes.bfloat16)
    q[:, -1:] = last
    ids = np.arange(tokens)[None]
    many = F.fused_rotary_position_embedding(on("gpu", q), position_ids=on("gpu", ids))[0]
    alone = F.fused_rotary_position_embedding(
        on("gpu", last), position_ids=on("gpu", ids[:, -1:].copy())
    )[0]
    numeric.assert_bit_equal(to_numpy(many)[:, -1:], to_numpy(alone))


@pytest.mark.parametrize("rows, width", [(200003, 96), (512, 4096)])
def test_no_races_between_rows_of_a_block(rng, rows, width):
    """Twenty runs, the same bits, and the oracle's values."""
    import paddle_fused.nn.functional as F

    x, g = (random_array(rng, (rows, width), "float32") for _ in range(2))
    weight = random_array(rng, (width,), "float32")
    (out,), (dx, dw) = run(F.rms_norm, [x, weight], [g])
    close(out, oracle.rms_norm(x, weight), "float32")
    want, scale = oracle.rms_norm_grad(x, weight, g), oracle.rms_norm_grad_scale(x, weight, g)
    close(dx, want[0], "float32", scale[0], width)
    close(dw, want[1], "float32", scale[1], rows)
    for _ in range(20):
        again = run(F.rms_norm, [x, weight], [g])
        for a, b in zip([out, dx, dw], [*again[0], *again[1]]):
            numeric.assert_bit_equal(a, b)


@pytest.mark.parametrize("rows", [1, 5])
def test_every_width_of_a_warp(rng, rows):
    """Widths 1 to 70: shuffles with lanes that have nothing to do."""
    import paddle_fused.nn.functional as F

    for width in range(1, 71):
        x, g = (random_array(rng, (rows, width), "float32") for _ in range(2))
        weight = random_array(rng, (width,), "float32")
        (out,), (dx, dw) = run(F.rms_norm, [x, weight], [g])
        close(out, oracle.rms_norm(x, weight), "float32")
        want, scale = oracle.rms_norm_grad(x, weight, g), oracle.rms_norm_grad_scale(x, weight, g)
        close(dx, want[0], "float32", scale[0], width + 1)
        close(dw, want[1], "float32", scale[1], rows + 1)
        packed, probs = np.concatenate([x, g], -1), random_array(rng, (rows,), "float32")
        _, (_, dp) = run(F.fused_swiglu_weighted, [packed, probs], [x])
        want = oracle.fused_swiglu_weighted_bwd(packed, x, probs)[1]
        close(dp, want, "float32", oracle.probs_grad_scale(packed, x, probs), width + 1)


def test_full_vectors_and_tails_round_alike(rng):
    """Width 8 takes 16-byte vectors, width 7 does not: the shared columns have the same bits."""
    import paddle_fused.nn.functional as F

    x, g = random_array(rng, (16, 2, 8), "bfloat16"), random_array(rng, (16, 8), "bfloat16")
    probs = random_array(rng, (16,), "float32")

    def results(x, g):
        packed = np.ascontiguousarray(x).reshape(16, -1)
        do1, _, out = F.fused_swiglu_weighted_bwd(*(on("gpu", a) for a in (packed, g, probs)))
        return to_numpy(do1).reshape(x.shape), to_numpy(out)

    wide, narrow = results(x, g), results(x[..., :7], np.ascontiguousarray(g[:, :7]))
    for a, b in zip(wide, narrow):
        numeric.assert_bit_equal(np.ascontiguousarray(a[..., :7]), b)


WIDTHS = [1, 2, 3, 5, 7, 9, 17, 33, 100, 1023, 1025, 1234, 3420, 3584, 3588]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_off_alignment(rng, dtype):
    import paddle_fused.nn.functional as F

    for width in WIDTHS:
        x, g = random_array(rng, (3, 2 * width), dtype), random_array(rng, (3, width), dtype)
        probs = random_array(rng, (3,), "float32")
        (out,), (dx, _) = run(F.fused_swiglu_weighted, [x, probs], [g])
        bound = numeric.MAX_ULP_WEIGHTED_FLOAT32 if dtype == "float32" else None
        close(out, oracle.fused_swiglu_weighted(x, probs), dtype, bound=bound)
        weighted = oracle.f64(g) * oracle.f64(probs)[:, None]
        scale = oracle.swiglu_grad_scale(x, None, weighted)
        close(dx, oracle.fused_swiglu_weighted_bwd(x, g, probs)[0], dtype, scale, 2)


@pytest.mark.parametrize("which", ["weight", "probs", "sin"])
def test_inputs_on_two_devices(rng, which):
    """A ValueError that names both places; the process computes on."""
    import paddle_fused.nn.functional as F

    x, v = random_array(rng, (4, 8), "float32"), random_array(rng, (8,), "float32")
    q = random_array(rng, (1, 4, 1, 8), "float32")
    call = {
        "weight": lambda: F.rms_norm(on("gpu", x), on("cpu", v)),
        "probs": lambda: F.fused_swiglu_weighted(on("gpu", x), on("cpu", v[:4])),
        "sin": lambda: F.fused_rotary_position_embedding(
            on("gpu", q), sin=on("cpu", x), cos=on("gpu", x)
        ),
    }[which]
    with pytest.raises(ValueError, match=r"(?i)gpu.*cpu|cpu.*gpu"):
        call()
    (out,), _ = run(F.rms_norm, [x, v])
    close(out, oracle.rms_norm(x, v), "float32")


def test_probability_gradient_in_range_of_a_product_that_is_not(rng):
    """As on the CPU: silu(gate) times up leaves float32, times the upstream gradient it is back."""
    import paddle_fused.nn.functional as F

    x = np.array([[3e38, 50.0], [-117.0, 2.6e3], [1e-30, 1e-12]], np.float32)
    g = np.array([[1e-20], [5e5], [1e9]], np.float32)
    probs = np.full(3, 0.5, np.float32)
    _, (_, dp) = run(F.fused_swiglu_weighted, [x, probs], [g])
    want = oracle.fused_swiglu_weighted_bwd(x, g, probs)[1]
    close(dp, want, "float32", oracle.probs_grad_scale(x, g, probs), 2)
