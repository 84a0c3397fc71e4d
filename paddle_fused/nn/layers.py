"""Ordinary paddle.nn.Layers whose state-dict keys are the usual Llama ones."""

from __future__ import annotations

import paddle
from paddle import nn

from paddle_fused import _checks as checks
from paddle_fused._ops import is_dygraph
from paddle_fused.nn import functional as F
from paddle_fused.nn.functional.rms_norm import check_casting_mode
from paddle_fused.nn.functional.rope import check_base, rotary_tables


class RMSNorm(nn.Layer):
    """RMSNorm over the last axis; see :func:`paddle_fused.nn.functional.rms_norm`.

    Args:
        hidden_size (int): Size H of the last axis.
        epsilon (float, optional): Added to the mean of squares.
        offset (float, optional): Added to the weight; the weight starts at 1 - offset.
        casting_mode (str, optional): "llama", "gemma" or "none".
        weight_attr (ParamAttr|bool, optional): As in Paddle's layers; False: no weight.
        name (str, optional): Unused; for likeness with Paddle.

    State dict:
        ``weight``, shape ``[H]``, in the default dtype at construction.

    Examples:
        >>> import paddle
        >>> from paddle_fused.nn import RMSNorm
        >>> norm = RMSNorm(4)
        >>> print(norm(paddle.full([1, 4], 2.0)).numpy().round(4), list(norm.state_dict()))
        [[1. 1. 1. 1.]] ['weight']
    """

    def __init__(
        self,
        hidden_size,
        epsilon=1e-6,
        offset=0.0,
        casting_mode="llama",
        weight_attr=None,
        name=None,
    ):
        super().__init__()
        checks.check_int("RMSNorm", "hidden_size", hidden_size)
        checks.check_epsilon("RMSNorm", epsilon)
        checks.check_finite("RMSNorm", "offset", offset)
        check_casting_mode("RMSNorm", casting_mode)
        if weight_attr is False and offset not in (0.0, 1.0):
            raise checks.wrong_value("RMSNorm", "offset", "0.0 or 1.0 without a weight", offset)
        self.hidden_size = hidden_size
        self.epsilon = epsilon
        self.offset = offset
        self.casting_mode = casting_mode
        self.weight = None
        if weight_attr is not False:
            self.weight = self.create_parameter(
                shape=[hidden_size],
                attr=weight_attr,
                default_initializer=nn.initializer.Constant(1.0 - offset),
            )

    def forward(self, x, residual=None):
        """Normalises x; with a residual returns (out, x + residual)."""
        return F.rms_norm(
            x,
            self.weight,
            self.epsilon,
            offset=self.offset if self.weight is not None else 0.0,
            casting_mode=self.casting_mode,
            residual=residual,
        )

    def extra_repr(self):
        """What print(model) shows."""
        return (
            f"hidden_size={self.hidden_size}, epsilon={self.epsilon}, offset={self.offset}, "
            f"casting_mode={self.casting_mode!r}"
        )


