"""Operators on streams other than the default one, and in CUDA graphs, through Paddle."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from helpers import devices
from helpers.arrays import to_numpy, to_paddle
from helpers.calls import CALLS, make_call
from helpers.running import as_tuple, assert_same

SHAPE = (64, 512)


@pytest.fixture(scope="module")
def driver():
    """The CUDA driver: copies on a stream, in the context that Paddle made current."""
    return ctypes.CDLL("libcuda.so.1")


def copy_on(driver, stream, target, source) -> None:
    """Device to device, asynchronously, into the memory of a tensor."""
    size = int(np.prod(target.shape)) * target.element_size()
    code = driver.cuMemcpyDtoDAsync_v2(
        *(ctypes.c_uint64(t.data_ptr()) for t in (target, source)),
        *(ctypes.c_size_t(size), ctypes.c_void_p(stream)),
    )
    assert code == 0, f"CUDA error {code}"


class Prepared:
    """A call whose tensors are made, so that only the operator's own work is left."""

    def __init__(self, name, dtype, seed=0):
        self.call = make_call(name, dtype, *SHAPE, seed=seed)
        self.tensors = [to_paddle(a, a.dtype == np.int64) for a in self.call.inputs]
        self.upstream = [None if g is None else to_paddle(g) for g in self.call.upstream]

    def compute(self):
        """Outputs, and gradients where the call has a backward pass."""
        import paddle

        outputs = as_tuple(self.call.function(*self.tensors))
        pairs = [(o, g) for o, g in zip(outputs, self.upstream) if g is not None]
        if not pairs:
            return list(outputs)
        wanted = [t for t in self.tensors if not t.stop_gradient]
        grads = paddle.grad([o for o, _ in pairs], wanted, [g for _, g in pairs])
        return [*outputs, *grads]


@pytest.mark.parametrize("name", list(filter(devices.works, CALLS)))
def test_side_stream(driver, dtype, name):
    """What a stream did before the operator is seen by it: its input arrives late on that stream.

    An operator on another stream would start before the input is there.
    """
    import paddle

    prepared = Prepared(name, dtype)
    first = prepared.tensors[0]
    expected = [to_numpy(t) for t in prepared.compute()]
    source = to_paddle(prepared.call.inputs[0])
    blank = to_paddle(np.zeros_like(prepared.call.inputs[0]))
    block = to_paddle(np.zeros(64 << 20, np.float32))
    stream = paddle.device.cuda.Stream()
    handle = getattr(stream, "stream_base", stream).cuda_stream
    copy_on(driver, 0, first, blank)
    paddle.device.synchronize()
    with paddle.device.cuda.stream_guard(stream):
        for _ in range(10):  # about a millisecond
            copy_on(driver, handle, block, block)
        copy_on(driver, handle, first, source)
        results = prepared.compute()
        stream.synchronize()
        assert_same([to_numpy(t) for t in results], expected, name)


@pytest.mark.parametrize("name", list(filter(devices.works, CALLS)))
def test_graph_capture(driver, dtype, name):
    """Captured once, forward and backward, and replayed on other values of the same memory."""
    import paddle
    from paddle.device.cuda import graphs

    if not graphs.is_cuda_graph_supported():
        pytest.skip("this Paddle has no CUDA graphs")
    prepared, other = Prepared(name, dtype), Prepared(name, dtype, seed=1)
    expected = [[to_numpy(t) for t in one.compute()] for one in (prepared, other)]
    first, second = (
        [to_paddle(a) for a in (*one.call.inputs, *one.call.upstream) if a is not None]
        for one in (prepared, other)
    )
    memory = [t for t in (*prepared.tensors, *prepared.upstream) if t is not None]
    paddle.device.synchronize()
    graph = graphs.CUDAGraph()
    graph.capture_begin()
    results = prepared.compute()
    graph.capture_end()
    for values, wanted in zip((second, first, second), (*expected[::-1], expected[1])):
        for target, source in zip(memory, values):
            copy_on(driver, 0, target, source)
        graph.replay()
        paddle.device.synchronize()
        assert_same([to_numpy(t) for t in results], wanted, name)
    graph.reset()
