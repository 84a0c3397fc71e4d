"""Small models for tests of graphs."""

from __future__ import annotations

import paddle

import paddle_fused.nn.functional as F
from paddle_fused.nn import RMSNorm, RotaryEmbedding

HIDDEN, HEADS = 12, 2


class OneChain(paddle.nn.Layer):
    """Our operators alone, each used once: Paddle's CPU cannot add bfloat16."""

    def __init__(self):
        super().__init__()
        self.input_norm = RMSNorm(HIDDEN)
        self.rotary = RotaryEmbedding(HIDDEN // HEADS, max_position_embeddings=16)
        self.post_norm = RMSNorm(HIDDEN // 2, casting_mode="gemma", offset=1.0)

    def forward(self, x):
        heads = [paddle.shape(x)[0], paddle.shape(x)[1], HEADS, HIDDEN // HEADS]
        q = self.rotary(paddle.reshape(self.input_norm(x), heads))
        normed = self.post_norm(paddle.flatten(F.swiglu(q), 2))
        probs = paddle.full(heads[:2], 0.5, "float32")
        return F.fused_swiglu_weighted(normed, probs)
