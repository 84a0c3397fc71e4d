"""From source to an installed package in a clean place: what users and packagers do."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import paddle
import pytest

import paddle_fused

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("custom_ops", "paddle_fused", "setup.py", "pyproject.toml", "MANIFEST.in")
SOURCES += ("README.md", "LICENSE", "CHANGELOG.md")


def clean_environment(**changes):
    """No CUDA toolkit, no folder of this repository on the path."""
    dropped = ("PYTHONPATH", "CUDA_HOME", "CUDA_PATH")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    folders = [f for f in kept["PATH"].split(os.pathsep) if not (Path(f) / "nvcc").exists()]
    return {**kept, "PATH": os.pathsep.join(folders), **changes}


def python(code, *arguments, **environment):
    """What the code prints, run in /; fails with what it wrote to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd="/",
        env=clean_environment(**environment),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


BACKEND = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, target: Path) -> Path:
    """An sdist or wheel through the build backend, as pip and build call it."""
    done = subprocess.run(
        [sys.executable, "-c", BACKEND, f"build_{kind}", str(target)],
        capture_output=True,
        text=True,
        cwd=source,
        env=clean_environment(),
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return target / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source distribution, built from a copy without what earlier builds left."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.py")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def site(sdist, tmp_path_factory):
    """A folder with the package built from that sdist without nvcc, read-only like a system's."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as file:
        file.extractall(folder)
    (source,) = folder.iterdir()
    wheel = build("wheel", source, tmp_path_factory.mktemp("wheel"))
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*command, str(site), str(wheel)], check=True, timeout=300)
    files = [path for path in site.rglob("*") if path.is_file()]
    for path in [*files, *(p for p in site.rglob("*") if p.is_dir()), site]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    yield site
    for path in [site, *(p for p in site.rglob("*") if p.is_dir())]:
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


def test_sdist_holds_what_a_build_needs(sdist):
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    native = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "custom_ops").rglob("*")
        if path.suffix in {".h", ".inc", ".cc", ".cu", ".cuh"}
    }
    assert native <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md"} <= names
    assert not [n for n in names if n.endswith((".so", ".o", ".pyc", "_build_info.py"))]


CALL = """
import os, sys
import paddle, paddle_fused
import paddle_fused.nn.functional as F
assert paddle_fused.__file__.startswith(sys.argv[1]), paddle_fused.__file__
x = paddle.ones([2, 8]); x.stop_gradient = False
F.swiglu(F.rms_norm(x)).sum().backward()
print(x.grad.shape, paddle_fused.has_cuda())
"""


def test_works_from_elsewhere_where_nothing_can_be_written(site):
    """From /, without compilers on the path; the folder is the same afterwards."""

    def snapshot():
        return {path: path.stat().st_mtime_ns for path in site.rglob("*")}

    before = snapshot()
    out = python(CALL, site, PYTHONPATH=str(site), PATH="/nonexistent")
    assert "[2, 8]" in out and out.split()[-1] == "False"
    assert snapshot() == before


def test_four_processes_import_at_once(site):
    command = [sys.executable, "-c", CALL, str(site)]
    environment = clean_environment(PYTHONPATH=str(site))
    processes = [
        subprocess.Popen(command, cwd="/", env=environment, stdout=-1, stderr=-1, text=True)
        for _ in range(4)
    ]
    for process in processes:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0 and "[2, 8]" in out, error[-2000:]


def test_a_gpu_tensor_is_told_that_there_is_no_kernel(site):
    """Without a GPU the error cannot be provoked: the library has its text."""
    assert (
        b"this build of paddle_fused has no kernels for"
        in (site / "paddle_fused" / "_C.so").read_bytes()
    )


@pytest.mark.skipif(shutil.which("ldd") is None, reason="no ldd")
def test_every_symbol_is_found():
    """Paddle's libraries and the system's hold all that the library needs, by its own run path."""
    done = subprocess.run(
        ["ldd", "-r", paddle_fused.library_path()], capture_output=True, text=True, timeout=60
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    # Those of Python itself come from the interpreter.
    missing = [
        line
        for line in lines
        if "undefined symbol" in line
        and "undefined symbol: Py" not in line
        and "undefined symbol: _Py" not in line
    ]
    assert missing == []
    assert not [line for line in lines if "not found" in line and "libpython" not in line]


SECOND = """
#include "paddle/extension.h"
std::vector<paddle::Tensor> Twice(const paddle::Tensor& x) { return {paddle::add(x, x)}; }
PD_BUILD_OP(someone_elses_twice).Inputs({"X"}).Outputs({"Out"}).SetKernelFn(PD_KERNEL(Twice));
"""
BOTH = """
import sys
import paddle
from paddle.utils import cpp_extension
if sys.argv[3] == "ours first":
    import paddle_fused
