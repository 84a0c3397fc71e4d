"""Runs with PaddleFormers on the path only: `make test-paddleformers`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import paddle_fused

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:  # for `library` and `stand_in`
    sys.path.insert(0, HERE)

collect_ignore_glob = [] if importlib.util.find_spec("paddleformers") else ["test_*.py"]


@pytest.fixture(autouse=True)
def unpatched():
    """Every test starts and ends unpatched."""
    yield
    paddle_fused.unpatch()
