"""Tables and files of a run of benchmarks.gpu_kernels:

    python -m benchmarks.gpu.report CSV

prints the table of docs/benchmarks.md.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

OURS, COPY = "paddle_fused", "copy"
TITLES = {
    "swiglu_fwd": "weighted SwiGLU",
    "swiglu_bwd": "weighted SwiGLU backward",
    "plain_swiglu_fwd": "SwiGLU",
    "plain_swiglu_bwd": "SwiGLU backward",
    "rms_fwd": "RMSNorm",
    "rms_bwd": "RMSNorm backward, dweight",
    "add_rms_fwd": "RMSNorm + residual",
    "add_rms_bwd": "RMSNorm + residual backward, dweight",
    "rope_fwd": "RoPE",
    "rope_bwd": "RoPE backward",
}
# Of a copy, below which times say more than rates.
SMALL_US = 10.0


def read(path: Path) -> list[dict]:
    """The rows of a CSV, numbers as numbers."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for key in ("us", "us_low", "us_high", "GB/s", "share", "bytes", "flops"):
            row[key] = float(row[key])
    return rows


def case(rows, operator: str, shape: str) -> dict[str, dict]:
    """The rows of one workload by implementation."""
    chosen = [r for r in rows if (r["operator"], r["shape"]) == (operator, shape)]
    return {row["implementation"]: row for row in chosen}


def cases(rows):
    """(operator, shape) of every workload, in order."""
    return list(dict.fromkeys((row["operator"], row["shape"]) for row in rows))


def peers(found: dict[str, dict]) -> list[dict]:
    """Rows that are neither ours nor the copy's, the fastest first."""
    others = [row for name, row in found.items() if name not in (OURS, COPY)]
    return sorted(others, key=lambda row: row["us"])


def line(rows, operator: str, shape: str) -> str:
    """One workload as a line of a terminal."""
    found = case(rows, operator, shape)
    if OURS not in found:
        return f"{operator} {shape}: no figure"
    us, copy = found[OURS], found.get(COPY)
    text = f"{operator:16} {shape:>16} {us['us']:8.1f} us ({us['us_low']:.1f}..{us['us_high']:.1f})"
    text += f" {us['GB/s']:5.0f} GB/s {us['share']:5.1f} %"
    text += f"  copy {copy['copy_ratio']} {copy['GB/s']:.0f}" if copy else ""
    return text + "".join(f"  {r['implementation']} {r['GB/s']:.0f}" for r in peers(found))


def table(rows) -> str:
    """The Markdown table of large shapes: GB/s of ours, of a copy and of every peer."""
    names = list(dict.fromkeys(r["implementation"] for r in rows))
    names = [name for name in names if name not in (OURS, COPY)]
    head = ["operator", "shape", "paddle_fused", "share", "copy", *names, "to the best peer"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for operator, shape in cases(rows):
        found = case(rows, operator, shape)
        if found[COPY]["us"] < SMALL_US:
            continue
        rates = [f"{found[n]['GB/s']:.0f}" if n in found else "" for n in names]
        best = peers(found)
        ratio = f"{best[0]['us'] / found[OURS]['us']:.2f}×" if best else "-"
        copy = f"{found[COPY]['GB/s']:.0f} ({found[COPY]['copy_ratio']})"
        ours = [f"**{found[OURS]['GB/s']:.0f}**", f"{found[OURS]['share']:.1f} %"]
        cells = [TITLES[operator], shape.replace("x", " × "), *ours, copy, *rates, ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def small_table(rows) -> str:
    """The Markdown table of small shapes: microseconds."""
    lines = ["| operator | shape | paddle_fused, µs | the best peer, µs |", "|---|---|---|---|"]
    for operator, shape in cases(rows):
        found = case(rows, operator, shape)
        if found[COPY]["us"] >= SMALL_US:
            continue
        best = peers(found)
        other = f"{best[0]['us']:.1f} ({best[0]['implementation']})" if best else "-"
        ours = f"{found[OURS]['us']:.1f}"
        lines.append(f"| {TITLES[operator]} | {shape.replace('x', ' × ')} | {ours} | {other} |")
    return "\n".join(lines)


def write(folder: Path, rows: list[dict], conditions: dict) -> None:
    """The CSV, the conditions and, where matplotlib is installed, the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "gpu_kernels.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (folder / "gpu_conditions.json").write_text(json.dumps(conditions, indent=1) + "\n")
    try:
        from . import roofline
    except ImportError as error:
        print(f"no pictures: {error}")
        return
    roofline.draw(rows, conditions, folder)


if __name__ == "__main__":
    found = read(Path(sys.argv[1]))
    print(table(found), small_table(found), sep="\n\n")
