"""Faults around autograd: memory shared with others, gradients lost, views, other ways to run."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import paddle_fused.nn.functional as F
from helpers import numeric, oracle
from helpers.arrays import random_array, to_numpy, to_paddle
from helpers.calls import CALLS, make_call
from helpers.running import as_tuple, assert_same
from paddle_fused import reference as R


def leaves(*arrays):
    return [to_paddle(a, stop_gradient=False) for a in arrays]


def gradients(function, arrays):
    """The input gradients of Σ weights·outputs, in float64 arithmetic of the tests' making."""
    tensors = leaves(*arrays)
    outputs = as_tuple(function(*tensors))
    upstream = [
        to_paddle(random_array(np.random.default_rng(7), out.shape, "float64")) for out in outputs
    ]
    return [to_numpy(g) for g in paddle.grad(list(outputs), tensors, upstream)]


def norm(x, weight):
    return F.rms_norm(x, weight, 2.0**-20)


def plain_norm(x, weight):
    return x / paddle.sqrt((x * x).mean(-1, keepdim=True) + 2.0**-20) * weight


def plain_swiglu(x, y):
    return x / (1.0 + paddle.exp(-x)) * y


# Graphs whose branches share a tensor: (with our operators, in plain Paddle, shapes).
SHARED = {
    "a norm and its input": (
        lambda x, w: norm(x, w) + x,
        lambda x, w: plain_norm(x, w) + x,
        [(5, 8), (8,)],
    ),
    "two norms of one input": (
        lambda x, w, v: norm(x, w) + norm(x, v),
        lambda x, w, v: plain_norm(x, w) + plain_norm(x, v),
        [(5, 8), (8,), (8,)],
    ),
    "a norm whose output meets an earlier residual": (
        lambda x, r, w: sum(F.rms_norm(norm(x + r, w), w, 2.0**-20, residual=r)),
        lambda x, r, w: plain_norm(plain_norm(x + r, w) + r, w) + plain_norm(x + r, w) + r,
        [(5, 8), (5, 8), (8,)],
    ),
    "a gate that remembers its output": (
        lambda p, y: F.swiglu(paddle.tanh(p), y),
        lambda p, y: plain_swiglu(paddle.tanh(p), y),
        [(4, 6), (4, 6)],
    ),
    "a gate with another use": (
        lambda x, y: F.swiglu(x, y) + x * x,
        lambda x, y: plain_swiglu(x, y) + x * x,
        [(4, 6), (4, 6)],
    ),
    "one tensor as gate and as up": (
        lambda x: F.swiglu(x, x),
        lambda x: plain_swiglu(x, x),
        [(4, 6)],
    ),
    "a norm after a norm": (
        lambda x, w: norm(norm(x, w), w),
        lambda x, w: plain_norm(plain_norm(x, w), w),
        [(4, 6), (6,)],
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_tensors_with_several_uses(rng, name):
    ours, plain, shapes = SHARED[name]
    arrays = [random_array(rng, shape, "float64") for shape in shapes]
    for actual, expected in zip(gradients(ours, arrays), gradients(plain, arrays)):
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in CALLS if make_call(n, "float32", 3, 16).upstream])
def test_a_second_backward_gives_the_same(name):
    """retain_graph: nothing that was saved has been overwritten; leaves keep their data."""
    call = make_call(name, "float32", 3, 16)
    tensors = [to_paddle(a, stop_gradient=a.dtype == np.int64) for a in call.inputs]
    wanted = [t for t in tensors if not t.stop_gradient]
    outputs = as_tuple(call.function(*tensors))
    pairs = [(o, to_paddle(g)) for o, g in zip(outputs, call.upstream) if g is not None]

    def backward():
        outs, grads = zip(*pairs)
        got = paddle.grad(list(outs), wanted, list(grads), retain_graph=True)
        return [to_numpy(g) for g in got]

    first = backward()
    assert_same(backward(), first)
    assert_same([to_numpy(t) for t in tensors], call.inputs, "inputs")
    for (_, grad), array in zip(pairs, [g for g in call.upstream if g is not None]):
        numeric.assert_bit_equal(to_numpy(grad), array, "upstream gradient")


