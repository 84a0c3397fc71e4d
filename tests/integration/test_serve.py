"""examples/serve.py, run as a user runs it, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "serve.py"
TINY = ["--hidden-size=16", "--layers=1", "--expert-size=24"]


def run(folder, *arguments, prompts=""):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        input=prompts,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a tiny model is exported."""
    folder = tmp_path_factory.mktemp("serve")
    process = run(folder, "export", "--output=out", *TINY)
    assert process.returncode == 0, process.stderr
    return folder


def test_prompts_are_answered(folder):
    process = run(folder, "run", "out", "--bytes=5", prompts="def main\n\ngrüß\n")
    assert process.returncode == 0, process.stderr
    assert "logits differ from dygraph's by" in process.stderr
    answers = [json.loads(line) for line in process.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["def main", "grüß"]
    for answer in answers:
        assert len(answer["completion"]) > 0
        assert answer["seconds"] > 0


def test_the_likeliest_byte_does_not_depend_on_the_seed(folder):
    def answers(*options):
        process = run(folder, "run", "out", "--bytes=8", *options, prompts="a\n")
        return json.loads(process.stdout)["completion"]

    assert answers("--temperature=0") == answers("--temperature=0", "--seed=1")
    assert answers("--seed=1") != answers("--seed=2")


def test_an_export_of_other_weights_is_noticed(folder):
    process = run(folder, "export", "--output=other", "--seed=1", *TINY)
    assert process.returncode == 0, process.stderr
    check = dict(np.load(folder / "out" / "check.npz"))
    np.savez(folder / "other" / "check.npz", **check)
    process = run(folder, "run", "other", prompts="a\n")
    assert process.returncode == 1
    assert "that is more than" in process.stderr
    assert process.stdout == ""


def test_checkpoint(folder):
    """The parameters of a file; a file of another model is refused."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import paddle; from moe_model import LanguageModel, ModelOptions\n"
        "from paddle_fused.nn import functional\n"
        "paddle.seed(7)\n"
        "options = ModelOptions(hidden_size=16, layers=1, heads=4, expert_size=24)\n"
        "paddle.save(LanguageModel(options, functional).state_dict(), 'seven.pdparams')\n"
    )
    command = [sys.executable, "-c", code, str(SCRIPT.parent)]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    process = run(folder, "export", "--output=seven", "--checkpoint=seven.pdparams", *TINY)
    assert process.returncode == 0, process.stderr
    logits = [np.load(folder / name / "check.npz")["logits"] for name in ("out", "seven")]
    assert np.abs(logits[0] - logits[1]).max() > 1e-3
    assert run(folder, "run", "seven", prompts="a\n").returncode == 0
    process = run(folder, "export", "--output=none", "--checkpoint=seven.pdparams", "--layers=2")
    assert process.returncode != 0
