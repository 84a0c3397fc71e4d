"""Runs the examples in docstrings."""

from __future__ import annotations

import inspect
from pathlib import Path

import paddle
import pytest
from xdoctest import core

import paddle_fused
import paddle_fused.nn as nn
import paddle_fused.nn.functional as F

PACKAGE = Path(paddle_fused.__file__).parent
EXAMPLES = [
    example
    for path in sorted(PACKAGE.rglob("*.py"))
    for example in core.parse_doctestables(str(path), style="google", analysis="static")
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{Path(e.fpath).stem}:{e.callname}")
def test_example(example):
    paddle.seed(0)
    example.mode = "native"
    report = example.run(verbose=0, on_error="raise")
    assert report["passed"]


def test_examples_are_found():
    assert len(EXAMPLES) >= 14


@pytest.mark.parametrize("name", F.__all__)
def test_functions_say_all_that_a_caller_needs(name):
    function = getattr(F, name)
    doc = inspect.getdoc(function)
    for section in ("Args:", "Returns:", "Raises:", "Examples:"):
        assert section in doc, f"{name}: no {section}"
    for parameter in inspect.signature(function).parameters:
        assert f"\n    {parameter} (" in doc, f"{name}: {parameter} is not described"


@pytest.mark.parametrize("name", nn.__all__)
def test_layers_have_examples(name):
    if name != "functional":
        assert "Examples:" in inspect.getdoc(getattr(nn, name))
