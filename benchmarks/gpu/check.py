"""Every kernel against the NumPy float64 oracle, by raw pointer:

    PYTHONPATH=tests python -m benchmarks.gpu.check [WORD ...]

Besides the error bounds: the scalar path (shifted pointers) returns the vector path's bits, a
repeated call its own, and a row alone the bits it had in its batch.
"""

from __future__ import annotations

import sys
import traceback

import ml_dtypes
import numpy as np
import torch

from helpers import norms, numeric, oracle
from helpers.arrays import random_array

from . import library as lib

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


# SwiGLU


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


# RMSNorm


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


def check_rms_norm(rng, dtype):
    """Widths, modes, dtypes of the weight, sums, extremes."""
    for rows, cols in [
        (3, 1),
        (5, 7),
        (4, 64),
        (3, 100),
        (9, 1024),
        (6, 2048),
        (7, 4096),
        (3, 5120),
        (3, 7168),
        (3, 8192),
        (3, 16384),
        (2, 32768),
        (2, 65536),
        (2, 70001),
        (2, 140000),
        (300, 520),
    ]:
        x = random_array(rng, (rows, cols), dtype, 3.0)
        g = random_array(rng, (rows, cols), dtype)
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
        residual, more = random_array(rng, x.shape, dtype), random_array(rng, x.shape, dtype)
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
        got = twice_and_shifted(norm_backward, x, w, g, more)
        want, scale = oracle.rms_norm_grad(x, w, g), oracle.rms_norm_grad_scale(x, w, g)
        scale = scale[0] + np.abs(oracle.f64(more))
        close(got[0], want[0] + oracle.f64(more), scale, cols + 1, what="dx + residual")
        same(got[:1], got[1:2], "residual_grad")
        got = twice_and_shifted(norm_backward, x, w, g, wants=("weight", "norm_bias", "bias"))
        close(got[1], want[1], oracle.rms_norm_grad_scale(x, w, g)[1], rows + 1, what="plain dw")
        close(
            got[2], oracle.f64(g).sum(0), np.abs(oracle.f64(g)).sum(0), rows + 1, what="dnorm_bias"
        )
        close(
            got[3],
            want[0].sum(0),
            oracle.rms_norm_grad_scale(x, w, g)[0].sum(0),
            cols + rows,
            what="dbias",
        )
        # y in the weight's dtype, and 1 / rms
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
        (q,) = twice_and_shifted(norm, x, w, quant=(False, 0.4, 127.0, -127.0))
        want = oracle.quantize_int8(oracle.rms_norm(x, w), 0.4, 0, 127, -127)
        assert np.abs(q.astype(int) - want.astype(int)).max() <= 1, "int8"
        assert (q != want).mean() < 1e-2, "int8 often"
        if dtype in numeric.HALVES:
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


# RoPE


def rope(tensors, cos, sin, layout, pairing, ids=None, adjoint=False):
    """The rotated tensors; layout is of "bshd", "sbhd" or "bhsd"."""
    given = [gpu(t) for t in tensors]
    outs = [empty(t.shape, t.dtype) for t in given]
    c, s, i = gpu(cos), gpu(sin), gpu(ids)
    shape = given[0].shape
    axis = {name: layout.index(name) for name in "bsh"}
    p = lib.Rope(
        dt(given[0]), dt(c), pairing, adjoint, shape[axis["b"]], shape[axis["s"]], shape[3]
    )
    p.rotary_dim = c.shape[-1]
    p.rotary_begin = shape[3] - c.shape[-1] if pairing == lib.INTERLEAVED_TO_HALVES else 0
    p.cos, p.sin, p.position_ids = c.data_ptr(), s.data_ptr(), lib.data(i)
    p.table_rows, p.table_batch_stride = (
        c.shape[-2],
        c.shape[-1] * c.shape[-2] if c.dim() == 3 else 0,
    )
    p.position_ids_int32 = i is not None and i.dtype == torch.int32
    p.tensor_count = len(given)
    for k, (t, o) in enumerate(zip(given, outs)):
        stride = t.stride()
        p.tensors[k] = lib.RopeTensor(
            t.data_ptr(),
            o.data_ptr(),
            t.shape[axis["h"]],
            stride[axis["b"]],
            stride[axis["s"]],
            stride[axis["h"]],
        )
    KERNELS.launch("rope", p)
    return [cpu(o) for o in outs]


