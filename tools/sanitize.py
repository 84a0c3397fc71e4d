"""Runs the CPU kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

    python tools/sanitize.py [memory|threads ...] [--jobs N]

The kernels know no framework, so a plain program drives them: tools/sanitize/grid.cc. It runs once
per instruction set of this machine, and all of them must compute the same bits. Nothing is
suppressed; ThreadSanitizer gets OpenMP's entry points on std::thread, which it understands.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from strict_compile import ROOT, build_flags

# All that is below the operators.
KERNELS = sorted(
    path for path in (ROOT / "custom_ops").rglob("*.cc") if not path.name.endswith("_op.cc")
)
GRID = ROOT / "tools" / "sanitize" / "grid.cc"
TARGETS = ("portable", "avx2", "avx512")
# Not optimised: half the time to compile, and every access stays where the source has it.
BUILDS = {
    "memory": {
        "modes": ["memory", "huge"],
        "flags": ["-O0", "-fsanitize=address,undefined,float-cast-overflow"],
        "sources": [*KERNELS, GRID],
        "link": ["-fopenmp"],
        "options": {
            "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        },
    },
    "threads": {
        "modes": ["threads"],
        "flags": ["-O1", "-fsanitize=thread"],
        "sources": [*KERNELS, GRID, GRID.with_name("openmp_on_threads.cc")],
        "link": ["-pthread"],
        "options": {"TSAN_OPTIONS": "halt_on_error=1:history_size=4"},
    },
}


def compiler() -> list[str]:
    """The compiler, behind ccache where there is one."""
    found = os.environ.get("CXX", "c++").split()
    return ["ccache", *found] if shutil.which("ccache") and "ccache" not in found else found


def build(name: str, jobs: int) -> Path:
    """Compiles and links one program; raises with the compiler's text."""
    description, folder = BUILDS[name], ROOT / "build" / "sanitize" / name
    folder.mkdir(parents=True, exist_ok=True)
    sanitizers = description["flags"][1:]
    # setup.py's flags but for its optimisation; then ours.
    flags = [f for f in build_flags() if not f.startswith(("-O", "-g"))]
    flags += [
        *description["flags"],
        "-g1",
        "-w",
        "-fno-omit-frame-pointer",
        "-fno-sanitize-recover=all",
    ]

    def compile_one(source: Path) -> Path:
        target = folder / (source.stem + ".o")
        command = [*compiler(), *flags, f"-I{ROOT}", "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{source.name} does not compile:\n{done.stderr}")
        return target

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, description["sources"]))
    program = folder / "grid"
    command = [*compiler(), *map(str, objects), *sanitizers, *description["link"], "-o", program]
    subprocess.run(command, check=True)
    return program


def run(name: str, mode: str, program: Path) -> bool:
    """Runs a mode on every instruction set; True when nothing was found and all agree."""
    results = {}
    for target in TARGETS:
        environment = {
            **os.environ,
            **BUILDS[name]["options"],
            "PADDLE_FUSED_CPU_TARGET": target,
        }
        done = subprocess.run([program, mode], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"{mode} on {target}: FAILED\n{done.stdout}{done.stderr}")
            return False
        active, launches, digest = done.stdout.split()
        if active != target:
            print(f"{mode}: this machine has no {target}")
            continue
        results[target] = digest
        print(f"{mode} on {target}: {launches} launches, digest {digest}")
    if len(set(results.values())) > 1:
        print(f"{mode}: the instruction sets differ: {results}")
        return False
    return True


def main() -> int:
    """Builds and runs; 0 when no sanitizer spoke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {list(BUILDS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    failures = 0
    for name in options.names or BUILDS:
        start = time.monotonic()
        program = build(name, options.jobs)
        built = time.monotonic()
        failures += not all([run(name, mode, program) for mode in BUILDS[name]["modes"]])
        print(f"{name}: built in {built - start:.0f} s, ran in {time.monotonic() - built:.0f} s")
    return failures


if __name__ == "__main__":
    sys.exit(main())
