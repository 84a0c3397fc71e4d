"""The pipe between the driver and a worker process, one JSON object a line.

Each library runs in a process of its own: two OpenMP runtimes in one process take the cores from
each other. A worker is stopped (SIGSTOP) while it is not its turn, so that threads which spin
between parallel regions do not disturb the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np

from benchmarks.cpu.cases import Case


class Worker:
    """The driver's end."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]):
        self.name = name
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, **environment},
        )
        self.description = self._reply()

    def _reply(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit status {self.process.wait()}")
        self.process.send_signal(signal.SIGSTOP)
        return json.loads(line)

    def ask(self, **request):
        """Sends a request, waits for the answer, and stops the process again."""
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._reply()

    def close(self) -> None:
        """Ends the process."""
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()
        self.process.wait()


def _per_call(prepare, call, loops: int) -> float:
    """Mean seconds of one call; what prepare makes for it is not timed."""
    total = 0.0
    for _ in range(loops):
        state = prepare() if prepare is not None else None
        start = time.perf_counter()
        result = call(state)
        total += time.perf_counter() - start
        del result, state
    return total / loops


def _looped(call, loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        call(None)
    return (time.perf_counter() - start) / loops


def serve(description: dict, make_case) -> None:
    """Answers requests until the pipe closes.

    make_case(case, rng) returns {provider: (prepare or None, call)}.
    """
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get into the pipe

    def reply(value) -> None:
        pipe.write(json.dumps(value) + "\n")
        pipe.flush()

    providers: dict = {}
    reply(description)
    for line in sys.stdin:
        request = json.loads(line)
        if "case" in request:
            providers.clear()
            providers.update(make_case(Case(**request["case"]), np.random.default_rng(0)))
            reply(list(providers))
            continue
        prepare, call = providers[request["provider"]]
        loops = request["loops"]
        seconds = _looped(call, loops) if prepare is None else _per_call(prepare, call, loops)
        reply(seconds)


def keep_freed_memory() -> None:
    """What paddle_fused.keep_cpu_memory() does, for the libraries that are compared with it."""
    import ctypes

    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((-4, 0), (-1, 2**31 - 1), (-3, 2**25)):
        mallopt(option, value)
