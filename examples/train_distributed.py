"""Trains a small Llama-like language model on several processes with auto-parallel tensors.

    python -m paddle.distributed.launch --nproc_per_node 2 examples/train_distributed.py --check

`--parallel data` cuts the batch over the processes, `--parallel tensor` the heads and the inner
width of the feed-forward blocks: the projections before them by columns, those behind them by rows.
Norms, rotations and gates are those of paddle_fused; where each of their tensors lies follows from
its neighbours (docs/distributed.md). Every process draws the same weights and batches.

`--check` trains the same model on whole tensors in every process as well and exits with an error
when a loss differs. On a machine without GPUs the processes talk over gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_fused.nn import RMSNorm, RotaryEmbedding, SwiGLUMLP

VOCABULARY = 256  # bytes
# float32 sums in another order part slowly as training goes on.
LOSS_TOLERANCE = 1e-3
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--parallel", choices=("data", "tensor"), default="tensor", help="what is cut")
    add("--steps", type=int, default=50, help="training steps")
    add("--batch-size", type=int, default=8, help="sequences in a step, over all processes")
    add("--seq-len", type=int, default=64, help="bytes in a sequence")
    add("--hidden-size", type=int, default=64, help="width of the residual stream")
    add("--intermediate-size", type=int, default=160, help="width inside the feed-forward blocks")
    add("--layers", type=int, default=2, help="blocks")
    add("--heads", type=int, default=4, help="attention heads")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--data", type=Path, default=Path(argparse.__file__), help="the text to learn")
    add("--check", action="store_true", help="compare every loss with one process's")
    add("--output", type=Path, help="a JSON file for the losses")
    options = parser.parse_args(arguments)
    if options.hidden_size % (2 * options.heads):
        parser.error("--hidden-size must be a multiple of twice --heads")
    return options


# ---- the model: nothing in it knows of processes


class Attention(nn.Layer):
    """Causal self-attention with rotated queries and keys."""

    def __init__(self, options):
        super().__init__()
        self.head_dim = options.hidden_size // options.heads
        size = options.hidden_size
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_sublayer(name, nn.Linear(size, size, bias_attr=False))
        self.rotary = RotaryEmbedding(self.head_dim, max_position_embeddings=options.seq_len)
        mask = np.triu(np.full((options.seq_len, options.seq_len), -1e9, "float32"), 1)
        self.register_buffer("mask", paddle.to_tensor(mask), persistable=False)

    def forward(self, x):
        """X and result: [batch, sequence, hidden]."""
        shape = [*x.shape[:2], -1, self.head_dim]
        q, k, v = (proj(x).reshape(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotary(q, k)
        q, k, v = (one.transpose([0, 2, 1, 3]) for one in (q, k, v))
        scores = paddle.matmul(q, k, transpose_y=True) * self.head_dim**-0.5
        weights = nn.functional.softmax(scores + self.mask)
        out = paddle.matmul(weights, v).transpose([0, 2, 1, 3])
        return self.o_proj(out.reshape(x.shape))


class Block(nn.Layer):
    """Attention and feed-forward, each behind a norm that takes the residual along."""

    def __init__(self, options):
        super().__init__()
        self.input_norm = RMSNorm(options.hidden_size)
        self.attention = Attention(options)
        self.post_norm = RMSNorm(options.hidden_size)
        self.mlp = SwiGLUMLP(options.hidden_size, options.intermediate_size)

    def forward(self, x):
        """X and result: [batch, sequence, hidden]."""
        normed, x = self.post_norm(self.attention(self.input_norm(x)), residual=x)
        return x + self.mlp(normed)


class Model(nn.Layer):
    """Bytes to logits."""

    def __init__(self, options):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, options.hidden_size)
        self.blocks = nn.LayerList([Block(options) for _ in range(options.layers)])
        self.norm = RMSNorm(options.hidden_size)
        self.head = nn.Linear(options.hidden_size, VOCABULARY, bias_attr=False)

    def forward(self, tokens):
        """Tokens [batch, sequence] to logits [batch, sequence, bytes]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ---- where it lies


def shard_parameters(name: str, layer, mesh, parallel: str) -> None:
    """Cuts the parameters of one layer, for dist.shard_layer."""
    last = name.rpartition(".")[2]
    placement = dist.Replicate()
    if parallel == "tensor" and last in COLUMNS:
        placement = dist.Shard(1)
    elif parallel == "tensor" and last in ROWS:
        placement = dist.Shard(0)
    for key, parameter in list(layer._parameters.items()):
        if parameter is not None:
            layer.add_parameter(key, dist.shard_tensor(parameter, mesh, [placement]))


# ---- training


def read_batches(options):
    """A generator of (inputs, targets) as int64 arrays."""
    data = np.frombuffer(options.data.read_bytes(), np.uint8).astype("int64")
    if len(data) <= options.seq_len + 1:
        raise SystemExit(f"{options.data}: not enough text, {len(data)} bytes")
    rng = np.random.default_rng(options.seed)
    for _ in range(options.steps):
        starts = rng.integers(0, len(data) - options.seq_len - 1, options.batch_size)
        rows = np.stack([data[start : start + options.seq_len + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def train(model, options, place, report) -> list[float]:
    """The losses of all steps."""
    optimizer = paddle.optimizer.AdamW(options.lr, parameters=model.parameters())
    losses = []
    for inputs, targets in read_batches(options):
        logits = model(place(inputs))
        loss = nn.functional.cross_entropy(logits, place(targets).unsqueeze(-1))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
        report(len(losses), losses[-1])
    return losses


def make_model(options) -> Model:
    """The same weights in every process and every run."""
    paddle.seed(options.seed)
    return Model(options)


def main() -> int:
    """Trains; returns the exit status."""
    options = parse_options()
    dist.init_parallel_env()
    count, rank = dist.get_world_size(), dist.get_rank()
    cut = options.batch_size if options.parallel == "data" else options.heads
    if cut % count:
        raise SystemExit(f"{cut} does not divide over {count} processes (--parallel)")
    mesh = dist.ProcessMesh(list(range(count)), dim_names=["x"])

    def report(step, loss):
        if rank == 0 and (step == 1 or step % 10 == 0 or step == options.steps):
            print(f"step {step:4d}  loss {loss:.4f}", flush=True)

    placement = dist.Shard(0) if options.parallel == "data" else dist.Replicate()
    model = dist.shard_layer(
        make_model(options),
        mesh,
        lambda name, layer, mesh: shard_parameters(name, layer, mesh, options.parallel),
    )
    start = time.perf_counter()
    losses = train(
        model,
        options,
        lambda array: dist.shard_tensor(paddle.to_tensor(array), mesh, [placement]),
        report,
    )
    seconds = time.perf_counter() - start
    if rank == 0:
        print(f"{options.parallel} parallel, {count} processes: {seconds:.1f} s")
    results = {"parallel": options.parallel, "processes": count, "losses": losses}
    failed = False
    if options.check:
        alone = train(make_model(options), options, paddle.to_tensor, lambda *_: None)
        difference = max(abs(a - b) for a, b in zip(losses, alone))
        failed = difference > LOSS_TOLERANCE
        results["difference"] = difference
        if rank == 0:
            verdict = "differ from" if failed else "are"
            print(f"losses {verdict} those of one process, to {difference:.1e}")
    if options.output and rank == 0:
        options.output.write_text(json.dumps(results))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
