"""The operators as benchmarks call them: buffers, bytes, launches by raw pointer."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Callable

import torch

from . import library as lib

ELEMENT = 2  # bytes of bfloat16
BFLOAT16 = lib.DTYPES[torch.bfloat16]


def random(*shape, dtype=torch.bfloat16):
    """Random normal values."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


@dataclass
class Workload:
    """One operator at one shape.

    Attributes:
        size: bytes that a call has to move at least.
        make: index -> buffers.
        run: (buffers, tuning) -> None.
        results: buffers -> the tensors that a call writes.
        ratio: arrays in and out of the copy it is compared with.
        flops: floating-point operations of a call, counting an exponential as one.
    """

    name: str
    shape: str
    size: int
    make: Callable
    run: Callable
    results: Callable = lambda buffers: []
    ratio: tuple = (1, 1)
    width: int = 0
    flops: int = 0


def _halves(tensor, cols: int) -> tuple[int, int]:
    """Addresses of the gate half and the up half of packed rows."""
    return tensor.data_ptr(), tensor.data_ptr() + cols * ELEMENT


def swiglu_forward(kernels, rows: int, cols: int, weighted: bool = True) -> Workload:
    """SwiGLU of a packed tensor, weighted or plain."""

    def make(_):
        return random(rows, 2 * cols), torch.rand(rows, device="cuda"), random(rows, cols)

    def run(buffers, tuning=None):
        x, probs, out = buffers
        p = lib.Swiglu(BFLOAT16, rows, cols, 2 * cols, *_halves(x, cols))
        p.probs, p.out = probs.data_ptr() if weighted else None, out.data_ptr()
        kernels.launch("swiglu", p, tuning)

    size = 3 * rows * cols * ELEMENT + (4 * rows if weighted else 0)
    name = "swiglu_fwd" if weighted else "plain_swiglu_fwd"
    rest = {"ratio": (2, 1), "width": cols, "flops": (6 if weighted else 5) * rows * cols}
    return Workload(name, f"{rows}x{cols}", size, make, run, lambda b: b[2:], **rest)


def swiglu_backward(kernels, rows: int, cols: int, weighted: bool = True) -> Workload:
    """The backward pass; the weighted one gives the gradient of the probabilities and o2_s, too."""

    def make(_):
        x, g, probs = random(rows, 2 * cols), random(rows, cols), torch.rand(rows, device="cuda")
        return x, g, probs, torch.empty_like(x), torch.empty_like(probs), torch.empty_like(g)

    def run(buffers, tuning=None):
        x, g, probs, dx, dprobs, out = buffers
        p = lib.SwigluBackward(BFLOAT16, rows, cols, 2 * cols, *_halves(x, cols))
        p.out_grad = g.data_ptr()
        p.gate_grad, p.up_grad = _halves(dx, cols)
        if weighted:
            p.probs, p.probs_grad, p.out = probs.data_ptr(), dprobs.data_ptr(), out.data_ptr()
        kernels.launch("swiglu_backward", p, tuning)

    arrays = 6 if weighted else 5
    size = arrays * rows * cols * ELEMENT + (8 * rows if weighted else 0)
    name = "swiglu_bwd" if weighted else "plain_swiglu_bwd"
    end, per_element = (6, 16) if weighted else (4, 12)
    rest = {"ratio": (3, arrays - 3), "width": cols, "flops": per_element * rows * cols}
    return Workload(name, f"{rows}x{cols}", size, make, run, lambda b: b[3:end], **rest)


def rms_norm_forward(kernels, rows: int, cols: int, residual: bool = False) -> Workload:
    """RMSNorm, casting mode llama, weight of x's dtype."""

    def make(_):
        x, weight = random(rows, cols), random(cols)
        more = (random(rows, cols), torch.empty_like(x)) if residual else (None, None)
        return x, weight, torch.empty_like(x), *more

    def run(buffers, tuning=None):
        x, weight, y, more, total = buffers
        p = lib.RmsNorm(rows, cols, 1e-6, 0.0, lib.LLAMA)
        p.x_dtype = p.y_dtype = p.weight_dtype = BFLOAT16
        p.x, p.weight, p.y = x.data_ptr(), weight.data_ptr(), y.data_ptr()
        p.residual, p.residual_out = lib.data(more), lib.data(total)
        kernels.launch("rms_norm", p, tuning)

    size = (4 if residual else 2) * rows * cols * ELEMENT + cols * ELEMENT
    name = "add_rms_fwd" if residual else "rms_fwd"
    ratio, per_element = ((2, 2), 5) if residual else ((1, 1), 4)
    rest = {"ratio": ratio, "width": cols, "flops": per_element * rows * cols}
    written = [2, 4] if residual else [2]
    return Workload(
        name, f"{rows}x{cols}", size, make, run, lambda b: [b[i] for i in written], **rest
    )


