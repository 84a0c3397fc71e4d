"""More than 2**31 elements: every row is that of a small launch of the same rows.

The rows repeat with a period that no power of two is a multiple of, so an index that wraps lands on
another row's values.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest

import paddle_fused.nn.functional as F
from helpers import numeric, oracle
from helpers.arrays import random_array, to_numpy, to_paddle

PERIOD, COLS = 509, 4096
ROWS = 2**31 // COLS + 517
DTYPE = "bfloat16"


def tiled(block: np.ndarray, rows: int = ROWS) -> np.ndarray:
    """The block's rows again and again."""
    copies = -(-rows // len(block))
    return np.concatenate([block] * copies)[:rows]


@pytest.fixture(autouse=True)
def gives_memory_back():
    import paddle

    yield
    gc.collect()
    paddle.device.cuda.empty_cache()


@pytest.fixture(scope="module")
def blocks():
    """Small arrays whose rows the huge ones repeat: x, upstream gradient, packed x, weight."""
    rng = np.random.default_rng(3)
    x, g = (random_array(rng, (PERIOD, COLS), DTYPE) for _ in range(2))
    return x, g, random_array(rng, (COLS,), DTYPE), random_array(rng, (PERIOD,), "float32")


def assert_repeats(huge, block: np.ndarray, what: str) -> None:
    """Bit-equal to the block's rows, again and again."""
    huge = to_numpy(huge)
    bits = np.dtype(f"u{block.dtype.itemsize}")
    small = np.ascontiguousarray(block).view(bits)
    whole = huge.view(bits)
    for start in range(0, len(whole), PERIOD):
        part = whole[start : start + PERIOD]
        if not np.array_equal(part, small[: len(part)]):
            raise AssertionError(f"{what}: rows from {start} on differ")


def run(function, arrays, upstream):
    """(outputs, gradients) as tensors."""
    import paddle

    tensors = [to_paddle(a, stop_gradient=False) for a in arrays]
    outputs = function(*tensors)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    grads = paddle.grad(outputs, tensors, [to_paddle(g) for g in upstream])
    return outputs, grads


def compare(function, rowwise, shared, upstream, what):
    """Huge against small, for arrays with rows and shared ones; returns the shared gradients."""
    small, small_grads = run(function, [*rowwise, *shared], upstream)
    expected = [to_numpy(t) for t in (*small, *small_grads[: len(rowwise)])]
    arrays = [*map(tiled, rowwise), *shared]
    outputs, grads = run(function, arrays, list(map(tiled, upstream)))
    for index, (huge, block) in enumerate(zip((*outputs, *grads[: len(rowwise)]), expected)):
        assert_repeats(huge, block, f"{what} {index}")
    return grads[len(rowwise) :]


def test_swiglu(blocks):
    x, g, _, _ = blocks
    compare(F.swiglu, [x], [], [g[:, : COLS // 2]], "swiglu")


def test_weighted_swiglu(blocks):
    x, g, _, probs = blocks
    half = np.ascontiguousarray(g[:, : COLS // 2])
    compare(F.fused_swiglu_weighted, [x, probs], [], [half], "fused_swiglu_weighted")
    small = F.fused_swiglu_weighted_bwd(*map(to_paddle, (x, half, probs)))
    huge = F.fused_swiglu_weighted_bwd(*(to_paddle(tiled(a)) for a in (x, half, probs)))
    for index, (a, b) in enumerate(zip(huge, small)):
        assert_repeats(a, to_numpy(b), f"fused_swiglu_weighted_bwd {index}")


@pytest.mark.parametrize("mode", ["llama", "gemma"])
def test_rms_norm(blocks, mode):
    x, g, weight, _ = blocks

    def function(x, weight):
        return F.rms_norm(x, weight, casting_mode=mode)

    (dweight,) = compare(function, [x], [weight], [g], "rms_norm")
    if mode == "gemma":
        counts = np.full(PERIOD, ROWS // PERIOD)
        counts[: ROWS % PERIOD] += 1
        terms = oracle.f64(g) * oracle.normalized(x, 1e-6) * counts[:, None]
        bound = numeric.sum_bound(DTYPE, ROWS)
        numeric.assert_ulp(to_numpy(dweight), terms.sum(0), bound, np.abs(terms).sum(0), "dweight")


def test_residual(blocks):
    x, g, weight, _ = blocks

    def function(x, residual, weight):
        return F.rms_norm(x, weight, residual=residual)

    compare(function, [x, g], [weight], [g, x], "rms_norm with a residual")


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "halves"])
def test_rope(blocks, pairs):
    """Every token at the same position of a table of one row, as a batch of sequences of one."""
    x, g, _, _ = blocks
    tables = [random_array(np.random.default_rng(5), (1, 128), "float32") for _ in range(2)]

    def function(q):
        heads = q.reshape([q.shape[0], 1, COLS // 128, 128])
        out, _, _ = F.fused_rotary_position_embedding(
            heads, None, None, *map(to_paddle, tables), use_neox_rotary_style=pairs
        )
        return out.reshape(q.shape)

    compare(function, [x], [], [g], "fused_rotary_position_embedding")
