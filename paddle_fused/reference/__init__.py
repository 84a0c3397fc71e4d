"""The functions of `paddle_fused.nn.functional` in plain differentiable Paddle operators.

This is what a Paddle user would write by hand without the fused kernels: it runs on any device,
exports to ONNX, and is what the benchmarks compare with. Signatures, defaults and results are
those of `paddle_fused.nn.functional`; arguments are validated there, so checks here are few.

float16 and bfloat16 are computed in float32 and rounded where the function's docstring says so;
float64 stays float64. Gradients are Paddle's own derivatives of these operators, so a gradient
that passes back through a cast to a half type is rounded there once more than in the kernels.
"""

from __future__ import annotations

from .rms_norm import (
    fast_rms_norm,
    fused_rms_norm,
    fused_rms_norm_ext,
    fused_rms_norm_ext_grad,
    rms_norm,
)
from .rope import apply_rotary_pos_emb, fused_partial_rope, fused_rotary_position_embedding
from .swiglu import fused_swiglu_weighted, fused_swiglu_weighted_bwd, swiglu

__all__ = [
    "apply_rotary_pos_emb",
    "fast_rms_norm",
    "fused_partial_rope",
    "fused_rms_norm",
    "fused_rms_norm_ext",
    "fused_rms_norm_ext_grad",
    "fused_rotary_position_embedding",
    "fused_swiglu_weighted",
    "fused_swiglu_weighted_bwd",
    "rms_norm",
    "swiglu",
]
