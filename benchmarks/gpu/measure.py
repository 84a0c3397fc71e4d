"""How fast something runs on a GPU, away from caches and launch gaps.

One CUDA graph holds at least 20 calls that rotate over sets of buffers; the sets together exceed
300 MB, so that nothing is found in the 50 to 60 MB of L2. The graph is replayed; the figure is the
median over the replays, and the spread says how far they lie apart.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

FOOTPRINT = 300 << 20
WARM_UP_MS = 60.0


@dataclass
class Timing:
    """Microseconds of one call."""

    median: float
    low: float
    high: float

    def rate(self, size: int) -> float:
        """GB/s for a call that moves so many bytes."""
        return size / self.median / 1e3


def buffer_sets(make, size: int) -> list:
    """As many sets of make(index) as it takes to exceed the footprint; at least two."""
    return [
        make(index)
        for index in range(max(2, -(-FOOTPRINT // max(size, 1)) if size < FOOTPRINT else 2))
    ]


def capture(call, sets, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls that rotate over the sets."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for buffers in sets[:2]:
            call(buffers)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(sets[index % len(sets)])
    return graph


def measure(call, sets, replays: int = 9) -> Timing:
    """Times call(buffers)."""
    calls = max(20, len(sets))
    graph = capture(call, sets, calls)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spent = 0.0
    while spent < WARM_UP_MS:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent += start.elapsed_time(end)
    times = []
    for _ in range(replays):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return Timing(statistics.median(times), min(times), max(times))
