"""Runs tests on a CUDA device, with whatever this Paddle can do there."""

from __future__ import annotations

import numpy as np
import pytest

# Tests of tests/ops that are about the CPU's kernels, or errors that a GPU does not raise.
CPU_ONLY = {
    "test_threads_and_repeats": "threads of the CPU kernels",
    "test_cpu_targets": "instruction sets of the CPU kernels",
    "test_fork_after_use": "a CUDA context does not survive a fork",
    "test_position_outside_the_tables": "a GPU marks such tokens with NaN instead",
}


def missing() -> str | None:
    """Why nothing can be tested on a CUDA device here; None if it can."""
    try:
        import paddle
    except ImportError:
        return "Paddle is not installed"
    if not paddle.is_compiled_with_cuda():
        return "this Paddle has no CUDA"
    if paddle.device.cuda.device_count() == 0:
        return "there is no CUDA device"
    import paddle_fused

    return None if paddle_fused.has_cuda() else "paddle_fused was built for the CPU only"


def own_kernels_run() -> bool:
    """Whether Paddle's own GPU kernels run here: without code for the device they do nothing."""
    import paddle

    return bool((paddle.full([3], 7.0).numpy() == 7.0).all())


def use(device: str) -> None:
    """New tensors are created there."""
    import paddle

    paddle.set_device(device)


def prepare(items) -> None:
    """Marks collected tests for a run on the GPU, and makes it the place of new tensors."""
    reason = missing()
    if reason:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    use("gpu")
    for item in items:
        name = getattr(item, "originalname", item.name)
        if name in CPU_ONLY:
            item.add_marker(pytest.mark.skip(reason=CPU_ONLY[name]))


def spread(values: np.ndarray) -> np.ndarray:
    """The largest magnitude of each row: what a sum that cancels is measured by.

    Of everything where a row has one element.
    """
    values = np.abs(np.asarray(values).astype(np.float64))
    if values.size == 0:
        return values
    axis = -1 if values.shape[-1] > 1 else None
    return np.broadcast_to(values.max(axis, keepdims=True), values.shape)


def empty_outputs_work() -> bool:
    """Whether this Paddle lets a custom operator return an empty tensor; 2.x does not.

    One does for no rows, and for the sum that an int8 output comes without.
    """
    import paddle

    return int(paddle.__version__.split(".")[0]) != 2


def works(name: str) -> bool:
    """Whether a call of `helpers.calls` or `helpers.cases` works with this Paddle."""
    return empty_outputs_work() or not name.endswith("int8")
