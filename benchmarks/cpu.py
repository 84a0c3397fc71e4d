"""Times our operators against plain Paddle operators on the CPU, in one process.

    python benchmarks/cpu.py [--repeats N] [--dtype float32] [--keep-memory] [--csv FILE]

"plain Paddle" is paddle_fused.reference: what one writes by hand with Paddle's own operators. Each
round runs both providers, one after the other; the medians of the rounds are printed, with the
range of their middle half. A copy of the same number of bytes, by NumPy on one thread, shows what
memory allows. Nothing is asserted: figures are for reading.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time

# Paddle takes the thread count of its own kernels from here, when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("GLOG_minloglevel", "2")

import numpy as np
import paddle

import paddle_fused
from paddle_fused import reference
from paddle_fused.nn import functional


def tensor(rng, shape, dtype, trains=True):
    """A random tensor that asks for its gradient."""
    value = paddle.to_tensor(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
    value.stop_gradient = not trains
    return value


def nbytes(value) -> int:
    """Bytes of a tensor's elements."""
    return value.size * value.element_size()


class Consumer(paddle.autograd.PyLayer):
    """Stands for the next layer: takes an output and hands back a ready gradient.

    paddle.grad(out, inputs, grad) would copy the gradient into fresh memory first, which no layer
    of a model does and which can cost more than a fused operator.
    """

    @staticmethod
    def forward(ctx, out, ready):
        """A scalar to start the backward pass from."""
        ctx.ready = ready[0]
        return paddle.zeros([])

    @staticmethod
    def backward(ctx, _):
        """The gradient of the output."""
        return ctx.ready


def gradients(outputs, inputs, ready):
    """Gradients of the inputs when those of the outputs are ready."""
    loss = sum(Consumer.apply(out, [grad]) for out, grad in zip(outputs, ready))
    return paddle.grad(loss, inputs)


def rms_norm_case(rng, dtype):
    """rms_norm, forward and backward, [4096, 4096]."""
    x, weight = tensor(rng, [4096, 4096], dtype), tensor(rng, [4096], dtype)
    grad = tensor(rng, [4096, 4096], dtype, trains=False)
    return lambda ops: gradients([ops.rms_norm(x, weight)], [x, weight], [grad]), 5 * nbytes(x)


def swiglu_case(rng, dtype):
    """fused_swiglu_weighted, forward and backward, [8192, 2 x 1024]."""
    x, probs = tensor(rng, [8192, 2048], dtype), tensor(rng, [8192], "float32")
    grad = tensor(rng, [8192, 1024], dtype, trains=False)
    moved = 3 * nbytes(x) + 2 * nbytes(grad)
    return lambda ops: gradients([ops.fused_swiglu_weighted(x, probs)], [x, probs], [grad]), moved


def rope_case(rng, dtype):
    """fused_rotary_position_embedding of q and k, forward and backward, [4, 512, 16, 128]."""
    q, k = tensor(rng, [4, 512, 16, 128], dtype), tensor(rng, [4, 512, 16, 128], dtype)
    grads = [tensor(rng, [4, 512, 16, 128], dtype, trains=False) for _ in range(2)]
    angle = np.outer(np.arange(512), 10000.0 ** (-np.arange(0, 128, 2) / 128)).repeat(2, axis=1)
    sin, cos = (paddle.to_tensor(f(angle).astype("float32")) for f in (np.sin, np.cos))

    def call(ops):
        out = ops.fused_rotary_position_embedding(q, k, sin=sin, cos=cos)
        return gradients(out[:2], [q, k], grads)

    return call, 8 * nbytes(q)


CASES = {
    "rms_norm [4096, 4096]": rms_norm_case,
    "fused_swiglu_weighted [8192, 2x1024]": swiglu_case,
    "fused_rope q, k [4, 512, 16, 128]": rope_case,
}


def milliseconds(call) -> float:
    """Time of one call; its results are freed after it."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def copy_time(size: int, repeats: int) -> float:
    """Median time of a copy that reads and writes size bytes in all."""
    source = np.ones(size // 2, np.uint8)
    target = np.empty_like(source)
    return statistics.median(
        milliseconds(lambda: np.copyto(target, source)) for _ in range(repeats + 1)
    )


def measure(case, dtype: str, repeats: int) -> dict:
    """Medians of both providers, taken turn about."""
    call, moved = case(np.random.default_rng(0), dtype)
    times = {"fused": [], "plain": []}
    for round_ in range(repeats + 2):
        for name, ops in (("fused", functional), ("plain", reference)):
            elapsed = milliseconds(lambda ops=ops: call(ops))
            if round_ >= 2:  # the first rounds warm caches and the allocator
                times[name].append(elapsed)
    row = {"dtype": dtype, "bytes": moved}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        row.update({f"{name}_ms": middle, f"{name}_low": low, f"{name}_high": high})
    row["speedup"] = row["plain_ms"] / row["fused_ms"]
    row["gb_per_s"] = moved / row["fused_ms"] / 1e6
    row["copy_gb_per_s"] = moved / copy_time(moved, repeats) / 1e6
    return row


def main() -> int:
    """Runs all cases and prints one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds (default 15)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--keep-memory", action="store_true", help="call keep_cpu_memory() first")
    parser.add_argument("--csv", help="also write the rows to this file")
    options = parser.parse_args()
    if options.keep_memory:
        paddle_fused.keep_cpu_memory()
    print(
        f"paddle {paddle.__version__}, {paddle_fused.get_num_threads()} threads, "
        f"freed memory {'kept' if options.keep_memory else 'given back'}; forward + backward, "
        "median [middle half]\n"
    )
    print(
        f"{'operator':<38}{'dtype':<10}{'fused ms':>20}{'plain ms':>22}{'ratio':>7}{'GB/s':>7}"
        f"{'copy':>7}"
    )
    rows = []
    for name, case in CASES.items():
        for dtype in options.dtype:
            row = {"operator": name, **measure(case, dtype, options.repeats)}
            rows.append(row)
            spread = {
                k: f"{row[k + '_ms']:.1f} [{row[k + '_low']:.1f}, {row[k + '_high']:.1f}]"
                for k in ("fused", "plain")
            }
            print(
                f"{name:<38}{dtype:<10}{spread['fused']:>20}{spread['plain']:>22}"
                f"{row['speedup']:>6.1f}x{row['gb_per_s']:>7.1f}{row['copy_gb_per_s']:>7.1f}",
                flush=True,
            )
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
