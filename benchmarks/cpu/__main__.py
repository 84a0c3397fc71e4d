"""Times the CPU kernels beside plain Paddle, Paddle's own kernels, PyTorch and copies.

    python -m benchmarks.cpu [--operators rms_norm ...] [--sizes memory ...] [--output FOLDER]

Each library runs in a process of its own; rounds take the providers of a case turn about, in an
order that rotates, and every figure is a median of rounds. Writes cpu.csv, cpu.json (pyperf's
format: `python -m pyperf stats cpu.json`) and pictures. Nothing is asserted: figures are for
reading.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.cpu import cases, pictures, report
from benchmarks.cpu.worker import Worker

ROUND_SECONDS = 0.02  # of one provider in one round, where a call is shorter


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    operators = sorted({operator for operator, _ in cases.STREAMS})
    cores = len(os.sched_getaffinity(0))
    add("--operators", nargs="+", choices=operators, help="default: all")
    add("--dtypes", nargs="+", choices=cases.ITEM, default=list(cases.DTYPES))
    add("--sizes", nargs="+", choices=cases.SIZES, default=list(cases.SIZES))
    add("--threads", nargs="+", type=int, default=sorted({1, min(2, cores)}))
    add("--rounds", type=int, default=11, help="timed rounds of a case")
    add("--seconds", type=float, default=8.0, help="no new round of a case after that long")
    add("--paddle-python", default=sys.executable, help="python that has paddle_fused")
    add("--torch-python", help="python that has PyTorch; without one PyTorch is left out")
    add("--as-installed", action="store_true", help="do not keep freed memory, in any process")
    add("--demo-steps", type=int, default=0, help="also train the demo's model for so many steps")
    add("--output", type=Path, default=Path("build/bench"), help="folder for results")
    return parser.parse_args()


def start_workers(options: argparse.Namespace, threads: int) -> list[Worker]:
    """One process a library, with that many threads."""
    pythons = {"copies": sys.executable, "paddle": options.paddle_python}
    if options.torch_python:
        pythons["torch"] = options.torch_python
    # Workers start in another folder. A link stays one: it is how an environment is recognised.
    pythons = {name: os.path.abspath(python) for name, python in pythons.items()}
    memory = "give" if options.as_installed else "keep"
    # The source tree comes last on the path: its paddle_fused has no library.
    root = str(Path(__file__).resolve().parents[2])
    start = "import sys; sys.path.append(sys.argv.pop()); import benchmarks.cpu.{0} as w; w.main()"
    return [
        Worker(
            name,
            [python, "-c", start.format(f"{name}_worker"), str(threads), memory, root],
            # Paddle and PyTorch read it when they are imported.
            {"OMP_NUM_THREADS": str(threads)},
        )
        for name, python in pythons.items()
    ]


def run_demo(options: argparse.Namespace) -> dict[str, dict]:
    """The demo, {provider: what it measured}: a whole training step, matrix products and all."""
    script = Path(__file__).resolve().parents[2] / "examples" / "train_moe.py"
    folder = options.output.resolve() / "demo"
    command = [options.paddle_python, str(script), f"--steps={options.demo_steps}"]
    subprocess.run([*command, f"--output={folder}"], check=True)
    names = {"paddle_fused": "fused", "plain Paddle": "plain"}
    return {key: json.loads((folder / f"{name}.json").read_text()) for key, name in names.items()}


def measure(case: cases.Case, workers: list[Worker], options: argparse.Namespace) -> dict:
    """{provider: [seconds of each round]}."""
    turns = []
    for each in workers:
        for provider in each.ask(case=case.to_json()):
            each.ask(provider=provider, loops=2)  # compiles, touches memory, warms the caches
            once = each.ask(provider=provider, loops=1)
            loops = max(1, min(20000, int(ROUND_SECONDS / max(once, 1e-7))))
            turns.append((each, provider, loops))
    values = {provider: [] for _, provider, _ in turns}
    start = time.monotonic()
    for round_ in range(options.rounds):
        if round_ >= 3 and time.monotonic() - start > options.seconds:
            break
        first = round_ % len(turns)
        for each, provider, loops in turns[first:] + turns[:first]:
            values[provider].append(each.ask(provider=provider, loops=loops))
    return values


def main() -> int:
    """Measures every case for each thread count, then writes table, files and pictures."""
    options = parse_options()
    options.output.mkdir(parents=True, exist_ok=True)
    chosen = cases.all_cases(options.operators, options.dtypes, options.sizes)
    rows, described = [], {}
    for threads in options.threads:
        workers = start_workers(options, threads)
        try:
            for each in workers:
                described.update(each.description)
            for case in chosen:
                if case.size == "tiny" and threads > 1:
                    continue  # a small input runs on one thread in any case
                row = report.Row(case, threads, measure(case, workers, options))
                rows.append(row)
                print(report.line(row), flush=True)
        finally:
            for each in workers:
                each.close()
    report.write(rows, described, options)
    pictures.draw(rows, described, options)
    if options.demo_steps:
        pictures.draw_demo(run_demo(options), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
