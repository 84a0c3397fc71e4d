"""Operators on a CUDA device through Paddle: values, gradients, agreement with the CPU, streams."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import norms, numeric, oracle
from helpers.arrays import random_array, to_numpy, to_paddle

DTYPES = ["float32", "float16", "bfloat16", "float64"]


def on(device, array, stop_gradient=True):
    """A tensor on "cpu" or "gpu"; None stays None."""
    import paddle

    if array is None:
        return None
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        array = np.array(array, order="C").view(np.uint16)
    place = paddle.CPUPlace() if device == "cpu" else paddle.CUDAPlace(0)
    return paddle.to_tensor(array, place=place, stop_gradient=stop_gradient)


def run(function, arrays, grads=None, device="gpu", frozen=()):
    """(outputs, gradients) as arrays; gradients of the float inputs that are not frozen."""
    import paddle

    tensors = [
        on(device, a, index in frozen or np.asarray(a).dtype.kind == "i")
        for index, a in enumerate(arrays)
    ]
    outs = function(*tensors)
    outs = [o for o in (outs if isinstance(outs, (list, tuple)) else [outs]) if o is not None]
    wanted = [t for t in tensors if t is not None and not t.stop_gradient]
    got = []
    if grads is not None:
        given = [on(device, g) for g in grads]
        got = paddle.grad(outs, wanted, given)
    return [to_numpy(o) for o in outs], [to_numpy(g) for g in got]


def close(actual, expected, dtype, scale=None, terms=1, bound=None):
    """Within the bound of the dtype."""
    bound = bound or (
        numeric.sum_bound(dtype, terms) if terms > 1 else numeric.elementwise_bound(dtype)
    )
    numeric.assert_ulp(actual, expected, bound, scale=scale)


def agree(first, second, dtype, ulp=2.0):
    """CPU and GPU differ by roundings of intermediate values only."""
    for a, b in zip(first, second):
        unit = np.spacing(np.abs(oracle.f64(b)).max().astype(np.float32)).astype(np.float64)
        factor = {"float32": 1.0, "float64": 1.0, "float16": 2.0**13, "bfloat16": 2.0**16}[dtype]
        assert np.abs(oracle.f64(a) - oracle.f64(b)).max() <= ulp * 16 * unit * factor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (3, 7), (2, 3, 1536), (9, 2048)])
def test_weighted_swiglu(rng, dtype, shape):
    import paddle_fused.nn.functional as F

    cols = shape[-1]
    x = random_array(rng, (*shape[:-1], 2 * cols), dtype, 2.0)
    g, probs = random_array(rng, shape, dtype), random_array(rng, shape[:-1], "float32")
    (out,), (dx, dp) = run(F.fused_swiglu_weighted, [x, probs], [g])
    close(out, oracle.fused_swiglu_weighted(x, probs), dtype)
    want = oracle.fused_swiglu_weighted_bwd(x, g, probs)
    weighted = oracle.f64(g) * oracle.f64(probs)[..., None]
    close(dx, want[0], dtype, oracle.swiglu_grad_scale(x, None, weighted))
    close(dp, want[1], "float32", oracle.probs_grad_scale(x, g, probs), cols)
    got, _ = run(F.fused_swiglu_weighted_bwd, [x, g, probs], frozen=(0, 1, 2))
    numeric.assert_bit_equal(got[0], dx)
    numeric.assert_bit_equal(got[1], dp)
    close(got[2], want[2], dtype)
    agree([out, dx], run(F.fused_swiglu_weighted, [x, probs], [g], "cpu")[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("joined", [True, False])
def test_swiglu(rng, dtype, joined):
    import paddle_fused.nn.functional as F

    x, y, g = (random_array(rng, (6, 200), dtype) for _ in range(3))
    if joined:
        xy = np.concatenate([x, y], -1)
        (out,), grads = run(F.swiglu, [xy], [g])
        grads = [grads[0][:, :200], grads[0][:, 200:]]
    else:
        (out,), grads = run(F.swiglu, [x, y], [g])
    close(out, oracle.swiglu(x, y), dtype)
    scales = oracle.swiglu_grad_scale(x, y, g)
    for got, want, scale in zip(grads, oracle.swiglu_grad(x, y, g), scales):
        close(got, want, dtype, scale)


def test_swiglu_of_far_gates(rng):
    """Gates whose sigmoid is near or below the smallest float32, with ups of every size."""
    import paddle_fused.nn.functional as F

    x = rng.uniform(-150.0, -80.0, (40, 300)).astype("float32")
    y, g = (random_array(rng, x.shape, "float32") for _ in range(2))
    y *= (10.0 ** rng.integers(-3, 36, x.shape)).astype("float32")
    (out,), grads = run(F.swiglu, [x, y], [g])
    close(out, oracle.swiglu(x, y), "float32")
    scales = oracle.swiglu_grad_scale(x, y, g)
    for got, want, scale in zip(grads, oracle.swiglu_grad(x, y, g), scales):
        close(got, want, "float32", scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [7, 64, 1000, 1024, 4096, 8192, 16384, 33000, 65536])
@pytest.mark.parametrize("mode", ["llama", "gemma"])
def test_rms_norm(rng, dtype, cols, mode):
    import paddle_fused.nn.functional as F

    x, g = random_array(rng, (5, cols), dtype, 3.0), random_array(rng, (5, cols), dtype)
    w = random_array(rng, (cols,), "float32" if mode == "gemma" else dtype)

    def function(x, w):
        return F.rms_norm(x, w, 1e-6, casting_mode=mode)

    (out,), (dx, dw) = run(function, [x, w], [g])
    exact, moved = oracle.rms_norm(x, w), out
    if mode == "llama" and dtype in numeric.HALVES:  # the bound is of a normal x·r
        moved = norms.towards(out, exact, norms.subnormal_slack(x, w, 1e-6, 0.0))
    bound = numeric.rms_norm_bound(dtype, mode)
    numeric.assert_ulp(moved, exact, bound, dtype=dtype)
    want, scale = oracle.rms_norm_grad(x, w, g), oracle.rms_norm_grad_scale(x, w, g)
    close(dx, want[0], dtype, scale[0], cols + 1)
    if mode == "gemma" or dtype not in numeric.HALVES:
        close(dw, want[1], numeric.dtype_name(dw.dtype), scale[1], 6)
    (frozen,) = run(function, [x, w], [g], frozen=(1,))[1]
    numeric.assert_bit_equal(frozen, dx)
    again = run(function, [x, w], [g])
    for a, b in zip([out, dx, dw], [*again[0], *again[1]]):
        numeric.assert_bit_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual(rng, dtype):
    import paddle_fused.nn.functional as F

    x, r, g, more = (random_array(rng, (5, 4096), dtype) for _ in range(4))
    w = random_array(rng, (4096,), dtype)

    def function(x, r, w):
        return F.rms_norm(x, w, 1e-6, casting_mode="gemma", residual=r)

    (out, total), (dx, dr, dw) = run(function, [x, r, w], [g, more])
    close(total, oracle.residual_sum(x, r), dtype)
    close(out, oracle.rms_norm(total, w), dtype)
    want, scale = oracle.rms_norm_grad(total, w, g), oracle.rms_norm_grad_scale(total, w, g)
    close(dx, want[0] + oracle.f64(more), dtype, scale[0] + np.abs(oracle.f64(more)), 4097)
    numeric.assert_bit_equal(dx, dr)
    close(dw, want[1], dtype, scale[1], 6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_rms_norm_and_ext(rng, dtype):
    import paddle_fused.nn.functional as F

    x, r = (random_array(rng, (5, 300), dtype) for _ in "xr")
    w, b, nb = (random_array(rng, (300,), dtype) for _ in range(3))

    def function(x, w, nb, b, r):
        return F.fused_rms_norm(x, w, nb, 1e-6, 1, b, r)

    (out, total), _ = run(function, [x, w, nb, b, r])
    scale = np.abs(oracle.rms_norm(total, w)) + np.abs(oracle.f64(nb))
    close(out, oracle.fused_rms_norm(total, w, nb, 1e-6), dtype, scale, 2)
    scale32 = random_array(rng, (300,), "float32")
    (y, inv), _ = run(F.fused_rms_norm_ext, [x, scale32])
    want = oracle.fused_rms_norm_ext(x, scale32)
    close(y, want[0], "float32")
    close(inv, want[1], "float32")
    g32 = random_array(rng, (5, 300), "float32")

    def gradient(x, s, inv, g):
        return F.fused_rms_norm_ext_grad(x, s, inv, g, 1e-5)

    (dx, ds), _ = run(gradient, [x, scale32, inv, g32], frozen=(0, 1, 2, 3))
    want = oracle.fused_rms_norm_ext_grad(x, scale32, inv, g32)
    scales = oracle.rms_norm_grad_scale(x, scale32, g32, 1e-5)
    close(dx, want[0], dtype, scales[0], 301)
    close(ds, want[1], "float32", scales[1], 6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("time_major", [True, False])
def test_rope(rng, dtype, neox, time_major):
    import paddle_fused.nn.functional as F

    batch, seq, dim = 2, 9, 128
    shape = (seq, batch) if time_major else (batch, seq)
    q, k = random_array(rng, (*shape, 4, dim), dtype), random_array(rng, (*shape, 2, dim), dtype)
    cos, sin = (random_array(rng, (20, dim), dtype) for _ in "cs")
    ids = rng.integers(0, 20, (batch, seq))

    def function(q, k, sin, cos, ids):
        return F.fused_rotary_position_embedding(
            q, k, None, sin, cos, ids, use_neox_rotary_style=neox, time_major=time_major
        )

    grads = [random_array(rng, t.shape, dtype) for t in (q, k)]
    outs, got = run(function, [q, k, sin, cos, ids], grads, frozen=(2, 3))
    c, s = oracle.fused_rope_tables(cos, sin, ids, time_major)
    style = oracle.PAIRS if neox else oracle.HALVES_STYLE
    for t, out in zip((q, k), outs):
        close(out, oracle.rope(t, c, s, style), dtype, oracle.rope_scale(t, c, s, style))
    for g, out in zip(grads, got):
        close(out, oracle.rope_grad(g, c, s, style), dtype, oracle.rope_grad_scale(g, c, s, style))
    bad = ids.copy()
    bad[1, 3] = 20
    (out, _), _ = run(function, [q, k, sin, cos, bad], frozen=(0, 1, 2, 3))
    nan = np.isnan(oracle.f64(out)).all((2, 3))
    assert nan.sum() == 1 and nan[(3, 1) if time_major else (1, 3)]


def test_generated_tables(rng):
    import paddle_fused.nn.functional as F

    q = random_array(rng, (2, 300, 3, 64), "float32")

    def function(q):
        return F.fused_rotary_position_embedding(q)[0]

    (out,), _ = run(function, [q])
    cos, sin = oracle.rope_tables(np.arange(300), 64, 10000.0, oracle.PAIRS)
    c, s = oracle.fused_rope_tables(cos, sin)
    close(
        out, oracle.rope(q, c, s, oracle.PAIRS), "float32", oracle.rope_scale(q, c, s, oracle.PAIRS)
    )


@pytest.mark.parametrize("unsqueeze", [1, 2])
def test_apply_rotary_pos_emb(rng, unsqueeze):
    import paddle_fused.nn.functional as F

    shape = (2, 4, 9, 96) if unsqueeze == 1 else (2, 9, 4, 96)
    q, k = (random_array(rng, shape, "bfloat16") for _ in "qk")
    cos, sin = (random_array(rng, (2, 9, 64), "float32") for _ in "cs")

    def function(q, k, cos, sin):
        return F.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze)

    outs, _ = run(function, [q, k, cos, sin], frozen=(2, 3))
    c, s = oracle.applied_rope_tables(cos, sin, None, unsqueeze)
    for t, out in zip((q, k), outs):
        style = oracle.HALVES_STYLE
        close(out, oracle.rope(t, c, s, style), "bfloat16", oracle.rope_scale(t, c, s, style))


def test_partial_rope(rng):
    import paddle_fused.nn.functional as F

    x = random_array(rng, (2, 9, 3, 192), "bfloat16")
    cos, sin = (random_array(rng, (1, 9, 1, 64), "bfloat16") for _ in "cs")
    (out,), _ = run(F.fused_partial_rope, [x, cos, sin], frozen=(1, 2))
    close(out, oracle.partial_rope(x, cos, sin), "bfloat16", oracle.partial_rope_scale(x, cos, sin))


def test_side_stream(rng):
    import paddle

    import paddle_fused.nn.functional as F

    x, w = random_array(rng, (512, 4096), "bfloat16"), random_array(rng, (4096,), "bfloat16")
    xx, ww = to_paddle(x), to_paddle(w)
    paddle.device.synchronize()
    stream = paddle.device.cuda.Stream()
    with paddle.device.cuda.stream_guard(stream):
        out = F.rms_norm(xx, ww, 1e-6, casting_mode="gemma")
    stream.synchronize()
    close(to_numpy(out), oracle.rms_norm(x, w), "bfloat16")
