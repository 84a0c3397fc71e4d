"""The kernels without a framework: ctypes over a plain shared library, raw pointers from PyTorch.

`build()` compiles the library with nvcc; a ready one can be named by PADDLE_FUSED_KERNELS.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_bool,
    c_double,
    c_float,
    c_int,
    c_int8,
    c_int64,
    c_size_t,
    c_void_p,
)
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
LLAMA, GEMMA, NONE = 0, 1, 2
INTERLEAVED, HALVES, INTERLEAVED_TO_HALVES = 0, 1, 2


def _struct(name: str, *fields) -> type:
    return type(name, (Structure,), {"_fields_": list(fields)})


def _pointers(text: str) -> list:
    return [(name, c_void_p) for name in text.split()]


def _sizes(text: str) -> list:
    return [(name, c_int64) for name in text.split()]


Swiglu = _struct(
    "Swiglu", ("dtype", c_int8), *_sizes("rows cols in_stride"), *_pointers("gate up probs out")
)
SwigluBackward = _struct(
    "SwigluBackward",
    ("dtype", c_int8),
    *_sizes("rows cols in_stride"),
    *_pointers("gate up probs out_grad gate_grad up_grad probs_grad out"),
)
SwigluDoubleBackward = _struct(
    "SwigluDoubleBackward",
    ("dtype", c_int8),
    *_sizes("rows cols in_stride"),
    *_pointers("gate up out_grad gate_grad_grad up_grad_grad gate_out up_out out_grad_grad"),
)
SwigluTuning = _struct("SwigluTuning", ("threads", c_int), ("rows", c_int), ("vectors", c_int))

Quant = _struct(
    "Quant",
    ("enabled", c_bool),
    ("round_half_away", c_bool),
    ("scale", c_float),
    ("max_bound", c_float),
    ("min_bound", c_float),
)
_NORM = [*_sizes("rows cols"), ("epsilon", c_double), ("offset", c_double), ("mode", c_int)]
RmsNorm = _struct(
    "RmsNorm",
    *_NORM,
    ("quant", Quant),
    *[(name, c_int8) for name in ("x_dtype", "y_dtype", "weight_dtype", "norm_bias_dtype")],
    *_pointers("x residual bias weight norm_bias y residual_out inv_rms"),
)
RmsNormBackward = _struct(
    "RmsNormBackward",
    *_NORM,
    *[(name, c_int8) for name in ("x_dtype", "y_dtype", "weight_dtype", "norm_bias_dtype")],
    *_pointers("x weight inv_rms y_grad residual_out_grad x_grad residual_grad weight_grad"),
    *_pointers("norm_bias_grad bias_grad"),
)
RmsNormDoubleBackward = _struct(
    "RmsNormDoubleBackward",
    *_NORM,
    ("dtype", c_int8),
    ("weight_dtype", c_int8),
    *_pointers("x weight y_grad x_grad_grad residual_grad_grad weight_grad_grad"),
    *_pointers("x_out weight_out y_grad_grad sum_grad_grad"),
)
RmsNormTuning = _struct(
    "RmsNormTuning",
    *[(name, c_int) for name in ("threads", "rows", "vectors", "stages", "blocks", "cluster")],
)
RopeTensor = _struct(
    "RopeTensor", *_pointers("in_ out"), *_sizes("heads batch_stride seq_stride head_stride")
)
Rope = _struct(
    "Rope",
    ("dtype", c_int8),
    ("table_dtype", c_int8),
    ("pairing", c_int),
    ("adjoint", c_bool),
    *_sizes("batch seq head_dim rotary_begin rotary_dim"),
    *_pointers("cos sin"),
    *_sizes("table_rows table_batch_stride"),
    ("position_ids", c_void_p),
    ("position_ids_int32", c_bool),
    ("tensor_count", c_int),
    ("tensors", RopeTensor * 3),
)
RopeTable = _struct(
    "RopeTable",
    ("pairing", c_int),
    ("base", c_double),
    *_sizes("rows dim"),
    ("position_ids", c_void_p),
    ("position_ids_int32", c_bool),
    *_pointers("cos sin"),
)
RopeTuning = _struct("RopeTuning", ("threads", c_int), ("heads", c_int))

COMPILE = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-fPIC", "-shared"]


def build(arch: str = "90", output: Path | None = None) -> Path:
    """Compiles launchers and kernels for one architecture; returns the library."""
    output = output or ROOT / "build" / "cuda" / f"kernels_sm{arch}.so"
    output.parent.mkdir(parents=True, exist_ok=True)
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    sources = [*sorted((ROOT / "custom_ops").rglob("*.cu")), Path(__file__).parent / "kernels.cu"]
    gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    includes = [f"-I{ROOT}", f"-I{home / 'include' / 'cccl'}"]
    command = ["nvcc", *COMPILE, gencode, *includes, *map(str, sources), "-o", str(output)]
    subprocess.run([*command, "--threads", "0"], check=True)
    return output


def data(tensor):
    """Its address; None stays None."""
    return None if tensor is None else tensor.data_ptr()


class Kernels:
    """Launchers on PyTorch's current stream; a failed launch raises RuntimeError."""

    def __init__(self, path=None):
        path = path or os.environ.get("PADDLE_FUSED_KERNELS") or build()
        self.library = ctypes.CDLL(str(path))
        self.library.pf_error.restype = ctypes.c_char_p
        for name in ("pf_rms_norm_backward_workspace", "pf_rms_norm_double_backward_workspace"):
            getattr(self.library, name).restype = c_size_t

    def call(self, name: str, *arguments) -> None:
        """Calls an entry point that returns non-zero on failure."""
        if getattr(self.library, name)(*arguments) != 0:
            raise RuntimeError(self.library.pf_error().decode())

    @staticmethod
    def stream() -> c_void_p:
        """PyTorch's current stream."""
        return c_void_p(torch.cuda.current_stream().cuda_stream)

    def launch(self, name: str, params, tuning=None) -> None:
        """A launcher without a workspace."""
        extra = () if name in ("swiglu_double_backward", "rope_table") else (_optional(tuning),)
        self.call(f"pf_{name}", byref(params), self.stream(), *extra)

    def workspace(self, name: str, params) -> torch.Tensor:
        """Memory that a launcher with column sums wants."""
        size = getattr(self.library, f"pf_{name}_workspace")(byref(params))
        return torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")

    def launch_with(self, name: str, params, workspace, tuning=None) -> None:
        """A launcher with a workspace."""
        extra = () if name == "rms_norm_double_backward" else (_optional(tuning),)
        memory = c_void_p(workspace.data_ptr())
        self.call(f"pf_{name}", byref(params), memory, self.stream(), *extra)


def _optional(tuning):
    return None if tuning is None else byref(tuning)


__all__ = ["POINTER", "Kernels", "build", "data"]
