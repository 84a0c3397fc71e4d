"""Pictures of a run: the share of a copy's speed, and times beside the peers'."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.cpu import report

SIZES = ("cache", "llc", "memory")


def draw(rows: list[report.Row], described: dict, options) -> None:
    """roofline.png and peers.png, for the largest number of threads that was measured."""
    threads = max(row.threads for row in rows)
    rows = [row for row in rows if row.threads == threads and row.case.size in SIZES]
    if not rows:
        return
    about = (
        f"{report.processor()}, {described.get('target', '')}, {threads} threads, freed memory "
        f"{'given back' if options.as_installed else 'kept'}"
    )
    _draw_shares(rows, about, options.output / "roofline.png")
    _draw_peers(rows, about, options.output / "peers.png")


def _label(row: report.Row) -> str:
    return f"{row.case.operator}\n{row.case.direction}, {row.case.dtype}"


def _draw_shares(rows, about: str, path) -> None:
    """Bars: our speed as a part of a copy with the same ratio of reads to writes."""
    labels = list(dict.fromkeys(map(_label, rows)))
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(labels) + 1.2), layout="constrained")
    sizes = [size for size in SIZES if any(row.case.size == size for row in rows)]
    height = 0.8 / len(sizes)
    for index, size in enumerate(sizes):
        found = {_label(row): 100 * row.share for row in rows if row.case.size == size}
        places = [labels.index(label) + (index - (len(sizes) - 1) / 2) * height for label in found]
        axes.barh(places, found.values(), height, label=size)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("% of the speed of the fastest copy with the same bytes and read:write ratio")
    axes.set_title(about, fontsize=8)
    axes.legend(title="size", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_peers(rows, about: str, path) -> None:
    """Bars: time of the others over ours, sizes beyond the caches, log scale."""
    rows = [row for row in rows if row.case.size == "memory"] or rows
    labels = [_label(row) for row in rows]
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(labels) + 1.2), layout="constrained")
    height = 0.8 / len(report.PEERS)
    for index, peer in enumerate(report.PEERS):
        places, ratios = [], []
        for place, row in enumerate(rows):
            if peer in row.values:
                places.append(place + (index - (len(report.PEERS) - 1) / 2) * height)
                ratios.append(row.median(peer) / row.median(report.OURS))
        if places:
            axes.barh(places, ratios, height, label=peer)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time of the other / time of paddle_fused, size beyond the caches")
    axes.set_title(about, fontsize=8)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_demo(runs: dict[str, dict], options) -> None:
    """demo.png: milliseconds of a training step of the demo's model."""
    steps = {name: 1e3 * run["seconds_per_step"] for name, run in runs.items()}
    figure, axes = plt.subplots(figsize=(6, 1.8), layout="constrained")
    bars = axes.barh(list(steps), list(steps.values()), 0.6, color=["C0", "C1"])
    axes.bar_label(bars, fmt="%.0f ms", padding=3)
    axes.set_xlim(0, 1.2 * max(steps.values()))
    axes.invert_yaxis()
    axes.set_xlabel("median training step of examples/train_moe.py, freed memory kept")
    axes.set_title(report.processor(), fontsize=8)
    figure.savefig(options.output / "demo.png", dpi=120)
    plt.close(figure)
