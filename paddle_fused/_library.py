"""Finds, checks and loads the compiled library."""

from __future__ import annotations

import os
import struct
from pathlib import Path

REBUILD = "pip install --force-reinstall --no-deps --no-build-isolation <the paddle_fused sources>"
_LIBRARY = Path(__file__).resolve().parent / "_C.so"

_loaded = False


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def _is_whole(path: Path) -> bool:
    """False for a file that is not all of an ELF library.

    The loader maps a library without looking at the file's length, and a process that then touches
    a page past the end dies of SIGBUS. The table of sections is the last thing in the file.
    """
    with open(path, "rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return False
    (sections_at,) = struct.unpack_from("<Q", header, 40)
    entry_size, entries = struct.unpack_from("<HH", header, 58)
    return path.stat().st_size >= sections_at + entry_size * entries


def _check_build(paddle_version: str) -> None:
    """Raises ImportError where loading the library could end the process instead."""
    try:
        from paddle_fused import _build_info
    except ImportError:
        raise ImportError(
            "paddle_fused is not built here: this is its source folder, or an incomplete "
            "installation. Install it with: pip install . --no-build-isolation"
        ) from None
    built = _build_info.PADDLE_VERSION
    if _minor(built) != _minor(paddle_version):
        raise ImportError(
            f"paddle_fused was built against Paddle {built} but Paddle {paddle_version} is "
            f"installed, and the two are not binary compatible. Rebuild it: {REBUILD}"
        )
    if not _LIBRARY.is_file():
        raise ImportError(f"paddle_fused: {_LIBRARY} is missing. Reinstall it: {REBUILD}")
    if not _is_whole(_LIBRARY):
        raise ImportError(f"paddle_fused: {_LIBRARY} is damaged. Reinstall it: {REBUILD}")


def load() -> None:
    """Registers the operators with Paddle, once in a process.

    Raises:
        ImportError: Paddle is missing, another minor version than the one built against, or the
            library is missing or broken.
    """
    global _loaded
    if _loaded:
        return
    try:
        import paddle
    except ImportError as error:
        raise ImportError(
            "paddle_fused needs PaddlePaddle: pip install paddlepaddle (or paddlepaddle-gpu)"
        ) from error
    _check_build(paddle.__version__)
    # Not paddle.utils.cpp_extension: importing that looks for compilers and warns without any.
    from paddle.base import core
    from paddle.base.framework import OpProtoHolder

    try:
        new = core.load_op_meta_info_and_register_op(str(_LIBRARY))
    except Exception as error:
        raise ImportError(
            f"paddle_fused: {_LIBRARY} does not load: {error}. Rebuild it: {REBUILD}"
        ) from error
    try:
        OpProtoHolder.instance().update_op_proto(new)
    except TypeError:  # Paddle 2.x updates all of them
        OpProtoHolder.instance().update_op_proto()
    _loaded = True
    from paddle_fused import _runtime

    _runtime.set_default_threads()


def library_path() -> str:
    """Path of the shared library that holds the operators.

    A C++ program registers it before it reads a model; docs/deploy.md says how.

    Returns:
        An absolute path.
    """
    return os.fspath(_LIBRARY)


def is_available() -> bool:
    """Whether the operators are registered and can be called.

    Returns:
        True: the import of the package would have failed otherwise.
    """
    return _loaded


def has_cuda() -> bool:
    """Whether the library holds CUDA kernels.

    Returns:
        True when it was built against a CUDA Paddle with nvcc present.
    """
    from paddle_fused import _build_info

    return _build_info.CUDA_VERSION is not None
