"""docs/patching.md names every place that is patched."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_fused.patching.routes import LAYER
from paddle_fused.patching.state import TABLES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "patching.md").read_text()
MODELS = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "gemma3_text": "Gemma 3",
    "phi3": "Phi 3",
    "glm4_moe": "GLM-4-MoE",
    "gpt_oss": "GPT-OSS",
    "ernie4_5": "ERNIE 4.5",
    "deepseek_v3": "DeepSeek-V3",
}
ROWS = {row.name: row for rows in TABLES.values() for row in rows}


CELLS = [line for line in PAGE.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", ROWS)
def test_place_is_on_the_page(name):
    """In a cell of the table; a norm of a live model has a section."""
    row = ROWS[name]
    attribute = "`Norm`" if row.attribute.startswith("Norm[") else row.attribute
    lines = CELLS if row.kind != LAYER else ["RMSNorm.forward"] * ("(model=model)" in PAGE)
    named = [line for line in lines if attribute in line]
    assert named
    if attribute == "apply_rotary_pos_emb":
        assert MODELS[row.module.split(".")[2]] in named[0]
