"""The list of kinds names tests that exist, and docs/reliability.md counts what the list holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from kinds import KINDS

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"
NAMED = sorted({test for cases in KINDS.values() for tests in cases.values() for test in tests})


def functions(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("test", NAMED)
def test_named_tests_exist(test):
    file, _, function = test.partition("::")
    assert function in functions(TESTS / file)


def test_every_case_has_a_test():
    assert all(tests for cases in KINDS.values() for tests in cases.values())


def test_page_counts_what_is_there():
    rows = dict(re.findall(r"^\| ([a-z][^|]*?) \| (\d+) \|", PAGE.read_text(), re.M))
    counted = {kind: str(len(cases)) for kind, cases in KINDS.items()}
    assert {kind: rows.get(kind) for kind in counted} == counted
    total = sum(map(len, KINDS.values()))
    assert rows["all"] == str(total)