other = cpp_extension.load(
    "someone_elses", [sys.argv[1]], build_directory=sys.argv[2], extra_cxx_cflags=["-O0", "-w"]
)
import paddle_fused
import paddle_fused.nn.functional as F
x = paddle.ones([2, 4])
print(other.someone_elses_twice(x).sum().item(), F.swiglu(x).shape, F.rms_norm(x).shape)
"""


def test_beside_a_second_package_of_operators(tmp_path):
    """Another library of custom operators works with ours, whichever comes first."""
    source = tmp_path / "second.cc"
    source.write_text(SECOND)
    for order in ("theirs first", "ours first"):
        out = python(BOTH, source, tmp_path, order, PATH=os.environ["PATH"])
        assert out.splitlines()[-1].startswith("16.0 "), out


ALL_OPERATORS = """
import inspect, json, sys
import paddle
from paddle.base.framework import OpProtoHolder

def functions(module):
    found = {}
    for name in sorted(dir(module)):
        value = getattr(module, name)
        if callable(value) and not name.startswith("__"):
            try:
                signature = str(inspect.signature(value))
            except (TypeError, ValueError):
                signature = value.__doc__
            found[name] = [signature, id(value)]
    return found

import paddle.incubate.nn.functional as incubate
import paddle.nn.functional as plain
MODULES = [paddle._C_ops, paddle, plain, incubate, paddle.nn, paddle.Tensor]

def state():
    protos = {n: p.SerializeToString().hex()
              for n, p in OpProtoHolder.instance().op_proto_map.items()
              if not n.startswith("paddle_fused_")}
    return [protos, [functions(m) for m in MODULES]]

before = state()
import paddle_fused
after = state()
ours = [n for n in after[1][0] if n.startswith("paddle_fused_")]
for name in ours:
    del after[1][0][name]
assert before[0] == after[0], "operators"
for module, a, b in zip(MODULES, before[1], after[1]):
    assert a == b, (module, {n for n in {*a, *b} if a.get(n) != b.get(n)})
print(len(before[0]), sum(map(len, before[1])))
"""


def test_nothing_of_paddle_changes():
    """Every operator, and every function's signature and identity, before and after the import."""
    operators, functions = map(int, python(ALL_OPERATORS).split()[-2:])
    assert operators > 300 and functions > 1500


def test_import_starts_no_compiler(tmp_path):
    """Nothing is built at import time, so a killed build cannot be in the way."""
    for name in ("cc", "c++", "gcc", "g++", "nvcc", "ninja"):
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/called\nexit 1\n")
        script.chmod(0o755)
    code = (
        "import paddle_fused, paddle_fused.nn.functional as F, paddle; F.swiglu(paddle.ones([2]))"
    )
    python(code, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert not (tmp_path / "called").exists()


def test_versions_named_by_the_error_are_the_real_ones(tmp_path):
    """Built against another minor version: both versions, before the library is touched."""
    shutil.copytree(Path(paddle_fused.__file__).parent, tmp_path / "paddle_fused")
    info = tmp_path / "paddle_fused" / "_build_info.py"
    info.write_text(info.read_text().replace(paddle.__version__, "9.8.7"))
    (tmp_path / "paddle_fused" / "_C.so").write_bytes(b"not a library")
    code = "import sys\ntry:\n    import paddle_fused\nexcept ImportError as e:\n    print(e)"
    out = python(code, PYTHONPATH=str(tmp_path))
    assert "9.8.7" in out and paddle.__version__ in out and "pip install" in out


def test_garbage_for_a_library(tmp_path):
    """A file of the right size with other bytes in it: an ImportError that names the file."""
    shutil.copytree(Path(paddle_fused.__file__).parent, tmp_path / "paddle_fused")
    library = tmp_path / "paddle_fused" / "_C.so"
    library.write_bytes(os.urandom(library.stat().st_size))
    code = "try:\n    import paddle_fused\nexcept ImportError as e:\n    print('ImportError', e)"
    assert f"ImportError paddle_fused: {library}" in python(code, PYTHONPATH=str(tmp_path))
