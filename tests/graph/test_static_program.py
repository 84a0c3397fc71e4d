"""Static programs with unknown sizes: inferred shapes and dtypes, results, gradients."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import pytest

import paddle_fused.nn.functional as F
from helpers.arrays import random_array
from helpers.cases import CASES
from helpers.numeric import assert_bit_equal
from helpers.running import as_tuple, check, run
from paddle_fused import reference

DTYPES = ["float32", "bfloat16"]
DIFFERENTIABLE = [case for case in CASES if case.differentiable]


@pytest.fixture(autouse=True)
def dygraph_afterwards():
    """Whatever a test does, the next one finds dygraph."""
    yield
    paddle.disable_static()


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def dtype_of(value) -> str:
    return str(value.dtype).rpartition(".")[2].lower()


def feedable(array):
    """The executor takes bfloat16 as its bits."""
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def fetched(array):
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array


class Static:
    """A static program of one call: its variables, and runs on arrays."""

    def __init__(self, case, dtype, with_grads=False, used=None, frozen=()):
        paddle.enable_static()
        self.program = paddle.static.Program()
        self.grads = []
        with paddle.static.program_guard(self.program, paddle.static.Program()):
            self.inputs = []
            for index, one in enumerate(case.inputs):
                shape, kind = one.unknown(), one.dtype or dtype
                variable = paddle.static.data(f"input{index}", shape, kind)
                variable.stop_gradient = not one.trains or index in frozen
                self.inputs.append(variable)
            self.outputs = as_tuple(case.call(*self.inputs))
            if with_grads:
                self.make_gradients(case, dtype, used, frozen)
        self.executor = paddle.static.Executor(paddle.CPUPlace())

    def make_gradients(self, case, dtype, used, frozen):
        self.used = used or [i for i, one in enumerate(case.outputs) if one.trains]
        self.wanted = [i for i, one in enumerate(case.inputs) if one.trains and i not in frozen]
        seeds = [
            paddle.static.data(f"seed{i}", case.outputs[i].shape, case.outputs[i].dtype or dtype)
            for i in self.used
        ]
        self.grads = paddle.static.gradients(
            [self.outputs[i] for i in self.used], [self.inputs[i] for i in self.wanted], seeds
        )

    def run(self, arrays, seeds=None, fetch=None):
        feed = {f"input{index}": feedable(array) for index, array in enumerate(arrays)}
        for index, seed in (seeds or {}).items():
            feed[f"seed{index}"] = feedable(seed)
        fetch = [*self.outputs, *self.grads] if fetch is None else fetch
        results = self.executor.run(self.program, feed=feed, fetch_list=fetch)
        return [fetched(array) for array in results]


@pytest.mark.parametrize("dtype", DTYPES)
@named(CASES)
def test_infers_and_computes(case, dtype, rng):
    static = Static(case, dtype)
    assert len(static.outputs) == len(case.outputs)
    for variable, output in zip(static.outputs, case.outputs):
        assert list(variable.shape) == output.shape
        assert dtype_of(variable) == (output.dtype or dtype)
    for batch in (3, 0, 1):
        arrays = case.arrays(rng, batch, dtype)
        results = static.run(arrays)
        expected = case.expected(*arrays)
        for actual, value, output in zip(results, expected, case.outputs):
            kind = output.dtype or dtype
            if kind == "int8":
                assert actual.dtype == np.int8
                # A value next to a tie may fall to either side.
                assert np.abs(actual.astype(int) - value.astype(int)).max(initial=0) <= 1
                continue
            check_against(actual, value, kind, output.terms, f"{case.name}, batch {batch}")


def check_against(actual, expected, dtype, terms, what):
    """The bounds of tests/ops; a sum that may cancel is judged by the largest element."""
    if terms == 1:
        check(actual, expected, dtype, what=what)
        return
    scale = np.full(np.shape(expected), np.abs(expected).max(initial=1.0))
    check(actual, expected, dtype, scale, terms, what)


@pytest.mark.parametrize("dtype", DTYPES)
@named(DIFFERENTIABLE)
def test_gradients_are_those_of_dygraph(case, dtype, rng):
    """The same bits as dygraph, whose gradients tests/ops compares with the oracle."""
    static = Static(case, dtype, with_grads=True)
    for variable, index in zip(static.grads, static.wanted):
        assert list(variable.shape) == case.inputs[index].unknown()
        assert dtype_of(variable) == (case.inputs[index].dtype or dtype)
    for batch in (3, 0):
        arrays = case.arrays(rng, batch, dtype)
        compare_with_dygraph(case, static, arrays, rng, f"{case.name}, batch {batch}")


def compare_with_dygraph(case, static, arrays, rng, what):
    paddle.disable_static()
    frozen = {i for i in range(len(arrays)) if i not in static.wanted}
    outputs, _ = run(case.call, arrays, frozen=frozen)
    seeds = {}
    for index in static.used:
        seed = rng.standard_normal(outputs[index].shape)
        seeds[index] = seed.astype(outputs[index].dtype)
    grads = [seeds.get(i) for i in range(len(outputs))]
    outputs, expected = run(case.call, arrays, grads, frozen)
    paddle.enable_static()
    results = static.run(arrays, seeds)
    for actual, value in zip(results, outputs):
        assert_bit_equal(actual, value, f"{what}: output")
    for actual, index in zip(results[len(outputs) :], static.wanted):
        assert_bit_equal(actual, expected[index], f"{what}: gradient of input {index}")


SEVERAL = [c for c in DIFFERENTIABLE if sum(one.trains for one in c.outputs) > 1]


@named(SEVERAL)
def test_gradients_of_one_output_only(case, rng):
    for used in range(len(case.outputs)):
        static = Static(case, "float32", with_grads=True, used=[used])
        arrays = case.arrays(rng, 3, "float32")
        paddle.disable_static()
        value = rng.standard_normal(run(case.call, arrays)[0][used].shape).astype("float32")
        frozen = {i for i in range(len(arrays)) if i not in static.wanted}
        seeds = [value if i == used else None for i in range(len(case.outputs))]
        _, expected = run(case.call, arrays, seeds, frozen)
        paddle.enable_static()
        wanted, reached = [], []
        for variable, index in zip(static.grads, static.wanted):
            if variable is None:  # Paddle's word for a gradient of zeros
                assert expected[index] is None or not expected[index].any()
            else:
                wanted.append(variable)
                reached.append(expected[index])
        results = static.run(arrays, {used: value}, wanted)
        for actual, grad in zip(results, reached):
            # Adding 0 turns the -0 of rotated zeros into 0: a graph rotates what dygraph fills in.
            grad = np.zeros_like(actual) if grad is None else grad + 0
            assert_bit_equal(actual + 0, grad, f"{case.name} from output {used}")


def second_order(function, program):
    """Variables of the second derivatives of a function of one tensor in a static program."""
    with paddle.static.program_guard(program, paddle.static.Program()):
        x = paddle.static.data("x", [-1, 8], "float32")
        x.stop_gradient = False
        first = paddle.static.gradients([function(x)], [x])
        return paddle.static.gradients([(first[0] * first[0]).sum()], [x])


@pytest.mark.parametrize("name", ["rms_norm", "swiglu"])
def test_second_order_ends_at_the_operators(name):
    """Paddle's limit on custom operators; when it is gone, change docs/deploy.md."""
    paddle.enable_static()
    assert second_order(getattr(F, name), paddle.static.Program()) == [None]


def test_second_order_of_the_reference(rng):
    paddle.enable_static()
    x = random_array(rng, (3, 8), "float32")
    program = paddle.static.Program()
    (second,) = second_order(reference.rms_norm, program)
    executor = paddle.static.Executor(paddle.CPUPlace())
    (result,) = executor.run(program, feed={"x": x}, fetch_list=[second])
    assert result.shape == x.shape and np.isfinite(result).all() and result.any()