def check_rope(rng, dtype):
    """Pairings, layouts, partial rotation, position ids, tables of another dtype."""
    batch, seq = 2, 9
    for heads, dim, rotary in [
        ((32, 8), 128, 128),
        ((3, 1, 2), 64, 64),
        ((5,), 96, 64),
        ((2, 2), 10, 6),
        ((7, 2), 80, 80),
        ((2,), 6000, 6000),
        ((1,), 1026, 1026),
    ]:
        for layout in ("bshd", "sbhd", "bhsd"):

            def place(array, layout=layout):
                return np.ascontiguousarray(np.transpose(array, ["bshd".index(a) for a in layout]))

            tensors = [random_array(rng, (batch, seq, h, dim), dtype) for h in heads]
            for table_dtype in dict.fromkeys((dtype, "float32")):
                for pairing in (lib.INTERLEAVED, lib.HALVES, lib.INTERLEAVED_TO_HALVES):
                    for use_ids in (False, True):
                        cos, sin = (random_array(rng, (20, rotary), table_dtype) for _ in "cs")
                        ids = rng.integers(0, 20, (batch, seq)) if use_ids else None
                        if use_ids and pairing == lib.HALVES:
                            ids = ids.astype(np.int32)
                        c, s = oracle.fused_rope_tables(cos, sin, ids, length=seq)
                        for adjoint in (False, True):
                            args = (
                                [place(t) for t in tensors],
                                cos,
                                sin,
                                layout,
                                pairing,
                                ids,
                                adjoint,
                            )
                            got = twice_and_shifted(rope, *args)
                            for t, y in zip(tensors, got):
                                if pairing == lib.INTERLEAVED_TO_HALVES:
                                    f = oracle.partial_rope_grad if adjoint else oracle.partial_rope
                                    fs = (
                                        oracle.partial_rope_grad_scale
                                        if adjoint
                                        else oracle.partial_rope_scale
                                    )
                                    want, scale = f(t, c, s), fs(t, c, s)
                                else:
                                    style = (
                                        oracle.PAIRS
                                        if pairing == lib.INTERLEAVED
                                        else oracle.HALVES_STYLE
                                    )
                                    f = oracle.rope_grad if adjoint else oracle.rope
                                    fs = oracle.rope_grad_scale if adjoint else oracle.rope_scale
                                    want, scale = f(t, c, s, style), fs(t, c, s, style)
                                close(
                                    y,
                                    place(want),
                                    place(scale),
                                    what=f"rope {dim} {layout} {pairing}",
                                )
    q = random_array(rng, (1, 4, 2, 128), dtype)
    cos, sin = (random_array(rng, (20, 128), dtype) for _ in "cs")
    ids = np.array([[3, -1, 20, 19]])
    (y,) = rope([q], cos, sin, "bshd", lib.HALVES, ids)
    assert (np.isnan(oracle.f64(y)).all((0, 2, 3)) == [False, True, True, False]).all(), "bad ids"


def check_rope_table(rng, dtype):
    """Large positions."""
    if dtype != "float32":
        return
    for pairing, style in ((lib.INTERLEAVED, oracle.PAIRS), (lib.HALVES, oracle.HALVES_STYLE)):
        ids = rng.integers(0, 1_000_000, (50,))
        for positions in (None, ids):
            i = gpu(positions)
            cos, sin = empty((50, 128), torch.float32), empty((50, 128), torch.float32)
            p = lib.RopeTable(
                pairing, 10000.0, 50, 128, lib.data(i), False, cos.data_ptr(), sin.data_ptr()
            )
            KERNELS.launch("rope_table", p)
            want = oracle.rope_tables(
                np.arange(50) if positions is None else ids, 128, 10000.0, style
            )
            for got, w in zip((cos, sin), want):
                error = np.abs(oracle.f64(cpu(got)) - w).max()
                assert error < 1.3e-7, f"table {error}"


