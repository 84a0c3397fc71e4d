"""Paddle's side: this package, the same in plain Paddle operators, Paddle's own kernels."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("GLOG_minloglevel", "2")

import numpy as np
import paddle

import paddle_fused
from benchmarks.cpu import cases, worker
from paddle_fused import _ops, _runtime, reference
from paddle_fused.nn import functional

OPERATORS = {"paddle_fused": functional, "plain Paddle": reference}


def tensor(rng, shape, dtype, trains=False):
    """Random values."""
    value = paddle.to_tensor(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
    value.stop_gradient = not trains
    return value


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


def both_ways(case, forward, inputs, ready):
    """(prepare, call) of the forward or of the backward pass of forward(), given by its inputs."""
    if case.direction == "forward":
        return None, lambda _: forward()

    def prepare():
        outputs = forward()
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return sum(Consumer.apply(out, [grad]) for out, grad in zip(outputs, ready))

    return prepare, lambda loss: paddle.grad(loss, inputs)


def rms_norm(case, rng):
    """rms_norm; beside it Paddle's fused_rms_norm, whose CPU kernel is float32 and AVX-512 only."""
    trains = case.direction == "backward"
    x = tensor(rng, case.shape, case.dtype, trains)
    weight = tensor(rng, case.shape[-1:], case.dtype, trains)
    ready = [tensor(rng, case.shape, case.dtype)]
    calls = {
        name: both_ways(case, lambda ops=ops: ops.rms_norm(x, weight), [x, weight], ready)
        for name, ops in OPERATORS.items()
    }
    if not trains and case.dtype == "float32" and _runtime.cpu_target() == "avx512":
        own = paddle.incubate.nn.functional.fused_rms_norm
        calls["Paddle's kernel"] = None, lambda _: own(x, weight, None, 1e-6, 1)
    parts = _ops.double_parts(1e-6), _ops.double_parts(0.0)
    if not trains:
        bare = lambda _: _ops._run("paddle_fused_rms_norm", x, weight, *parts, 0, False)  # noqa: E731
        calls["bare operator"] = None, bare
    return calls


def swiglu(case, rng):
    """Swiglu of a packed tensor; Paddle's own has a float32 kernel."""
    trains = case.direction == "backward"
    rows, width = case.shape
    x = tensor(rng, [rows, 2 * width], case.dtype, trains)
    ready = [tensor(rng, case.shape, case.dtype)]
    calls = {
        name: both_ways(case, lambda ops=ops: ops.swiglu(x), [x], ready)
        for name, ops in OPERATORS.items()
    }
    own = getattr(paddle.nn.functional, "swiglu", None)
    if own is not None and case.dtype == "float32":
        calls["Paddle's kernel"] = both_ways(case, lambda: own(x), [x], ready)
    if not trains:
        calls["bare operator"] = None, lambda _: _ops._run("paddle_fused_swiglu", x)
    return calls


def swiglu_weighted(case, rng):
    """fused_swiglu_weighted; Paddle has no CPU kernel of it."""
    trains = case.direction == "backward"
    rows, width = case.shape
    x = tensor(rng, [rows, 2 * width], case.dtype, trains)
    probs = tensor(rng, [rows], "float32", trains)
    ready = [tensor(rng, case.shape, case.dtype)]
    calls = {
        name: both_ways(case, lambda o=ops: o.fused_swiglu_weighted(x, probs), [x, probs], ready)
        for name, ops in OPERATORS.items()
    }
    if not trains:
        bare = lambda _: _ops._run("paddle_fused_swiglu_weighted", x, probs)  # noqa: E731
        calls["bare operator"] = None, bare
    return calls


def fused_swiglu_weighted_bwd(case, rng):
    """The hand-written backward pass of a mixture of experts."""
    rows, width = case.shape
    x, probs = tensor(rng, [rows, 2 * width], case.dtype), tensor(rng, [rows], "float32")
    grad = tensor(rng, case.shape, case.dtype)
    calls = {
        name: (None, lambda _, ops=ops: ops.fused_swiglu_weighted_bwd(x, grad, probs))
        for name, ops in OPERATORS.items()
    }
    bare = lambda _: _ops._run("paddle_fused_swiglu_weighted_bwd", x, grad, probs)  # noqa: E731
    calls["bare operator"] = None, bare
    return calls


def rope(case, rng):
    """fused_rotary_position_embedding of q and k in halves; Paddle has no CPU kernel of it."""
    trains = case.direction == "backward"
    q, k = (tensor(rng, case.shape, case.dtype, trains) for _ in range(2))
    ready = [tensor(rng, case.shape, case.dtype) for _ in range(2)]
    sin, cos = (tensor(rng, [case.shape[1], case.shape[3]], "float32") for _ in range(2))

    def call(ops):
        return ops.fused_rotary_position_embedding(
            q, k, sin=sin, cos=cos, use_neox_rotary_style=False
        )[:2]

    calls = {
        name: both_ways(case, lambda ops=ops: call(ops), [q, k], ready)
        for name, ops in OPERATORS.items()
    }
    if not trains:
        attributes = (None, 1, 0, [*q.shape, *k.shape], "rope")
        bare = lambda _: _ops._run("paddle_fused_rope_qk", q, k, sin, cos, *attributes)  # noqa: E731
        calls["bare operator"] = None, bare
    return calls


MAKERS = {f.__name__: f for f in (rms_norm, swiglu, swiglu_weighted, rope)}
MAKERS["fused_swiglu_weighted_bwd"] = fused_swiglu_weighted_bwd


def make_case(case: cases.Case, rng) -> dict:
    """The providers of a case."""
    calls = MAKERS[case.operator](case, rng)
    if case.size != "tiny":
        calls.pop("bare operator", None)
    return calls


def main() -> None:
    """Serves until the driver closes the pipe."""
    threads, keep = int(sys.argv[1]), sys.argv[2] == "keep"
    paddle_fused.set_num_threads(threads)
    if keep:
        paddle_fused.keep_cpu_memory()
    description = {
        "paddle": paddle.__version__,
        "paddle_fused": paddle_fused.__version__,
        "target": _runtime.cpu_target(),
    }
    worker.serve(description, make_case)


if __name__ == "__main__":
    main()
