"""A picture per operator: where it lies under the roofs, and everybody's speed by shape:

python -m benchmarks.gpu.roofline CSV CONDITIONS FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from . import report

FAMILIES = {
    "swiglu": ("swiglu_fwd", "swiglu_bwd", "plain_swiglu_fwd", "plain_swiglu_bwd"),
    "rms_norm": ("rms_fwd", "rms_bwd", "add_rms_fwd", "add_rms_bwd"),
    "rope": ("rope_fwd", "rope_bwd"),
}
# An H200's data sheet: GB/s of its memory, GFLOP/s of float32 outside the matrix units.
MEMORY, FLOAT32 = 4800.0, 67000.0
COLOURS = {
    report.OURS: "#d62728",
    report.COPY: "#7f7f7f",
    "torch.compile": "#1f77b4",
    "torch.compile, autograd": "#17becf",
    "F.rms_norm": "#2ca02c",
    "Liger": "#9467bd",
    "Liger CuTe": "#e377c2",
    "QuACK": "#ff7f0e",
    "Paddle's structure": "#8c564b",
}


def _roof(axes, rows, copy_rate: float) -> None:
    """GFLOP/s over FLOP per byte, with the roofs of memory and of arithmetic."""
    intensities = [2.0**e for e in range(-3, 8)]
    for rate, style, name in (
        (MEMORY, ":", "memory, data sheet"),
        (copy_rate, "-", "memory, copy of this run"),
    ):
        roof = [min(i * rate, FLOAT32) for i in intensities]
        axes.plot(intensities, roof, style, color="black", linewidth=1, label=name)
    for row in rows:
        intensity = row["flops"] / row["bytes"]
        axes.plot(
            *(intensity, intensity * row["GB/s"], "o"),
            color=COLOURS.get(row["implementation"], "#bcbd22"),
            markersize=6 if row["implementation"] == report.OURS else 3,
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s")
    axes.legend(fontsize=7, loc="lower right")
    axes.grid(alpha=0.3, which="both", linewidth=0.4)


def _speeds(axes, rows, copy_rate: float) -> None:
    """GB/s by shape, a mark per implementation."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    for name in dict.fromkeys(row["implementation"] for row in rows):
        mine = [row for row in rows if row["implementation"] == name]
        places = [shapes.index(row["shape"]) for row in mine]
        low, middle, high = (
            [row["bytes"] / row[key] / 1e3 for row in mine] for key in ("us_high", "us", "us_low")
        )
        axes.errorbar(
            *(places, middle),
            yerr=[[m - v for m, v in zip(middle, low)], [v - m for m, v in zip(middle, high)]],
            fmt={report.OURS: "o-", report.COPY: "_--"}.get(name, "s"),
            color=COLOURS.get(name, "#bcbd22"),
            markersize=6 if name == report.OURS else 4,
            linewidth=1.2,
            label=f"copy {mine[0]['copy_ratio']}" if name == report.COPY else name,
        )
    axes.axhline(copy_rate, color="black", linewidth=1)
    axes.axhline(MEMORY, color="black", linewidth=1, linestyle=":")
    axes.set_xticks(range(len(shapes)), [s.replace("x", "×") for s in shapes], fontsize=7)
    axes.tick_params(axis="x", rotation=20)
    axes.set(ylim=(0, MEMORY * 1.04), ylabel="GB/s")
    axes.legend(fontsize=7, loc="lower left", ncols=2)
    axes.grid(alpha=0.3, axis="y", linewidth=0.4)


def draw(rows, conditions: dict, folder: Path) -> None:
    """Writes gpu_<operator>.svg for every operator with figures."""
    plt.rcParams.update({"svg.hashsalt": "paddle_fused", "svg.fonttype": "none", "font.size": 8})
    copy_rate = max(v for k, v in conditions.items() if k.endswith("2 GiB, GB/s"))
    for family, operators in FAMILIES.items():
        there = [o for o in operators if any(row["operator"] == o for row in rows)]
        if not there:
            continue
        size = {"figsize": (11, 3.2 * len(there)), "layout": "constrained"}
        kwargs = {"width_ratios": [1, 2.4]}
        figure, grid = plt.subplots(len(there), 2, squeeze=False, gridspec_kw=kwargs, **size)
        for (left, right), operator in zip(grid, there):
            small = {
                row["shape"]
                for row in rows
                if row["implementation"] == report.COPY and row["us"] < report.SMALL_US
            }
            mine = [r for r in rows if r["operator"] == operator and r["shape"] not in small]
            left.set_title(report.TITLES[operator], loc="left")
            _roof(left, mine, copy_rate)
            _speeds(right, mine, copy_rate)
        name = conditions.get("name", "GPU")
        figure.suptitle(f"{family}, bfloat16, {name}: the line is the copy of 2 GiB in this run")
        figure.savefig(folder / f"gpu_{family}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    table, state, target = map(Path, sys.argv[1:])
    draw(report.read(table), json.loads(state.read_text()), target)
