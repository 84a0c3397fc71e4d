"""The operators as benchmarks call them: buffers, bytes, launches by raw pointer, and peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable

import torch

from . import library as lib

ELEMENT = 2  # bytes of bfloat16


def random(*shape, dtype=torch.bfloat16):
    """Random normal values."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


@dataclass
class Workload:
    """One operator at one shape."""

    name: str
    shape: str
    size: int  # minimal bytes of a call
    make: Callable  # index -> buffers
    run: Callable  # (buffers, tuning) -> None
    ratio: tuple = (1, 1)  # arrays in and out of the copy it is compared with
    peers: dict = field(default_factory=dict)  # name -> function of buffers
    width: int = 0


def swiglu_forward(kernels, rows: int, cols: int, weighted: bool = True) -> Workload:
    """Weighted SwiGLU."""

    def make(_):
        return random(rows, 2 * cols), torch.rand(rows, device="cuda"), random(rows, cols)

    def run(buffers, tuning=None):
        x, probs, out = buffers
        p = lib.Swiglu(3, rows, cols, 2 * cols, x.data_ptr(), x.data_ptr() + cols * ELEMENT)
        p.probs, p.out = probs.data_ptr() if weighted else None, out.data_ptr()
        kernels.launch("swiglu", p, tuning)

    size = 3 * rows * cols * ELEMENT + 4 * rows
    return Workload("swiglu_fwd", f"{rows}x{cols}", size, make, run, (2, 1), width=cols)


def swiglu_backward(kernels, rows: int, cols: int) -> Workload:
    """Weighted SwiGLU backward with o2_s."""

    def make(_):
        x, g, probs = random(rows, 2 * cols), random(rows, cols), torch.rand(rows, device="cuda")
        return x, g, probs, torch.empty_like(x), torch.empty_like(probs), torch.empty_like(g)

    def run(buffers, tuning=None):
        x, g, probs, dx, dprobs, out = buffers
        half = cols * ELEMENT
        p = lib.SwigluBackward(3, rows, cols, 2 * cols, x.data_ptr(), x.data_ptr() + half)
        p.probs, p.out_grad = probs.data_ptr(), g.data_ptr()
        p.gate_grad, p.up_grad = dx.data_ptr(), dx.data_ptr() + half
        p.probs_grad, p.out = dprobs.data_ptr(), out.data_ptr()
        kernels.launch("swiglu_backward", p, tuning)

    def four_wide(buffers):
        x, g, probs, dx, dprobs, out = (b.data_ptr() for b in buffers)
        from ctypes import c_int64, c_void_p

        pointers = [c_void_p(v) for v in (x, g, probs, dx, dprobs, out)]
        kernels.call(
            "pf_four_wide_swiglu_backward", *pointers, c_int64(rows), cols, kernels.stream()
        )

    size = 6 * rows * cols * ELEMENT + 8 * rows
    peers = {"paddle-kernel": four_wide}
    return Workload("swiglu_bwd", f"{rows}x{cols}", size, make, run, (3, 3), peers, width=cols)


def rms_norm_forward(kernels, rows: int, cols: int, residual: bool = False) -> Workload:
    """RMSNorm, casting mode llama, weight of x's dtype."""

    def make(_):
        x, weight = random(rows, cols), random(cols)
        more = (random(rows, cols), torch.empty_like(x)) if residual else (None, None)
        return x, weight, torch.empty_like(x), *more

    def run(buffers, tuning=None):
        x, weight, y, more, total = buffers
        p = lib.RmsNorm(rows, cols, 1e-6, 0.0, lib.LLAMA)
        p.x_dtype = p.y_dtype = p.weight_dtype = 3
        p.x, p.weight, p.y = x.data_ptr(), weight.data_ptr(), y.data_ptr()
        p.residual, p.residual_out = lib.data(more), lib.data(total)
        kernels.launch("rms_norm", p, tuning)

    size = (4 if residual else 2) * rows * cols * ELEMENT + cols * ELEMENT
    name = "add_rms_fwd" if residual else "rms_fwd"
    ratio = (2, 2) if residual else (1, 1)
    return Workload(name, f"{rows}x{cols}", size, make, run, ratio, width=cols)


def rms_norm_backward(kernels, rows: int, cols: int, residual: bool = False) -> Workload:
    """RMSNorm backward with dweight; with a residual's gradient fused."""

    def make(_):
        x, g, weight = random(rows, cols), random(rows, cols), random(cols)
        more = random(rows, cols) if residual else None
        p = lib.RmsNormBackward(rows, cols, 1e-6, 0.0, lib.LLAMA, 3, 3, 3, 3)
        p.weight_grad = weight.data_ptr()
        p.y_grad = g.data_ptr()
        workspace = kernels.workspace("rms_norm_backward", p)
        return x, g, weight, torch.empty_like(x), torch.empty_like(weight), workspace, more

    def run(buffers, tuning=None):
        x, g, weight, dx, dw, workspace, more = buffers
        p = lib.RmsNormBackward(rows, cols, 1e-6, 0.0, lib.LLAMA, 3, 3, 3, 3)
        p.x, p.weight, p.y_grad = x.data_ptr(), weight.data_ptr(), g.data_ptr()
        p.x_grad, p.weight_grad = dx.data_ptr(), dw.data_ptr()
        p.residual_out_grad = lib.data(more)
        kernels.launch_with("rms_norm_backward", p, workspace, tuning)

    size = (4 if residual else 3) * rows * cols * ELEMENT + 2 * cols * ELEMENT
    name = "add_rms_bwd" if residual else "rms_bwd"
    return Workload(name, f"{rows}x{cols}", size, make, run, (2, 1), width=cols)


def rope(kernels, batch: int, seq: int, heads, dim: int, adjoint: bool = False) -> Workload:
    """Q and k in the layout [B, S, heads, D], the two halves, tables of q's dtype."""

    def make(_):
        tensors = [random(batch, seq, h, dim) for h in heads]
        angle = torch.rand(seq, dim, device="cuda") * 6
        tables = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
        return tensors, [torch.empty_like(t) for t in tensors], tables

    def run(buffers, tuning=None):
        tensors, outs, (cos, sin) = buffers
        p = lib.Rope(3, 3, lib.HALVES, adjoint, batch, seq, dim, 0, dim)
        p.cos, p.sin, p.table_rows, p.tensor_count = cos.data_ptr(), sin.data_ptr(), seq, len(heads)
        for k, (t, o) in enumerate(zip(tensors, outs)):
            stride = t.stride()
            p.tensors[k] = lib.RopeTensor(
                t.data_ptr(), o.data_ptr(), heads[k], stride[0], stride[1], stride[2]
            )
        kernels.launch("rope", p, tuning)

    size = 2 * batch * seq * sum(heads) * dim * ELEMENT
    shape = f"{batch}x{seq}x{'/'.join(map(str, heads))}x{dim}"
    return Workload("rope_bwd" if adjoint else "rope_fwd", shape, size, make, run, width=dim)


def copy(kernels, arrays_in: int, arrays_out: int, size: int) -> Workload:
    """Our copy kernel, moving about `size` bytes."""
    vectors = size // 16 // (arrays_in + arrays_out)

    def make(_):
        source = random(arrays_in * vectors * 8)
        return source, torch.empty(arrays_out * vectors * 8, device="cuda", dtype=torch.bfloat16)

    def run(buffers, tuning=None):
        from ctypes import c_int64, c_void_p

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
