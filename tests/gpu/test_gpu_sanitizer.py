"""compute-sanitizer over small calls of every operator: memory and shared-memory races.

Paddle's allocator is told to give every tensor memory of its own, so that a step past the end of
one does not land in another. Skipped where the tool is missing or the device refuses it; that it
finds what it looks for is tested on two kernels with a fault each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FOUND = 57  # the exit status that tells of findings
FAULTS = r"""
#include <cuda_runtime.h>
__global__ void memcheck(int* p) { p[threadIdx.x + 32] = 1; }
__global__ void racecheck(int* p) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  p[threadIdx.x % 32] = s[63 - threadIdx.x];
}
int main(int count, char** words) {
  int* p = nullptr;
  if (cudaMalloc(&p, 32 * sizeof(int)) != cudaSuccess) return 2;
  if (words[1][0] == 'm') memcheck<<<1, 64>>>(p);
  if (words[1][0] == 'r') racecheck<<<1, 64>>>(p);
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 3;
}
"""


def sanitizer() -> str:
    """The tool, or a skip."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    for found in (shutil.which("compute-sanitizer"), home / "bin" / "compute-sanitizer"):
        if found and Path(found).exists():
            return str(found)
    pytest.skip("compute-sanitizer is not installed")


def watch(tool: str, *command: str, seconds: int = 550) -> tuple[int, str]:
    """Exit status and output of a command under one of the sanitizer's tools."""
    environment = {**os.environ, "FLAGS_use_system_allocator": "1"}
    watched = [sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), *command]
    done = subprocess.run(
        watched, env=environment, cwd="/", capture_output=True, text=True, timeout=seconds
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """A program with one faulty kernel per tool, compiled; None without nvcc."""
    if not shutil.which("nvcc"):
        return None
    folder = tmp_path_factory.mktemp("faults")
    (folder / "faults.cu").write_text(FAULTS)
    command = ["nvcc", "-arch=native", "-o", str(folder / "faults"), str(folder / "faults.cu")]
    subprocess.run(command, check=True)
    return str(folder / "faults")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_found(tool, faults):
    if faults is not None:
        status, output = watch(tool, faults, tool)
        if "not supported" in output or "unsupported" in output.lower():
            pytest.skip(f"compute-sanitizer refuses this device: {output.splitlines()[-1]}")
        assert status == FOUND, f"a planted fault was not found:\n{output[-2000:]}"
    # Shared memory is used by what adds up rows and columns.
    words = [] if tool == "memcheck" else ["weighted", "rms_norm"]
    status, output = watch(tool, sys.executable, str(HERE / "small_cases.py"), *words)
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer refuses this device")
    assert status == 0, output[-4000:]
    assert "ran " in output, output[-2000:]
