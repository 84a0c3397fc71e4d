"""Searches for wrong results for a while: tests/fuzz again and again, each time from another seed.

    python tools/fuzz.py [--minutes 60] [--seed 1]

Stops at the first failure, which pytest prints with the smallest example that shows it. Prints how
many examples each test ran.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def one_round(seed: int, report: Path) -> tuple[bool, dict[str, int]]:
    """Runs every test once; (whether all passed, examples per test)."""
    environment = {
        **os.environ,
        "PADDLE_FUSED_FUZZ": "long",
        "PADDLE_FUSED_FUZZ_REPORT": str(report),
    }
    # Not `python -m pytest`, which would find the sources before the installed package.
    pytest = Path(sys.executable).with_name("pytest")
    command = [str(pytest), "-q", "-x", "-W", "ignore", "-p", "no:cacheprovider"]
    command += [f"--hypothesis-seed={seed}", "tests/fuzz"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout[-20000:], done.stderr[-5000:], sep="\n")
    return done.returncode == 0, json.loads(report.read_text()) if report.exists() else {}


def main() -> int:
    """Searches; 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    examples: collections.Counter = collections.Counter()
    start, seed, fine = time.monotonic(), options.seed, True
    with tempfile.TemporaryDirectory() as folder:
        while fine and time.monotonic() - start < 60 * options.minutes:
            fine, ran = one_round(seed, Path(folder) / "report.json")
            examples.update(ran)
            minutes = (time.monotonic() - start) / 60
            print(f"seed {seed}: {sum(examples.values())} examples, {minutes:.1f} min", flush=True)
            seed += 1
    for name, count in sorted(examples.items()):
        print(f"{count:9d} {name}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
