"""Starts a script on two processes with Paddle's launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def launch(script: Path, arguments, folder: Path, environment=None):
    """Runs the script in `folder`; returns the finished launcher and the end of both logs."""
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", "logs"]
    process = subprocess.run(
        [sys.executable, *launcher, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        timeout=300,
    )
    logs = "".join(path.read_text()[-3000:] for path in sorted(folder.glob("logs/workerlog.*")))
    return process, logs
