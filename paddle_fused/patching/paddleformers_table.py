"""PaddleFormers: its registry of norms, its MLP, norms and rotations of single models.

Everything it imports from Paddle by value is in Paddle's table. Nothing here imports PaddleFormers.
"""

from __future__ import annotations

import paddle

from paddle_fused import _checks as checks
from paddle_fused.nn import functional as F
from paddle_fused.nn.functional.rope import rotate_pairs_heads_first
from paddle_fused.patching.routes import ATTRIBUTE, LAYER, METHOD, REGISTRY, Row
from paddle_fused.patching.support import first_reason, unsupported_tensor

_KNOWN = ("1.2", "1.3")  # what a method or a model's rotation computes is not in its signature


# Norms


def _norm(self, hidden_states):
    """RMSNorm.forward with the roundings that its flag asks for."""
    if self.config.get("fuse_rms_norm", True):
        out, _ = F.fused_rms_norm_ext(hidden_states, self.weight, self.variance_epsilon)
        return out
    return F.rms_norm(hidden_states, self.weight, self.variance_epsilon, casting_mode="llama")


def _norm_unsupported(self, hidden_states):
    if not self.config.get("fuse_rms_norm", True) and hidden_states.dtype != self.weight.dtype:
        return "unfused with x and weight of two dtypes"
    return first_reason(
        unsupported_tensor("x", hidden_states), unsupported_tensor("weight", self.weight)
    )


def _offset_norm(self, x):
    """The norm of Gemma and Qwen3-Next: weight - 1 is kept, one rounding."""
    return F.rms_norm(x, self.weight, self.eps, offset=1.0, casting_mode="gemma")


def _offset_norm_unsupported(self, x):
    return first_reason(unsupported_tensor("x", x), unsupported_tensor("weight", self.weight))


# Feed-forward blocks


def _activate(mlp, gate, up=None):
    """silu(gate) * up, of the packed pair without up."""
    reason = first_reason(unsupported_tensor("gate", gate), unsupported_tensor("up", up))
    if reason is None and (up is None or up.dtype == gate.dtype):
        return F.swiglu(gate, up)
    if up is None:
        gate, up = gate.chunk(2, axis=-1)
    return mlp.act_fn(gate) * up


def _mlp(self, x):
    """MLP.forward; with two projections no concatenation, whatever fuse_swiglu says."""
    if self.fuse_up_gate:
        return self.down_proj(_activate(self, getattr(self, self.gate_up_proj_name)(x)))
    return self.down_proj(_activate(self, self.gate_proj(x), self.up_proj(x)))


def _mlp_unsupported(self, x):
    if not isinstance(self.act_fn, paddle.nn.Silu):
        return f"its activation is {type(self.act_fn).__name__}"
    return unsupported_tensor("x", x)


# Rotations. position_ids are accepted and not looked at, as in the originals.


def _rotation_unsupported(q, k, cos, sin, unsqueeze_dim, width, table_dtypes):
    """What all rotations need: one dtype, and a table row of ``width`` for each token."""
    shape, table = checks.shape_of(q), checks.shape_of(cos)
    if unsqueeze_dim not in (1, 2) or len(shape) != 4 or len(table) != 3:
        return f"q of {len(shape)} and tables of {len(table)} axes, unsqueeze_dim {unsqueeze_dim}"
    sequence = shape[3 - unsqueeze_dim]
    if table[0] != 1 and not checks.same_size(table[0], shape[0]):
        return f"tables of shape {table} for q of shape {shape}"
    if not checks.same_shape(table[1:], [sequence, width]):
        return f"tables of shape {table} for q of shape {shape}"
    return _dtypes_unsupported(q, k, cos, sin, table_dtypes)


def _dtypes_unsupported(q, k, cos, sin, table_dtypes):
    return first_reason(
        unsupported_tensor("q", q),
        unsupported_tensor("k", k, (q.dtype,)),
        unsupported_tensor("cos", cos, table_dtypes),
        unsupported_tensor("sin", sin, table_dtypes),
    )


