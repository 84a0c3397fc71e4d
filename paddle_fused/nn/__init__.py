"""Layers over paddle_fused.nn.functional."""

from paddle_fused.nn import functional
from paddle_fused.nn.layers import RMSNorm, RotaryEmbedding, SwiGLUMLP

__all__ = ["RMSNorm", "RotaryEmbedding", "SwiGLUMLP", "functional"]