def test_storage_of_heads_last_is_not_rotated_in_place(rng):
    """Q and k whose [B, S, heads, D] memory is seen as [B, heads, S, D]; also a single k head."""
    q, k = (random_array(rng, (2, 5, heads, 8), "float32") for heads in (4, 1))
    cos, sin = (to_paddle(random_array(rng, (5, 8), "float32")) for _ in range(2))
    tensors = [to_paddle(t) for t in (q, k)]
    outputs = F.apply_rotary_pos_emb(*(t.transpose([0, 2, 1, 3]) for t in tensors), cos, sin)
    assert_same([to_numpy(t) for t in tensors], [q, k])
    for out, array in zip(outputs, (q, k)):
        assert np.abs(to_numpy(out) - array.transpose(0, 2, 1, 3)).max() > 0.1


def test_one_head_is_rotated(rng):
    q, k = (random_array(rng, (1, 2, heads, 128), "float32") for heads in (2, 1))
    out_q, out_k, _ = F.fused_rotary_position_embedding(*map(to_paddle, (q, k)))
    cos, sin = (t[None, :, None] for t in oracle.rope_tables(np.arange(2), 128, 1e4, "pairs"))
    for out, array in ((out_q, q), (out_k, k)):
        scale = oracle.rope_scale(array, cos, sin, "pairs")
        numeric.assert_ulp(to_numpy(out), oracle.rope(array, cos, sin, "pairs"), 4.0, scale)
        assert (to_numpy(out)[0, 1] != array[0, 1]).any()


@pytest.mark.parametrize("which", ["weight", "probability"])
def test_what_should_train_trains(rng, which):
    x = random_array(rng, (6, 16), "float32")
    other = random_array(rng, (16,) if which == "weight" else (6,), "float32")
    parameter = to_paddle(other, stop_gradient=False)
    optimizer = paddle.optimizer.SGD(0.1, parameters=[parameter])
    function = F.rms_norm if which == "weight" else F.fused_swiglu_weighted
    out = function(to_paddle(x), parameter)
    (out * out).sum().backward()
    assert (to_numpy(parameter.grad) != 0).all()
    optimizer.step()
    assert (to_numpy(parameter) != other).all()


@pytest.mark.parametrize("wanting", ["v", "qv", "k", "kv"])
def test_gradients_arrive_in_their_own_slots(rng, wanting):
    """q, k and v of different shapes, only some of which want a gradient."""
    arrays = {n: random_array(rng, (2, 3, h, 4), "float32") for n, h in zip("qkv", (3, 2, 1))}
    tensors = {n: to_paddle(a, stop_gradient=n not in wanting) for n, a in arrays.items()}
    outputs = F.fused_rotary_position_embedding(**tensors)
    pairs = [(o, n) for o, n in zip(outputs, "qkv") if n in wanting]
    paddle.autograd.backward([o for o, _ in pairs], [to_paddle(arrays[n]) for _, n in pairs])
    for name, tensor in tensors.items():
        assert (tensor.grad is None) == (name not in wanting)
        if tensor.grad is not None:
            alone = to_paddle(arrays[name], stop_gradient=False)
            out = F.fused_rotary_position_embedding(alone)[0]
            paddle.autograd.backward([out], [to_paddle(arrays[name])])
            numeric.assert_bit_equal(to_numpy(tensor.grad), to_numpy(alone.grad), name)


def test_slices_of_a_fused_projection(rng):
    qkv = to_paddle(random_array(rng, (6, 192), "float32"))
    weight = to_paddle(random_array(rng, (64,), "float32"))
    for view in (qkv[:, 64:128], qkv.reshape([2, 3, 192])[..., 64:128]):
        assert not view.is_contiguous()
        expected = F.rms_norm(view.clone(), weight)
        numeric.assert_bit_equal(to_numpy(F.rms_norm(view, weight)), to_numpy(expected))
        numeric.assert_bit_equal(to_numpy(F.swiglu(view)), to_numpy(F.swiglu(view.clone())))


class Turned(paddle.nn.Layer):
    """The operators on transposed inputs."""

    def forward(self, x, weight, probs):
        turned = x.t()
        return F.fused_swiglu_weighted(turned, probs), F.rms_norm(turned, weight)


