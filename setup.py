"""Builds paddle_fused against the Paddle that is installed: ``pip install . --no-build-isolation``.

One extension, ``paddle_fused/_C.so``, from every source under ``custom_ops/``. CUDA sources join
when that Paddle has CUDA and nvcc is there. Environment variables:

    MAX_JOBS                  compile jobs at a time
    PADDLE_CUDA_ARCH_LIST     for example "8.0;9.0"; default: every architecture in
    CUDA_ARCHITECTURES PADDLE_FUSED_FORCE_CPU    any value: leave the CUDA sources out
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

try:
    import paddle
    from paddle.utils import cpp_extension
except ImportError as error:
    raise SystemExit(
        "paddle_fused is compiled against the Paddle in this environment, and there is none: "
        "pip install paddlepaddle==3.3.1 (or a paddlepaddle-gpu), then "
        "pip install . --no-build-isolation"
    ) from error

ROOT = Path(__file__).resolve().parent
OPS = ROOT / "custom_ops"
# Compute capabilities of the default build, and the one whose PTX serves newer devices.
CUDA_ARCHITECTURES = ("8.0", "9.0")
# -ffp-contract=off: see custom_ops/common/foreach_cpu_target.inc. -g0 and the prefix maps keep the
# paths of the build machine out of the library.
CXX_FLAGS = ["-std=c++17", "-O2", "-g0", "-fopenmp", "-ffp-contract=off"]
# -fmad=false: products and sums are fused where a kernel says so, see common/cuda_math.cuh.
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-DPADDLE_FUSED_WITH_CUDA"]


def cuda_home() -> Path | None:
    """The CUDA toolkit. Not Paddle's own idea of it, which has moved between versions."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return Path(os.environ[name])
    if (Path("/usr/local/cuda") / "bin" / "nvcc").exists():
        return Path("/usr/local/cuda")
    nvcc = shutil.which("nvcc")
    return Path(nvcc).resolve().parent.parent if nvcc else None


def cuda_sources() -> list[str]:
    """CUDA sources to build: none without a CUDA Paddle and nvcc."""
    if os.environ.get("PADDLE_FUSED_FORCE_CPU") or not paddle.is_compiled_with_cuda():
        return []
    if cuda_home() is None:
        print(
            "paddle_fused: this Paddle has CUDA but nvcc was not found; building for the CPU only"
        )
        return []
    return relative(OPS.rglob("*.cu"))


def relative(paths) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def gencode_flags() -> list[str]:
    """-gencode for each architecture, and PTX of the newest."""
    listed = re.split(r"[;,\s]+", os.environ.get("PADDLE_CUDA_ARCH_LIST", "").strip())
    names = [name.replace(".", "") for name in listed if name] or [
        name.replace(".", "") for name in CUDA_ARCHITECTURES
    ]
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    newest = max(names, key=lambda name: int(re.match(r"\d+", name).group()))
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def make_extension():
    """The one extension, CPU only or CPU and CUDA."""
    cuda = cuda_sources()
    include = paddle.sysconfig.get_include()
    cxx = [*CXX_FLAGS, f"-ffile-prefix-map={ROOT}=.", f"-ffile-prefix-map={include}=paddle/include"]
    arguments = {
        "sources": relative(OPS.rglob("*.cc")) + cuda,
        "include_dirs": [str(ROOT)],
        "extra_link_args": openmp_library(),
        "depends": [
            "setup.py",
            *relative([*OPS.rglob("*.h"), *OPS.rglob("*.inc"), *OPS.rglob("*.cuh")]),
        ],
    }
    if cuda:
        # CUDA 13 keeps thrust, which Paddle's headers include, in a folder of its own.
        cccl = cuda_home() / "include" / "cccl"
        cxx += ["-DPADDLE_FUSED_WITH_CUDA", "-DPADDLE_WITH_CUDA", f"-I{cccl}"]
        nvcc = [*NVCC_FLAGS, f"-I{cccl}", *gencode_flags()]
        flags = {"cxx": cxx, "nvcc": nvcc}
        extension = cpp_extension.CUDAExtension(**arguments, extra_compile_args=flags)
    else:
        extension = cpp_extension.CppExtension(**arguments, extra_compile_args={"cxx": cxx})
    extension.name = "paddle_fused._C"
    # Where Paddle lies seen from an installed paddle_fused, instead of this machine's paths.
    extension.runtime_library_dirs = ["$ORIGIN/../paddle/base", "$ORIGIN/../paddle/libs"]
    return extension


