"""SwiGLU: plain, weighted, backward and twice."""

from __future__ import annotations

import numpy as np
import torch

from helpers import oracle
from helpers.arrays import random_array

from .. import library as lib
from .arrays import KERNELS, close, cpu, dt, empty, gpu, same, twice_and_shifted


def swiglu(x, probs):
    """The forward of joined halves."""
    rows, cols = x.shape[0], x.shape[1] // 2
    a, pr = gpu(x), gpu(probs)
    out = empty((rows, cols), a.dtype)
    size = a.element_size()
    KERNELS.launch(
        "swiglu",
        lib.Swiglu(
            dt(a),
            rows,
            cols,
            2 * cols,
            a.data_ptr(),
            a.data_ptr() + cols * size,
            lib.data(pr),
            out.data_ptr(),
        ),
    )
    return [cpu(out)]


def swiglu_backward(x, g, probs, with_out=True):
    """(x_grad[, probs_grad, out])."""
    rows, cols = g.shape
    a, gg, pr = gpu(x), gpu(g), gpu(probs)
    half = cols * a.element_size()
    grad = empty(a.shape, a.dtype)
    probs_grad = empty((rows,), torch.float32) if probs is not None else None
    out = empty(gg.shape, a.dtype) if probs is not None and with_out else None
    p = lib.SwigluBackward(
        dt(a), rows, cols, 2 * cols, a.data_ptr(), a.data_ptr() + half, lib.data(pr)
    )
    p.out_grad, p.gate_grad, p.up_grad = gg.data_ptr(), grad.data_ptr(), grad.data_ptr() + half
    p.probs_grad, p.out = lib.data(probs_grad), lib.data(out)
    KERNELS.launch("swiglu_backward", p)
    return [cpu(t) for t in (grad, probs_grad, out) if t is not None]


def swiglu_double(x, g, v):
    """(x_out, out_grad_grad)."""
    rows, cols = g.shape
    a, gg, vv = gpu(x), gpu(g), gpu(v)
    half = cols * a.element_size()
    x_out, g_out = empty(a.shape, a.dtype), empty(gg.shape, a.dtype)
    p = lib.SwigluDoubleBackward(
        dt(a), rows, cols, 2 * cols, a.data_ptr(), a.data_ptr() + half, gg.data_ptr()
    )
    p.gate_grad_grad, p.up_grad_grad = vv.data_ptr(), vv.data_ptr() + half
    p.gate_out, p.up_out, p.out_grad_grad = (
        x_out.data_ptr(),
        x_out.data_ptr() + half,
        g_out.data_ptr(),
    )
    KERNELS.launch("swiglu_double_backward", p)
    return [cpu(x_out), cpu(g_out)]


def check_swiglu(rng, dtype):
    """Shapes, probs, rows alone, saturation."""
    for rows, cols in [
        (5, 64),
        (3, 7),
        (33, 1536),
        (9, 2048),
        (2, 4099),
        (3, 14336),
        (2, 40000),
        (1, 1),
    ]:
        x = random_array(rng, (rows, 2 * cols), dtype, 2.0)
        g = random_array(rng, (rows, cols), dtype)
        probs = random_array(rng, (rows,), "float32")
        (out,) = twice_and_shifted(swiglu, x, None)
        close(out, oracle.swiglu(x), what="swiglu")
        (out,) = twice_and_shifted(swiglu, x, probs)
        close(out, oracle.fused_swiglu_weighted(x, probs), what="weighted")
        (grad,) = twice_and_shifted(swiglu_backward, x, g, None)
        close(grad, oracle.swiglu_grad(x, None, g), oracle.swiglu_grad_scale(x, None, g), what="dx")
        got = twice_and_shifted(swiglu_backward, x, g, probs)
        want = oracle.fused_swiglu_weighted_bwd(x, g, probs)
        weights = oracle.f64(g) * probs[:, None]
        close(got[0], want[0], oracle.swiglu_grad_scale(x, None, weights), what="do1")
        close(got[1], want[1], oracle.probs_grad_scale(x, g, probs), cols, what="probs_grad")
        close(got[2], want[2], what="o2_s")
        same(got[:2], swiglu_backward(x, g, probs, False), "without o2_s")
        last = slice(rows - 1, rows)
        same([v[last] for v in got], swiglu_backward(x[last], g[last], probs[last]), "row alone")
        v = random_array(rng, x.shape, dtype)
        got = twice_and_shifted(swiglu_double, x, g, v)
        want = oracle.swiglu_double_grad(x, None, g, v)
        if dtype in ("float16", "bfloat16") or dtype == "float64":
            scale = [np.abs(w) + np.abs(oracle.f64(v)).max() * 8 for w in want]
            close(got[0], want[0], scale[0], 1, 300, "double x")
            close(got[1], want[1], scale[1], 1, 300, "double g")
        else:
            error = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got, want))
            assert error < 3e-6, f"double backward {error}"
    big = {"float16": 65504, "bfloat16": 3e38, "float32": 3e38, "float64": 1e300}[dtype]
    edge = np.array(
        [[1e4, -1e4, 0.0, -0.0, big, -big, 90, -90, 104, -104, np.nan, np.inf]], np.float64
    )
    edge = np.concatenate([edge, np.ones_like(edge)], 1).astype(random_array(rng, 1, dtype).dtype)
    (out,) = twice_and_shifted(swiglu, edge, None)
    close(out, oracle.swiglu(edge), what="edges")