@pytest.mark.parametrize("how", ["dygraph", "to_static", "exported"])
def test_transposed_input(rng, how, tmp_path):
    arrays = [random_array(rng, shape, "float32") for shape in ((8, 6), (8,), (6,))]
    x, weight, probs = map(to_paddle, arrays)
    contiguous = to_paddle(arrays[0].T.copy())
    expected = F.fused_swiglu_weighted(contiguous, probs), F.rms_norm(contiguous, weight)
    layer = Turned()
    if how == "to_static":
        layer = paddle.jit.to_static(layer, full_graph=True)
    elif how == "exported":
        specs = [paddle.static.InputSpec([-1] * a.ndim, "float32") for a in arrays]
        paddle.jit.save(layer, str(tmp_path / "turned"), input_spec=specs)
        layer = paddle.jit.load(str(tmp_path / "turned"))
    outputs = layer(x, weight, probs)
    assert_same([to_numpy(o) for o in outputs], [to_numpy(e) for e in expected])


# ---- Mixed precision, recomputation


class Small(paddle.nn.Layer):
    """Linear, norm with a float32 weight, linear, weighted SwiGLU with float32 probabilities."""

    def __init__(self):
        super().__init__()
        self.first, self.second = paddle.nn.Linear(16, 16), paddle.nn.Linear(16, 32)
        self.weight = self.create_parameter([16])

    def forward(self, x, probs):
        return F.fused_swiglu_weighted(self.second(F.rms_norm(self.first(x), self.weight)), probs)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_mixed_precision(rng, level):
    """Leaves get gradients in their own dtype, close to a float32 run's; some CPUs cast nothing."""
    paddle.seed(3)
    layer = Small()
    x, probs = leaves(*(random_array(rng, s, "float32") for s in ((5, 16), (5,))))
    exact = layer(x, probs)
    exact.sum().backward()
    expected = {n: to_numpy(p.grad) for n, p in layer.named_parameters()}
    layer.clear_gradients()
    with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
        out = layer(x, probs)
    out.astype("float32").sum().backward()
    for name, parameter in layer.named_parameters():
        grad = to_numpy(parameter.grad)
        assert parameter.grad.dtype == parameter.dtype
        distance = np.linalg.norm(grad - expected[name]) / np.linalg.norm(expected[name])
        assert distance < 2e-2, name


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(rng, reentrant):
    """Q and k through recompute: the plain run's bits, in both of Paddle's ways."""
    from paddle.distributed.fleet.utils import recompute

    def rotate(q, k):
        return F.fused_rotary_position_embedding(q, k)[:2]

    arrays = [random_array(rng, (2, 3, h, 8), "float32") for h in (2, 1)]
    results = []
    for call in (rotate, lambda q, k: recompute(rotate, q, k, use_reentrant=reentrant)):
        tensors = leaves(*arrays)
        outputs = call(*tensors)
        (outputs[0].sum() + (outputs[1] * outputs[1]).sum()).backward()
        results.append([to_numpy(t) for t in (*outputs, *(t.grad for t in tensors))])
    assert_same(*results)


# ---- Widths of nothing


def test_statistics_of_rows_without_columns():
    y, invvar = F.fused_rms_norm_ext(paddle.zeros([3, 0]), paddle.zeros([0]))
    assert y.shape == [3, 0] and invvar.shape == [3]
    assert np.isfinite(invvar.numpy()).all()


def test_probability_gradient_of_rows_without_columns():
    """A sum over nothing is zero, whatever the memory held."""
    for _ in range(20):
        dirt = [paddle.full([1000], float("nan")) for _ in range(4)]
        del dirt
        probs = to_paddle(np.ones(1000, np.float32), stop_gradient=False)
        out = F.fused_swiglu_weighted(paddle.zeros([1000, 0]), probs)
        paddle.autograd.backward([out], [out.detach()])
        assert not to_numpy(probs.grad).any()


def test_reference_takes_the_same_calls(rng):
    """The wrapper does not fall through from the fused path into a plain one: one result, once."""
    x, weight = (to_paddle(random_array(rng, s, "float64")) for s in ((3, 8), (8,)))
    np.testing.assert_allclose(
        F.rms_norm(x, weight).numpy(), R.rms_norm(x, weight).numpy(), rtol=1e-12
    )