def _rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return F.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def _rope_unsupported(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    tables = (q.dtype, paddle.float32)
    return _rotation_unsupported(q, k, cos, sin, unsqueeze_dim, q.shape[-1], tables)


def _rope_partial_unsupported(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """As `_rope`, of any width; the original's result takes the tables' dtype if that is wider."""
    return _rotation_unsupported(q, k, cos, sin, unsqueeze_dim, -1, (q.dtype,))


def _rope_half_tables(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """GPT-OSS: the tables hold one half."""
    cos, sin = (paddle.concat([table, table], axis=-1) for table in (cos, sin))
    return F.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def _rope_half_tables_unsupported(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return _rotation_unsupported(q, k, cos, sin, unsqueeze_dim, q.shape[-1] // 2, (q.dtype,))


def _rope_pairs(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """ERNIE 4.5: adjacent pairs; the tables come in halves, of which it takes the first."""
    half = cos.shape[-1] // 2
    cos, sin = (table[..., :half].repeat_interleave(2, axis=-1) for table in (cos, sin))
    return rotate_pairs_heads_first(q, k, cos, sin)


def _rope_pairs_unsupported(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    if unsqueeze_dim != 1:
        return f"unsqueeze_dim {unsqueeze_dim}"
    return _rope_unsupported(q, k, cos, sin)


def _rope_deepseek(q, k, cos, sin, position_ids, apply_rope_fusion=False):
    """DeepSeek: adjacent pairs in, halves out."""
    if position_ids is not None:
        rows = [q.shape[0], q.shape[1], 1, q.shape[3]]
        cos, sin = cos.reshape(rows), sin.reshape(rows)
    return F.fused_partial_rope(q, cos, sin), F.fused_partial_rope(k, cos, sin)


def _rope_deepseek_unsupported(q, k, cos, sin, position_ids, apply_rope_fusion=False):
    batch, sequence, _, width = q.shape
    shape = list(cos.shape)
    if position_ids is None:
        fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1:] == [sequence, 1, width]
    else:
        # The original drops every axis of size 1 and expects these to be left; a single row
        # (sequence 1), or one table for several sequences, comes out in another meaning.
        left = [sequence, width] if batch == 1 else [batch, sequence, width]
        fits = sequence > 1 and [size for size in shape if size != 1] == left
    if not fits:
        return f"tables of shape {shape} for q of shape {list(q.shape)}"
    return _dtypes_unsupported(q, k, cos, sin, (q.dtype,))


def _row(module, attribute, op, replacement, unsupported, kind=ATTRIBUTE, versions=_KNOWN):
    code = unsupported.__code__
    parameters = code.co_varnames[: code.co_argcount]
    return Row(
        "paddleformers",
        f"paddleformers.{module}",
        attribute,
        op,
        replacement,
        unsupported,
        parameters,
        versions,
        kind,
    )


def _rope_row(model, replacement, unsupported):
    module = f"transformers.{model}.modeling"
    return _row(module, "apply_rotary_pos_emb", "rope", replacement, unsupported)


ROWS = (
    _row("nn.norm", "Norm['rms_norm']", "rms_norm", _norm, _norm_unsupported, REGISTRY),
    _row("nn.norm", "RMSNorm.forward", "rms_norm", _norm, _norm_unsupported, LAYER),
    *(
        _row(
            f"transformers.{model}.modeling",
            f"{name}.forward",
            "rms_norm",
            _offset_norm,
            _offset_norm_unsupported,
            METHOD,
        )
        for model, name in (
            ("gemma3_text", "Gemma3RMSNorm"),
            ("qwen3_next", "Qwen3NextRMSNorm"),
        )
    ),
    _row("nn.mlp", "MLP.forward", "swiglu", _mlp, _mlp_unsupported, METHOD),
    *(
        _rope_row(model, _rope, _rope_unsupported)
        for model in ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma3_text")
    ),
    *(_rope_row(model, _rope, _rope_partial_unsupported) for model in ("phi3", "glm4_moe")),
    _rope_row("gpt_oss", _rope_half_tables, _rope_half_tables_unsupported),
    _rope_row("ernie4_5", _rope_pairs, _rope_pairs_unsupported),
    _rope_row("deepseek_v3", _rope_deepseek, _rope_deepseek_unsupported),
)
