"""Our CUDA kernels beside copies and public kernels, on one GPU, in one process:

    python -m benchmarks.gpu_kernels [--output FOLDER] [--no-peers] [--jobs N] [WORD ...]

By raw pointer in a PyTorch process. Protocol: benchmarks/gpu/measure.py; peers:
benchmarks/gpu/peers.py. Prints a table and writes gpu_kernels.csv, gpu_conditions.json and a
picture per operator. GB/s count the bytes that the operator has to move at least; shares are of
the larger of cudaMemcpy and our own 1:1 copy kernel over 2 GiB in this run.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path

import torch

from .gpu import library, peers, report, workloads
from .gpu.measure import Timing, buffer_sets, measure, measure_together

# Of bfloat16 results, some of which round twice.
MAX_DISAGREEMENT = 0.02


def chosen(kernels, words):
    """The workloads whose name or shape holds one of the words; all without words."""
    for w in workloads.performance_table(kernels):
        if not words or any(word in f"{w.name} {w.shape}" for word in words):
            yield w


def free() -> None:
    """Gives memory back between workloads."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()


def compile_peers(kernels, words, part: int, parts: int) -> None:
    """Calls every part-th workload's peers once, which leaves compiled kernels in their caches."""
    for index, w in enumerate(chosen(kernels, words)):
        if index % parts != part:
            continue
        buffers = w.make(0)
        for peer in peers.peers_of(w, kernels):
            try:
                peer.call(peer.prepare(buffers))
            except Exception as error:
                print(f"{w.name} {w.shape} {peer.name}: {error}", file=sys.stderr)
        del buffers
        free()


def compile_in_processes(jobs: int, words) -> None:
    """The same in so many processes at once: compilers take most of the time of a first run."""
    command = [sys.executable, "-m", "benchmarks.gpu_kernels", *words]
    running = [
        subprocess.Popen([*command, "--compile-part", str(part), "--jobs", str(jobs)])
        for part in range(jobs)
    ]
    for process in running:
        process.wait()


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


def base_rate(kernels) -> tuple[float, float]:
    """GB/s of our 1:1 copy kernel and of cudaMemcpy over 2 GiB."""
    copy = workloads.copy(kernels, 1, 1, 2 << 30)
    own = measure(copy.run, buffer_sets(copy.make, copy.size)).rate(copy.size)
    return own, eager_memcpy(2 << 30)


def contenders(kernels, w, with_peers: bool) -> dict:
    """(call, sets) by name: ours, a copy of the same size and ratio, peers."""
    sets = buffer_sets(w.make, w.size)
    copy = workloads.copy(kernels, *w.ratio, w.size)
    found = {report.OURS: (w.run, sets), report.COPY: (copy.run, buffer_sets(copy.make, copy.size))}
    w.run(sets[0])
    for peer in peers.peers_of(w, kernels) if with_peers else []:
        try:
            apart = peers.disagreement(peer, w, sets[0])
        except Exception as error:
            print(f"  {peer.name}: {type(error).__name__}: {str(error).splitlines()[:1]}")
            continue
        if not apart <= MAX_DISAGREEMENT:
            print(f"  {peer.name}: results differ from ours by {apart:.3g}; not timed")
            continue
        found[peer.name] = (peer.call, [peer.prepare(buffers) for buffers in sets])
    return found


def rows_of(w, results: dict, base: float) -> list[dict]:
    """One row of the CSV per contender."""
    rows = []
    for name, timing in results.items():
        if not isinstance(timing, Timing):
            print(f"  {name}: {type(timing).__name__}: {str(timing).splitlines()[:1]}")
            continue
        row = {"operator": w.name, "shape": w.shape, "implementation": name}
        row |= {"us": round(timing.median, 2), "us_low": round(timing.low, 2)}
        row |= {"us_high": round(timing.high, 2), "GB/s": round(timing.rate(w.size))}
        row |= {"share": round(100 * timing.rate(w.size) / base, 1), "bytes": w.size}
        row |= {"flops": w.flops, "copy_ratio": "{}:{}".format(*w.ratio)}
        rows.append(row)
    return rows


def conditions(base: tuple[float, float]) -> dict:
    """The card, its state and everybody's versions."""
    query = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    smi = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    found = dict(zip(query.split(","), smi.splitlines()[0].split(", ") if smi else []))
    found |= {"CUDA": torch.version.cuda, **peers.versions()}
    own, memcpy = base
    return {**found, "copy of 2 GiB, GB/s": round(own), "cudaMemcpy of 2 GiB, GB/s": round(memcpy)}


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only workloads whose name or shape holds one")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "build")))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile peers first")
    parser.add_argument("--compile-part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kernels = library.Kernels()
    if options.compile_part is not None:
        compile_peers(kernels, options.words, options.compile_part, options.jobs)
        return
    if options.jobs > 1 and not options.no_peers:
        compile_in_processes(options.jobs, options.words)
    base = base_rate(kernels)
    print(*(f"{name}: {value}" for name, value in conditions(base).items()), sep="\n")
    rows = []
    for w in chosen(kernels, options.words):
        calls = contenders(kernels, w, not options.no_peers)
        rows += rows_of(w, measure_together(calls), max(base))
        print(report.line(rows, w.name, w.shape), flush=True)
        del calls
        free()
    report.write(options.output, rows, conditions(base))


if __name__ == "__main__":
    main()
