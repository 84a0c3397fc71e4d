"""A byte-level language model with routed experts, in ordinary Paddle code.

`ops` is the module whose fused operators the model calls: `paddle_fused.nn.functional`, or
`paddle_fused.reference`, which has the same functions in plain Paddle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import paddle
from paddle import nn
from paddle.nn import functional as PF

VOCABULARY = 256  # every byte is a token


@dataclass(frozen=True)
class ModelOptions:
    """The sizes of a model."""

    hidden_size: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    experts: int = 8
    top_k: int = 2
    expert_size: int = 384
    balance: float = 0.01

    def __post_init__(self):
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden size {self.hidden_size} does not divide into {self.heads} heads of even "
                "size (RoPE rotates pairs)"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not share {self.kv_heads} KV heads evenly")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top-k {self.top_k} is not between 1 and {self.experts} experts")


def matrix(layer: nn.Layer, *shape: int, std: float = 0.0) -> paddle.Tensor:
    """A weight with normal values; their deviation defaults to 1/√(inputs)."""
    std = std or shape[-2] ** -0.5
    return layer.create_parameter(shape, default_initializer=nn.initializer.Normal(std=std))


def gain(layer: nn.Layer, size: int) -> paddle.Tensor:
    """The weight of an RMSNorm."""
    return layer.create_parameter([size], default_initializer=nn.initializer.Constant(1.0))


class Attention(nn.Layer):
    """Causal attention in which groups of query heads share a key and a value head."""

    def __init__(self, options: ModelOptions, ops):
        super().__init__()
        self.ops = ops
        self.heads, self.kv_heads = options.heads, options.kv_heads
        self.head_dim = options.hidden_size // options.heads
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = matrix(self, options.hidden_size, width)
        self.out = matrix(self, options.hidden_size, options.hidden_size)

    def forward(self, x, mask):
        """X `[B, S, H]`; mask `[S, S]`, added to the scores."""
        batch, length = paddle.shape(x)[0], paddle.shape(x)[1]
        packed = paddle.matmul(x, self.qkv)
        packed = packed.reshape([batch, length, self.heads + 2 * self.kv_heads, self.head_dim])
        q, k, v = paddle.split(packed, [self.heads, self.kv_heads, self.kv_heads], axis=2)
        # Halves, as Llama rotates; q and k in one call though they have other numbers of heads.
        q, k, _ = self.ops.fused_rotary_position_embedding(q, k, use_neox_rotary_style=False)

        # The query heads of a group are laid end to end, as if they were one longer sequence: so
        # they meet their shared key head in one product and k and v are never repeated.
        q = (q * self.head_dim**-0.5).transpose([0, 2, 1, 3])
        q = q.reshape([batch, self.kv_heads, -1, self.head_dim])
        scores = paddle.matmul(q, k.transpose([0, 2, 3, 1]))
        scores = scores.reshape([batch, self.heads, length, length]) + mask
        weights = PF.softmax(scores).reshape([batch, self.kv_heads, -1, length])
        mixed = paddle.matmul(weights, v.transpose([0, 2, 1, 3]))
        mixed = mixed.reshape([batch, self.heads, length, self.head_dim]).transpose([0, 2, 1, 3])
        return paddle.matmul(mixed.reshape([batch, length, -1]), self.out)


class Experts(nn.Layer):
    """A mixture of experts: each token goes to the `top_k` SwiGLU MLPs that its router chooses."""

    def __init__(self, options: ModelOptions, ops):
        super().__init__()
        self.ops = ops
        self.experts, self.top_k = options.experts, options.top_k
        hidden, inner = options.hidden_size, options.expert_size
        self.router = matrix(self, hidden, self.experts)
        self.gate_up = nn.ParameterList(
            [matrix(self, hidden, 2 * inner) for _ in range(self.experts)]
        )
        self.down = nn.ParameterList([matrix(self, inner, hidden) for _ in range(self.experts)])

    def route(self, tokens):
        """Probabilities `[T, E]`, zero for experts not chosen, and the balance loss."""
        probs = PF.softmax(paddle.matmul(tokens, self.router))
        _, chosen = paddle.topk(probs, self.top_k)
        mask = PF.one_hot(chosen, self.experts).sum(axis=1)
        kept = probs * mask
        # Lowest, 1, where every expert gets as many tokens as another (Switch Transformer).
        balance = (mask.mean(axis=0) * probs.mean(axis=0)).sum() * (self.experts / self.top_k)
        return kept / kept.sum(axis=-1, keepdim=True), mask, balance

    def forward(self, x):
        """X `[B, S, H]`; returns the same shape, and the balance loss.

        Each expert takes its own tokens by `nonzero` and `gather`, whose results may have any
        number of rows, none included. Both record into a static graph with an unknown size, so
        the graph that is exported routes as training does: no dense form in which every expert
        computes every token, and no second version of this function to keep in step.
        """
        tokens = x.reshape([-1, x.shape[-1]])
        probs, mask, balance = self.route(tokens)
        rows, results = [], []
        for expert in range(self.experts):
            own = paddle.nonzero(mask[:, expert])
            gate_up = paddle.matmul(paddle.gather(tokens, own), self.gate_up[expert])
            weight = paddle.gather(probs[:, expert], own)
            # The weight belongs to the activation, not to the result: that is half the work, and
            # the fused backward gives its gradient in the same pass.
            inner = self.ops.fused_swiglu_weighted(gate_up, weight)
            rows.append(own)
            results.append(paddle.matmul(inner, self.down[expert]))
        # One sum for all experts; a sum for each would copy all tokens each time.
        total = paddle.scatter_nd_add(
            paddle.zeros_like(tokens), paddle.concat(rows), paddle.concat(results)
        )
        return total.reshape(paddle.shape(x)), balance


class Block(nn.Layer):
    """Attention and experts, each behind a norm that also adds what came before it."""

    def __init__(self, options: ModelOptions, ops):
        super().__init__()
        self.ops = ops
        self.attention = Attention(options, ops)
        self.experts = Experts(options, ops)
        self.attention_norm = gain(self, options.hidden_size)
        self.experts_norm = gain(self, options.hidden_size)

    def forward(self, change, stream, mask):
        """Takes the residual stream and the last change to it, not yet added; returns the same.

        The addition waits for the next norm, which does both in one pass.
        """
        normed, stream = self.ops.rms_norm(change, self.attention_norm, residual=stream)
        change = self.attention(normed, mask)
        normed, stream = self.ops.rms_norm(change, self.experts_norm, residual=stream)
        change, balance = self.experts(normed)
        return change, stream, balance


class LanguageModel(nn.Layer):
    """Bytes in, logits of the next byte out; the head is the embedding."""

    def __init__(self, options: ModelOptions, ops):
        super().__init__()
        self.ops = ops
        self.options = options
        self.embedding = matrix(self, VOCABULARY, options.hidden_size, std=0.02)
        self.blocks = nn.LayerList([Block(options, ops) for _ in range(options.layers)])
        self.norm = gain(self, options.hidden_size)

    def trunk(self, ids):
        """Logits `[B, S, 256]` and the balance loss of all blocks together."""
        stream = PF.embedding(ids, self.embedding)
        change = paddle.zeros_like(stream)
        position = paddle.arange(paddle.shape(ids)[1])
        later = (position.unsqueeze(0) > position.unsqueeze(1)).astype(stream.dtype)
        mask, balance = later * -1e9, 0.0
        for block in self.blocks:
            change, stream, one = block(change, stream, mask)
            balance = balance + one
        normed, _ = self.ops.rms_norm(change, self.norm, residual=stream)
        return paddle.matmul(normed, self.embedding, transpose_y=True), balance

    def forward(self, ids):
        """Logits `[B, S, 256]` for ids, int64 `[B, S]`: what is exported."""
        return self.trunk(ids)[0]

    def loss(self, ids, targets):
        """Cross entropy in nats per byte, and what training minimises: with the balance loss."""
        logits, balance = self.trunk(ids)
        cross_entropy = PF.cross_entropy(logits.reshape([-1, VOCABULARY]), targets.reshape([-1]))
        return cross_entropy, cross_entropy + self.options.balance * balance


def learning_rate(peak: float, step: int, steps: int) -> float:
    """A short linear warm-up, then a half cosine down to a tenth of the peak."""
    warmup = max(1, min(40, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))
