"""A training step of PaddleFormers' Llama on a CPU: patched, against its fuse flags off.

    PYTHONPATH=build/paddleformers .venv/bin/python benchmarks/patched_llama.py

Both in one process, in turn, on the same tokens. Unpatched with the flags at their defaults the
model cannot run on a CPU at all.
"""

from __future__ import annotations

import argparse
import statistics
import time

import paddle
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM

import paddle_fused

FLAGS_OFF = {"fuse_rms_norm": False, "fuse_swiglu": False, "apply_rope_fusion": False}


def make(options, **flags):
    """A model and its optimizer, the same weights every time."""
    paddle.seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden_size // 64,
        num_key_value_heads=max(options.hidden_size // 256, 1),
        max_position_embeddings=options.seq_len,
        **flags,
    )
    model = LlamaForCausalLM(config)
    return model, paddle.optimizer.AdamW(1e-4, parameters=model.parameters())


def step(model, optimizer, ids) -> float:
    """Seconds of forward, backward and update."""
    start = time.perf_counter()
    out = model(ids, labels=ids)
    (out[0] if isinstance(out, (tuple, list)) else out.loss).backward()
    optimizer.step()
    optimizer.clear_grad()
    return time.perf_counter() - start


def main() -> None:
    """Prints the medians, their spreads and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--keep-memory", action="store_true", help="keep_cpu_memory() first")
    options = parser.parse_args()
    if options.keep_memory:
        paddle_fused.keep_cpu_memory()
    ids = paddle.randint(0, 1024, [options.batch_size, options.seq_len])
    plain = make(options, **FLAGS_OFF)
    with paddle_fused.patched():
        patched = make(options)
    seconds = {"flags off": [], "patched": []}
    for index in range(options.rounds + 2):  # two to warm up
        one = step(*plain, ids)
        with paddle_fused.patched() as report:
            other = step(*patched, ids)
        if index >= 2:
            seconds["flags off"].append(one)
            seconds["patched"].append(other)
    print(f"calls of ours in a step: {report.hits}, left to the originals: {report.fall_throughs}")
    for name, values in seconds.items():
        low, high = 1000 * min(values), 1000 * max(values)
        print(f"{name}: median {1000 * statistics.median(values):.0f} ms ({low:.0f} to {high:.0f})")
    ratio = statistics.median(seconds["flags off"]) / statistics.median(seconds["patched"])
    print(f"ratio of the medians: {ratio:.2f}")


if __name__ == "__main__":
    main()
