"""The functions of paddle.incubate.nn.functional that this package replaces, and their kin."""

from paddle_fused.nn.functional.rms_norm import (
    fast_rms_norm,
    fused_rms_norm,
    fused_rms_norm_ext,
    fused_rms_norm_ext_grad,
    rms_norm,
)
from paddle_fused.nn.functional.rope import (
    apply_rotary_pos_emb,
    fused_partial_rope,
    fused_rotary_position_embedding,
)
from paddle_fused.nn.functional.swiglu import (
    fused_swiglu_weighted,
    fused_swiglu_weighted_bwd,
    swiglu,
)

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
