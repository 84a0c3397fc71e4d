"""examples/finetune_paddleformers.py, run as a user runs it, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "finetune_paddleformers.py"
TINY = ["--hidden-size=32", "--layers=2", "--seq-len=16", "--batch-size=4", "--lr=0.01"]
ONE_LINE = "report = paddle_fused.patch()"


def run(folder, *arguments, script=SCRIPT):
    return subprocess.run(
        [sys.executable, str(script), *TINY, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return folder


def losses(folder, name):
    return json.loads((folder / name / "losses.json").read_text())


def test_it_learns_and_goes_on_from_its_result(folder):
    first = run(folder, "--steps=30", "--data=text.txt", "--output=first")
    assert first.returncode == 0, first.stderr[-3000:]
    assert "paddleformers.nn.norm.Norm['rms_norm']" in first.stdout
    assert losses(folder, "first")[-1] < 0.7 * losses(folder, "first")[0]

    again = ["--steps=3", "--data=text.txt", "--output=second", "--model=first/model"]
    second = run(folder, *again)
    assert second.returncode == 0, second.stderr[-3000:]
    # It begins where the first ended, as far as two batches compare.
    assert losses(folder, "second")[0] < 1.2 * losses(folder, "first")[-1]


def test_without_the_line_it_cannot_run(folder):
    text = SCRIPT.read_text()
    assert text.count(ONE_LINE) == 1
    stock = folder / "stock.py"
    stock.write_text(text.replace(ONE_LINE, "report = None"))
    result = run(folder, "--steps=1", "--data=text.txt", "--output=stock", script=stock)
    assert result.returncode != 0
    assert "The kernel `fused_rms_norm_ext` is not registered" in result.stderr


def test_too_little_text_is_refused(folder):
    (folder / "short.txt").write_text("short")
    result = run(folder, "--data=short.txt", "--output=none")
    assert result.returncode == 1
    assert "not enough text" in result.stderr


def test_benchmark(tmp_path):
    """benchmarks/patched_llama.py, once round."""
    script = SCRIPT.parents[1] / "benchmarks" / "patched_llama.py"
    sizes = ["--layers=1", "--hidden-size=64", "--seq-len=8", "--batch-size=1", "--rounds=1"]
    result = subprocess.run(
        [sys.executable, str(script), *sizes],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    # Two norms and the last one, one MLP, one rotation.
    assert "calls of ours in a step: 5, left to the originals: 0" in result.stdout
    assert "ratio of the medians" in result.stdout
