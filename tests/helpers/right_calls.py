"""A right call of every function, for tests that make it wrong."""

from __future__ import annotations

import paddle


def ones(*shape, dtype="float32"):
    """A tensor of ones."""
    return paddle.ones(shape, dtype)


# For each function a right call as keyword arguments; a wrong one changes some of them.
RIGHT = {
    "swiglu": {"x": ones(3, 8), "y": ones(3, 8)},
    "fused_swiglu_weighted": {"x": ones(3, 8), "probs": ones(3)},
    "fused_swiglu_weighted_bwd": {
        "o1": ones(3, 8),
        "do2_s": ones(3, 4),
        "unzipped_probs": ones(3),
    },
    "rms_norm": {"x": ones(3, 8), "weight": ones(8), "residual": ones(3, 8)},
    "fused_rms_norm": {
        "x": ones(3, 8),
        "norm_weight": ones(8),
        "norm_bias": ones(8),
        "epsilon": 1e-6,
        "bias": ones(8),
        "residual": ones(3, 8),
    },
    "fused_rms_norm_ext": {"x": ones(3, 8), "scale": ones(8)},
    "fast_rms_norm": {"x": ones(3, 8), "scale": ones(8)},
    "fused_rms_norm_ext_grad": {
        "x": ones(3, 8),
        "scale": ones(8),
        "invvar": ones(3),
        "y_grad": ones(3, 8),
        "epsilon": 1e-5,
    },
    "fused_rotary_position_embedding": {
        "q": ones(2, 3, 2, 8),
        "k": ones(2, 3, 1, 8),
        "v": ones(2, 3, 1, 8),
        "sin": ones(5, 8),
        "cos": ones(5, 8),
        "position_ids": paddle.zeros([2, 3], "int64"),
    },
    "apply_rotary_pos_emb": {
        "q": ones(2, 2, 3, 8),
        "k": ones(2, 1, 3, 8),
        "cos": ones(5, 8),
        "sin": ones(5, 8),
        "position_ids": paddle.zeros([2, 3], "int64"),
    },
    "fused_partial_rope": {
        "x": ones(2, 3, 2, 8),
        "cos": ones(1, 5, 1, 4),
        "sin": ones(1, 5, 1, 4),
    },
}
