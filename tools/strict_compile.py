"""Compiles our C++ sources with -Wall -Wextra -Werror: Paddle's builder switches warnings off.

    python tools/strict_compile.py [--jobs N] [FILE ...]

Objects go to build/strict and are thrown away with it; the flags are setup.py's own otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


def build_flags() -> list[str]:
    """CXX_FLAGS of setup.py, read without running it."""
    import ast

    (text,) = re.findall(r"^CXX_FLAGS = (\[.*?\])$", (ROOT / "setup.py").read_text(), re.M | re.S)
    return ast.literal_eval(text)


def include_flags() -> list[str]:
    """Ours with warnings, Paddle's and Python's as system headers."""
    import paddle

    paddle_include = Path(paddle.sysconfig.get_include())
    system = [paddle_include, paddle_include / "third_party", sysconfig.get_paths()["include"]]
    return [f"-I{ROOT}", *[f"-isystem{folder}" for folder in system]]


def compile_one(source: Path, flags: list[str]) -> tuple[Path, subprocess.CompletedProcess]:
    """Compiles one source; the result says whether it went well."""
    output = ROOT / "build" / "strict" / (source.stem + ".o")
    command = [os.environ.get("CXX", "c++"), *flags, "-c", str(source), "-o", str(output)]
    return source, subprocess.run(command, capture_output=True, text=True)


def main() -> int:
    """Compiles all sources, or those named; returns the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    sources = options.files or sorted((ROOT / "custom_ops").rglob("*.cc"))
    (ROOT / "build" / "strict").mkdir(parents=True, exist_ok=True)
    flags = [*build_flags(), "-fPIC", *WARNINGS, *include_flags()]
    failures = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for source, result in pool.map(lambda path: compile_one(path, flags), sources):
            failures += result.returncode != 0
            print(f"{'ok  ' if result.returncode == 0 else 'FAIL'} {source.relative_to(ROOT)}")
            if result.returncode != 0:
                print(result.stderr)
    return failures


if __name__ == "__main__":
    sys.exit(main())
