"""What must not change a result: repetition, threads, batch, instruction set, memory, forking."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import paddle
import pytest

import paddle_fused
from helpers import numeric
from helpers.arrays import numpy_dtype, to_numpy, to_paddle
from helpers.calls import CALLS, all_digests, check_nothing_written, make_call
from helpers.layouts import offset_by_one
from helpers.running import as_tuple, assert_same

# Above and below the size from which on the kernels use threads; few wide rows and many narrow.
SHAPES = [(5, 33), (2000, 67), (3, 65537)]


def flat(results):
    return [array for group in results for array in group]


def poison(arrays):
    """Leaves NaN in the allocator's free blocks of the arrays' sizes."""
    blocks = [paddle.full([max(a.nbytes // 4, 1)], float("nan")) for a in arrays for _ in range(2)]
    assert all(np.isnan(b.numpy()[0]) for b in blocks)
    del blocks


@pytest.fixture
def threads():
    """Gives set_num_threads, and puts the count back."""
    before = paddle_fused.get_num_threads()
    yield paddle_fused.set_num_threads
    paddle_fused.set_num_threads(before)


def skip_huge_heads(name, width):
    # A head of 16386 features with tables of its own is no use of RoPE; 1025 covers wide ones.
    return min(width, 1025) if "rope" in name or "rotary" in name else width


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threads_and_repeats(dtype, name, shape, threads):
    """1, 2, 3 and 8 threads, twice each, between blocks of NaN: the same bits."""
    rows, width = shape
    call = make_call(name, dtype, rows, skip_huge_heads(name, width))
    threads(1)
    expected = flat(call.results())
    for count in (1, 2, 2, 3, 8):
        threads(count)
        poison(expected)
        assert_same(flat(call.results()), expected, f"{name}, {count} threads")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("width", [9, 16, 67, 1025])
def test_batch(dtype, name, width):
    """A row alone, off alignment, and first, middle and last of many has the same bits."""
    many = make_call(name, dtype, 300, width)
    expected, _ = many.results()
    for row in (0, 7, 150, 299):
        alone = many.rows([row])
        for view in (np.asarray, offset_by_one):
            assert_same(alone.results(view)[0], [e[[row]] for e in expected], f"{name} {row}")
    order = np.random.default_rng(1).permutation(300)[:77]
    shuffled, _ = many.rows(order).results()
    assert_same(shuffled, [e[order] for e in expected], f"{name}, shuffled")


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_written_but_outputs(dtype, name):
    """Inputs and upstream gradients keep their bits; outputs own their memory."""
    check_nothing_written(make_call(name, dtype, 6, 33))


@pytest.mark.parametrize("name", CALLS)
def test_a_transposed_input_gives_a_contiguous_output(name):
    call = make_call(name, "float32", 6, 33)
    tensors = [to_paddle(a) for a in call.inputs]
    axes = list(range(tensors[0].ndim))[::-1]
    tensors[0] = to_paddle(call.inputs[0].transpose(axes)).transpose(axes)
    assert not tensors[0].is_contiguous()
    outputs = as_tuple(call.function(*tensors))
    expected_outputs = as_tuple(call.function(*map(to_paddle, call.inputs)))
    for out, expected in zip(outputs, expected_outputs):
        assert out.is_contiguous()
        numeric.assert_bit_equal(to_numpy(out.reshape(out.shape)), to_numpy(expected))


@pytest.mark.parametrize("name", CALLS)
def test_results_after_poisoned_memory(dtype, name):
    """Small blocks, which the allocator gives out again at once; also with zero rows."""
    for rows in (0, 1, 3):
        call = make_call(name, dtype, rows, 9)
        expected = flat(call.results())
        for _ in range(5):
            poison(expected)
            assert_same(flat(call.results()), expected, f"{name}, {rows} rows")
        assert all(np.isfinite(a.astype(np.float64)).all() for a in expected)


def run_python(code, **environment):
    """What the code prints in a fresh process that imports what this one can."""
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd="/",  # not the source folder, whose package is not built
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


DIGESTS = """
import json
from paddle_fused._runtime import cpu_target
from helpers.calls import all_digests
print(json.dumps([cpu_target(), all_digests()]))
"""


@pytest.mark.parametrize("target", ["portable", "avx2", "avx512"])
def test_cpu_targets(target):
    """The kernels of each instruction set compute the same bits as those that run here."""
    output = run_python(DIGESTS, PADDLE_FUSED_CPU_TARGET=target).splitlines()[-1]
    active, digests = json.loads(output)
    if active != target:
        pytest.skip(f"this processor, or this build, has no {target}: it ran {active}")
    here = all_digests()
    assert set(digests) == set(here)
    differing = [key for key in here if digests[key] != here[key]]
    assert not differing, f"{len(differing)} of {len(here)} differ: {differing[:8]}"


STREAMED = """
import json
from helpers.calls import CALLS, digest, make_call
shapes = [(40, 128), (3, 4096), (5, 67)]
def digest_of(call):
    rowwise, sums = call.results()
    return digest([*rowwise, *sums])
