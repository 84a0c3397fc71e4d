"""Two processes over gloo: values, placements and communication, against one process.

One launch runs every case of worker.py, since a launch takes longer than all of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worker import CASES, CUT, operators

from helpers.launching import launch

WORKER = Path(__file__).with_name("worker.py")
OPERATORS = list(operators())
FLOAT32_SUM = 2e-6  # of the largest element: sums over rows are added in two parts


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process saw."""
    folder = tmp_path_factory.mktemp("ranks")
    process, logs = launch(WORKER, [folder], folder, {"GLOG_vmodule": "*reshard*=4"})
    files = sorted(folder.glob("rank*.json"))
    assert len(files) == 2, process.stdout[-3000:] + process.stderr[-3000:] + logs
    return [json.loads(path.read_text()) for path in files]


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def saw(request, ranks):
    """What one process saw of a case."""

    def look(name):
        result = ranks[request.param][name]
        assert "failed" not in result, result["failed"]
        return result

    return look


def taken(name: str) -> str:
    """Where a case's row-wise tensors end: cut as given, or whole."""
    given = name.rpartition(" ")[2]
    if name == "one of two cut":
        return "1"
    if name == "sharded weight":
        return "0"
    if given == "2":  # the last axis of [B, S, n]: only an elementwise operator leaves it cut
        return "2" if name.startswith(("rope", "swiglu_pair")) else "R"
    return "R" if given in ("3", "P") else given


def sums(name: str) -> int:
    """How many of the gradients are sums over rows, the last ones of their lists."""
    if name.startswith("affine"):
        return 3
    normed = ("rms_norm", "add_rms_norm", "ext", "uneven rms_norm", "one of", "sharded weight")
    return 1 if name.startswith(normed) else 0


@pytest.mark.parametrize("name", OPERATORS)
def test_placements(saw, name):
    result, place = saw(name), taken(name)
    assert result["out"] == [place] * len(result["out"])
    partial = "R" if place == "R" else "P"
    grads = list(result["grad"])
    if name.startswith("affine"):  # x, three vectors, residual
        grads = [grads[0], grads[4], *grads[1:4]]
    rowwise = len(grads) - sums(name)
    assert grads == [place] * rowwise + [partial] * sums(name)


@pytest.mark.parametrize("name", OPERATORS)
def test_same_bits_as_one_process(saw, name):
    """But for sums over rows, whose parts are added in another order."""
    result = saw(name)
    assert result["out_error"] == [0.0] * len(result["out"])
    for place, error in zip(result["grad"], result["grad_error"]):
        assert error <= (FLOAT32_SUM if place == "P" else 0.0)


@pytest.mark.parametrize("name", OPERATORS)
def test_communication(saw, name):
    """None, but what takes an axis together that cannot be cut, or adds partial sums."""
    result = saw(name)
    given = name.rpartition(" ")[2]
    if name == "sharded weight":
        expected = ["AllGather"]
    elif given == "P":
        expected = ["AllReduce"]
    elif taken(name) == "R":
        expected = ["AllGather"]
    else:
        expected = []
    assert result["forward"][:1] == expected
    assert set(result["forward"]) == set(expected)
    assert result["backward"] == []


def test_each_process_has_its_part(ranks):
    assert [rank["swiglu 1"]["local"] for rank in ranks] == [[4, 3, 8]] * 2
    assert [rank["uneven swiglu 0"]["local"] for rank in ranks] == [[3, 6, 8], [2, 6, 8]]
    assert [rank["rope 2"]["local"] for rank in ranks] == [[2, 6, 2, 8]] * 2


def test_tensor_parallel_block(saw):
    """Column- and row-parallel products with our operators between: two sums, as without them."""
    result = saw("tensor_parallel_block")
    assert max(result["errors"].values()) < 1e-5
    assert result["places"] == {**CUT, "input_norm": "R", "post_norm": "R"}
    assert result["forward"] == ["AllReduce"] * 2
    assert set(result["backward"]) == {"AllReduce"}


@pytest.mark.parametrize("name", ["data_parallel", "auto_data_parallel"])
def test_training_step(saw, name):
    """Four AdamW steps on half batches end where four on whole batches do."""
    errors = saw(name)["errors"]
    assert len(errors) == 4
    assert max(errors.values()) < 1e-6


def test_every_case_is_looked_at(ranks):
    assert set(ranks[0]) == set(OPERATORS) | set(CASES) == set(ranks[1])
