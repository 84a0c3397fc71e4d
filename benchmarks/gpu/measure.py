"""How fast something runs on a GPU, away from caches and launch gaps.

One CUDA graph holds at least 20 calls that rotate over sets of buffers; the sets together exceed
300 MB, so that nothing is found in the 50 to 60 MB of L2. The graph is replayed; the figure is the
median over the replays, and the spread says how far they lie apart. Things that are compared are
replayed turn about, so that a change of clocks or temperature meets all of them.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

FOOTPRINT = 300 << 20
MIN_CALLS = 20
WARM_UP_MS = 60.0


@dataclass
class Timing:
    """Microseconds of one call: the median over replays, the least and the most."""

    median: float
    low: float
    high: float

    def rate(self, size: int) -> float:
        """GB/s for a call that moves so many bytes."""
        return size / self.median / 1e3


def buffer_sets(make, size: int) -> list:
    """As many sets of make(index) as it takes to exceed the footprint; at least two."""
    return [make(index) for index in range(max(2, -(-FOOTPRINT // max(size, 1))))]


class Captured:
    """A graph of calls that rotate over sets of buffers."""

    def __init__(self, call, sets):
        self.calls = max(MIN_CALLS, len(sets))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and fills the caches of compiled kernels
            for buffers in sets[:2]:
                call(buffers)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # What a call allocates lives until its set's next turn: outputs rotate like inputs.
        kept = [None] * len(sets)
        with torch.cuda.graph(self.graph):
            for index in range(self.calls):
                kept[index % len(sets)] = call(sets[index % len(sets)])
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(self) -> float:
        """Microseconds of one call in one replay."""
        self.start.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) * 1e3 / self.calls


def measure_together(calls: dict, replays: int = 9) -> dict[str, Timing | Exception]:
    """Times every (call, sets) of a dict by name, turn about.

    Returns:
        A Timing per name, or the exception that a call ended with.
    """
    captured, results = {}, {}
    for name, (call, sets) in calls.items():
        try:
            captured[name] = Captured(call, sets)
        except Exception as error:  # a peer's, of whatever type
            torch.cuda.synchronize()
            results[name] = error
    spent = 0.0
    while captured and spent < WARM_UP_MS * len(captured):
        spent += sum(graph.replay() * graph.calls for graph in captured.values()) / 1e3
    times = {name: [] for name in captured}
    for _ in range(replays):
        for name, graph in captured.items():
            times[name].append(graph.replay())
    for name, found in times.items():
        results[name] = Timing(statistics.median(found), min(found), max(found))
    return {name: results[name] for name in calls}


def measure(call, sets, replays: int = 9) -> Timing:
    """Times call(buffers) on its own."""
    result = measure_together({"": (call, sets)}, replays)[""]
    if isinstance(result, Exception):
        raise result
    return result
