"""Fused training operators for PaddlePaddle: weighted SwiGLU, RMSNorm and RoPE.

    import paddle_fused.nn.functional as F

Importing the package registers its operators with Paddle, so that a model that was exported with
them loads and runs afterwards.
"""

from __future__ import annotations

import sys

from paddle_fused.version import __version__

__all__ = [
    "__version__",
    "get_num_threads",
    "has_cuda",
    "is_available",
    "keep_cpu_memory",
    "library_path",
    "nn",
    "patch",
    "patch_report",
    "patched",
    "reference",
    "set_num_threads",
    "unpatch",
]


def _reports_environment() -> bool:
    """Whether this is ``python -m paddle_fused.env``, which has to run when nothing else does."""
    arguments = getattr(sys, "orig_argv", None)
    if arguments is None:  # Python 3.9
        try:
            with open("/proc/self/cmdline", encoding="utf-8") as file:
                arguments = file.read().split("\0")
        except OSError:
            return False
    return sys.argv[:1] == ["-m"] and "paddle_fused.env" in arguments


if not _reports_environment():
    from paddle_fused import _library

    _library.load()

    from paddle_fused import nn, reference
    from paddle_fused._library import has_cuda, is_available, library_path
    from paddle_fused._runtime import get_num_threads, keep_cpu_memory, set_num_threads
    from paddle_fused.patching import patch, patch_report, patched, unpatch
