"""Table, CSV and pyperf file of a run."""

from __future__ import annotations

import csv
import platform
import statistics
from dataclasses import dataclass

import pyperf

from benchmarks.cpu.cases import Case

OURS = "paddle_fused"
COPIES = ("copy", "streaming copy", "memcpy")
PEERS = ("PyTorch eager", "F.rms_norm", "torch.compile", "Paddle's kernel", "plain Paddle")


@dataclass
class Row:
    """The rounds of one case, by provider."""

    case: Case
    threads: int
    values: dict[str, list[float]]

    def median(self, provider: str) -> float:
        """Seconds of a call."""
        return statistics.median(self.values[provider])

    def gigabytes(self, provider: str) -> float:
        """Bytes that the case has to move, in GB/s."""
        return self.case.bytes / self.median(provider) / 1e9

    @property
    def copy(self) -> str:
        """The fastest copy of the case's ratio of reads to writes."""
        return min((name for name in COPIES if name in self.values), key=self.median)

    @property
    def share(self) -> float:
        """Our speed as a part of that copy's; of the medians."""
        return self.median(self.copy) / self.median(OURS)

    def peer(self) -> str | None:
        """The fastest of the others, plain Paddle and Paddle's kernel included."""
        found = [name for name in PEERS if name in self.values]
        return min(found, key=self.median) if found else None


def line(row: Row) -> str:
    """One line of the printed table."""
    low, middle, high = statistics.quantiles(row.values[OURS], n=4)
    text = (
        f"{row.case!s:<48}{row.threads:>2} thr{1e6 * middle:>11.1f} us "
        f"[{1e6 * low:.1f}, {1e6 * high:.1f}]"
    )
    if row.case.size == "tiny":
        if "bare operator" in row.values:
            bare = row.median("bare operator")
            text += f"   bare operator {1e6 * bare:.1f} us, ours {row.median(OURS) / bare:.2f}x"
    else:
        text += f"{row.gigabytes(OURS):>8.1f} GB/s{row.share:>7.0%} of a {row.copy}"
    peer = row.peer()
    return text + (f"   {row.median(peer) / row.median(OURS):.2f}x {peer}" if peer else "")


def write(rows: list[Row], described: dict, options) -> None:
    """cpu.csv and cpu.json."""
    with open(options.output / "cpu.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            "operator direction dtype size shape threads provider us us_low us_high gb_per_s "
            "share_of_best_copy".split()
        )
        for row in rows:
            case = row.case
            for provider, values in row.values.items():
                low, middle, high = (1e6 * v for v in statistics.quantiles(values, n=4))
                writer.writerow(
                    [case.operator, case.direction, case.dtype, case.size]
                    + ["x".join(map(str, case.shape)), row.threads, provider]
                    + [f"{v:.2f}" for v in (middle, low, high)]
                    + [f"{row.gigabytes(provider):.2f}"]
                    + [f"{row.median(row.copy) / row.median(provider):.3f}"]
                )
    metadata = {
        "freed_memory": "given back" if options.as_installed else "kept",
        "cpu": processor(),
        **{f"{name}_version": str(version) for name, version in described.items()},
    }
    benchmarks = [
        pyperf.Benchmark(
            [
                pyperf.Run(
                    values,
                    metadata={"name": f"{row.case} {row.threads} threads, {provider}", **metadata},
                    collect_metadata=False,
                )
            ]
        )
        for row in rows
        for provider, values in row.values.items()
    ]
    pyperf.BenchmarkSuite(benchmarks).dump(str(options.output / "cpu.json"), replace=True)


def processor() -> str:
    """The processor's name as Linux gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for text in file:
                if text.startswith("model name"):
                    return text.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
