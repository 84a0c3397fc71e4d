"""The example scripts, run as a user runs them, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_moe.py"
TINY = ["--batch-size=2", "--seq-len=16", "--hidden-size=16", "--layers=1", "--expert-size=24"]


def run(folder: Path, *arguments: str):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """One tiny run of everything, on a text of its own."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    arguments = ["--steps=12", "--data=text.txt", "--output=out", "--sample-bytes=20", "--lr=0.01"]
    return folder, run(folder, *TINY, *arguments)


def test_all_checks_pass(result):
    _, process = result
    assert process.returncode == 0, process.stdout + process.stderr
    assert "all checks passed" in process.stdout


def test_table_has_both_runs(result):
    _, process = result
    for row in ("validation loss", "tokens per second", "peak memory"):
        (line,) = [line for line in process.stdout.splitlines() if line.startswith(row)]
        assert len([word for word in line.split() if word[0].isdigit()]) == 3


def test_results_and_picture(result):
    folder, _ = result
    report = json.loads((folder / "out" / "results.json").read_text())
    fused, plain = report["runs"]["fused"], report["runs"]["plain"]
    assert len(fused["losses"]) == len(plain["losses"]) == 12
    assert fused["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-5)
    assert fused["losses"][-1] < fused["losses"][0]
    assert report["served"]["difference"] <= 1e-3
    assert len(report["served"]["sample"]) > 0
    assert (folder / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_progress_goes_to_stderr(result):
    _, process = result
    assert "step" in process.stderr
    assert "step/s" not in process.stdout


def test_help_names_every_option():
    process = run(Path("/"), "--help")
    assert process.returncode == 0
    for option in ("--steps", "--data", "--output", "--hidden-size", "--experts", "--seed"):
        assert option in process.stdout


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    process = run(tmp_path, "--data=short.txt", "--output=out")
    assert process.returncode != 0
    assert "not enough text" in process.stderr
