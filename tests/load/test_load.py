"""Many callers at once, workers, predictors; the answers stay right and memory stays flat.

PADDLE_FUSED_LOAD_SECONDS is how long the threads call: 5 unless it is set.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import paddle
import paddle.inference
from paddle.static import InputSpec

import paddle_fused
from helpers.calls import CALLS, digest, make_call
from helpers.numeric import assert_bit_equal
from paddle_fused.nn import RMSNorm, SwiGLUMLP

SECONDS = float(os.environ.get("PADDLE_FUSED_LOAD_SECONDS", "5"))
THREADS = 8
# What the allocators of eight threads may keep.
GROWTH = 64 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_threads(count, body):
    """Runs body(number) in threads; raises what the first of them raised."""
    errors = []

    def guarded(number):
        try:
            body(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_call_everything():
    """All functions, forward and backward, sizes with and without OpenMP threads of their own."""
    jobs = []
    for name in CALLS:
        for dtype, rows, width in (("float32", 3, 33), ("bfloat16", 700, 67)):
            call = make_call(name, dtype, rows, width)
            jobs.append((name, call, digest([a for g in call.results() for a in g])))
    counts, sizes = [0] * THREADS, []
    end = time.monotonic() + SECONDS

    def body(number):
        choose = random.Random(number)
        while time.monotonic() < end:
            name, call, expected = choose.choice(jobs)
            found = digest([a for g in call.results() for a in g])
            assert found == expected, name
            counts[number] += 1
            if number == 0 and counts[0] % 20 == 0:
                sizes.append((time.monotonic(), resident()))

    in_threads(THREADS, body)
    assert min(counts) > 0
    # The first third warms allocators and thread pools.
    warm = [size for moment, size in sizes if moment > end - SECONDS * 2 / 3]
    growth = (warm[-1] - warm[0]) if warm else 0
    print(
        f"{sum(counts)} calls from {THREADS} threads in {SECONDS:.0f} s; "
        f"resident {warm[0] >> 20 if warm else 0} MiB, then {growth / 2**20:+.1f} MiB"
    )
    assert growth < GROWTH


def test_no_call_leaks():
    """Every function 300 times on 64 KiB and more: a leaked result would be 20 MiB each."""
    calls = [make_call(name, "float32", 64, 257) for name in CALLS]
    for call in calls:
        call.results()
    before = resident()
    for call in calls:
        for _ in range(300 if SECONDS > 30 else 100):
            call.results()
    growth = resident() - before
    print(f"{len(calls)} functions: {growth / 2**20:+.1f} MiB")
    assert growth < GROWTH / 2


WORKERS = """
import numpy as np, paddle, paddle_fused
import paddle_fused.nn.functional as F

class Rows(paddle.io.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        x = paddle.full([300, 257], float(index % 7) - 3.0)
        return F.rms_norm(F.swiglu(x, x)).numpy()[:2]

paddle_fused.set_num_threads(4)
F.rms_norm(paddle.ones([3000, 257]))  # the pool runs before the fork
expected = [Rows()[i] for i in range(64)]
for _ in range(2):
    loader = paddle.io.DataLoader(Rows(), batch_size=None, num_workers=3)
    for index, row in enumerate(loader):
        assert (np.asarray(row) == expected[index]).all(), index
    assert index == 63
print("done")
"""


def test_data_loader_workers():
    """Workers are forked after the import and after use; they compute the same and end."""
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", WORKERS],
        capture_output=True,
        text=True,
        timeout=300,
        cwd="/",
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0 and done.stdout.split()[-1] == "done", done.stderr[-2000:]


def test_predictors_in_threads(tmp_path):
    """1,000 calls of one exported model from four threads, each with a clone of the predictor."""
    paddle.seed(5)
    layer = paddle.nn.Sequential(RMSNorm(64), SwiGLUMLP(64, 96))
    layer.eval()
    prefix = str(tmp_path / "model")
    paddle.jit.save(layer, prefix, input_spec=[InputSpec([None, None, 64], "float32", "x")])
    config = paddle.inference.Config(prefix + ".json", prefix + ".pdiparams")
    config.disable_glog_info()
    first = paddle.inference.create_predictor(config)
    predictors = [first, *(first.clone() for _ in range(3))]
    inputs = [np.random.default_rng(i).standard_normal((2, 5 + i, 64), "float32") for i in range(4)]
    expected = [first.run([paddle.to_tensor(x)])[0].numpy() for x in inputs]
    sizes = {}

    def body(number):
        for i in range(250):
            which = (number + i) % 4
            (out,) = predictors[number].run([paddle.to_tensor(inputs[which])])
            assert_bit_equal(out.numpy(), expected[which], f"call {i} of thread {number}")
            if number == 0 and i in (50, 249):
                sizes[i] = resident()

    in_threads(4, body)
    growth = sizes[249] - sizes[50]
    print(f"1000 predictor calls: {growth / 2**20:+.1f} MiB")
    assert growth < GROWTH
    assert paddle_fused.is_available()
