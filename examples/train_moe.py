"""Trains a small mixture-of-experts language model on the CPU, exports it and serves it.

The text is the Python standard library of this machine, byte by byte. The model is trained twice
from one seed on the same batches: with `paddle_fused.nn.functional`, and with
`paddle_fused.reference`, the same functions in plain Paddle operators. Each run has a process of
its own. Then the first model is exported as a static graph, and an inference predictor in a new
process, which knows nothing of the model's code, has to give the same logits and writes a sample.

    python examples/train_moe.py [--steps 300] [--data FILE_OR_FOLDER] [--output DIR] ...

Leaves in the output folder: loss.png, results.json, the exported model. Exits with an error when
the losses of the two runs part, the loss does not fall, or the predictor's logits differ.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import numpy as np
from serve import LOGIT_TOLERANCE, complete, difference, export_model, make_predictor

PROVIDERS = {"fused": "paddle_fused", "plain": "plain Paddle"}
# Two correct float32 programs part slowly, as rounding differences grow with training.
LOSS_TOLERANCE = 0.05


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="training steps of each run")
    add("--batch-size", type=int, default=8, help="sequences in a step")
    add("--seq-len", type=int, default=192, help="bytes in a sequence")
    add("--hidden-size", type=int, default=64, help="width of the residual stream")
    add("--layers", type=int, default=3, help="blocks of attention and experts")
    add("--heads", type=int, default=4, help="query heads")
    add("--kv-heads", type=int, default=2, help="key and value heads")
    add("--experts", type=int, default=8, help="experts in a block")
    add("--top-k", type=int, default=2, help="experts that see a token")
    add("--expert-size", type=int, default=512, help="width between an expert's two products")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--seed", type=int, default=0, help="of weights, batches and sample")
    add("--threads", type=int, help="threads of all kernels (default: as installed)")
    add("--data", type=Path, help="file or folder of text instead of the standard library")
    add("--output", type=Path, default=Path("build/demo"), help="folder for results")
    add("--sample-bytes", type=int, default=200, help="length of the text sample")
    add("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# ---- data


def text_files(source: Path | None) -> list[Path]:
    """The files to learn from, in a fixed order."""
    if source is not None:
        return [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file())
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(
        path for path in library.rglob("*.py") if not skipped & set(path.relative_to(library).parts)
    )


def write_data(options: argparse.Namespace) -> int:
    """Puts all bytes in one array, files in a shuffled order; returns their number."""
    files = text_files(options.data)
    np.random.default_rng(0).shuffle(files)  # neighbours are alike; validation takes the last tenth
    data = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    if len(data) < 20 * (options.seq_len + 1):
        raise SystemExit(f"not enough text: {len(data)} bytes in {len(files)} files")
    np.save(options.output / "data.npy", data)
    return len(data)


def cut(data: np.ndarray, starts, length: int) -> np.ndarray:
    """Sequences of length + 1 bytes: inputs and, one later, targets."""
    return np.stack([data[start : start + length + 1] for start in starts]).astype(np.int64)


# ---- training, in a child process


def validation_loss(model, data: np.ndarray, options: argparse.Namespace) -> float:
    """Mean cross entropy, nats per byte, over evenly spaced held-out sequences."""
    import paddle

    count = 8
    starts = np.linspace(0, len(data) - options.seq_len - 2, count * options.batch_size).astype(int)
    losses = []
    with paddle.no_grad():
        for part in np.split(starts, count):
            ids = paddle.to_tensor(cut(data, part, options.seq_len))
            losses.append(float(model.loss(ids[:, :-1], ids[:, 1:])[0]))
    return float(np.mean(losses))


def train(model, data: np.ndarray, options: argparse.Namespace, label: str):
    """Losses of all steps, and the seconds of each."""
    import paddle
    from moe_model import learning_rate
    from tqdm import tqdm

    optimizer = paddle.optimizer.AdamW(
        options.lr,
        parameters=model.parameters(),
        weight_decay=0.01,
        grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
    )
    rng = np.random.default_rng(options.seed)
    losses, seconds = [], []
    bar = tqdm(range(options.steps), desc=f"{label:<12}", unit="step", file=sys.stderr)
    for step in bar:
        starts = rng.integers(0, len(data) - options.seq_len - 1, options.batch_size)
        ids = paddle.to_tensor(cut(data, starts, options.seq_len))
        begin = time.perf_counter()
        optimizer.set_lr(learning_rate(options.lr, step, options.steps))
        cross_entropy, total = model.loss(ids[:, :-1], ids[:, 1:])
        total.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(cross_entropy))
        seconds.append(time.perf_counter() - begin)
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses, seconds


def run_training(options: argparse.Namespace) -> None:
    """One of the two runs: trains, measures, and leaves NAME.json."""
    import paddle
    from moe_model import LanguageModel, ModelOptions

    import paddle_fused
    from paddle_fused import reference
    from paddle_fused.nn import functional

    # Both runs alike: without it most of the time of large operators is fresh memory.
    paddle_fused.keep_cpu_memory()
    ops = {"fused": functional, "plain": reference}[options.child]
    data = np.load(options.output / "data.npy")
    split = len(data) * 9 // 10
    paddle.seed(options.seed)
    names = ("hidden_size", "layers", "heads", "kv_heads", "experts", "top_k", "expert_size")
    model = LanguageModel(ModelOptions(**{name: getattr(options, name) for name in names}), ops)
    losses, seconds = train(model, data[:split], options, PROVIDERS[options.child])
    warm = seconds[len(seconds) // 10 :]
    result = {
        "losses": losses,
        "validation_loss": validation_loss(model, data[split:], options),
        "seconds_per_step": float(np.median(warm)),
        "tokens_per_second": options.batch_size * options.seq_len / float(np.median(warm)),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "parameters": int(sum(parameter.size for parameter in model.parameters())),
        "versions": {"paddle": paddle.__version__, "paddle_fused": paddle_fused.__version__},
    }
    if options.child == "fused":
        held = data[split:]
        prompt = cut(held, [0, len(held) // 2], options.seq_len)[:, :-1]
        export_model(model, prompt, options.output)
    (options.output / f"{options.child}.json").write_text(json.dumps(result))


# ---- serving, in a process that has never seen the model's code


def run_serving(options: argparse.Namespace) -> None:
    """Compares the predictor with dygraph and samples from it; leaves served.json."""
    from tqdm import tqdm

    predict = make_predictor(options.output / "model")
    largest = difference(predict, options.output)
    rng = np.random.default_rng(options.seed)
    with tqdm(total=options.sample_bytes, desc=f"{'sample':<12}", unit="byte") as bar:

        def counted(ids):
            bar.update()
            return predict(ids)

        sample = complete(counted, b"def ", options.sample_bytes, options.seq_len, 0.7, rng)
    text = (b"def " + sample).decode("utf-8", "replace")
    (options.output / "served.json").write_text(json.dumps({"difference": largest, "sample": text}))


# ---- the whole


def start_child(name: str, options: argparse.Namespace) -> dict:
    """Runs one part in a new Python process and returns what it left."""
    environment = {"GLOG_minloglevel": "2", **os.environ}
    if options.threads:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *sys.argv[1:]]
    if subprocess.run([*command, "--child", name], env=environment).returncode:
        raise SystemExit(f"{name}: failed, see above")
    return json.loads((options.output / f"{name}.json").read_text())


def draw(runs: dict, options: argparse.Namespace) -> None:
    """Both loss curves in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    for (name, run), style in zip(runs.items(), ("-", "--")):
        axes.plot(run["losses"], style, label=PROVIDERS[name], linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="Training loss, one seed")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(options.output / "loss.png")


