"""Fine-tunes a Llama of PaddleFormers with PaddleFormers' own Trainer, on a CPU.

    pip install paddleformers==1.2.0
    python examples/finetune_paddleformers.py [--model FOLDER] [--steps 100] [--data FILE] ...

A stock script but for one call, `paddle_fused.patch()`. Without it the model cannot run here:
Paddle has no CPU kernel of its norm. The text is read byte by byte. Without --model a small model
with random weights takes the place of a pretrained one; --output/model is such a folder, so the
script can continue from its own result.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import paddle
from paddleformers.trainer import Trainer, TrainerCallback, TrainingArguments
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM

import paddle_fused

report = paddle_fused.patch()  # the one line


class Bytes(paddle.io.Dataset):
    """Pieces of a text, each to be predicted byte by byte."""

    def __init__(self, text: bytes, length: int):
        super().__init__()
        ids = np.frombuffer(text, np.uint8).astype(np.int64)
        self.pieces = ids[: len(ids) // length * length].reshape(-1, length)

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        piece = self.pieces[index]
        return {"input_ids": piece, "labels": piece}


class Losses(TrainerCallback):
    """Keeps the loss of each step."""

    def __init__(self):
        self.values: list[float] = []

    def on_log(self, args, state, control, logs=None, **rest):
        if logs and "loss" in logs:
            self.values.append(float(logs["loss"]))


def load(options: argparse.Namespace) -> LlamaForCausalLM:
    """The pretrained model, or a small one."""
    if options.model is not None:
        return LlamaForCausalLM.from_pretrained(str(options.model))
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3 // 8 * 8,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=options.seq_len,
    )
    return LlamaForCausalLM(config)


def fine_tune(model, data: Bytes, options: argparse.Namespace) -> list[float]:
    """The loss of each step."""
    arguments = TrainingArguments(
        output_dir=str(options.output / "checkpoints"),
        do_train=True,
        device="cpu",
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        amp_master_grad=False,  # its default needs a half-precision run
        seed=options.seed,
    )
    losses = Losses()
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[losses]).train()
    return losses.values


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="folder of a pretrained model whose tokens are bytes")
    add("--data", type=Path, default=Path(argparse.__file__), help="text to learn")
    add("--steps", type=int, default=100, help="training steps")
    add("--batch-size", type=int, default=8, help="sequences in a step")
    add("--seq-len", type=int, default=128, help="bytes in a sequence")
    add("--hidden-size", type=int, default=128, help="width of a new model")
    add("--layers", type=int, default=4, help="blocks of a new model")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--seed", type=int, default=42, help="of weights and batches")
    add("--output", type=Path, default=Path("build/finetune"), help="folder for results")
    return parser.parse_args(arguments)


def main() -> int:
    """Trains, saves the model and losses.json, and prints which calls were rerouted."""
    options = parse_options()
    paddle.seed(options.seed)
    data = Bytes(options.data.read_bytes(), options.seq_len)
    if len(data) < options.batch_size:
        print(f"{options.data} has not enough text for one batch", file=sys.stderr)
        return 1
    model = load(options)
    losses = fine_tune(model, data, options)
    model.save_pretrained(str(options.output / "model"))
    (options.output / "losses.json").write_text(json.dumps(losses))
    print(report)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per byte in {len(losses)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
