"""One of two processes: runs every case on sharded tensors and writes what it saw as JSON.

Started by `paddle.distributed.launch`, see test_two_processes.py. A case gives for every output and
gradient where it lies and how far it is from the same computation on whole tensors in this process,
and which collective operations ran.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

import paddle_fused.nn.functional as F

MESH = None  # set in main()
CASES = {}


def case(function):
    """Registers a case by its name."""
    CASES[function.__name__] = function
    return function


# ---- placements as text


def placements(text: str):
    """R, P (partial sum) or the number of an axis."""
    special = {"R": dist.Replicate(), "P": dist.Partial()}
    return [special.get(text) or dist.Shard(int(text))]


def describe(tensor) -> str:
    """The reverse of placements()."""
    (placement,) = tensor.placements
    if placement.is_shard():
        return str(placement.get_dim())
    return "P" if placement.is_partial() else "R"


def sharded(array, text: str, trains: bool = True):
    """A distributed leaf with an array's values. P: each process has half of every value."""
    array = np.asarray(array)
    if text == "P":
        tensor = dtensor_from_local(paddle.to_tensor(array / 2), MESH, placements("P")).detach()
    else:
        tensor = dist.shard_tensor(paddle.to_tensor(array), MESH, placements(text))
    tensor.stop_gradient = not trains
    return tensor


def whole(tensor) -> np.ndarray:
    """All values of a distributed tensor."""
    return dist.reshard(tensor, MESH, placements("R")).numpy()


# ---- communication


class Collectives:
    """Counts the collective operations of Paddle's resharding in a `with` block.

    Paddle logs each of them (GLOG_vmodule in the environment) to the process's standard error.
    """

    def __enter__(self):
        self.file = tempfile.TemporaryFile()
        sys.stderr.flush()
        self.saved = os.dup(2)
        os.dup2(self.file.fileno(), 2)
        return self

    def __exit__(self, *error):
        os.dup2(self.saved, 2)
        os.close(self.saved)
        self.file.seek(0)
        text = self.file.read().decode(errors="replace")
        found = re.findall(r"Call `(\w+)` in Resharding", text)
        local = {"Slice", "Split", "Concat", "Full", "Add", "Multiply", "Scale", "Divide"}
        self.names = [name for name in found if name not in local]
        if error[0] is not None:
            sys.stderr.write(text[-2000:])


# ---- one operator


def compare(function, arrays, given, frozen=(), uneven=False):
    """Runs a function forward and backward on sharded and on whole tensors."""
    dense = [paddle.to_tensor(a, stop_gradient=i in frozen) for i, a in enumerate(arrays)]
    parts = [sharded(a, text, i not in frozen) for i, (a, text) in enumerate(zip(arrays, given))]

    def tuple_of(value):
        values = value if isinstance(value, (tuple, list)) else [value]
        return [one for one in values if one is not None]

    expected = tuple_of(function(*dense))
    rng = np.random.default_rng(5)
    grads = [rng.standard_normal(one.shape).astype("float32") for one in expected]
    with Collectives() as forward:
        actual = tuple_of(function(*parts))
    pairs = [i for i, one in enumerate(expected) if not one.stop_gradient]
    upstream = [sharded(grads[i], describe(actual[i]), False) for i in pairs]
    with Collectives() as backward:
        if pairs:
            paddle.autograd.backward([actual[i] for i in pairs], upstream)
    if pairs:
        paddle.autograd.backward(
            [expected[i] for i in pairs], [paddle.to_tensor(grads[i]) for i in pairs]
        )

    def error(part, one):
        got, want = whole(part), one.numpy()
        assert got.shape == want.shape, (got.shape, want.shape)
        assert got.dtype == want.dtype
        scale = np.abs(want).max() if want.size else 0
        return (
            float(np.abs(got - want).max() / scale) if scale else float(np.abs(got).max(initial=0))
        )

    kept = [i for i in range(len(parts)) if i not in frozen and dense[i].grad is not None]
    assert [parts[i].grad is not None for i in kept] == [True] * len(kept)
    return {
        "out": [describe(one) for one in actual],
        "grad": [describe(parts[i].grad) for i in kept],
        "out_error": [error(a, e) for a, e in zip(actual, expected)],
        "grad_error": [error(parts[i].grad, dense[i].grad) for i in kept],
        "local": list(actual[0]._local_shape),
        "forward": forward.names,
        "backward": backward.names,
    }


