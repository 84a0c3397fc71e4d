"""Every kernel against the NumPy float64 oracle, by raw pointer:

    PYTHONPATH=tests python -m benchmarks.gpu.check [WORD ...]

Besides the error bounds: the scalar path (shifted pointers) returns the vector path's bits, a
repeated call its own, and a row alone the bits it had in its batch.
"""

from __future__ import annotations

import sys
import traceback

import numpy as np
import torch

from .arrays import NAMES
from .huge import check_huge
from .rms_norm import check_rms_norm, check_rms_norm_double
from .rope import check_rope, check_rope_table
from .swiglu import check_swiglu

CHECKS = [
    check_swiglu,
    check_rms_norm,
    check_rms_norm_double,
    check_rope,
    check_rope_table,
    check_huge,
]


def main() -> int:
    """Runs the checks whose name holds one of the words; returns how many failed."""
    failures = 0
    for check in CHECKS:
        name = check.__name__
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        for dtype in NAMES:
            try:
                check(np.random.default_rng(5), dtype)
                torch.cuda.synchronize()
                print(f"ok    {name} {dtype}", flush=True)
            except Exception:
                failures += 1
                text = traceback.format_exc().splitlines()
                print(f"FAIL  {name} {dtype}: {text[-1]}   {text[-4].strip()}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
