"""Functions and layers under paddle.jit.to_static: the same bits as in dygraph."""

from __future__ import annotations

import paddle
import pytest
from paddle.static import InputSpec

import paddle_fused.nn.functional as F
from helpers.arrays import random_array, to_numpy, to_paddle
from helpers.cases import CASES
from helpers.models import HEADS, HIDDEN, OneChain
from helpers.numeric import assert_bit_equal
from helpers.running import assert_same, run
from paddle_fused.nn import RMSNorm, RotaryEmbedding, SwiGLUMLP

BATCHES = (1, 3, 8, 0)
MODES = pytest.mark.parametrize("full_graph", [False, True], ids=["sot", "full_graph"])


def specs(case, dtype):
    """What is known of the inputs when the function is traced."""
    return [
        InputSpec(
            [None if size < 0 else size for size in one.unknown()],
            one.dtype or dtype,
            f"input{index}",
            stop_gradient=not one.trains,
        )
        for index, one in enumerate(case.inputs)
    ]


def traced(call, count, full_graph, input_spec):
    """The call under to_static, as a function of so many named arguments."""

    # SOT and the AST pass both want a plain signature.
    def one(a):
        return call(a)

    def two(a, b):
        return call(a, b)

    def three(a, b, c):
        return call(a, b, c)

    def four(a, b, c, d):
        return call(a, b, c, d)

    def five(a, b, c, d, e):
        return call(a, b, c, d, e)

    def six(a, b, c, d, e, f):
        return call(a, b, c, d, e, f)

    function = [one, two, three, four, five, six][count - 1]
    # SOT reads the sizes from the first call and makes them unknown when they change.
    input_spec = input_spec if full_graph else None
    return paddle.jit.to_static(function, input_spec=input_spec, full_graph=full_graph)


@MODES
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_functions(case, full_graph, rng):
    dtype = "bfloat16" if "swiglu" in case.name else "float32"
    function = traced(case.call, len(case.inputs), full_graph, specs(case, dtype))
    frozen = {index for index, one in enumerate(case.inputs) if not one.trains}
    for batch in BATCHES:
        arrays = case.arrays(rng, batch, dtype)
        outputs, _ = run(case.call, arrays, frozen=frozen)
        grads = None
        if case.differentiable:
            grads = [
                random_array(rng, out.shape, out.dtype) if output.trains else None
                for out, output in zip(outputs, case.outputs)
            ]
        expected = run(case.call, arrays, grads, frozen)
        actual = run(function, arrays, grads, frozen)
        for kind, a, b in zip(("output", "gradient"), actual, expected):
            assert_same(a, b, f"{case.name}, batch {batch}: {kind}")


class Block(paddle.nn.Layer):
    """Norm, rotation, and two feed-forward blocks of which one is weighted per token."""

    def __init__(self):
        super().__init__()
        self.input_norm = RMSNorm(HIDDEN)
        self.qk_proj = paddle.nn.Linear(HIDDEN, 2 * HIDDEN, bias_attr=False)
        self.rotary = RotaryEmbedding(HIDDEN // HEADS, max_position_embeddings=16)
        self.post_norm = RMSNorm(HIDDEN, casting_mode="gemma", offset=1.0)
        self.mlp = SwiGLUMLP(HIDDEN, 16)
        self.expert = paddle.nn.Linear(HIDDEN, 2 * HIDDEN, bias_attr=False)
        self.router = paddle.nn.Linear(HIDDEN, 1, bias_attr=False)

    def forward(self, x):
        qk = self.qk_proj(self.input_norm(x))
        q, k = paddle.split(qk, 2, axis=-1)
        heads = [paddle.shape(x)[0], paddle.shape(x)[1], HEADS, HIDDEN // HEADS]
        q, k = paddle.reshape(q, heads), paddle.reshape(k, heads)
        q, k = self.rotary(q, k)
        mixed = paddle.flatten(q * k, 2)
        normed, total = self.post_norm(mixed, x)
        probs = paddle.nn.functional.sigmoid(self.router(normed)).astype("float32")
        weighted = F.fused_swiglu_weighted(self.expert(normed), probs)
        return total + self.mlp(normed) + weighted


def train_step(model, parameters, x, optimizer, dtype):
    """(loss, input gradient, parameter gradients, parameters after the step), as arrays."""
    x = to_paddle(x, stop_gradient=False)
    out = model(x)
    loss = paddle.square(out.astype("float32")).sum()
    loss.backward()
    grads = [to_numpy(p.grad) for p in parameters]
    if dtype == "float32":
        optimizer.step()
    result = [to_numpy(out), to_numpy(loss), to_numpy(x.grad), *grads]
    optimizer.clear_grad()
    return [*result, *(to_numpy(p) for p in parameters)]


@MODES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_train_steps_of_layers(dtype, full_graph, rng):
    models = []
    for _ in range(2):
        paddle.seed(7)
        models.append(Block() if dtype == "float32" else OneChain().astype(dtype))
    optimizers = [paddle.optimizer.SGD(0.01, parameters=model.parameters()) for model in models]
    assert_same(*([to_numpy(p) for p in model.parameters()] for model in models), "start")
    spec = [InputSpec([None, None, HIDDEN], dtype)] if full_graph else None
    static = paddle.jit.to_static(models[1], input_spec=spec, full_graph=full_graph)
    for batch in BATCHES:
        x = random_array(rng, (batch, 5, HIDDEN), dtype)
        expected = train_step(models[0], models[0].parameters(), x, optimizers[0], dtype)
        actual = train_step(static, models[1].parameters(), x, optimizers[1], dtype)
        assert_same(actual, expected, f"batch {batch}")


@MODES
def test_input_spec_with_unknown_batch_and_length(full_graph, rng):
    """Traced once: another length is the same program."""
    norm = RMSNorm(HIDDEN)
    spec = [InputSpec([None, None, HIDDEN], "float32")]
    static = paddle.jit.to_static(norm.forward, input_spec=spec, full_graph=full_graph)
    for batch, length in ((1, 4), (3, 2), (8, 1), (0, 4), (2, 0)):
        x = to_paddle(random_array(rng, (batch, length, HIDDEN), "float32"))
        assert_bit_equal(to_numpy(static(x)), to_numpy(F.rms_norm(x, norm.weight)))
    if full_graph:
        assert len(static.program_cache) == 1
        assert "paddle_fused_rms_norm" in str(static.main_program)
