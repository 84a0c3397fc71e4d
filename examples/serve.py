"""Exports a language model as a static graph, and serves an exported one with a predictor.

    python examples/serve.py export --output build/serve [--checkpoint FILE] [--hidden-size 64 ...]
    echo "def " | python examples/serve.py run build/serve [--bytes 60] [--temperature 0.7]

`export` writes the graph of `moe_model.LanguageModel` in float32, for any batch and length, with
logits to check it by. `run` knows nothing of the model's code: it loads the graph into Paddle's
inference engine, compares its logits with those, then reads a prompt per line from standard input
and answers each with a line of JSON. What `make demo` leaves in build/demo can be run likewise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

LOGIT_TOLERANCE = 1e-3


def export_model(model, prompt: np.ndarray, folder: Path) -> None:
    """Saves a static graph for any batch and length, and logits to check it with."""
    import paddle
    from paddle.static import InputSpec

    model.eval()
    with paddle.no_grad():
        logits = model(paddle.to_tensor(prompt)).numpy()
    np.savez(folder / "check.npz", prompt=prompt, logits=logits)
    static = paddle.jit.to_static(
        model, input_spec=[InputSpec([None, None], "int64")], full_graph=True
    )
    paddle.jit.save(static, str(folder / "model"))


def make_predictor(prefix: Path):
    """A function from ids to logits, by Paddle's inference engine."""
    import paddle.inference as inference

    import paddle_fused  # noqa: F401  registers the operators that the exported graph names

    config = inference.Config(f"{prefix}.json", f"{prefix}.pdiparams")
    config.disable_glog_info()
    # Paddle's own reshape fails on an empty tensor under oneDNN, and an expert may get no token.
    config.disable_mkldnn()
    predictor = inference.create_predictor(config)
    handle = predictor.get_input_handle(predictor.get_input_names()[0])

    def predict(ids: np.ndarray) -> np.ndarray:
        handle.copy_from_cpu(ids)
        predictor.run()
        return predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()

    return predict


def difference(predict, folder: Path) -> float:
    """The largest difference from the logits that `export_model` left."""
    check = np.load(folder / "check.npz")
    return float(np.abs(predict(check["prompt"]) - check["logits"]).max())


def complete(predict, prompt: bytes, count: int, window: int, temperature: float, rng) -> bytes:
    """So many bytes more, each drawn from the logits after the last `window` bytes."""
    text = bytearray(prompt)
    for _ in range(count):
        seen = np.frombuffer(bytes(text[-window:]), np.uint8)[None].astype(np.int64)
        logits = predict(seen)[0, -1].astype(np.float64)
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            chance = np.exp((logits - logits.max()) / temperature)
            text.append(int(rng.choice(len(chance), p=chance / chance.sum())))
    return bytes(text[len(prompt) :])


def run_export(options: argparse.Namespace) -> int:
    """The export command."""
    import paddle
    from moe_model import LanguageModel, ModelOptions

    from paddle_fused.nn import functional

    paddle.seed(options.seed)
    names = ("hidden_size", "layers", "heads", "kv_heads", "experts", "top_k", "expert_size")
    model = LanguageModel(
        ModelOptions(**{name: getattr(options, name) for name in names}), functional
    )
    if options.checkpoint is not None:
        missing, unexpected = model.set_state_dict(paddle.load(str(options.checkpoint)))
        if missing or unexpected:
            raise SystemExit(f"{options.checkpoint}: missing {missing}, unexpected {unexpected}")
    options.output.mkdir(parents=True, exist_ok=True)
    prompt = np.random.default_rng(options.seed).integers(0, 256, (2, 17))
    export_model(model, prompt, options.output)
    print(f"exported to {options.output / 'model'}.json and .pdiparams")
    return 0


def run_serving(options: argparse.Namespace) -> int:
    """The run command."""
    predict = make_predictor(options.folder / "model")
    largest = difference(predict, options.folder)
    print(f"logits differ from dygraph's by {largest:.2g}", file=sys.stderr)
    if not largest <= LOGIT_TOLERANCE:
        print(f"that is more than {LOGIT_TOLERANCE}", file=sys.stderr)
        return 1
    rng = np.random.default_rng(options.seed)
    for line in sys.stdin:
        prompt = line.rstrip("\n")
        if not prompt:
            continue
        start = time.perf_counter()
        text = complete(
            predict, prompt.encode(), options.bytes, options.window, options.temperature, rng
        )
        answer = {
            "prompt": prompt,
            "completion": text.decode("utf-8", "replace"),
            "seconds": round(time.perf_counter() - start, 4),
        }
        print(json.dumps(answer), flush=True)
    return 0


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write a static graph", formatter_class=form)
    export.add_argument("--output", type=Path, default=Path("build/serve"), help="folder for it")
    export.add_argument("--checkpoint", type=Path, help="parameters, from paddle.save")
    for name, value in {
        "hidden-size": 64,
        "layers": 3,
        "heads": 4,
        "kv-heads": 2,
        "experts": 8,
        "top-k": 2,
        "expert-size": 512,
    }.items():
        export.add_argument(f"--{name}", type=int, default=value, help="of the model")
    run = commands.add_parser("run", help="answer prompts", formatter_class=form)
    run.add_argument("folder", type=Path, help="what export wrote")
    run.add_argument("--bytes", type=int, default=60, help="length of an answer")
    run.add_argument("--window", type=int, default=192, help="bytes that the model sees")
    run.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest byte")
    for command in (export, run):
        command.add_argument("--seed", type=int, default=0, help="of weights or answers")
    return parser.parse_args(arguments)


def main() -> int:
    """Either command."""
    options = parse_options()
    return run_export(options) if options.command == "export" else run_serving(options)


if __name__ == "__main__":
    sys.exit(main())
