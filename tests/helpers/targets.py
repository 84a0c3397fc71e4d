"""Processes that compute calls with the kernels of another instruction set."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

TARGETS = ("portable", "avx2", "avx512")

WORKER = """
import os, pickle, sys
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # whatever prints must not come between the answers
from paddle_fused._runtime import cpu_target
from helpers.calls import digest, make_call
pickle.dump(cpu_target(), answers); answers.flush()
while True:
    try:
        request = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    rowwise, sums = make_call(*request).results()
    pickle.dump([digest([a]) for a in [*rowwise, *sums]], answers); answers.flush()
"""


class Target:
    """A process with the kernels of one instruction set.

    Attributes:
        active: what it really runs: a machine may not have the wanted one.
    """

    def __init__(self, name: str):
        path = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PADDLE_FUSED_CPU_TARGET": name},
            cwd="/",
        )
        self.active = pickle.load(self._process.stdout)

    def digests(self, *request) -> list[str]:
        """A hash per result of make_call(*request)."""
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait(timeout=30)