class SwiGLUMLP(nn.Layer):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), the feed-forward block of Llama.

    Args:
        hidden_size (int): Size of the last axis of input and output.
        intermediate_size (int): Size between.
        weight_attr (ParamAttr, optional): Of the three projections.
        bias_attr (ParamAttr|bool, optional): Of the three projections; default: no bias.
        name (str, optional): Unused; for likeness with Paddle.

    State dict:
        ``gate_proj.weight``, ``up_proj.weight`` of shape ``[hidden, intermediate]``,
        ``down_proj.weight`` of shape ``[intermediate, hidden]``, and their biases if any.

    Examples:
        >>> import paddle
        >>> from paddle_fused.nn import SwiGLUMLP
        >>> mlp = SwiGLUMLP(8, 16)
        >>> print(mlp(paddle.ones([2, 8])).shape)
        paddle.Size([2, 8])
        >>> print(list(mlp.state_dict()))
        ['gate_proj.weight', 'up_proj.weight', 'down_proj.weight']
    """

    def __init__(
        self, hidden_size, intermediate_size, weight_attr=None, bias_attr=False, name=None
    ):
        super().__init__()
        attributes = {"weight_attr": weight_attr, "bias_attr": bias_attr}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **attributes)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **attributes)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **attributes)

    def forward(self, x):
        """Applies the block to the last axis of x."""
        return self.down_proj(F.swiglu(self.gate_proj(x), self.up_proj(x)))


class RotaryEmbedding(nn.Layer):
    """Rotates q and k of shape ``[B, S, heads, D]`` by tables that it keeps.

    Args:
        head_dim (int): D, even.
        max_position_embeddings (int, optional): Number of positions in the tables.
        base (float, optional): The angle of pair i at position p is p * base^(-2i/R).
        rotary_dim (int, optional): R, even: features rotated, the first ones; default all of D.
        interleaved (bool, optional): Pairs adjacent features; default: halves, as Llama does.
        name (str, optional): Unused; for likeness with Paddle.

    State dict:
        Empty: the tables are buffers that are not saved. They are float32 also after the layer is
        cast. Construct the layer in dygraph.

    Examples:
        >>> import paddle
        >>> from paddle_fused.nn import RotaryEmbedding
        >>> rotary = RotaryEmbedding(4, max_position_embeddings=16)
        >>> q, k = rotary(paddle.ones([1, 3, 2, 4]), paddle.ones([1, 3, 1, 4]))
        >>> print(q[0, 1, 0].numpy().round(4))
        [-0.3012  0.99    1.3818  1.0099]
    """

    def __init__(
        self,
        head_dim,
        max_position_embeddings=2048,
        base=10000.0,
        rotary_dim=None,
        interleaved=False,
        name=None,
    ):
        super().__init__()
        checks.check_int("RotaryEmbedding", "head_dim", head_dim)
        length = checks.check_int(
            "RotaryEmbedding", "max_position_embeddings", max_position_embeddings
        )
        if length < 0:
            raise checks.wrong_value(
                "RotaryEmbedding", "max_position_embeddings", "at least 0", length
            )
        if rotary_dim is not None:
            checks.check_int("RotaryEmbedding", "rotary_dim", rotary_dim)
        checks.check_bool("RotaryEmbedding", "interleaved", interleaved)
        check_base("RotaryEmbedding", "base", base)
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.interleaved = interleaved
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= head_dim:
            raise checks.wrong_value(
                "RotaryEmbedding",
                "rotary_dim",
                f"an even number of 2 to head_dim ({head_dim})",
                self.rotary_dim,
            )
        for table, value in zip(("cos", "sin"), self._make_tables()):
            self.register_buffer(table, value, persistable=False)

    def _make_tables(self):
        return rotary_tables(
            self.max_position_embeddings, self.rotary_dim, self.base, self.interleaved
        )

    def tables(self):
        """(cos, sin), float32, shape ``[max_position_embeddings, rotary_dim]``."""
        if self.cos.dtype != paddle.float32 and is_dygraph():
            # The layer was cast. A table in half precision is good for some 3 digits of an angle.
            self.cos, self.sin = self._make_tables()
        return self.cos, self.sin

    def forward(self, q, k=None, position_ids=None):
        """Rotates q, and k if given; position_ids ``[B, S]`` default to 0, 1, ..."""
        cos, sin = self.tables()
        out_q, out_k, _ = F.fused_rotary_position_embedding(
            q,
            k,
            sin=sin,
            cos=cos,
            position_ids=position_ids,
            use_neox_rotary_style=self.interleaved,
        )
        return out_q if k is None else (out_q, out_k)

    def extra_repr(self):
        """What print(model) shows."""
        return (
            f"head_dim={self.head_dim}, max_position_embeddings={self.max_position_embeddings}, "
            f"base={self.base}, rotary_dim={self.rotary_dim}, interleaved={self.interleaved}"
        )
