"""What PaddleFormers' table does, on a stand-in for it.

tests/with_paddleformers runs the real library.
"""

from __future__ import annotations

import copy
import importlib
import sys

import numpy as np
import paddle
import pytest

import paddle_fused
from helpers import model_library, numeric, oracle
from helpers.arrays import random_array, to_numpy, to_paddle
from helpers.rotations import check_rotation
from helpers.running import run
from paddle_fused.nn.functional.rope import rotate_pairs_heads_first

LLAMA = "paddleformers.transformers.llama.modeling"
ROPE = f"{LLAMA}.apply_rotary_pos_emb"


def load(name):
    return importlib.import_module(name)


class Block(paddle.nn.Layer):
    """A norm and a feed-forward block, as a model of the library has them."""

    def __init__(self, fuse=True, act_fn=None, fuse_up_gate=False):
        super().__init__()
        norm, mlp = load("paddleformers.nn.norm"), load("paddleformers.nn.mlp")
        self.norm = norm.Norm.create({"fuse_rms_norm": fuse}, 8)
        self.mlp = mlp.MLP(8, 6, act_fn, fuse_up_gate)

    def forward(self, x):
        return self.mlp(self.norm(x))


def line_of(report, name):
    (line,) = [line for line in report.lines if line.name == name]
    return line


@pytest.mark.parametrize("when", ["before", "after"])
def test_module_imported_before_or_after(library, rng, when):
    if when == "before":
        load(LLAMA)
    report = paddle_fused.patch()
    assert line_of(report, ROPE).status == ("replaced" if when == "before" else "waiting")
    module = load(LLAMA)
    assert line_of(report, ROPE).status == "replaced"
    q, k = (random_array(rng, (2, heads, 5, 8), "float32") for heads in (4, 2))
    cos, sin = (random_array(rng, (1, 5, 8), "float32") for _ in range(2))
    out = module.apply_rotary_pos_emb(*(to_paddle(a) for a in (q, k, cos, sin)))
    for actual, x in zip(out, (q, k)):
        expected = oracle.rope(x, cos[:, None], sin[:, None], "halves")
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert line_of(report, ROPE).hits == 1
    assert module.swiglu_by_value(paddle.ones([1, 2], dtype="float16")).shape == [1, 1]
    paddle_fused.unpatch()
    assert not hasattr(module.apply_rotary_pos_emb, "__wrapped__")
    assert module.swiglu_by_value is paddle.nn.functional.swiglu
    assert module.norm_by_value is paddle.incubate.nn.functional.fused_rms_norm_ext


def test_by_value_from_a_model_module(library):
    """A module that took another model's rotation by value follows it, there and back."""
    first = load(LLAMA)
    second = load("paddleformers.transformers.qwen2.modeling")
    original = [first.apply_rotary_pos_emb]
    paddle_fused.patch()
    assert second.llama_rope is first.apply_rotary_pos_emb is not original[0]
    paddle_fused.unpatch()
    assert second.llama_rope is first.apply_rotary_pos_emb is original[0]


def test_reloaded_module_is_patched_again(library):
    module = load(LLAMA)
    report = paddle_fused.patch()
    importlib.reload(module)
    assert hasattr(module.apply_rotary_pos_emb, "__wrapped__")
    assert line_of(report, ROPE).status == "replaced"


def test_rotation_with_another_signature_is_left_alone(library):
    report = paddle_fused.patch()
    module = load("paddleformers.transformers.qwen2.modeling")
    assert module.apply_rotary_pos_emb.__code__.co_varnames[4] == "offset"
    line = line_of(report, "paddleformers.transformers.qwen2.modeling.apply_rotary_pos_emb")
    assert (line.status, line.reason[:26]) == ("not replaced", "its signature is another o")


