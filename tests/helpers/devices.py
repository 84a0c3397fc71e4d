"""Runs tests on a CUDA device, with whatever this Paddle can do there."""

from __future__ import annotations

import numpy as np
import pytest

# Tests of tests/ops that are about the CPU's kernels, or errors that a GPU does not raise.
CPU_ONLY = {
    "test_threads_and_repeats": "threads of the CPU kernels",
    "test_cpu_targets": "instruction sets of the CPU kernels",
    "test_streaming_stores": "stores of the CPU kernels",
    "test_fork_after_use": "a CUDA context does not survive a fork",
    "test_position_outside_the_tables": "a GPU marks such tokens with NaN instead",
    "test_vector_math.py": "vectors of the CPU kernels",
}

# Those that also compute with operators of Paddle: views made contiguous, casts, gradients added up
# or filled with zeros, memory filled before it is freed.
PADDLES_KERNELS = (
    "test_reference.py",
    "test_a_longer_table_uses_its_first_rows",
    "test_a_tensor_used_twice_adds_its_gradients",
    "test_a_transposed_input_gives_a_contiguous_output",
    "test_epsilon_keeps_its_range_in_float64",
    "test_ext_layouts",
    "test_heads_of_a_fused_projection",
    "test_layouts",
    "test_missing_gradient_is_zero_or_an_error",
    "test_one_table_per_sequence_equals_the_reference",
    "test_results_after_poisoned_memory",
    "test_second_order_central_differences",
    "test_second_order_of_some_gradients",
    "test_some_outputs_used",
    "test_the_two_pairings",
    "test_weight_dtypes",
    "test_weight_trains_in_a_step",
)

# Paddle 2.x refuses empty outputs of custom operators, names their errors otherwise, and has fewer
# kinds of tensor.
PADDLE_3 = (
    "test_empty",
    "test_empty_others",
    "test_ext_empty",
    "test_gradient_of_another_shape_is_refused",
    "test_int8",
    "test_int8_saturates_and_keeps_shape",
    "test_int8_ties",
    "test_k_without_heads_leaves_q_alone",
    "test_second_order_of_no_rows",
    "test_second_order_that_does_not_exist_raises",
    "test_second_order_with_frozen_inputs",
    "test_sparse_tensors_are_refused",
)


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
    reasons = dict(CPU_ONLY)
    if not own_kernels_run():
        reasons |= dict.fromkeys(PADDLES_KERNELS, "Paddle has no GPU kernels for this device")
    if not empty_outputs_work():
        reasons |= dict.fromkeys(PADDLE_3, "needs Paddle 3")
    for item in items:
        names = (getattr(item, "originalname", item.name), item.path.name)
        for name in names:
            if name in reasons:
                item.add_marker(pytest.mark.skip(reason=reasons[name]))
        if not works(item.name.rstrip("]")):
            item.add_marker(pytest.mark.skip(reason="needs Paddle 3"))


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
