"""Reroutes Paddle's own functions, and model libraries that call them, to this package.

`paddle_fused.patch`, `paddle_fused.unpatch` and `paddle_fused.patched` are the public names. What
is replaced stands in one table per library: `paddle_table` and `paddleformers_table`.
"""

from paddle_fused.patching.api import patch, patch_report, patched, unpatch

__all__ = ["patch", "patch_report", "patched", "unpatch"]
