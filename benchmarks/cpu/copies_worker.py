"""Copies with an operator's bytes and ratio of reads to writes: the ceiling in the table."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.cpu import cases, worker

THREADS = int(sys.argv[1])


def build() -> ctypes.CDLL:
    """Compiles copies.cc."""
    source = Path(__file__).with_name("copies.cc")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "copies.so"
        command = [os.environ.get("CXX", "c++"), "-O3", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


def aligned(size: int) -> np.ndarray:
    """Memory of its own in huge pages where the system has them, written once."""
    raw = np.ones(size + (2 << 20), np.uint8)
    start = -raw.ctypes.data % (2 << 20) if size >= 2 << 20 else -raw.ctypes.data % 64
    return raw[start : start + size]


def make_case(library: ctypes.CDLL, case: cases.Case) -> dict:
    """The copies of a case."""
    reads, writes = case.streams
    size = max(64, case.elements * cases.ITEM[case.dtype] // 64 * 64)
    streams = [aligned(size) for _ in range(reads + writes)]
    pointers = [ctypes.c_void_p(s.ctypes.data) for s in streams]
    sources = (ctypes.c_void_p * reads)(*pointers[:reads])
    targets = (ctypes.c_void_p * writes)(*pointers[reads:])

    def copy(stream):
        def call(_, keep=streams):
            done = library.copy_streams(
                reads, writes, sources, targets, ctypes.c_int64(size), THREADS, stream
            )
            if not done:
                raise ValueError(f"copies.cc: no copy of {reads} reads and {writes} writes")

        return None, call

    calls = {"copy": copy(False), "streaming copy": copy(True)}
    if (reads, writes) == (1, 1):
        calls["memcpy"] = (
            None,
            lambda _: library.copy_plain(*pointers, ctypes.c_int64(size), THREADS),
        )
    return calls


def main() -> None:
    """Serves until the driver closes the pipe."""
    library = build()
    library.copy_streams.restype = ctypes.c_bool
    worker.serve({}, lambda case, rng: make_case(library, case))


if __name__ == "__main__":
    main()
