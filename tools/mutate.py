"""Breaks the sources on purpose, one line at a time, and sees whether the tests notice.

    python tools/mutate.py [--only WORD] [--jobs N]

First the tests have to pass as things are. Then each fault of tools/mutations.py goes into a copy
of the sources, whose affected objects are compiled and linked, and the tests named for it run until
the first failure. Prints a table; a fault that no test notices, or whose line is gone, makes the
exit status 1.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutations import MUTATIONS, Mutation
from sanitize import compiler
from strict_compile import ROOT, build_flags, include_flags

FOLDER = ROOT / "build" / "mutate"
COPIED = ("custom_ops", "paddle_fused", "tests", "tools", "docs")


def compile_flags(sandbox: Path) -> list[str]:
    """setup.py's flags, optimised less: it halves the time to compile."""
    flags = [flag for flag in build_flags() if not flag.startswith("-O")]
    paddle = [flag for flag in include_flags() if flag != f"-I{ROOT}"]
    return [*flags, "-O1", "-fPIC", "-w", f"-I{sandbox}", *paddle]


def compile_one(sandbox: Path, source: Path, target: Path) -> None:
    """One object; a makefile rule beside it lists what it includes."""
    command = [*compiler(), *compile_flags(sandbox), "-MMD", "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=sandbox)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])


def link(objects, target: Path) -> None:
    """The library, against the Paddle of this Python."""
    import paddle

    home = Path(paddle.__file__).parent
    libraries = [f"-L{home}/base", f"-L{home}/libs", "-l:libpaddle.so", "-lphi", "-lphi_core"]
    openmp = "libiomp5.so"
    openmp = [f"-l:{openmp}"] if (home / "libs" / openmp).exists() else ["-fopenmp"]
    run_path = [f"-Wl,-rpath,{home}/base:{home}/libs"]
    command = [*compiler(), "-shared", *map(str, objects), *libraries, "-lcommon", *openmp]
    subprocess.run([*command, *run_path, "-o", str(target)], check=True)


class Sandbox:
    """A copy of the sources with objects of its own."""

    def __init__(self, number: int):
        self.root = FOLDER / f"copy{number}"
        shutil.rmtree(self.root, ignore_errors=True)
        for name in COPIED:
            shutil.copytree(ROOT / name, self.root / name)
        for name in ("setup.py", "pyproject.toml", "Makefile"):
            shutil.copy(ROOT / name, self.root / name)
        self.objects = self.root / "objects"
        self.objects.mkdir()
        self.sources = sorted((self.root / "custom_ops").rglob("*.cc"))

    def object_of(self, source: Path) -> Path:
        return self.objects / (source.stem + ".o")

    def build(self, jobs: int) -> None:
        """Everything, unbroken."""
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda s: compile_one(self.root, s, self.object_of(s)), self.sources))
        self.link()
        self.write_build_info()

    def link(self) -> None:
        library = self.root / "paddle_fused" / "_C.so"
        link([self.object_of(source) for source in self.sources], library)

    def write_build_info(self) -> None:
        """As setup.py writes it; the tests read a few lines of it."""
        import paddle

        names = re.findall(
            r"^PD_BUILD_OP\((\w+)\)", "\n".join(s.read_text() for s in self.sources), re.M
        )
        info = {
            "PADDLE_VERSION": paddle.__version__,
            "PADDLE_COMMIT": paddle.version.commit,
            "CUDA_VERSION": None,
            "CUDA_FLAGS": [],
            "COMPILER": "unknown",
            "CXX_FLAGS": [],
            "GIT_COMMIT": None,
            "OPERATORS": sorted(names),
        }
        text = "\n".join(f"{key} = {value!r}" for key, value in info.items())
        (self.root / "paddle_fused" / "_build_info.py").write_text(text + "\n")

    def affected(self, file: str) -> list[Path]:
        """The sources whose objects depend on a file."""
        path = str(self.root / file)
        found = []
        for source in self.sources:
            rule = self.object_of(source).with_suffix(".d").read_text()
            names = rule.replace("\\\n", " ").split()[1:]
            if any(os.path.normpath(self.root / name) == path for name in names):
                found.append(source)
        return found

    def run_tests(self, tests) -> tuple[bool, str]:
        """(whether all passed, the first failure)."""
        path = f"{self.root}{os.pathsep}{self.root / 'tests'}"
        environment = {**os.environ, "PYTHONPATH": path}
        for test in tests:
            if test.startswith("sanitize "):
                command = [sys.executable, "tools/sanitize.py", test.split()[1], "--jobs", "1"]
            else:
                command = [sys.executable, "-m", "pytest", "-xq", "-W", "ignore", "--no-header"]
                command += ["-p", "no:cacheprovider", "--tb=no", "-rf", test]
            try:
                done = subprocess.run(
                    command,
                    cwd=self.root,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=900,
                )
            except subprocess.TimeoutExpired:
                return False, f"{test}: too slow"
            # pytest: 1 for failed tests, below 0 and above 127 for a process that died.
            if 2 <= done.returncode <= 5:
                raise RuntimeError(f"{test} did not run: {(done.stdout + done.stderr)[-300:]}")
            if done.returncode != 0:
                return False, first_failure(test, done.stdout + done.stderr)
        return True, ""

    def check(self, mutation: Mutation) -> tuple[str, str]:
        """("caught", by what), ("survived", "") or ("does not apply", why)."""
        path = self.root / mutation.file
        text = path.read_text()
        if text.count(mutation.old) != 1:
            return "does not apply", f"{text.count(mutation.old)} places in {mutation.file}"
        native = mutation.file.startswith("custom_ops/")
        plain = not mutation.tests[0].startswith("sanitize")
        sources = self.affected(mutation.file) if native and plain else []
        try:
            path.write_text(text.replace(mutation.old, mutation.new))
            for source in sources:
                compile_one(self.root, source, self.object_of(source))
            if sources:
                self.link()
            passed, failure = self.run_tests(mutation.tests)
            return ("survived", "") if passed else ("caught", failure)
        except RuntimeError as error:
            return "does not apply", str(error)[:200]
        finally:
            path.write_text(text)
            for source in sources:
                compile_one(self.root, source, self.object_of(source))
            if sources:
                self.link()


