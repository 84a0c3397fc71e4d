"""RMSNorm: every form, forward, backward and twice."""

from __future__ import annotations

import numpy as np
import torch

from helpers import norms, numeric, oracle
from helpers.arrays import random_array

from .. import library as lib
from .arrays import KERNELS, NAMES, close, cpu, dt, empty, gpu, same, twice_and_shifted


def norm(
    x,
    weight,
    residual=None,
    bias=None,
    norm_bias=None,
    mode=lib.GEMMA,
    epsilon=1e-6,
    offset=0.0,
    y_dtype=None,
    quant=None,
    inv=False,
):
    """[y, residual_out, inv_rms], as far as there."""
    rows, cols = x.shape
    xx, w, r, b, nb = gpu(x), gpu(weight), gpu(residual), gpu(bias), gpu(norm_bias)
    kind = torch.int8 if quant else NAMES[y_dtype] if y_dtype else xx.dtype
    y = empty(x.shape, kind)
    total = empty(x.shape, xx.dtype) if residual is not None or bias is not None else None
    inverse = empty((rows,), torch.float32) if inv else None
    p = lib.RmsNorm(rows, cols, epsilon, offset, mode)
    if quant:
        p.quant = lib.Quant(True, *quant)
    p.x_dtype, p.weight_dtype, p.norm_bias_dtype = dt(xx), dt(w), dt(nb)
    p.y_dtype = dt(xx) if quant else dt(y)
    p.x, p.residual, p.bias, p.weight, p.norm_bias = map(lib.data, (xx, r, b, w, nb))
    p.y, p.residual_out, p.inv_rms = y.data_ptr(), lib.data(total), lib.data(inverse)
    KERNELS.launch("rms_norm", p)
    return [cpu(t) for t in (y, total, inverse) if t is not None]


def norm_backward(
    x,
    weight,
    g,
    residual_grad=None,
    inv=None,
    mode=lib.GEMMA,
    epsilon=1e-6,
    offset=0.0,
    wants=("weight",),
    norm_bias_dtype="float32",
):
    """[dx, (residual_grad), dweight, dnorm_bias, dbias], as far as wanted."""
    rows, cols = x.shape
    xx, w, gg, rg, ir = gpu(x), gpu(weight), gpu(g), gpu(residual_grad), gpu(inv)
    dx = empty(x.shape, xx.dtype)
    dr = empty(x.shape, xx.dtype) if residual_grad is not None else None
    dw = empty((cols,), w.dtype) if w is not None and "weight" in wants else None
    dnb = empty((cols,), NAMES[norm_bias_dtype]) if "norm_bias" in wants else None
    db = empty((cols,), xx.dtype) if "bias" in wants else None
    p = lib.RmsNormBackward(rows, cols, epsilon, offset, mode)
    p.x_dtype, p.y_dtype, p.weight_dtype, p.norm_bias_dtype = dt(xx), dt(gg), dt(w), dt(dnb)
    p.x, p.weight, p.inv_rms, p.y_grad, p.residual_out_grad = map(lib.data, (xx, w, ir, gg, rg))
    p.x_grad, p.residual_grad, p.weight_grad = map(lib.data, (dx, dr, dw))
    p.norm_bias_grad, p.bias_grad = lib.data(dnb), lib.data(db)
    KERNELS.launch_with("rms_norm_backward", p, KERNELS.workspace("rms_norm_backward", p))
    return [cpu(t) for t in (dx, dr, dw, dnb, db) if t is not None]


def close_llama(y, x, w, offset) -> None:
    """Of a half in mode "llama": 1.5 ULP where x r is a normal number.

    Where it is subnormal, its own rounding costs half a subnormal step times the factor besides.
    """
    exact = oracle.rms_norm(x, w, offset=offset)
    moved = norms.towards(y, exact, norms.subnormal_slack(x, w, 1e-6, offset))
    bound = numeric.rms_norm_bound(y.dtype, "llama")
    numeric.assert_ulp(moved, exact, bound, what="llama", dtype=y.dtype)


SHAPES = [
    *((3, 1), (5, 7), (4, 64), (3, 100), (9, 1024), (6, 2048), (7, 4096), (3, 5120), (3, 7168)),
    *((3, 8192), (3, 16384), (2, 32768), (2, 65536), (2, 70001), (2, 140000), (300, 520)),
]


def check_rms_norm(rng, dtype):
    """Widths, modes, dtypes of the weight, sums, extremes."""
    for rows, cols in SHAPES:
        x = random_array(rng, (rows, cols), dtype, 3.0)
        g = random_array(rng, (rows, cols), dtype)
        check_weights(rng, x, g, dtype)
        check_sums(rng, x, dtype)
        check_gradients_of_sums(rng, x, g, dtype)
        check_ext(rng, x)
        check_int8(rng, x, dtype)
        if dtype in numeric.HALVES:
            check_modes(rng, x, g, dtype)
    check_magnitudes(rng, dtype)
    check_nan(rng, dtype)


