"""Our CUDA kernels beside copies and public kernels, on one GPU, in one process:

    python -m benchmarks.gpu_kernels [--output FOLDER] [--no-peers] [WORD ...]

By raw pointer in a PyTorch process. Protocol: benchmarks/gpu/measure.py. Prints a table and writes
gpu_kernels.csv. GB/s count the bytes that the operator has to move at least; shares are of the
larger of cudaMemcpy and our own 1:1 copy kernel in this run.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import subprocess
from pathlib import Path

import torch

from .gpu import library, workloads
from .gpu.measure import buffer_sets, measure


def peers_of(w: workloads.Workload) -> dict:
    """Public implementations of a workload as functions of its buffers."""
    import torch.nn.functional as F

    found = dict(w.peers)
    if w.name == "swiglu_fwd":

        def forward(x, probs):
            gate, up = x.float().chunk(2, -1)
            return (F.silu(gate) * up * probs[:, None]).to(x.dtype)

        compiled = torch.compile(forward, dynamic=False)
        found["torch.compile"] = lambda b: compiled(b[0], b[1])
    elif w.name == "rms_fwd":
        cols = w.width
        found["F.rms_norm"] = lambda b: F.rms_norm(b[0], (cols,), b[1], 1e-6)
        compiled = torch.compile(
            lambda x, weight: F.rms_norm(x, (cols,), weight, 1e-6), dynamic=False
        )
        found["torch.compile"] = lambda b: compiled(b[0], b[1])
    elif w.name == "add_rms_fwd":
        cols = w.width

        def add(x, residual, weight):
            total = x + residual
            return F.rms_norm(total, (cols,), weight, 1e-6), total

        compiled_add = torch.compile(add, dynamic=False)
        found["torch.compile"] = lambda b: compiled_add(b[0], b[3], b[1])
    elif w.name == "rms_bwd":

        def backward(x, g, weight):
            xf, gf = x.float(), g.float()
            r = torch.rsqrt(xf.square().mean(-1, keepdim=True) + 1e-6)
            z, m = xf * r, gf * weight.float()
            dx = r * (m - z * (m * z).mean(-1, keepdim=True))
            return dx.to(x.dtype), (gf * z).sum(0).to(weight.dtype)

        compiled = torch.compile(backward, dynamic=False)
        found["torch.compile"] = lambda b: compiled(b[0], b[1], b[2])
    elif w.name.startswith("rope"):

        def rotate(q, k, cos, sin):
            def one(t):
                a, b = t.chunk(2, -1)
                return t * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]

            return one(q), one(k)

        compiled = torch.compile(rotate, dynamic=False)
        found["torch.compile"] = lambda b: compiled(*b[0], *b[2])
    return found


def cases(kernels):
    """The workloads of the performance table, then small ones."""
    for rows, cols in ((32768, 1536), (32768, 2048), (32768, 4096), (16384, 14336)):
        yield workloads.swiglu_forward(kernels, rows, cols)
        yield workloads.swiglu_backward(kernels, rows, cols)
    for cols in (1024, 2048, 4096, 5120, 7168, 8192, 16384, 32768):
        yield workloads.rms_norm_forward(kernels, 16384, cols)
        yield workloads.rms_norm_backward(kernels, 16384, cols)
    yield workloads.rms_norm_forward(kernels, 4096, 65536)
    yield workloads.rms_norm_backward(kernels, 4096, 65536)
    for cols in (4096, 8192):
        yield workloads.rms_norm_forward(kernels, 16384, cols, True)
        yield workloads.rms_norm_backward(kernels, 16384, cols, True)
    for shape in ((4, 4096, (32, 8), 128), (4, 4096, (64, 8), 128), (2, 4096, (28, 4), 64)):
        yield workloads.rope(kernels, *shape)
        yield workloads.rope(kernels, *shape, adjoint=True)
    yield workloads.rms_norm_forward(kernels, 64, 4096)
    yield workloads.rms_norm_backward(kernels, 64, 4096)


def conditions() -> str:
    """The card and its state."""
    query = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    smi = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return f"{smi}; torch {torch.__version__}, CUDA {torch.version.cuda}"


def eager_memcpy(size: int) -> float:
    """GB/s of cudaMemcpyAsync outside a graph, where it runs as a kernel."""
    source = workloads.random(size // 4)
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(12):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return size / sorted(times)[len(times) // 2] / 1e6


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only workloads whose name or shape holds one")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "build")))
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    kernels = library.Kernels()
    print(conditions())
    copy = workloads.copy(kernels, 1, 1, 2 << 30)
    own = measure(lambda b: copy.run(b), buffer_sets(copy.make, copy.size)).rate(copy.size)
    base = max(own, eager_memcpy(2 << 30))
    print(f"copy of 2 GiB: our kernel {own:.0f} GB/s; base of all shares {base:.0f} GB/s")
    rows = []
    for w in cases(kernels):
        if options.words and not any(word in f"{w.name} {w.shape}" for word in options.words):
            continue
        like = workloads.copy(kernels, *w.ratio, w.size)
        same = measure(lambda b, like=like: like.run(b), buffer_sets(like.make, like.size))
        sets = buffer_sets(w.make, w.size)
        ours = measure(lambda b, w=w: w.run(b), sets)
        row = {
            "operator": w.name,
            "shape": w.shape,
            "us": round(ours.median, 2),
            "us_low": round(ours.low, 2),
            "us_high": round(ours.high, 2),
            "GB/s": round(ours.rate(w.size)),
            "share": round(100 * ours.rate(w.size) / base, 1),
            "same_size_copy": round(same.rate(like.size)),
            "copy_ratio": f"{w.ratio[0]}:{w.ratio[1]}",
        }
        text = ""
        for name, call in ({} if options.no_peers else peers_of(w)).items():
            try:
                call(sets[0])
                peer = measure(call, sets).rate(w.size)
            except Exception as error:
                text += f"  {name}: {type(error).__name__}"
                continue
            row[name] = round(peer)
            text += f"  {name} {peer:.0f}"
        rows.append(row)
        print(
            f"{w.name:11} {w.shape:>16} {ours.median:8.1f} us ({ours.low:.1f}..{ours.high:.1f}) "
            f"{row['GB/s']:5} GB/s {row['share']:5.1f} %  copy {row['copy_ratio']} "
            f"{row['same_size_copy']}{text}",
            flush=True,
        )
        del sets
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    options.output.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(key for row in rows for key in row))
    with open(options.output / "gpu_kernels.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    print(conditions())


if __name__ == "__main__":
    main()
