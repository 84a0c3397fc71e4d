"""Host time per call through Paddle on a GPU, forward and forward + backward:

    python -m benchmarks.gpu.host [--output FOLDER] [--rounds N]

Small tensors, so that the GPU waits for the host. "bare" is the same operator called by name, with
its arguments made ready, without paddle_fused's Python surface: what Paddle itself takes for a
custom operator. Gradients are given; 1000 calls between two synchronisations, medians over rounds.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import statistics
import time
from pathlib import Path

import numpy as np
import paddle

import paddle_fused
import paddle_fused.nn.functional as F
from paddle_fused._ops import _run, double_parts

CALLS = 1000


def tensor(*shape, dtype="bfloat16", train=True):
    """Random values, by copy from NumPy: works where Paddle's own kernels do not run."""
    array = np.random.default_rng(0).standard_normal(shape).astype("float32")
    if dtype == "bfloat16":  # Paddle reads uint16 as the bits of bfloat16
        array = (array.view(np.uint32) >> 16).astype(np.uint16)
    return paddle.to_tensor(array, stop_gradient=not train)


def cases():
    """(name, surface call, bare call, tensors, upstream gradients)."""
    rows, width = 32, 512
    x, packed, weight = tensor(rows, width), tensor(rows, 2 * width), tensor(width)
    probs, g, table = (
        tensor(rows, dtype="float32"),
        tensor(rows, width, train=False),
        tensor(rows, 64, dtype="float32", train=False),
    )
    q, k = tensor(1, rows, 8, 64), tensor(1, rows, 2, 64)
    gq, gk = tensor(1, rows, 8, 64, train=False), tensor(1, rows, 2, 64, train=False)
    epsilon, zero = double_parts(1e-6), double_parts(0.0)
    yield (
        "swiglu",
        lambda: F.swiglu(packed),
        lambda: _run("paddle_fused_swiglu", packed),
        *([packed], [g]),
    )
    yield (
        "fused_swiglu_weighted",
        lambda: F.fused_swiglu_weighted(packed, probs),
        lambda: _run("paddle_fused_swiglu_weighted", packed, probs),
        *([packed, probs], [g]),
    )
    yield (
        "rms_norm",
        lambda: F.rms_norm(x, weight),
        lambda: _run("paddle_fused_rms_norm", x, weight, epsilon, zero, 0, True),
        *([x, weight], [g]),
    )
    yield (
        "rms_norm with residual",
        lambda: F.rms_norm(x, weight, residual=x),
        lambda: _run("paddle_fused_add_rms_norm", x, x, weight, epsilon, zero, 0, True),
        *([weight], [g, g]),
    )
    yield (
        "fused_rotary_position_embedding, q and k",
        lambda: F.fused_rotary_position_embedding(q, k, None, table, table)[:2],
        None,
        *([q, k], [gq, gk]),
    )


def as_list(value) -> list:
    """Outputs as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def microseconds(call, rounds: int) -> tuple[float, float, float]:
    """Median, least and most over rounds of the host's time per call."""
    for _ in range(CALLS // 4):
        call()
    times = []
    for _ in range(rounds):
        paddle.device.synchronize()
        gc.disable()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) * 1e6 / CALLS)
        gc.enable()
    paddle.device.synchronize()
    return statistics.median(times), min(times), max(times)


def main() -> None:
    """Prints a table and writes gpu_host.csv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "build")))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not (paddle_fused.has_cuda() and paddle.device.cuda.device_count()):
        print("host time per call: needs a CUDA build of paddle_fused and a GPU")
        return
    paddle.set_device("gpu")
    rows = []
    for name, surface, bare, tensors, upstream in cases():

        def both(call, tensors=tensors, upstream=upstream):
            return lambda: paddle.grad(as_list(call()), tensors, upstream)

        for what, call in (("paddle_fused", surface), ("bare", bare)):
            if call is None:
                continue
            for passes, timed in (("forward", call), ("forward + backward", both(call))):
                median, low, high = microseconds(timed, options.rounds)
                row = {"operator": name, "call": what, "passes": passes, "us": round(median, 2)}
                rows.append(row | {"us_low": round(low, 2), "us_high": round(high, 2)})
                print(f"{name:42} {what:13} {passes:19} {median:7.1f} us", flush=True)
    print(f"Paddle {paddle.__version__}, {paddle.device.cuda.get_device_name()}")
    options.output.mkdir(parents=True, exist_ok=True)
    with open(options.output / "gpu_host.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
