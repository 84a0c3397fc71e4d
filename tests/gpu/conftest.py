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


def _missing() -> str | None:
    try:
        import paddle
    except ImportError:
        return "Paddle is not installed"
    if not paddle.is_compiled_with_cuda():
        return "this Paddle has no CUDA"
    if paddle.device.cuda.device_count() == 0:
        return "there is no CUDA device"
    import paddle_fused

    return None if paddle_fused.has_cuda() else "paddle_fused was built for the CPU only"


def pytest_collection_modifyitems(items):
    """Marks the tests of this folder, and skips them where they cannot run."""
    own = [item for item in items if Path(__file__).parent in Path(item.fspath).parents]
    reason = _missing() if own else None
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
