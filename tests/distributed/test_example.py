"""examples/train_distributed.py, run as a user runs it, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.launching import launch

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_distributed.py"
TINY = [
    "--steps=8",
    "--batch-size=4",
    "--seq-len=16",
    "--hidden-size=16",
    "--layers=1",
    "--lr=0.01",
]


@pytest.mark.parametrize("parallel", ["data", "tensor"])
def test_losses_are_those_of_one_process(tmp_path, parallel):
    out = tmp_path / "losses.json"
    options = [f"--parallel={parallel}", "--check", f"--output={out}"]
    process, logs = launch(SCRIPT, [*TINY, *options], tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr + logs
    assert "losses are those of one process" in logs
    report = json.loads(out.read_text())
    assert report["processes"] == 2
    assert len(report["losses"]) == 8
    assert report["losses"][-1] < report["losses"][0]
    assert 0 <= report["difference"] < 1e-4


def test_help_names_every_option():
    process = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, cwd="/"
    )
    assert process.returncode == 0, process.stderr
    for option in ("--parallel", "--steps", "--check", "--hidden-size", "--data", "--output"):
        assert option in process.stdout


def test_heads_that_do_not_divide_are_refused(tmp_path):
    process, logs = launch(SCRIPT, [*TINY, "--heads=1", "--hidden-size=16"], tmp_path)
    assert process.returncode != 0
    assert "does not divide" in logs
