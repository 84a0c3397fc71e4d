"""A stand-in for PaddleFormers: packages of the same names with the least that a patch looks at.

The real library is in tests/with_paddleformers; this one keeps the rest of the tests free of it.
Its functions compute what the real ones do, in plain Paddle.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path

FILES = {
    "paddleformers/__init__.py": "",
    "paddleformers/nn/__init__.py": "",
    "paddleformers/nn/norm.py": """
import paddle
from paddle import nn
from paddle.incubate.nn.functional import fused_rms_norm_ext


class RMSNorm(nn.Layer):
    def __init__(self, config, hidden_size=None, norm_eps=None, input_is_parallel=False, **kwargs):
        super().__init__()
        self.config, self.variance_epsilon = config, norm_eps
        self.weight = self.create_parameter([hidden_size])

    def forward(self, hidden_states):
        if self.config.get("fuse_rms_norm", True):
            return fused_rms_norm_ext(hidden_states, self.weight, self.variance_epsilon)[0]
        square = hidden_states.astype("float32").pow(2).mean(-1, keepdim=True)
        return hidden_states * paddle.rsqrt(square + self.variance_epsilon) * self.weight


class Norm:
    _global_mapping = {"rms_norm": RMSNorm}

    @classmethod
    def register(cls, key, value):
        cls._global_mapping.update({key: value})

    @classmethod
    def create(cls, config, hidden_size, norm_eps=1e-6):
        return cls._global_mapping["rms_norm"](config, hidden_size, norm_eps=norm_eps)
""",
    "paddleformers/nn/mlp.py": """
import paddle
from paddle import nn
from paddle.nn.functional import swiglu as fused_swiglu


class MLP(nn.Layer):
    def __init__(self, hidden_size, intermediate_size, act_fn=None, fuse_up_gate=False):
        super().__init__()
        self.fuse_up_gate, self.act_fn = fuse_up_gate, act_fn or nn.Silu()
        self.gate_up_proj_name = "up_gate_proj"
        if fuse_up_gate:
            self.up_gate_proj = nn.Linear(hidden_size, 2 * intermediate_size)
        else:
            self.gate_proj = nn.Linear(hidden_size, intermediate_size)
            self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x):
        if self.fuse_up_gate:
            gate, up = self.up_gate_proj(x).chunk(2, axis=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up)
""",
    "paddleformers/transformers/__init__.py": "",
    "paddleformers/transformers/llama/__init__.py": "",
    "paddleformers/transformers/llama/modeling.py": """
import paddle
from paddle.incubate.nn.functional import fused_rms_norm_ext as norm_by_value
from paddle.nn.functional import swiglu as swiglu_by_value

from ...nn.mlp import MLP
from ...nn.norm import Norm


def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def rotate(x):
        first, second = x.chunk(2, axis=-1)
        return x * cos + paddle.concat([-second, first], axis=-1) * sin

    return rotate(q), rotate(k)
""",
    "paddleformers/transformers/qwen2/__init__.py": "",
    "paddleformers/transformers/qwen2/modeling.py": """
from ..llama.modeling import apply_rotary_pos_emb as llama_rope


def apply_rotary_pos_emb(q, k, cos, sin, offset=0):
    raise AssertionError("has another signature than the table says")
""",
    "paddleformers-{version}.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: paddleformers\nVersion: {version}\n"
    ),
}


def modules() -> list[str]:
    """Those of its modules that are loaded."""
    return [n for n in sys.modules if n == "paddleformers" or n.startswith("paddleformers.")]


def write(folder: Path, version: str = "1.2.0") -> None:
    """Puts the packages into a folder."""
    for name, text in FILES.items():
        path = folder / name.format(version=version)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{version}", version) if "dist-info" in name else text)


@contextmanager
def installed(folder: Path, version: str = "1.2.0"):
    """The packages can be imported inside the block, and are forgotten after it."""
    assert not modules(), "PaddleFormers itself is loaded"
    write(folder, version)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in modules():
            del sys.modules[name]
        importlib.invalidate_caches()