def check_weights(rng, x, g, dtype):
    """A weight of x's dtype, of float32, none, a frozen one; the last row alone."""
    rows, cols = x.shape
    for weight_dtype in (dtype, "float32", None):
        w = None if weight_dtype is None else random_array(rng, (cols,), weight_dtype)
        (y,) = twice_and_shifted(norm, x, w)
        close(y, oracle.rms_norm(x, w), what=f"y {cols}")
        last = slice(rows - 1, rows)
        same([y[last]], norm(x[last], w), "row alone")
        got = twice_and_shifted(norm_backward, x, w, g)
        want, scale = oracle.rms_norm_grad(x, w, g), oracle.rms_norm_grad_scale(x, w, g)
        close(got[0], want[0], scale[0], cols + 1, what=f"dx {cols}")
        same([got[0][last]], norm_backward(x[last], w, g[last])[:1], "row alone")
        same(got[:1], norm_backward(x, w, g, wants=())[:1], "frozen weight")
        if w is not None:
            close(got[1], want[1], scale[1], rows + 1, what=f"dw {cols}")


def check_sums(rng, x, dtype):
    """With a residual; with biases before and after, too."""
    cols = x.shape[1]
    residual = random_array(rng, x.shape, dtype)
    bias, norm_bias = random_array(rng, (cols,), dtype), random_array(rng, (cols,), "float32")
    total = oracle.residual_sum(x, residual)
    w = random_array(rng, (cols,), dtype)
    y, out = twice_and_shifted(norm, x, w, residual)
    close(out, total, bound=0.51, what="residual_out")
    close(y, oracle.rms_norm(out, w), what="residual y")
    y, out = twice_and_shifted(norm, x, w, residual, bias, norm_bias)
    exact = oracle.f64(x) + oracle.f64(residual) + oracle.f64(bias)
    terms = np.abs(oracle.f64(x)) + np.abs(oracle.f64(residual)) + np.abs(oracle.f64(bias))
    close(out, exact, terms, bound=1.0, what="biased sum")
    want = oracle.rms_norm(out, w) + norm_bias
    close(y, want, np.abs(oracle.rms_norm(out, w)) + np.abs(norm_bias), 2, what="affine")


def check_gradients_of_sums(rng, x, g, dtype):
    """With the gradient of the sum, and of both biases."""
    rows, cols = x.shape
    w, more = random_array(rng, (cols,), dtype), random_array(rng, x.shape, dtype)
    got = twice_and_shifted(norm_backward, x, w, g, more)
    want, scale = oracle.rms_norm_grad(x, w, g), oracle.rms_norm_grad_scale(x, w, g)
    scale = scale[0] + np.abs(oracle.f64(more))
    close(got[0], want[0] + oracle.f64(more), scale, cols + 1, what="dx + residual")
    same(got[:1], got[1:2], "residual_grad")
    got = twice_and_shifted(norm_backward, x, w, g, wants=("weight", "norm_bias", "bias"))
    close(got[1], want[1], oracle.rms_norm_grad_scale(x, w, g)[1], rows + 1, what="plain dw")
    close(got[2], oracle.f64(g).sum(0), np.abs(oracle.f64(g)).sum(0), rows + 1, what="dnorm_bias")
    close(
        got[3],
        want[0].sum(0),
        oracle.rms_norm_grad_scale(x, w, g)[0].sum(0),
        cols + rows,
        what="dbias",
    )


def check_ext(rng, x):
    """Y in the weight's dtype, and 1 / rms."""
    rows, cols = x.shape
    w32 = random_array(np.random.default_rng(3), (cols,), "float32")
    y, inv = twice_and_shifted(norm, x, w32, y_dtype="float32", inv=True)
    close(y, oracle.rms_norm(x, w32), what="ext y")
    close(inv, oracle.inverse_rms(x, 1e-6)[:, 0], what="inv_rms")
    g32 = random_array(rng, x.shape, "float32")
    got = twice_and_shifted(norm_backward, x, w32, g32, None, inv)
    want = oracle.fused_rms_norm_ext_grad(x, w32, inv, g32)
    scale = oracle.rms_norm_grad_scale(x, w32, g32)
    close(got[0], want[0], scale[0], cols + 1, what="ext dx")
    close(got[1], want[1], scale[1], rows + 1, what="ext dw")


def check_int8(rng, x, dtype):
    """A value next to a tie may fall to either side."""
    w = random_array(rng, x.shape[1:], dtype)
    (q,) = twice_and_shifted(norm, x, w, quant=(False, 0.4, 127.0, -127.0))
    want = oracle.quantize_int8(oracle.rms_norm(x, w), 0.4, 0, 127, -127)
    assert np.abs(q.astype(int) - want.astype(int)).max() <= 1, "int8"
    assert (q != want).mean() < 1e-2, "int8 often"