def openmp_library() -> list[str]:
    """Links the OpenMP runtime that Paddle's MKL brings, where it does; else the compiler's.

    Two runtimes in one process each keep a pool of threads that spin while they wait, and take the
    cores from each other: a training step measured 2.5 times slower than with one.
    """
    name = "libiomp5.so"  # it has the entry points of GCC's runtime, too
    if (Path(paddle.__file__).parent / "libs" / name).exists():
        return [f"-l:{name}"]
    return ["-fopenmp"]


def declared_operators(sources) -> list[str]:
    """Names that the sources register."""
    found = set()
    for source in sources:
        found.update(re.findall(r"^PD_BUILD_OP\((\w+)\)", (ROOT / source).read_text(), re.M))
    return sorted(found)


def git_commit() -> str | None:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


class BuildExtension(cpp_extension.BuildExtension):
    """Paddle's builder; checks that all operators are there and nothing else is in the wheel."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "no_python_abi_suffix": True})

    def run(self):
        extension = self.extensions[0]
        library = Path(self.get_ext_fullpath(extension.name)).resolve()
        # Paddle's builder goes on after a compile error: an object of an earlier build must not be
        # there to be linked instead.
        for leftover in library.parent.parent.rglob("*.o"):
            if "custom_ops" in leftover.parts:
                leftover.unlink()
        super().run()
        for leftover in [*library.parent.parent.rglob("*.o"), library.parent / "version.txt"]:
            leftover.unlink(missing_ok=True)
        (library.parent.parent / "version.txt").unlink(missing_ok=True)
        self.check_operators(library, declared_operators(extension.sources))
        self.write_build_info(library.parent / "_build_info.py", extension)

    def build_extensions(self):
        # Some Pythons link everything with their own folder as run path.
        for name in ("linker_so", "linker_so_cxx"):
            command = getattr(self.compiler, name, None) or []
            kept = [word for word in command if not word.startswith("-Wl,-rpath")]
            setattr(self.compiler, name, kept)
        super().build_extensions()

    def _generate_python_api_file(self):
        """Paddle's generated stub: not wanted, paddle_fused has hand-written wrappers."""

    def _rename_inplace_shared_library(self):
        """Paddle's renaming for that stub: the library keeps its name in every kind of build."""

    @staticmethod
    def check_operators(library: Path, expected: list[str]) -> None:
        """Loads the library in a process of its own and compares the operators it registers."""
        code = (
            "import json, sys, paddle\n"
            "from paddle.base import core\n"
            "from paddle.base.framework import OpProtoHolder\n"
            "new = core.load_op_meta_info_and_register_op(sys.argv[1])\n"
            "if new is None:  # Paddle 2.x tells nothing\n"
            "    OpProtoHolder.instance().update_op_proto()\n"
            "    new = OpProtoHolder.instance().op_proto_map\n"
            "print(json.dumps(sorted(new)))"
        )
        command = [sys.executable, "-c", code, str(library)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"the built library does not load:\n{result.stderr}")
        registered = json.loads(result.stdout.strip().splitlines()[-1])
        missing = [name for name in expected if name not in registered]
        if missing or not expected:
            raise RuntimeError(
                f"the build lacks operators {missing} of {expected}: look above for a compile error"
            )

    def write_build_info(self, path: Path, extension) -> None:
        cuda = any(source.endswith(".cu") for source in extension.sources)
        compiler = subprocess.run(
            [*shlex.split(os.environ.get("CXX", "c++")), "--version"],
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        info = {
            "PADDLE_VERSION": paddle.__version__,
            "PADDLE_COMMIT": paddle.version.commit,
            "CUDA_VERSION": str(paddle.version.cuda()) if cuda else None,
            "CUDA_FLAGS": gencode_flags() if cuda else [],
            "COMPILER": compiler[0] if compiler else "unknown",
            "CXX_FLAGS": CXX_FLAGS,
            "GIT_COMMIT": git_commit(),
            "OPERATORS": declared_operators(extension.sources),
        }
        lines = ['"""Written by the build: what this copy was compiled with."""', ""]
        lines += [f"{key} = {value!r}" for key, value in info.items()]
        path.write_text("\n".join(lines) + "\n")


setup(ext_modules=[make_extension()], cmdclass={"build_ext": BuildExtension})
