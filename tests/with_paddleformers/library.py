"""Tiny random models of PaddleFormers, one per family."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import paddle
import stand_in

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
_EXPERTS = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_DEEPSEEK = {
    **_EXPERTS,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_GLM = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_ON = {"fuse_rms_norm": True, "fuse_swiglu": True, "apply_rope_fusion": True}
_OFF = dict.fromkeys(_ON, False)
FLAGS = {"off": _OFF, "defaults": {}, "on": _ON}


@dataclass(frozen=True)
class Family:
    """A model class and its tiny configuration.

    Attributes:
        config: name of the configuration class.
        model: name of the model class.
        extra: configuration besides SIZES.
        replaced: the places whose functions a patched run has to go through.
        on: flags that say something else than FLAGS["on"], for the reason beside it.
    """

    config: str
    model: str
    extra: dict = field(default_factory=dict)
    replaced: tuple[str, ...] = ("Norm['rms_norm']", "MLP.forward", "apply_rotary_pos_emb")
    on: dict = field(default_factory=dict)


FAMILIES = {
    "Llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "Qwen2": Family("Qwen2Config", "Qwen2ForCausalLMDeprecated"),
    "Qwen2-MoE": Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLMDeprecated",
        {**_EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "Qwen3": Family("Qwen3Config", "Qwen3ForCausalLMDeprecated"),
    "Qwen3-MoE": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLMDeprecated", _EXPERTS),
    "Qwen3-Next": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_EXPERTS, "full_attention_interval": 2},  # one layer of linear attention, one of full
        ("Qwen3NextRMSNorm.forward",),
    ),
    "ERNIE 4.5": Family("Ernie4_5Config", "Ernie4_5ForCausalLM"),
    "ERNIE 4.5 MoE, dense layers": Family(
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 9, "moe_layer_end_index": 9}
        | {"num_nextn_predict_layers": 0},
    ),
    "DeepSeek-V3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _DEEPSEEK,
        on={"apply_rope_fusion": False},  # the stock model then needs position_ids, and gets none
    ),
    "GPT-OSS": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        ("Norm['rms_norm']", "apply_rotary_pos_emb"),
    ),
    "Gemma 3": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"query_pre_attn_scalar": 8, "sliding_window": 16},
        ("Gemma3RMSNorm.forward", "apply_rotary_pos_emb"),
        {"fuse_swiglu": False},  # the stock model then computes SwiGLU where it has a GELU
    ),
    "GLM-4-MoE": Family("Glm4MoeConfig", "Glm4MoeForCausalLMDeprecated", _GLM),
    "Phi 3": Family(
        "Phi3Config", "Phi3ForCausalLM", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    ),
}


def replaced(name: str, flags: str) -> tuple[str, ...]:
    """The places that a patched run goes through: ERNIE's flag picks another rotation."""
    places = FAMILIES[name].replaced
    if flags == "on" and name.startswith("ERNIE"):
        return (*places[:2], "fused_rotary_position_embedding")
    return places


def went_through(report, places):
    """Those of the places that were called."""
    called = {line.name for line in report.lines if line.hits}
    return tuple(p for p in places if any(name.endswith(p) for name in called))


def build(name: str, flags: str, dtype: str = "float32", like=None):
    """A model in training mode; with ``like`` it has that model's parameters."""
    stand_in.install()
    from paddleformers import transformers

    family = FAMILIES[name]
    sizes = {**SIZES, **family.extra, **FLAGS[flags], **(family.on if flags == "on" else {})}
    config = getattr(transformers, family.config)(**sizes)
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        paddle.seed(3)
        model = getattr(transformers, family.model)(config)
    finally:
        paddle.set_default_dtype(before)
    if like is not None:
        state = like.state_dict()
        own = model.state_dict()
        model.set_state_dict({key: state[key].astype(own[key].dtype) for key in own})
    model.train()
    return model


def tokens(rows: int = 2, length: int = 12, seed: int = 0):
    """Random token ids, int64."""
    generator = np.random.default_rng(seed)
    return paddle.to_tensor(generator.integers(3, SIZES["vocab_size"], [rows, length]))


def loss_of(model, ids):
    """The model's own loss on predicting its input."""
    out = model(ids, labels=ids)
    return out[0] if isinstance(out, (tuple, list)) else out.loss


def gradients(model, ids):
    """(loss, {parameter: gradient or None}) of one backward pass."""
    loss = loss_of(model, ids)
    loss.backward()
    found = {
        name: None if parameter.grad is None else parameter.grad.astype("float32").numpy()
        for name, parameter in model.named_parameters()
    }
    model.clear_gradients()
    return float(loss), found
