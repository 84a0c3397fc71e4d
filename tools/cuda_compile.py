"""Compiles every CUDA source on a machine without a GPU, strictly, and keeps ptxas' figures.

    python tools/cuda_compile.py [--arch 80 --arch 90] [--jobs N]

Kernels are compiled alone, no Paddle header in sight, with every warning an error; the operators'
host code is compiled as the CUDA build would, against the headers of the installed Paddle.
Registers and spills of every kernel go to build/cuda/ptxas.txt. Without nvcc there is nothing to
do, and the tool says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from strict_compile import ROOT, WARNINGS, build_flags, include_flags

BUILD = ROOT / "build" / "cuda"
STRICT = ["-Werror", "all-warnings", "-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror"]


def nvcc_flags() -> list[str]:
    """NVCC_FLAGS of setup.py, read without running it."""
    import ast

    (text,) = re.findall(r"^NVCC_FLAGS = (\[.*?\])$", (ROOT / "setup.py").read_text(), re.M | re.S)
    return ast.literal_eval(text)


def cuda_home(nvcc: str) -> Path:
    """The toolkit's folder, also where nvcc on the path is only a script that calls it."""
    out = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True)
    found = re.search(r"^#\$ TOP=(.*)$", out.stdout + out.stderr, re.M)
    return Path(found.group(1).strip()) if found else Path("/usr/local/cuda")


def kernel_command(nvcc: str, source: Path, archs: list[str]) -> list[str]:
    """One source of kernels, machine code for every architecture and PTX of the newest."""
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    codes.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    includes = [f"-I{ROOT}", f"-I{cuda_home(nvcc) / 'include' / 'cccl'}"]
    output = BUILD / f"{source.stem}.o"
    return [
        *[nvcc, *nvcc_flags(), *STRICT, "-Xptxas", "-v", *codes, *includes],
        *["-c", str(source), "-o", str(output)],
    ]


def host_command(nvcc: str, source: Path) -> list[str]:
    """One source of host code, as in the CUDA build."""
    macros = ["-DPADDLE_FUSED_WITH_CUDA", "-DPADDLE_WITH_CUDA"]
    toolkit = cuda_home(nvcc) / "include"  # CUDA 13 keeps thrust, which Paddle includes, in cccl
    includes = [*include_flags(), f"-isystem{toolkit}", f"-isystem{toolkit / 'cccl'}"]
    compiler = os.environ.get("CXX", "c++")
    output = BUILD / f"{source.stem}.host.o"
    return [
        *[compiler, *build_flags(), "-O0", "-fPIC", *WARNINGS, *macros, *includes],
        *["-c", str(source), "-o", str(output)],
    ]


def kernel_table(log: str) -> list[tuple]:
    """(architecture, registers, spilled bytes, kernel) of each kernel in ptxas' output."""
    pattern = (
        r"Compiling entry function '(\S+)' for '(\S+)'.*?(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    )
    rows = re.findall(pattern, log, re.S)
    names = "\n".join(row[0] for row in rows)
    if shutil.which("c++filt"):
        names = subprocess.run(["c++filt"], input=names, capture_output=True, text=True).stdout
    table = []
    for name, row in zip(names.splitlines(), rows):
        short = re.sub(r"paddle_fused::|gpu::|\(anonymous namespace\)::|^void ", "", name)
        table.append(
            (row[1], int(row[5]), int(row[3]) + int(row[4]), re.sub(r"\(\w+Params.*", "", short))
        )
    return table


def main() -> int:
    """Compiles everything; returns the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", help="compute capability without the dot")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        print("cuda_compile: no nvcc on the path, CUDA sources not compiled")
        return 0
    archs = sorted(options.arch or ["80", "90"], key=int)
    BUILD.mkdir(parents=True, exist_ok=True)
    operators = ROOT / "custom_ops"
    kernels = sorted(operators.rglob("*.cu"), key=lambda path: -path.stat().st_size)
    commands = [(path, kernel_command(nvcc, path, archs)) for path in kernels]
    commands += [(path, host_command(nvcc, path)) for path in sorted(operators.rglob("*_op.cc"))]

    def run(job):
        return job[0], subprocess.run(job[1], capture_output=True, text=True)

    failures, table = 0, []
    with ThreadPoolExecutor(options.jobs) as pool:
        for source, result in pool.map(run, commands):
            failures += result.returncode != 0
            print(f"{'ok  ' if result.returncode == 0 else 'FAIL'} {source.relative_to(ROOT)}")
            if result.returncode != 0:
                print(result.stdout + result.stderr)
            elif source.suffix == ".cu":
                table += kernel_table(result.stdout + result.stderr)
    lines = [f"{'arch':6} {'registers':>9} {'spilled bytes':>13}  kernel"]
    lines += [f"{a:6} {r:9} {s:13}  {name}" for a, r, s, name in sorted(table)]
    (BUILD / "ptxas.txt").write_text("\n".join(lines) + "\n")
    spilling = sum(row[2] > 0 for row in table)
    print(
        f"{len(table)} kernels, {spilling} with spills: {(BUILD / 'ptxas.txt').relative_to(ROOT)}"
    )
    return failures


if __name__ == "__main__":
    sys.exit(main())
