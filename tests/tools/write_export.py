"""Exports a model of every operator with this version, for tests/graph/test_old_exports.py.

    PYTHONPATH=tests .venv/bin/python tests/tools/write_export.py

Run once per release: it writes tests/data/export-<version> and leaves older ones alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
from paddle.static import InputSpec

import paddle_fused
import paddle_fused.nn.functional as F

DATA = Path(__file__).resolve().parents[1] / "data"
HEADS, DIM, LENGTH = 2, 8, 5
WIDTH = HEADS * DIM
MODES = ("llama", "gemma", "none")


class Everything(paddle.nn.Layer):
    """Each operator once, on one input; no operator of Paddle that rounds."""

    def forward(self, x, weight, table, ids):
        flat = paddle.reshape(x, [-1, WIDTH])
        probs = paddle.full([1], 0.75, "float32").expand([paddle.shape(flat)[0]])
        heads = paddle.reshape(x, [-1, LENGTH, HEADS, DIM])
        results = [
            F.swiglu(x),
            F.swiglu(x, x),
            F.fused_swiglu_weighted(flat, probs),
            *F.fused_swiglu_weighted_bwd(flat, flat[:, :DIM], probs),
            *(
                F.rms_norm(x, weight, offset=0.5, casting_mode=m)
                for m in ("llama", "gemma", "none")
            ),
            F.rms_norm(x),
            *F.rms_norm(x, weight, residual=x),
            *F.rms_norm(x, residual=x),
            F.fused_rms_norm(flat, weight, weight, 1e-6)[0],
            *F.fused_rms_norm(flat, weight, weight, 1e-6, 1, weight, flat),
            *F.fused_rms_norm_ext(x, weight),
            F.fused_rms_norm(flat, weight, None, 1e-6, 1, None, None, 0.5, 0, 127, -127)[0],
            F.fused_rotary_position_embedding(heads, sin=table, cos=table)[0],
            *F.fused_rotary_position_embedding(heads, heads, None, table, table, ids, False)[:2],
            *F.fused_rotary_position_embedding(heads, heads, heads, rotary_emb_base=500.0),
            *F.apply_rotary_pos_emb(heads, heads, table, table, unsqueeze_dim=2),
            F.fused_partial_rope(heads, *[paddle.reshape(table, [1, -1, 1, DIM])] * 2),
        ]
        return tuple(results)


def arrays() -> list[np.ndarray]:
    """The inputs of the kept results."""
    rng = np.random.default_rng(2026)
    x = rng.standard_normal((2, LENGTH, WIDTH)).astype("float32")
    weight = rng.standard_normal(WIDTH).astype("float32")
    table = rng.standard_normal((LENGTH + 2, DIM)).astype("float32")
    return [x, weight, table, rng.integers(0, LENGTH + 2, (2, LENGTH))]


def main() -> None:
    """Writes the model, its inputs and its results."""
    folder = DATA / f"export-{paddle_fused.__version__}"
    folder.mkdir(parents=True)
    layer, inputs = Everything(), arrays()
    layer.eval()
    specs = [InputSpec([None, LENGTH, WIDTH], "float32", "x")]
    specs += [InputSpec([WIDTH], "float32", "weight")]
    specs += [InputSpec([None, DIM], "float32", "table")]
    specs += [InputSpec([None, LENGTH], "int64", "ids")]
    paddle.jit.save(layer, str(folder / "model"), input_spec=specs)
    results = paddle.jit.load(str(folder / "model"))(*map(paddle.to_tensor, inputs))
    kept = {f"out{i:02d}": r.numpy() for i, r in enumerate(results)}
    np.savez_compressed(
        folder / "results.npz", **kept, **{f"in{i}": a for i, a in enumerate(inputs)}
    )
    print(f"{folder}: {len(kept)} results")


if __name__ == "__main__":
    main()
