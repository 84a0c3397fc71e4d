"""``python -m paddle_fused.env [--json]``: what is installed here, for a report or a question.

Runs with the standard library alone, also when the library cannot load or Paddle is missing; every
probe may fail by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def _paddle() -> dict:
    import paddle

    return {
        "version": paddle.__version__,
        "commit": paddle.version.commit,
        "cuda": str(paddle.version.cuda()) if paddle.is_compiled_with_cuda() else None,
    }


def _build() -> dict:
    from paddle_fused import _build_info

    return {key.lower(): value for key, value in vars(_build_info).items() if key.isupper()}


def _library() -> dict:
    from paddle_fused import _library as library

    path = Path(library.library_path())
    report = {"path": str(path), "bytes": path.stat().st_size if path.is_file() else None}
    try:
        library.load()
        report["loads"] = True
    except ImportError as error:
        report.update(loads=False, error=str(error))
        return report
    from paddle_fused import _runtime

    report["cpu_target"] = _runtime.cpu_target()
    report["threads"] = _runtime.get_num_threads()
    return report


def _operators() -> list[str]:
    """Operators of ours that Paddle knows now."""
    from paddle.base.framework import OpProtoHolder

    names = OpProtoHolder.instance().op_proto_map
    return sorted(
        name for name in names if name.startswith("paddle_fused_") and not name.endswith("_grad")
    )


def _cpu() -> dict:
    info = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    wanted = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "asimd", "sve")
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            info["model"] = value.strip()
        if key.strip() in ("flags", "Features"):
            flags = value.split()
            info["features"] = [name for name in wanted if name in flags]
            break
    return info


def _gpu() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=20)
    return result.stdout.strip().splitlines() if result.returncode == 0 else []


def _environment() -> dict:
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in names or name.startswith("PADDLE_FUSED_")
    }


def collect() -> dict:
    """The report as a dict; a probe that fails leaves ``{"error": ...}`` in its place."""
    from paddle_fused.version import __version__

    report = {
        "paddle_fused": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    probes = {
        "environment": _environment,  # first: importing Paddle sets OMP_NUM_THREADS
        "paddle": _paddle,
        "build": _build,
        "library": _library,
        "operators": _operators,
        "cpu": _cpu,
        "gpu": _gpu,
    }
    for name, probe in probes.items():
        try:
            report[name] = probe()
        except Exception as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
    return report


def _lines(report: dict) -> list[str]:
    lines = []
    for section, content in report.items():
        if isinstance(content, dict):
            lines.append(f"{section}:")
            lines += [f"  {key}: {value}" for key, value in content.items()]
        elif isinstance(content, list):
            lines.append(f"{section}: {', '.join(content) or 'none'}")
        else:
            lines.append(f"{section}: {content}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Prints the report; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m paddle_fused.env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    report = collect()
    print(json.dumps(report, indent=2) if options.json else "\n".join(_lines(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