def check_modes(rng, x, g, dtype):
    """The casting modes "llama" and "none" of a half."""
    cols = x.shape[1]
    w = random_array(rng, (cols,), "float32")
    (y,) = twice_and_shifted(norm, x, w, mode=lib.LLAMA, offset=1.0)
    close_llama(y, x, w, 1.0)
    got = twice_and_shifted(norm_backward, x, w, g, mode=lib.LLAMA, offset=1.0)
    want = oracle.rms_norm_grad(x, w, g, 1e-6, 1.0, "llama", dtype)
    scale = oracle.rms_norm_grad_scale(x, w, g, 1e-6, 1.0)
    close(got[0], want[0], scale[0], cols + 1, what="llama dx")
    # rounding x r the other way at a tie moves a term by an ULP of the half
    assert np.all(np.abs(got[1] - want[1]) <= scale[1] * 2.0**-8), "llama dw"
    (y,) = twice_and_shifted(norm, x, w, mode=lib.NONE, offset=1.0)
    want = oracle.rms_norm_rounded(x, w, 1e-6, 1.0, "none", dtype)
    assert np.all(np.abs(oracle.f64(y) - want) <= np.abs(want) * 2.0**-5 + 1e-6), "none"


def check_magnitudes(rng, dtype):
    """Rows whose squares leave the range, and rows of zeros."""
    for magnitude in (1e30, 1e-30, 1e25, 1e-22, 0.0):
        if dtype == "float16" and magnitude > 1:
            continue
        x = random_array(rng, (3, 4096), dtype, magnitude)
        g, w = random_array(rng, x.shape, dtype), random_array(rng, (4096,), dtype)
        for epsilon in (1e-6, 0.0) if magnitude else (1e-6,):
            (y,) = twice_and_shifted(norm, x, w, epsilon=epsilon)
            want = oracle.rms_norm(x, w, epsilon)
            if not np.abs(oracle.f64(x)).max():
                want = np.zeros_like(want) if epsilon else want * np.nan
            close(y, want, what=f"y of {magnitude}, epsilon {epsilon}")
            if dtype != "float16" and epsilon == 0.0 and magnitude > 1e-29:
                continue
            norm_backward(x, w, g, epsilon=epsilon)


def check_nan(rng, dtype):
    """NaN and infinity stay in their rows."""
    x = random_array(rng, (4, 4096), dtype)
    x[1, 77], x[2, 99] = np.nan, np.inf
    y = norm(x, None)[0]
    assert np.isnan(oracle.f64(y[1])).all() and not np.isnan(oracle.f64(y[[0, 3]])).any(), "NaN row"
    dx = norm_backward(x, None, x)[0]
    assert np.isnan(oracle.f64(dx[1])).all() and not np.isnan(oracle.f64(dx[[0, 3]])).any(), (
        "NaN row"
    )


def norm_double(x, w, g, v, u, epsilon=1e-6, offset=0.0):
    """[x_out, weight_out, y_grad_grad]."""
    rows, cols = x.shape
    xx, ww, gg, vv, uu = map(gpu, (x, w, g, v, u))
    x_out, g_out = empty(x.shape, xx.dtype), empty(x.shape, xx.dtype)
    w_out = empty((cols,), ww.dtype) if ww is not None else None
    p = lib.RmsNormDoubleBackward(rows, cols, epsilon, offset, lib.GEMMA, dt(xx), dt(ww))
    p.x, p.weight, p.y_grad, p.x_grad_grad, p.weight_grad_grad = map(lib.data, (xx, ww, gg, vv, uu))
    p.x_out, p.weight_out, p.y_grad_grad = map(lib.data, (x_out, w_out, g_out))
    KERNELS.launch_with(
        "rms_norm_double_backward", p, KERNELS.workspace("rms_norm_double_backward", p)
    )
    return [cpu(t) for t in (x_out, w_out, g_out) if t is not None]


def check_rms_norm_double(rng, dtype):
    """Against the oracle, relative to the largest value."""
    limit = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-3, "bfloat16": 1.2e-2}[dtype]
    for rows, cols in [(4, 7), (5, 1024), (3, 4096), (300, 100), (2, 20000)]:
        x, g, v = (random_array(rng, (rows, cols), dtype) for _ in range(3))
        w, u = random_array(rng, (cols,), dtype), random_array(rng, (cols,), dtype)
        got = twice_and_shifted(norm_double, x, w, g, v, u)
        want = oracle.rms_norm_double_grad(x, w, g, v, u)
        for a, b in zip(got, want):
            error = np.abs(oracle.f64(a) - b).max() / np.abs(b).max()
            assert error < limit, f"{cols}: {error}"
