"""The tables of the CPU tests on the GPU: oracle, the CPU's results, repeats, rows of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import devices, numeric, oracle
from helpers.arrays import random_array
from helpers.calls import CALLS, make_call
from helpers.cases import CASES
from helpers.layouts import offset_by_one
from helpers.running import assert_same, check, run

# Odd and even widths, below and above a block's; the last two have 16-byte vectors.
SHAPES = [(5, 33), (300, 67), (3, 1025), (64, 512), (9, 4096)]


def on_both(compute):
    """compute() with tensors on the GPU, then on the CPU."""
    on_gpu = compute()
    devices.use("cpu")
    on_cpu = compute()
    devices.use("gpu")
    return on_gpu, on_cpu


def assert_agree(on_gpu, on_cpu, terms=1, what=""):
    """Each within its bound of the exact value, so within twice the bound of each other.

    A value that may cancel is measured by the largest of its row.
    """
    for index, (a, b) in enumerate(zip(on_gpu, on_cpu)):
        assert (a is None) == (b is None), what
        if a is None:
            continue
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what} {index}"
        if a.dtype == np.int8:  # a value next to a tie may fall to either side
            assert np.abs(a.astype(int) - b.astype(int)).max(initial=0) <= 1, f"{what} {index}"
            continue
        name = numeric.dtype_name(a.dtype)
        bound = max(numeric.sum_bound(name, terms), numeric.rms_norm_bound(name, "llama"))
        wide = oracle.f64(b)
        numeric.assert_ulp(a, wide, 2 * bound, devices.spread(wide), f"{what} {index}")


@pytest.mark.parametrize(
    "case", [case for case in CASES if devices.works(case.name)], ids=lambda case: case.name
)
def test_every_form(rng, dtype, case):
    """Outputs against the oracle; outputs and gradients against the CPU's; zero rows, too."""
    for batch in (3, 0, 1, 70):
        if batch == 0 and not devices.empty_outputs_work():
            continue
        arrays = case.arrays(rng, batch, dtype)
        frozen = [index for index, one in enumerate(case.inputs) if not one.trains]
        shapes = [np.shape(value) for value in case.expected(*arrays)]
        upstream = None
        if case.differentiable:
            upstream = [
                random_array(rng, shape, one.dtype or dtype) if one.trains else None
                for shape, one in zip(shapes, case.outputs)
            ]

        def compute(arrays=arrays, upstream=upstream, frozen=frozen):
            return run(case.call, arrays, upstream, frozen)

        (outputs, grads), (outputs_cpu, grads_cpu) = on_both(compute)
        for actual, value, one in zip(outputs, case.expected(*arrays), case.outputs):
            kind = one.dtype or dtype
            cancels = one.terms > 1 or "sum" in case.name
            scale = devices.spread(value) if cancels else None
            if kind != "int8":
                check(actual, value, kind, scale, one.terms, f"{case.name}, batch {batch}")
        terms = max([64, *(one.terms for one in case.outputs)])
        assert_agree(outputs, outputs_cpu, terms, f"{case.name}, batch {batch}, output")
        assert_agree(grads, grads_cpu, terms, f"{case.name}, batch {batch}, gradient")


@pytest.mark.parametrize("name", list(filter(devices.works, CALLS)))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_cpu_and_repeats(dtype, name, shape):
    """Forward and backward of every operator; a second and a third time the same bits."""
    rows, width = shape
    call = make_call(name, dtype, rows, width)
    (rowwise, sums), (rowwise_cpu, sums_cpu) = on_both(call.results)
    assert_agree(rowwise, rowwise_cpu, width, name)
    assert_agree(sums, sums_cpu, max(rows, width), f"{name}, sums")
    for _ in range(2):
        again, sums_again = call.results()
        assert_same([*again, *sums_again], [*rowwise, *sums], f"{name}, repeated")


@pytest.mark.parametrize("name", list(filter(devices.works, CALLS)))
@pytest.mark.parametrize("width", [9, 16, 67, 1024])
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