def random(*shape):
    """An array that depends on its shape only."""
    return np.random.default_rng(sum(shape) + len(shape)).standard_normal(shape).astype("float32")


def operators():
    """name: (function, arrays, placements, frozen); run for every placement that is listed."""
    x, pair, probs = random(4, 6, 16), random(4, 6, 8), np.abs(random(4, 6))
    weight, bias = random(16), random(16)
    odd = random(5, 6, 16)
    q, k = random(2, 6, 4, 8), random(2, 6, 2, 8)
    sin, cos = random(6, 8), random(6, 8)
    long_sin, long_cos = random(9, 8), random(9, 8)
    ids = np.random.default_rng(0).integers(0, 9, (2, 6))

    def rope(a, b, s=None, c=None, i=None):
        return F.fused_rotary_position_embedding(
            a, b, sin=s, cos=c, position_ids=i, use_neox_rotary_style=False
        )

    def norm(a, r, w):
        return F.rms_norm(a, w, residual=r)

    def affine(a, w, n, b, r):
        return F.fused_rms_norm(a, w, n, 1e-6, 2, bias=b, residual=r)

    rows = ["0", "1", "2", "P"]
    table = {}
    for p in rows:
        table[f"swiglu {p}"] = (F.swiglu, [x], [p])
        table[f"weighted {p}"] = (F.fused_swiglu_weighted, [x, probs], [p, "R"])
        bwd = [p if p != "2" else "R", "R"]
        table[f"weighted_bwd {p}"] = (F.fused_swiglu_weighted_bwd, [x, pair, probs], [p, *bwd])
        table[f"rms_norm {p}"] = (F.rms_norm, [x, weight], [p, "R"])
        table[f"add_rms_norm {p}"] = (norm, [x, x + 1, weight], [p, p, "R"])
        table[f"ext {p}"] = (F.fused_rms_norm_ext, [x, weight], [p, "R"])
        table[f"affine {p}"] = (affine, [x, weight, bias, bias + 1, x], [p, "R", "R", "R", p])
    for p in ["0", "1", "2"]:
        table[f"swiglu_pair {p}"] = (F.swiglu, [x, x * 2], [p, p])
    for p in ["0", "1", "2", "3", "P"]:
        table[f"rope {p}"] = (rope, [q, k], [p, p])
        table[f"rope tables {p}"] = (rope, [q, k, sin, cos], [p, p, "R", "R"], (2, 3))
        table[f"rope long {p}"] = (rope, [q, k, long_sin, long_cos], [p, p, "R", "R"], (2, 3))
        table[f"rope ids {p}"] = (
            *(rope, [q, k, long_sin, long_cos, ids], [p, p, "R", "R", "R"]),
            (2, 3, 4),
        )
    table["uneven rms_norm 0"] = (norm, [odd, odd + 1, weight], ["0", "0", "R"])
    table["uneven swiglu 0"] = (F.swiglu, [odd], ["0"])
    table["uneven rope 1"] = (rope, [q[:, :5], k[:, :5]], ["1", "1"])
    table["one of two cut"] = (norm, [x, x + 1, weight], ["R", "1", "R"])
    table["sharded weight"] = (F.rms_norm, [x, weight], ["0", "0"])
    return table


# ---- a tensor-parallel block


SHAPES = {
    "input_norm": [16],
    "post_norm": [16],
    "q": [16, 32],
    "k": [16, 32],
    "v": [16, 32],
    "o": [32, 16],
    "gate": [16, 24],
    "up": [16, 24],
    "down": [24, 16],
}
CUT = {"q": "1", "k": "1", "v": "1", "gate": "1", "up": "1", "o": "0", "down": "0"}


