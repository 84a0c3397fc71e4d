"""README and docs: the Python blocks run, the links lead somewhere, the make targets exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    """Fenced blocks of a language; those in ```python no-run fences are left out."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def test_pages_are_found():
    names = {page.name for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy.md", "numerics.md"} <= names


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=str)
def test_python_blocks_run(page, tmp_path):
    """All blocks of a page, in order, as one script in an empty folder."""
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(blocks(page, "python")))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [
        target
        for target in targets
        if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_make_targets_exist(page):
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    used = set(re.findall(r"(?:`|^    )make ([a-z][a-z-]*)", page.read_text(), re.M))
    assert used <= known, used - known


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_named_in_code_exist(page):
    """Paths in backticks that look like files of this repository."""
    paths = re.findall(
        r"`((?:custom_ops|paddle_fused|tests|docs|examples|benchmarks|tools)/[\w./-]+)`",
        page.read_text(),
    )
    ignored = ("paddle_fused/_C.so", "paddle_fused/_build_info.py")
    missing = [p for p in paths if p not in ignored and not (ROOT / p).exists()]
    assert missing == []