def first_failure(test: str, output: str) -> str:
    """The test or sanitizer that spoke."""
    if test.startswith("sanitize "):
        found = re.search(r"(ERROR|WARNING): \w+Sanitizer: [\w-]+|runtime error.*|grid: .*", output)
    else:
        found = re.search(r"(?<=FAILED )\S*|(?<=::)\S*|Fatal Python error.*", output)
    return f"{test}: {found.group(0)[:70] if found else output.strip()[-70:]}"


def main() -> int:
    """Runs all mutations; 1 when one survived or did not apply."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run those whose kind contains this")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if options.only in m.kind]
    free: queue.Queue = queue.Queue()
    for number in range(options.jobs):
        sandbox = Sandbox(number)
        sandbox.build(options.jobs)
        free.put(sandbox)
    print(f"{len(chosen)} mutations", flush=True)
    for tests in sorted({m.tests for m in chosen}):
        passed, failure = sandbox.run_tests(tests)
        if not passed:
            print(f"fails without any mutation: {failure}")
            return 1

    def run(mutation: Mutation) -> str:
        sandbox, start = free.get(), time.monotonic()
        try:
            verdict, detail = sandbox.check(mutation)
        finally:
            free.put(sandbox)
        seconds = time.monotonic() - start
        print(f"{verdict:15s} {seconds:5.0f} s  {mutation.kind:45s} {detail}", flush=True)
        return verdict

    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(pool.map(run, chosen))
    caught = verdicts.count("caught")
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