class Block:
    """A Llama block in plain functions, its weights whole or sharded."""

    def __init__(self, make):
        self.weights = {
            name: make(random(*shape) * 0.3, CUT.get(name, "R")) for name, shape in SHAPES.items()
        }

    def __call__(self, x):
        w = self.weights
        batch, length, _ = x.shape
        h = F.rms_norm(x, w["input_norm"])
        q, k, v = (
            paddle.matmul(h, w[name]).reshape([batch, length, -1, 8]) for name in ("q", "k", "v")
        )
        q, k, _ = F.fused_rotary_position_embedding(q, k, use_neox_rotary_style=False)
        q, k, v = (one.transpose([0, 2, 1, 3]) for one in (q, k, v))
        scores = paddle.nn.functional.softmax(paddle.matmul(q, k, transpose_y=True))
        mixed = paddle.matmul(scores, v).transpose([0, 2, 1, 3]).reshape([batch, length, 32])
        out, total = F.rms_norm(paddle.matmul(mixed, w["o"]), w["post_norm"], residual=x)
        hidden = F.swiglu(paddle.matmul(out, w["gate"]), paddle.matmul(out, w["up"]))
        return total + paddle.matmul(hidden, w["down"])


def leaf(array, _):
    """A whole leaf."""
    return paddle.to_tensor(array, stop_gradient=False)


@case
def tensor_parallel_block():
    x = random(2, 6, 16)
    dense, cut = Block(leaf), Block(sharded)
    upstream = random(2, 6, 16)
    expected = dense(paddle.to_tensor(x))
    (expected * paddle.to_tensor(upstream)).sum().backward()
    with Collectives() as forward:
        actual = cut(sharded(x, "R", False))
    with Collectives() as backward:
        (actual * sharded(upstream, "R", False)).sum().backward()
    errors = {"out": float(np.abs(whole(actual) - expected.numpy()).max())}
    for name, weight in dense.weights.items():
        want = weight.grad.numpy()
        errors[name] = float(
            np.abs(whole(cut.weights[name].grad) - want).max() / np.abs(want).max()
        )
    places = {name: describe(weight.grad) for name, weight in cut.weights.items()}
    return {
        "errors": errors,
        "places": places,
        "forward": forward.names,
        "backward": backward.names,
    }


# ---- data parallel


class Small(paddle.nn.Layer):
    """A norm, a rotation and a gate between two products."""

    def __init__(self):
        super().__init__()
        from paddle_fused.nn import RMSNorm, RotaryEmbedding, SwiGLUMLP

        paddle.seed(3)
        self.norm = RMSNorm(16)
        self.rotary = RotaryEmbedding(8, max_position_embeddings=32)
        self.mlp = SwiGLUMLP(16, 24)

    def forward(self, x):
        h = self.norm(x).reshape([*x.shape[:2], 2, 8])
        return self.mlp(self.rotary(h).reshape(x.shape))


def train(model, batches, place):
    """The parameters after some steps."""
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    for x, y in batches:
        ((model(place(x)) - place(y)) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return optimizer


def training_errors(model):
    """How far a trained model's parameters are from those of the same steps on whole batches."""
    alone = Small()
    train(alone, batches(), paddle.to_tensor)
    errors = {}
    for (name, a), (_, b) in zip(model.named_parameters(), alone.named_parameters()):
        value = whole(a) if a.is_dist() else a.numpy()
        errors[name.rpartition("_layers.")[2]] = float(np.abs(value - b.numpy()).max())
    return errors


def batches():
    """Four pairs of inputs and targets."""
    rng = np.random.default_rng(1)
    return [rng.standard_normal((2, 4, 6, 16)).astype("float32") for _ in range(4)]


@case
def data_parallel():
    model = paddle.DataParallel(Small())
    rank = dist.get_rank()
    train(model, batches(), lambda a: paddle.to_tensor(a[2 * rank : 2 * rank + 2]))
    return {"errors": training_errors(model)}


@case
def auto_data_parallel():
    model = Small()
    for layer in model.sublayers(include_self=True):
        for name, parameter in list(layer._parameters.items()):
            if parameter is not None:
                layer.add_parameter(name, dist.shard_tensor(parameter, MESH, placements("R")))
    train(model, batches(), lambda a: sharded(a, "0", False))
    return {"errors": training_errors(model)}


def main():
    """Runs all cases and leaves one file."""
    global MESH
    dist.init_parallel_env()
    MESH = dist.ProcessMesh([0, 1], dim_names=["x"])
    results = {}
    for name, arguments in operators().items():
        CASES[name] = lambda arguments=arguments: compare(*arguments)
    for name, function in CASES.items():
        try:
            results[name] = function()
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
    folder = Path(sys.argv[1])
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main()