def check_huge(rng, dtype):
    """More than 2**31 elements: the last rows are those of a launch on their own."""
    if dtype != "bfloat16":
        return
    bf16 = torch.bfloat16
    cols = 4096
    rows = 2**31 // cols + 5
    x = torch.randn(rows, cols, device="cuda", dtype=bf16)
    w = torch.randn(cols, device="cuda", dtype=bf16)

    def launches(x):
        rows = x.shape[0]
        y, dx, dw = torch.empty_like(x), torch.empty_like(x), torch.empty_like(w)
        p = lib.RmsNorm(rows, cols, 1e-6, 0.0, lib.LLAMA)
        p.x_dtype = p.y_dtype = p.weight_dtype = 3
        p.x, p.weight, p.y = x.data_ptr(), w.data_ptr(), y.data_ptr()
        KERNELS.launch("rms_norm", p)
        yield y
        b = lib.RmsNormBackward(rows, cols, 1e-6, 0.0, lib.LLAMA, 3, 3, 3, 3)
        b.x, b.weight, b.y_grad = x.data_ptr(), w.data_ptr(), x.data_ptr()
        b.x_grad, b.weight_grad = dx.data_ptr(), dw.data_ptr()
        KERNELS.launch_with("rms_norm_backward", b, KERNELS.workspace("rms_norm_backward", b))
        yield dx
        half = cols // 2 * 2
        out, probs = (
            torch.empty(rows, cols // 2, device="cuda", dtype=bf16),
            torch.ones(rows, device="cuda"),
        )
        s = lib.Swiglu(
            3,
            rows,
            cols // 2,
            cols,
            x.data_ptr(),
            x.data_ptr() + half,
            probs.data_ptr(),
            out.data_ptr(),
        )
        KERNELS.launch("swiglu", s)
        yield out
        sb = lib.SwigluBackward(
            3, rows, cols // 2, cols, x.data_ptr(), x.data_ptr() + half, probs.data_ptr()
        )
        dprobs, again = torch.empty_like(probs), torch.empty_like(out)
        sb.out_grad, sb.gate_grad, sb.up_grad = out.data_ptr(), dx.data_ptr(), dx.data_ptr() + half
        sb.probs_grad, sb.out = dprobs.data_ptr(), again.data_ptr()
        KERNELS.launch("swiglu_backward", sb)
        yield dx
        yield again
        r = lib.Rope(3, 3, lib.HALVES, False, rows, 1, 128, 0, 128)
        r.cos, r.sin, r.table_rows, r.tensor_count = w.data_ptr(), w.data_ptr() + 256, 1, 1
        r.tensors[0] = lib.RopeTensor(x.data_ptr(), y.data_ptr(), cols // 128, cols, cols, 128)
        KERNELS.launch("rope", r)
        yield y

    for index, (whole, part) in enumerate(zip(launches(x), launches(x[-3:].clone()))):
        torch.cuda.synchronize()
        same = whole[-3:].contiguous().view(torch.int16) == part.view(torch.int16)
        assert bool(same.all()), f"huge {index}"


def main() -> int:
    """Runs the checks whose name holds one of the words; returns how many failed."""
    failures = 0
    for name, check in list(globals().items()):
        if not name.startswith("check_") or (
            sys.argv[1:] and not any(w in name for w in sys.argv[1:])
        ):
            continue
        for dtype in NAMES:
            try:
                check(np.random.default_rng(5), dtype)
                torch.cuda.synchronize()
                print(f"ok    {name} {dtype}", flush=True)
            except Exception:
                failures += 1
                text = traceback.format_exc().splitlines()
                print(f"FAIL  {name} {dtype}: {text[-1]}   {text[-4].strip()}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