def print_table(runs: dict) -> None:
    """The two runs side by side."""
    fused, plain = runs["fused"], runs["plain"]
    rows = [
        ("validation loss, nats per byte", "validation_loss", ".4f"),
        ("tokens per second", "tokens_per_second", ",.0f"),
        ("peak memory, MiB", "peak_memory_mib", ",.0f"),
    ]
    print(f"\n{'':<32}{PROVIDERS['fused']:>14}{PROVIDERS['plain']:>14}{'ratio':>8}")
    for title, key, form in rows:
        a, b = fused[key], plain[key]
        print(f"{title:<32}{a:>14{form}}{b:>14{form}}{a / b:>8.2f}")


def problems(runs: dict, served: dict) -> list[str]:
    """What went wrong, if anything."""
    found = []
    gap = abs(runs["fused"]["validation_loss"] - runs["plain"]["validation_loss"])
    if not gap <= LOSS_TOLERANCE:
        found.append(f"the validation losses differ by {gap:.4f}, more than {LOSS_TOLERANCE}")
    for name, run in runs.items():
        if not run["validation_loss"] < run["losses"][0]:
            found.append(f"{PROVIDERS[name]}: the loss did not fall")
    if not served["difference"] <= LOGIT_TOLERANCE:
        found.append(f"the predictor's logits differ from dygraph's by {served['difference']:.2e}")
    return found


def main() -> int:
    """Runs all parts and prints what came out; returns the exit code."""
    options = parse_options()
    if options.child:
        warnings.simplefilter("ignore")
        run_serving(options) if options.child == "served" else run_training(options)
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    size = write_data(options)
    print(f"{size / 1e6:.1f} MB of text; results go to {options.output}", flush=True)
    runs = {name: start_child(name, options) for name in PROVIDERS}
    served = start_child("served", options)
    draw(runs, options)
    print_table(runs)
    if not options.threads:
        # As a user gets them: Paddle's own CPU kernels run on one thread unless told otherwise.
        print(
            "\nthreads as installed: 1 for Paddle's kernels, every core for those of paddle_fused"
        )
    print(f"\npredictor against dygraph: logits differ by at most {served['difference']:.1e}")
    print(f"loss curves: {options.output / 'loss.png'}\n\nsample:\n{served['sample']}\n")
    settings = {key: str(value) for key, value in vars(options).items() if key != "child"}
    report = {"options": settings, "runs": runs, "served": served, "bytes": size}
    (options.output / "results.json").write_text(json.dumps(report, indent=1))
    found = problems(runs, served)
    print("\n".join(f"FAILED: {text}" for text in found) or "all checks passed")
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
