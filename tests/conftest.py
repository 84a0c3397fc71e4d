"""Fixtures of all tests. Nothing is seeded globally: a test draws from its own `rng`."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:  # for `helpers`, whatever directory pytest was started in
    sys.path.insert(0, HERE)


@pytest.fixture
def rng(request):
    """A generator seeded by the test's name, so that one test's numbers do not move another's."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(params=["float32", "float16", "bfloat16", "float64"])
def dtype(request):
    """The name of each float dtype in turn."""
    return request.param
