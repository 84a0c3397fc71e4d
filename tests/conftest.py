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


def pytest_addoption(parser):
    """`--device gpu` runs tests/ops on a CUDA device; tests/gpu runs there anyway."""
    parser.addoption("--device", choices=["cpu", "gpu"], default="cpu", help="where tensors are")


def pytest_collection_modifyitems(config, items):
    """With `--device gpu`: leaves out what tests the CPU, or this Paddle cannot do there."""
    if config.getoption("--device") == "gpu":
        from helpers import devices

        devices.prepare(items)


@pytest.fixture
def rng(request):
    """A generator seeded by the test's name, so that one test's numbers do not move another's."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(params=["float32", "float16", "bfloat16", "float64"])
def dtype(request):
    """The name of each float dtype in turn."""
    return request.param