def test_rotation_falls_through_with_tables_it_would_broadcast(library):
    report = paddle_fused.patch()
    module = load(LLAMA)
    q = paddle.randn([1, 2, 5, 8])
    cos, sin = paddle.randn([1, 1, 8]), paddle.randn([1, 1, 8])
    got, _ = module.apply_rotary_pos_emb(q, q, cos, sin)
    paddle_fused.unpatch()
    expected, _ = module.apply_rotary_pos_emb(q, q, cos, sin)
    np.testing.assert_array_equal(got.numpy(), expected.numpy())
    assert sum(line_of(report, ROPE).left.values()) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adjacent_pairs_with_heads_first(rng, dtype):
    """ERNIE's rotation, which no public function has."""
    q, k = (random_array(rng, (2, heads, 5, 8), dtype) for heads in (4, 2))
    grads = [random_array(rng, a.shape, dtype) for a in (q, k)]
    cos, sin = (random_array(rng, (1, 5, 8), dtype) for _ in range(2))

    def rotate(q, k):
        return rotate_pairs_heads_first(q, k, to_paddle(cos), to_paddle(sin))

    result = run(rotate, [q, k], grads)
    check_rotation(result, (q, k), grads, cos[:, None], sin[:, None], oracle.PAIRS)


@pytest.mark.parametrize("fuse", [True, False])
def test_norms_come_from_the_registry(library, rng, fuse):
    norm = load("paddleformers.nn.norm")
    stock = [norm.RMSNorm]
    report = paddle_fused.patch()
    layer = norm.Norm.create({"fuse_rms_norm": fuse}, 8)
    assert isinstance(layer, norm.RMSNorm) and norm.RMSNorm is stock[0]
    assert type(layer).__name__ == "RMSNorm" and list(layer.state_dict()) == ["weight"]
    x = random_array(rng, (3, 8), "float32")
    numeric.assert_ulp(
        layer(to_paddle(x)).numpy(),
        oracle.rms_norm(x, to_numpy(layer.weight), 1e-6),
        numeric.rms_norm_bound("float32", "gemma" if fuse else "llama"),
    )
    name = "paddleformers.nn.norm.Norm['rms_norm']"
    assert line_of(report, name).hits == 1
    paddle_fused.unpatch()
    assert type(norm.Norm.create({}, 8)) is norm.RMSNorm
    assert norm.Norm._global_mapping["rms_norm"] is norm.RMSNorm
    if fuse:  # and a layer that outlives the patch is the stock one again
        with pytest.raises(RuntimeError, match="fused_rms_norm_ext"):
            layer(to_paddle(x))


def test_a_norm_of_somebody_else_is_left_alone(library):
    norm = load("paddleformers.nn.norm")

    class Theirs(norm.RMSNorm):
        pass

    norm.Norm.register("rms_norm", Theirs)
    report = paddle_fused.patch()
    assert norm.Norm._global_mapping["rms_norm"] is Theirs
    line = line_of(report, "paddleformers.nn.norm.Norm['rms_norm']")
    assert line.status == "not replaced" and "Theirs is registered" in line.reason


@pytest.mark.parametrize("fuse_up_gate", [True, False], ids=["packed", "two projections"])
def test_mlp(library, rng, fuse_up_gate):
    mlp = load("paddleformers.nn.mlp")
    layer = mlp.MLP(8, 6, fuse_up_gate=fuse_up_gate)
    x = to_paddle(random_array(rng, (3, 8), "float32"))
    expected = layer(x).numpy()
    with paddle_fused.patched() as report:
        np.testing.assert_allclose(layer(x).numpy(), expected, rtol=1e-5, atol=1e-6)
    assert line_of(report, "paddleformers.nn.mlp.MLP.forward").hits == 1


def test_mlp_with_another_activation_falls_through(library, rng):
    mlp = load("paddleformers.nn.mlp")
    layer = mlp.MLP(8, 6, paddle.nn.GELU())
    x = to_paddle(random_array(rng, (3, 8), "float32"))
    expected = layer(x).numpy()
    with paddle_fused.patched() as report:
        np.testing.assert_array_equal(layer(x).numpy(), expected)
    assert line_of(report, "paddleformers.nn.mlp.MLP.forward").left == {"its activation is GELU": 1}