print(json.dumps([
    digest_of(make_call(name, dtype, *shape))
    for name in CALLS for dtype in ("float32", "bfloat16", "float16") for shape in shapes
]))
"""


@pytest.mark.parametrize("target", ["portable", "avx2", "avx512"])
def test_streaming_stores(target):
    """Outputs that bypass the caches, in rows that allow it and in rows that do not."""
    digests = [
        run_python(STREAMED, PADDLE_FUSED_CPU_TARGET=target, PADDLE_FUSED_STREAM_BYTES=limit)
        for limit in ("0", str(1 << 40))
    ]
    assert digests[0] == digests[1]


FORK = """
import os
import paddle_fused
from helpers.calls import CALLS, make_call

def compute():
    return [make_call(name, "float32", 2000, 67).results() for name in CALLS]

def same(a, b):
    pairs = zip([x for c in a for g in c for x in g], [x for c in b for g in c for x in g])
    return all((x == y).all() for x, y in pairs)

paddle_fused.set_num_threads(4)
expected = compute()
child = os.fork()
if child == 0:
    code = 1
    try:
        code = 0 if same(compute(), expected) and paddle_fused.get_num_threads() == 1 else 2
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert same(compute(), expected)
print("done")
"""


def test_fork_after_use():
    """A child of a process whose threads have run computes the same and ends, and so does it."""
    assert run_python(FORK).splitlines()[-1] == "done"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_neighbours_of_extreme_values(dtype):
    """A value that sends its whole step to the careful path changes no bit of the other columns."""
    rng = np.random.default_rng(0)
    width = 35 * 32  # each group of 32 columns gets one extreme value

    def wide(exponents):
        signs = rng.choice([-1.0, 1.0], (64, width))
        return signs * np.exp2(rng.uniform(-exponents, 3, (64, width)))

    gate, up, grad = wide(8), wide(8), wide(12)
    probs = paddle.to_tensor(rng.uniform(0.1, 1.0, 64).astype(np.float32))
    place = (np.arange(64)[:, None], np.arange(width // 32) * 32 + rng.integers(0, 32, (64, 35)))

    def run():
        x, upstream = (
            to_paddle(v.astype(numpy_dtype(dtype))) for v in (np.concatenate([gate, up], -1), grad)
        )
        x.stop_gradient = False
        out = paddle_fused.nn.functional.fused_swiglu_weighted(x, probs)
        (dx,) = paddle.grad(out, [x], [upstream])
        halves = to_numpy(out), to_numpy(dx)[:, :width], to_numpy(dx)[:, width:]
        for half in halves:
            half[place] = 0
        return halves

    expected = run()
    for array, value in [(gate, -100.0), (gate, 0.0), (up, 3e4), (up, 0.0), (grad, 0.0)]:
        kept = array[place].copy()
        array[place] = value
        assert_same(run(), expected, f"{value}")
        array[place] = kept


def test_nan_of_any_payload():
    """Rounding to bfloat16 may not carry out of a NaN that has all bits set."""

    def nan(*shape):
        return to_paddle(np.full(shape, 0x7FFFFFFF, np.uint32).view(np.float32))

    def ones(*shape, dtype="bfloat16"):
        return to_paddle(np.ones(shape, numpy_dtype(dtype)))

    x = ones(64, 128)
    x.stop_gradient = False
    out = paddle_fused.nn.functional.fused_swiglu_weighted(x, nan(64))
    (dx,) = paddle.grad(out, [x], [ones(64, 64)])
    assert np.isnan(to_numpy(out)).all() and np.isnan(to_numpy(dx)).all()
    rows = paddle_fused.nn.functional.rms_norm(ones(4, 64), nan(64))
    assert np.isnan(to_numpy(rows)).all()
    scale, invvar = ones(64, dtype="float32"), ones(1, dtype="float32")
    dx, dscale = paddle_fused.nn.functional.fused_rms_norm_ext_grad(
        ones(1, 64), scale, invvar, nan(1, 64), 1e-6
    )
    assert np.isnan(to_numpy(dx)).all() and np.isnan(to_numpy(dscale)).all()
    table = nan(4, 64)
    for style in (True, False):
        rotated, _, _ = paddle_fused.nn.functional.fused_rotary_position_embedding(
            ones(1, 4, 2, 64), sin=table, cos=table, use_neox_rotary_style=style
        )
        assert np.isnan(to_numpy(rotated)).all()
