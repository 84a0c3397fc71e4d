"""Times the launch shapes that a kernel can take, one workload after the other:

python -m benchmarks.gpu.tune [WORD ...]
"""

from __future__ import annotations

import gc
import sys

import torch

from . import library as lib
from . import workloads
from .measure import buffer_sets, measure


def candidates(kind: str, width: int):
    """Tunings to try; None is the default."""
    yield None
    vectors = width // 8
    if kind == "swiglu_fwd":
        for count in (1, 2, 4):
            for threads in (64, 96, 128, 192, 224, 256, 512):
                tile = threads * count
                if -(-vectors // tile) * tile <= vectors * 1.1:
                    for rows in sorted({1, max(1, 256 // threads)}):
                        yield lib.SwigluTuning(threads, rows, count)
    elif kind == "swiglu_bwd":
        for threads in (64, 96, 128, 192, 224, 256, 448, 512):
            if -(-vectors // threads) * threads <= vectors * 1.15:
                for rows in sorted({1, 2, max(1, 256 // threads), max(1, 512 // threads)}):
                    if threads * rows <= 512:
                        yield lib.SwigluTuning(threads, rows, 1)
    elif kind in ("rms_fwd", "add_rms_fwd"):
        for count in (1, 2, 4, 8):
            threads = -(-vectors // count // 32) * 32
            if threads > (1024 if count == 8 else 512):
                continue
            for rows in sorted(
                {1, 2, max(1, 128 // threads), max(1, 256 // threads), max(1, 512 // threads)}
            ):
                if threads * rows <= max(512, threads):
                    yield lib.RmsNormTuning(threads, rows, count, 0, 0, 0)
    elif kind in ("rms_bwd", "add_rms_bwd"):
        arrays = 3 if kind == "add_rms_bwd" else 2
        for cluster in (1, 2, 4):
            mine = -(-vectors // cluster)
            for count in (1, 2, 4) if cluster == 1 else (4,):
                threads = -(-mine // count // 32) * 32
                limit = 512
                if threads > limit:
                    continue
                for rows in (1, 2, 4, 8, 16):
                    if threads * rows > limit or (cluster > 1 and rows > 1):
                        continue
                    for blocks in (1, 2, 3, 4):
                        if (
                            threads * rows * blocks > 2048 // (1 if count == 1 else 2)
                            or threads * rows * blocks < 256
                        ):
                            continue
                        for stages in (2, 3, 4):
                            memory = count * threads * rows * 16 * arrays * stages * blocks
                            if memory <= 220 << 10 and memory >= 24 << 10:
                                yield lib.RmsNormTuning(
                                    threads, rows, count, stages, blocks, cluster
                                )
    elif kind.startswith("rope"):
        for threads in (32, 64, 96, 128):
            for heads in (1, 2, 4, 5):
                yield lib.RopeTuning(threads, heads)


def cases(kernels):
    """The workloads of the performance table."""
    for rows, cols in ((32768, 1536), (32768, 2048), (32768, 4096), (16384, 14336)):
        yield workloads.swiglu_forward(kernels, rows, cols)
        yield workloads.swiglu_backward(kernels, rows, cols)
    for cols in (1024, 2048, 4096, 5120, 7168, 8192, 16384, 32768):
        yield workloads.rms_norm_forward(kernels, 16384, cols)
        yield workloads.rms_norm_backward(kernels, 16384, cols)
    for cols in (4096, 8192):
        yield workloads.rms_norm_forward(kernels, 16384, cols, True)
        yield workloads.rms_norm_backward(kernels, 16384, cols, True)
    for shape in ((4, 4096, (32, 8), 128), (4, 4096, (64, 8), 128), (2, 4096, (28, 4), 64)):
        yield workloads.rope(kernels, *shape)
    yield workloads.rms_norm_forward(kernels, 64, 4096)
    yield workloads.rms_norm_backward(kernels, 64, 4096)


def time_of(workload, tuning=None, sets=None, replays: int = 5):
    """Timing of one tuning, or the error's text."""
    sets = sets or buffer_sets(workload.make, workload.size)
    return measure(lambda b: workload.run(b, tuning), sets, replays)


def main() -> None:
    """Prints the best five of each workload, the default, and copies."""
    kernels = lib.Kernels()
    words = sys.argv[1:]
    for size in (64 << 20, 256 << 20, 1 << 30, 2 << 30):
        for w in (
            workloads.memcpy(size),
            *(workloads.copy(kernels, i, o, size) for i, o in ((1, 1), (2, 1), (3, 3))),
        ):
            t = time_of(w)
            print(
                f"{w.name:10} {w.shape:>8} {t.rate(w.size):7.0f} GB/s {t.median:8.1f} us",
                flush=True,
            )
    for workload in cases(kernels):
        if words and not any(word in f"{workload.name} {workload.shape}" for word in words):
            continue
        sets = buffer_sets(workload.make, workload.size)
        found = []
        for tuning in candidates(workload.name, workload.width):
            text = (
                "default"
                if tuning is None
                else "-".join(str(getattr(tuning, f)) for f, _ in tuning._fields_)
            )
            try:
                t = time_of(workload, tuning, sets, 3)
                found.append((t.rate(workload.size), t.median, text))
            except RuntimeError as error:
                print("   ", workload.name, text, str(error).splitlines()[0])
                torch.cuda.synchronize()
        default = next(f for f in found if f[2] == "default")
        found.sort(reverse=True)
        line = "  ".join(f"{text} {rate:.0f}" for rate, _, text in found[:6])
        print(
            f"{workload.name:11} {workload.shape:>16} default {default[0]:5.0f} "
            f"({default[1]:.1f} us) of {len(found):3}: {line}",
            flush=True,
        )
        del sets
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
