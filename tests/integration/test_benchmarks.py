"""The CPU benchmark runs and leaves its files; what the figures are is not looked at."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pyperf
import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def load_cases():
    """cases.py by path: with the source tree on sys.path, paddle_fused would be the unbuilt one."""
    path = ROOT / "benchmarks" / "cpu" / "cases.py"
    spec = importlib.util.spec_from_file_location("benchmark_cases", path)
    module = sys.modules["benchmark_cases"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Every operator on the smallest sizes, few rounds, without PyTorch.

    Workers start elsewhere: a path from here must do.
    """
    folder = tmp_path_factory.mktemp("bench")
    python = os.path.relpath(sys.executable, ROOT)
    arguments = ["--sizes", "tiny", "cache", "--threads", "1", "--rounds=2", f"--output={folder}"]
    arguments += [f"--paddle-python={python}"]
    return folder, run("benchmarks.cpu", *arguments)


def test_every_case_is_measured(result):
    cases = load_cases()
    folder, printed = result
    expected = cases.all_cases(None, cases.DTYPES, ("tiny", "cache"))
    lines = printed.splitlines()
    assert [line[: len(str(case))] for line, case in zip(lines, expected)] == [*map(str, expected)]
    with open(folder / "cpu.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    key = "operator", "direction", "dtype", "size"
    ours = {tuple(row[k] for k in key) for row in rows if row["provider"] == "paddle_fused"}
    assert ours == {(c.operator, c.direction, c.dtype, c.size) for c in expected}
    for row in rows:
        assert 0 < float(row["us_low"]) <= float(row["us"]) <= float(row["us_high"])


def test_the_rounds_are_kept_for_pyperf(result):
    folder, _ = result
    suite = pyperf.BenchmarkSuite.load(str(folder / "cpu.json"))
    name = "rms_norm forward float32 cache 1 threads, paddle_fused"
    assert suite.get_benchmark(name).get_nvalue() == 2


@pytest.mark.parametrize("picture", ["roofline.png", "peers.png"])
def test_pictures(result, picture):
    folder, _ = result
    assert (folder / picture).read_bytes()[:4] == b"\x89PNG"
