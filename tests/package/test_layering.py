"""The rooms of custom_ops/: which file may include what, and how operators are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

OPS = Path(__file__).resolve().parents[2] / "custom_ops"
SHARED = {"common", "paddle"}
SOURCES = sorted(
    path for path in OPS.rglob("*") if path.suffix in {".h", ".cc", ".cu", ".cuh", ".inc"}
)
IDS = [str(path.relative_to(OPS)) for path in SOURCES]


def includes(path: Path) -> list[str]:
    """What a source includes, as written."""
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.M)


def sees_tensors(path: Path) -> bool:
    """Whether a file is host code: the only kind that may know Paddle."""
    return path.parent.name == "paddle" or path.name.endswith(("_op.cc", "_host.h"))


def test_sources_are_found():
    assert len(SOURCES) > 15


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_kernels_know_no_framework(path):
    paddle = [name for name in includes(path) if name.startswith(("paddle/", "custom_ops/paddle/"))]
    assert sees_tensors(path) or not paddle, f"{path.name} includes {paddle}"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_operators_do_not_include_each_other(path):
    own = path.parent.name
    folders = {name.split("/")[1] for name in includes(path) if name.startswith("custom_ops/")}
    assert folders <= {own} | SHARED
    if own in SHARED:
        assert folders <= SHARED, "shared code must not know an operator"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.suffix in {".h", ".cuh"}], ids=lambda p: p.name
)
def test_headers_guard_or_say_why_not(path):
    text = path.read_text()
    assert "#pragma once" in text or "no include guard" in " ".join(text.split()).replace("// ", "")


def test_operator_names_carry_the_prefix_and_stand_literally():
    names = []
    for path in SOURCES:
        found = re.findall(r"PD_BUILD_(?:GRAD_|DOUBLE_GRAD_)?OP\((\w+)\)", path.read_text())
        assert not found or path.name.endswith("_op.cc"), f"{path} registers operators"
        names += found
    assert len(set(names)) >= 15
    assert all(name.startswith("paddle_fused_") for name in names)


def test_every_operator_folder_has_the_same_files():
    for folder in sorted(p for p in OPS.iterdir() if p.is_dir() and p.name not in SHARED):
        stem = folder.name
        expected = {
            f"{stem}.h",
            f"{stem}_math.h",
            f"{stem}_cpu.cc",
            f"{stem}_cpu_kernels.inc",
            f"{stem}_op.cc",
        }
        assert expected <= {path.name for path in folder.iterdir()}, stem
