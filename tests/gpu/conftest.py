"""These tests need a CUDA build of Paddle and of the package, and a device: skipped without.

They run on devices for which Paddle's own GPU kernels were not built, too: tensors come from NumPy,
gradients are given, comparisons are made in NumPy, and no operator but ours runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).resolve().parents[1])
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)

from helpers import devices  # noqa: E402


def pytest_collection_modifyitems(items):
    """Marks the tests of this folder, and skips them where they cannot run."""
    own = [item for item in items if Path(__file__).parent in Path(item.fspath).parents]
    reason = devices.missing() if own else None
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def on_the_gpu():
    """New tensors lie on the GPU; afterwards wherever they did before."""
    import paddle

    before = paddle.get_device()
    devices.use("gpu")
    yield
    devices.use(before)
