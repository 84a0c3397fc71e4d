"""Paddle's state under auto_cast, which on a CPU paddle.amp.auto_cast itself does not set."""

from __future__ import annotations

import contextlib

import paddle
from paddle.base import core

LEVELS = {"O1": core.AmpLevel.O1, "O2": core.AmpLevel.O2}


@contextlib.contextmanager
def auto_cast(level="O1", dtype="bfloat16"):
    """Paddle's state under paddle.amp.auto_cast on a GPU."""
    tracer = paddle.base.framework._dygraph_tracer()
    before = tracer._amp_level, tracer._amp_dtype
    tracer._amp_level, tracer._amp_dtype = LEVELS[level], dtype
    try:
        assert paddle.is_autocast_enabled()
        yield
    finally:
        tracer._amp_level, tracer._amp_dtype = before
