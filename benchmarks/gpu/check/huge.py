"""More than 2**31 elements."""

from __future__ import annotations

import torch

from .. import library as lib
from .arrays import KERNELS


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