# A model that exists


def test_live_model_keeps_parameters_and_keys(library, rng):
    model = Block(fuse=False)
    parameters = [id(p) for p in model.parameters()]
    keys = list(model.state_dict())
    x = to_paddle(random_array(rng, (3, 8), "float32"))
    expected = model(x).numpy()
    report = paddle_fused.patch(targets=[], model=model)
    np.testing.assert_allclose(model(x).numpy(), expected, rtol=1e-5, atol=1e-6)
    assert [id(p) for p in model.parameters()] == parameters
    assert list(model.state_dict()) == keys
    assert report.hits == 2
    assert "RMSNorm.forward of 1 layers" in str(report)
    assert not hasattr(load("paddleformers.nn.mlp").MLP.forward, "__wrapped__")
    paddle_fused.unpatch()
    assert "forward" not in vars(model.norm) and "forward" not in vars(model.mlp)
    np.testing.assert_array_equal(model(x).numpy(), expected)


def test_live_model_alone_of_two(library):
    one, other = Block(), Block()
    x = paddle.randn([3, 8])
    with paddle_fused.patched(targets=[], model=one):
        one(x).sum().backward()
        assert one.norm.weight.grad is not None
        with pytest.raises(RuntimeError, match="fused_rms_norm_ext"):
            other(x)


def test_live_model_nests_and_repeats(library):
    model = Block()
    x = paddle.randn([3, 8])
    paddle_fused.patch(targets=[], model=model)
    paddle_fused.patch(targets=[], model=model)
    with paddle_fused.patched(targets=[], model=model):
        pass
    model(x)
    with paddle_fused.patched(targets=[], model=model):
        paddle_fused.unpatch()
        model(x)
    assert "forward" not in vars(model.norm)


def test_live_model_built_under_an_earlier_patch(library):
    with paddle_fused.patched():
        model = Block()
    with paddle_fused.patched(targets=[], model=model) as report:
        model(paddle.randn([3, 8]))
    assert report.hits == 2


def test_live_model_copies_and_dies(library):
    model = Block()
    paddle_fused.patch(targets=[], model=model)
    twin = copy.deepcopy(model)
    twin.norm.weight.set_value(twin.norm.weight * 2)
    x = paddle.randn([3, 8])
    assert twin.norm.forward.__self__ is twin.norm
    np.testing.assert_allclose(twin.norm(x).numpy(), 2 * model.norm(x).numpy(), rtol=1e-6)
    import gc
    import weakref

    gone = weakref.ref(model.norm)
    del model
    gc.collect()
    assert gone() is None
    assert "RMSNorm.forward of" not in str(paddle_fused.patch_report())


def test_layers_that_override_forward_are_left_alone(library):
    norm = load("paddleformers.nn.norm")

    class Pipe(norm.RMSNorm):
        def forward(self, arguments):
            return super().forward(arguments[0])

    layer = Pipe({"fuse_rms_norm": False}, 8)
    layer.norm_eps = layer.variance_epsilon = 1e-6
    with paddle_fused.patched(targets=[], model=layer):
        assert "forward" not in vars(layer)
        layer((paddle.randn([3, 8]),))


# Versions


@pytest.mark.parametrize(
    "version, reason",
    [
        ("1.1.5", "paddleformers 1.1.5, known from 1.2"),
        ("1.3.0", "paddleformers 1.3.0, known below 1.3"),
    ],
)
def test_other_versions_are_left_alone(tmp_path, version, reason):
    with model_library.installed(tmp_path, version):
        module = load(LLAMA)
        report = paddle_fused.patch()
        assert not hasattr(module.apply_rotary_pos_emb, "__wrapped__")
        assert reason in str(report)
        # Names that it took from Paddle are Paddle's all the same.
        assert module.swiglu_by_value(paddle.ones([1, 2], dtype="float16")).shape == [1, 1]
        paddle_fused.unpatch()
        assert "paddleformers" in sys.modules
