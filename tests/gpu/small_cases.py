"""Every operator once on small tensors on the GPU, for tools that watch a process:

    python small_cases.py [WORD ...]

Widths with and without 16-byte vectors, aligned and not, forward and backward, every dtype; only
the calls whose name holds one of the words.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers import devices
from helpers.arrays import DTYPES
from helpers.calls import CALLS, make_call
from helpers.layouts import offset_by_one

SHAPES = [(3, 9), (5, 64), (3, 520), (2, 4096)]
# Rows that a cluster of blocks, or a loop over the row, works on.
WIDE = ["swiglu joined", "fused_swiglu_weighted", "rms_norm llama", "rms_norm residual"]


def main() -> None:
    """Runs them and says how many."""
    devices.use("gpu")
    count = 0
    for name in filter(devices.works, CALLS):
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        for dtype in DTYPES:
            wide = [(2, 33000)] if name in WIDE and dtype in ("bfloat16", "float32") else []
            for rows, width in SHAPES + wide:
                if "rope" in name or "rotary" in name:
                    width = min(width, 1024)
                call = make_call(name, dtype, rows, width)
                for view in (np.asarray, offset_by_one):
                    call.results(view)
                    count += 1
    print(f"ran {count} calls")


if __name__ == "__main__":
    main()
