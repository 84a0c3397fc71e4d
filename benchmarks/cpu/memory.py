"""What keep_cpu_memory() gains and what it costs: time and resident memory, with and without.

    python -m benchmarks.cpu.memory

A child process for each setting runs rms_norm on [4096, 4096] float32 forward and backward ten
times, frees everything, and tells the median time of one and its resident memory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path


def resident() -> float:
    """MiB of this process in memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def child(keep: bool) -> None:
    """One setting; prints its figures as JSON."""
    import numpy as np
    import paddle

    import paddle_fused
    from benchmarks.cpu import cases, paddle_worker

    if keep:
        paddle_fused.keep_cpu_memory()
    before = resident()
    case = cases.Case("rms_norm", "backward", "float32", "memory")
    calls = paddle_worker.make_case(case, np.random.default_rng(0))
    prepare, call = calls["paddle_fused"]
    seconds, most = [], 0.0
    for _ in range(10):
        start = time.perf_counter()
        gradients = call(prepare())
        seconds.append(time.perf_counter() - start)
        most = max(most, resident())
        del gradients
    del calls, prepare, call
    paddle.zeros([1])
    figures = {
        "milliseconds": 1e3 * statistics.median(seconds),
        "used_mib": most - before,
        "left_mib": resident() - before,
    }
    print(json.dumps(figures))


def main() -> int:
    """Runs both settings and prints a line for each."""
    root = str(Path(__file__).resolve().parents[2])
    start = "import sys; sys.path.append({!r}); from benchmarks.cpu import memory; memory.child({})"
    for keep in (False, True):
        command = [sys.executable, "-c", start.format(root, keep)]
        environment = {**os.environ, "GLOG_minloglevel": "2"}
        output = subprocess.run(
            command, cwd="/", env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        found = json.loads(output.splitlines()[-1])
        print(
            f"freed memory {'kept' if keep else 'given back':<11}"
            f"{found['milliseconds']:8.1f} ms forward + backward"
            f"{found['used_mib']:8.0f} MiB in use at most"
            f"{found['left_mib']:8.0f} MiB still resident when all tensors are freed"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
