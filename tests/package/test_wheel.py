"""What is in the wheel, and what is not."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEELS = sorted((ROOT / "build" / "wheel").glob("paddle_fused-*.whl"))


@pytest.fixture(scope="module")
def wheel():
    if not WHEELS:
        pytest.skip("no wheel in build/wheel: `make test` builds it, plain pytest does not")
    with zipfile.ZipFile(WHEELS[-1]) as file:
        yield file


def test_contents(wheel):
    names = set(wheel.namelist())
    assert {"paddle_fused/_C.so", "paddle_fused/_build_info.py", "paddle_fused/env.py"} <= names
    assert "paddle_fused/nn/functional/rope.py" in names
    strays = [
        name
        for name in names
        if not re.match(r"paddle_fused(/[\w/]+\.py|/_C\.so|-[\w.+]+\.dist-info/.+)$", name)
    ]
    assert strays == []


def test_one_source_file_each(wheel):
    packaged = {name for name in wheel.namelist() if name.endswith(".py")}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "paddle_fused").rglob("*.py")
        if path.name != "_build_info.py"
    }
    assert packaged - {"paddle_fused/_build_info.py"} == sources


def test_no_paths_of_the_build_machine(wheel):
    needles = [str(ROOT).encode(), b"site-packages", str(Path.home()).encode() + b"/"]
    for name in ("paddle_fused/_C.so", "paddle_fused/_build_info.py"):
        content = wheel.read(name)
        assert len(content) > 100
        found = [needle for needle in needles if needle in content]
        assert found == [], f"{name} holds {found}"


def test_run_path_is_relative(wheel):
    content = wheel.read("paddle_fused/_C.so")
    assert b"$ORIGIN/../paddle/base" in content


def test_metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    text = wheel.read(name).decode()
    version = {}
    exec((ROOT / "paddle_fused" / "version.py").read_text(), version)
    assert f"Version: {version['__version__']}" in text
    assert "Name: paddle-fused" in text
    # Two distributions provide Paddle; naming one would pull it in beside the other.
    assert "Requires-Dist: paddlepaddle" not in text