def rms_norm_backward(kernels, rows: int, cols: int, residual: bool = False) -> Workload:
    """RMSNorm backward with dweight; with a residual's gradient fused."""

    def make(_):
        x, g, weight = random(rows, cols), random(rows, cols), random(cols)
        more = random(rows, cols) if residual else None
        p = lib.RmsNormBackward(rows, cols, 1e-6, 0.0, lib.LLAMA, *[BFLOAT16] * 4)
        p.weight_grad = weight.data_ptr()
        p.y_grad = g.data_ptr()
        workspace = kernels.workspace("rms_norm_backward", p)
        return x, g, weight, torch.empty_like(x), torch.empty_like(weight), workspace, more

    def run(buffers, tuning=None):
        x, g, weight, dx, dw, workspace, more = buffers
        p = lib.RmsNormBackward(rows, cols, 1e-6, 0.0, lib.LLAMA, *[BFLOAT16] * 4)
        p.x, p.weight, p.y_grad = x.data_ptr(), weight.data_ptr(), g.data_ptr()
        p.x_grad, p.weight_grad = dx.data_ptr(), dw.data_ptr()
        p.residual_out_grad = lib.data(more)
        kernels.launch_with("rms_norm_backward", p, workspace, tuning)

    size = (4 if residual else 3) * rows * cols * ELEMENT + 2 * cols * ELEMENT
    name = "add_rms_bwd" if residual else "rms_bwd"
    ratio, per_element = ((3, 1), 12) if residual else ((2, 1), 11)
    rest = {"ratio": ratio, "width": cols, "flops": per_element * rows * cols}
    return Workload(name, f"{rows}x{cols}", size, make, run, lambda b: b[3:5], **rest)


def rope(kernels, batch: int, seq: int, heads, dim: int, adjoint: bool = False) -> Workload:
    """Q and k in the layout [B, S, heads, D], the two halves, tables of q's dtype."""

    def make(_):
        tensors = [random(batch, seq, h, dim) for h in heads]
        angle = (torch.rand(seq, dim // 2, device="cuda") * 6).repeat(1, 2)
        tables = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
        return tensors, [torch.empty_like(t) for t in tensors], tables

    def run(buffers, tuning=None):
        tensors, outs, (cos, sin) = buffers
        p = lib.Rope(BFLOAT16, BFLOAT16, lib.HALVES, adjoint, batch, seq, dim, 0, dim)
        p.cos, p.sin, p.table_rows, p.tensor_count = cos.data_ptr(), sin.data_ptr(), seq, len(heads)
        for k, (t, o) in enumerate(zip(tensors, outs)):
            addresses, strides = (t.data_ptr(), o.data_ptr()), t.stride()[:3]
            p.tensors[k] = lib.RopeTensor(*addresses, heads[k], *strides)
        kernels.launch("rope", p, tuning)

    elements = batch * seq * sum(heads) * dim
    name = "rope_bwd" if adjoint else "rope_fwd"
    shape = f"{batch}x{seq}x{'/'.join(map(str, heads))}x{dim}"
    rest = {"width": dim, "flops": 3 * elements}
    return Workload(name, shape, 2 * elements * ELEMENT, make, run, lambda b: b[1], **rest)


def copy(kernels, arrays_in: int, arrays_out: int, size: int) -> Workload:
    """Our copy kernel; size: bytes read and written together."""
    vectors = size // 16 // (arrays_in + arrays_out)

    def make(_):
        source = random(arrays_in * vectors * 8)
        return source, torch.empty(arrays_out * vectors * 8, device="cuda", dtype=torch.bfloat16)

    def run(buffers, tuning=None):
        source, target = (c_void_p(b.data_ptr()) for b in buffers)
        kernels.call(
            "pf_copy", arrays_in, arrays_out, source, target, c_int64(vectors), kernels.stream()
        )

    moved = vectors * 16 * (arrays_in + arrays_out)
    return Workload(f"copy_{arrays_in}_{arrays_out}", f"{moved >> 20}MiB", moved, make, run)


def memcpy(size: int) -> Workload:
    """CudaMemcpy on the device, `size` bytes read and written together."""

    def make(_):
        source = random(size // 4)
        return source, torch.empty_like(source)

    def run(buffers, tuning=None):
        buffers[1].copy_(buffers[0])

    return Workload("memcpy", f"{size >> 20}MiB", size // 4 * 4, make, run)


def performance_table(kernels):
    """The shapes that figures are published for, then small ones."""
    for rows, cols in ((32768, 1536), (32768, 2048), (32768, 4096), (16384, 14336)):
        for weighted in (True, False):
            yield swiglu_forward(kernels, rows, cols, weighted)
            yield swiglu_backward(kernels, rows, cols, weighted)
    for cols in (1024, 2048, 4096, 5120, 7168, 8192, 16384, 32768):
        yield rms_norm_forward(kernels, 16384, cols)
        yield rms_norm_backward(kernels, 16384, cols)
    yield rms_norm_forward(kernels, 4096, 65536)
    yield rms_norm_backward(kernels, 4096, 65536)
    for cols in (4096, 5120, 7168, 8192):
        yield rms_norm_forward(kernels, 16384, cols, True)
        yield rms_norm_backward(kernels, 16384, cols, True)
    for shape in ((4, 4096, (32, 8), 128), (4, 4096, (64, 8), 128), (2, 4096, (28, 4), 64)):
        yield rope(kernels, *shape)
        yield rope(kernels, *shape, adjoint=True)
    yield swiglu_forward(kernels, 64, 4096)
    yield swiglu_backward(kernels, 64, 4096)
    yield rms_norm_forward(kernels, 64, 4096)
    yield rms_norm_backward(kernels, 64, 4096)
