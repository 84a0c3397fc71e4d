"""Importing: what it registers, what it leaves alone, and how it fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import paddle
import pytest

import paddle_fused


def run(code: str, folder: Path | None = None, arguments=("-c",)):
    """Runs Python in an empty folder, with a copy of the package first on the path if given."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if folder is not None:
        environment["PYTHONPATH"] = str(folder)
    return subprocess.run(
        [sys.executable, *arguments, *([code] if code else [])],
        capture_output=True,
        text=True,
        env=environment,
        cwd="/",
    )


@pytest.fixture
def copy(tmp_path):
    """A copy of the installed package that a test may damage."""
    shutil.copytree(Path(paddle_fused.__file__).parent, tmp_path / "paddle_fused")
    return tmp_path


def set_paddle_version(folder: Path, version: str) -> None:
    path = folder / "paddle_fused" / "_build_info.py"
    lines = path.read_text().splitlines()
    lines = [
        f"PADDLE_VERSION = {version!r}" if line.startswith("PADDLE_VERSION") else line
        for line in lines
    ]
    path.write_text("\n".join(lines) + "\n")


def test_other_minor_version_is_refused_with_both_versions(copy):
    set_paddle_version(copy, "3.1.4")
    result = run("import paddle_fused", copy)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: paddle_fused was built against Paddle 3.1.4")
    assert paddle.__version__ in last
    assert "pip install" in last


def test_other_patch_version_is_accepted(copy):
    major, minor, *_ = paddle.__version__.split(".")
    set_paddle_version(copy, f"{major}.{minor}.99")
    result = run("import paddle_fused; print(paddle_fused.is_available())", copy)
    assert result.stdout.strip() == "True", result.stderr


def remove_library(folder: Path) -> None:
    (folder / "_C.so").unlink()


def truncate_library(folder: Path) -> None:
    library = folder / "_C.so"
    library.write_bytes(library.read_bytes()[:4096])


def remove_build_info(folder: Path) -> None:
    (folder / "_build_info.py").unlink()


@pytest.mark.parametrize("damage", [remove_library, truncate_library, remove_build_info])
def test_damaged_installation_raises_import_error(copy, damage):
    damage(copy / "paddle_fused")
    result = run("import paddle_fused", copy)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("ImportError: paddle_fused")


@pytest.mark.parametrize("damage", [None, remove_library, truncate_library, remove_build_info])
def test_env_runs_whatever_is_broken(copy, damage):
    if damage is not None:
        damage(copy / "paddle_fused")
    result = run("", copy, ("-m", "paddle_fused.env", "--json"))
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["paddle_fused"] == paddle_fused.__version__
    assert report["paddle"]["version"] == paddle.__version__
    assert report["library"]["loads"] is (damage is None)
    assert (len(report["operators"]) >= 15) is (damage is None)


def test_env_prints_text():
    result = run("", None, ("-m", "paddle_fused.env"))
    assert result.returncode == 0
    assert "library:" in result.stdout
    assert "cpu_target:" in result.stdout


def test_import_is_silent_and_leaves_paddle_alone():
    code = """
import inspect, json, os, sys
import paddle, paddle.incubate.nn.functional as F
from paddle.base.framework import OpProtoHolder
names = ["swiglu", "fused_rms_norm", "fused_rms_norm_ext", "fused_rotary_position_embedding",
         "fused_swiglu_weighted_bwd"]
def state():
    return ({name: str(inspect.signature(getattr(F, name))) for name in names},
            {name: id(getattr(F, name)) for name in names},
            {name: id(getattr(paddle._C_ops, name)) for name in ["swiglu", "rms_norm"]})
before, operators = state(), set(OpProtoHolder.instance().op_proto_map)
sys.stderr.flush()
saved = os.dup(2); read, write = os.pipe(); os.dup2(write, 2)
import paddle_fused
os.dup2(saved, 2); os.close(write)
new = set(OpProtoHolder.instance().op_proto_map) - operators
print(json.dumps({"stderr": os.read(read, 10000).decode(), "same": before == state(),
                  "strange": [n for n in new if not n.startswith("paddle_fused_")],
                  "new": len(new)}))
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert report["stderr"] == ""
    assert report["same"] is True
    assert report["strange"] == []
    assert report["new"] >= 15


def test_second_import_of_the_library_is_harmless():
    code = (
        "import paddle, paddle_fused; from paddle.base import core;"
        "core.load_op_meta_info_and_register_op(paddle_fused.library_path());"
        "import paddle_fused.nn.functional as F; print(F.swiglu(paddle.ones([2, 4])).shape)"
    )
    result = run(code)
    assert "[2, 2]" in result.stdout, result.stderr


def test_surface():
    assert paddle_fused.is_available() is True
    assert paddle_fused.has_cuda() is False
    assert Path(paddle_fused.library_path()).is_absolute()
    assert Path(paddle_fused.library_path()).is_file()
    assert paddle_fused.__version__.count(".") == 2


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, len(os.sched_getaffinity(0))),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"PADDLE_FUSED_NUM_THREADS": "5", "OMP_NUM_THREADS": "1"}, 5),
    ],
    ids=str,
)
def test_default_threads(environment, expected):
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in ("OMP_NUM_THREADS", "PADDLE_FUSED_NUM_THREADS")
    }
    result = subprocess.run(
        [sys.executable, "-c", "import paddle_fused; print(paddle_fused.get_num_threads())"],
        capture_output=True,
        text=True,
        env={**inherited, **environment},
        cwd="/",
    )
    assert result.stdout.strip() == str(expected), result.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PADDLE_FUSED_NUM_THREADS", "abc"),
        ("PADDLE_FUSED_NUM_THREADS", "0"),
        ("PADDLE_FUSED_NUM_THREADS", "99999999999"),
        ("PADDLE_FUSED_CPU_TARGET", "bogus"),
    ],
)
def test_environment_values_that_mean_nothing_warn(name, value):
    inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    result = subprocess.run(
        [sys.executable, "-c", "import paddle_fused; print(paddle_fused.get_num_threads())"],
        capture_output=True,
        text=True,
        env={**inherited, name: value},
        cwd="/",
    )
    assert result.stdout.strip() == str(len(os.sched_getaffinity(0))), result.stderr
    assert f"{name}: expected" in result.stderr


@pytest.mark.parametrize(
    ("count", "error"), [(0, ValueError), (-1, ValueError), ("2", TypeError), (True, TypeError)]
)
def test_set_num_threads_checks(count, error):
    before = paddle_fused.get_num_threads()
    with pytest.raises(error, match=r"set_num_threads\(\): count"):
        paddle_fused.set_num_threads(count)
    assert paddle_fused.get_num_threads() == before


def test_keep_cpu_memory_keeps_it():
    """Freed memory of a large tensor is used again instead of faulting in fresh pages."""
    code = """
import resource, sys
import numpy as np, paddle, paddle_fused
import paddle_fused.nn.functional as F
if "keep" in sys.argv:
    assert paddle_fused.keep_cpu_memory() is True
x = paddle.ones([1024, 8192])
for _ in range(3):
    F.swiglu(x)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    F.swiglu(x)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = {}
    for mode in ("plain", "keep"):
        result = subprocess.run(
            [sys.executable, "-c", code, mode],
            capture_output=True,
            text=True,
            env={**os.environ, "PADDLE_FUSED_HUGE_PAGES": "0"},
            cwd="/",
        )
        assert result.returncode == 0, result.stderr
        faults[mode] = int(result.stdout)
    assert faults["plain"] > 20 * 1000, "16 MiB an output: without it every page faults"
    assert faults["keep"] < faults["plain"] / 100
