"""Threads and memory of the CPU kernels."""

from __future__ import annotations

import ctypes
import os
import warnings

from paddle_fused import _library

CPU_TARGETS = ("portable", "avx2", "avx512")
MAX_THREADS = 4096

_library_handle = None


def _handle() -> ctypes.CDLL:
    global _library_handle
    if _library_handle is None:
        handle = ctypes.CDLL(_library.library_path())
        handle.paddle_fused_cpu_target.restype = ctypes.c_char_p
        _library_handle = handle
    return _library_handle


def _variable_at_start(name: str) -> str | None:
    """An environment variable as the process was started with, before anybody changed it."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    prefix = name.encode() + b"="
    for entry in entries:
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode()
    return None


def _check_environment() -> bool:
    """Warns of values that nobody can have meant; True when a thread count is set."""
    target = os.environ.get("PADDLE_FUSED_CPU_TARGET")
    if target and target not in CPU_TARGETS:
        warnings.warn(
            f"PADDLE_FUSED_CPU_TARGET: expected one of {CPU_TARGETS}, got {target!r}: ignored",
            stacklevel=2,
        )
    threads = os.environ.get("PADDLE_FUSED_NUM_THREADS")
    if not threads:
        return False
    if threads.isdecimal() and 1 <= int(threads) <= MAX_THREADS:
        return True
    warnings.warn(
        f"PADDLE_FUSED_NUM_THREADS: expected a number of 1 to {MAX_THREADS}, got {threads!r}: "
        "ignored",
        stacklevel=2,
    )
    return False


def set_default_threads() -> None:
    """Keeps a thread count that somebody asked for; else uses every core.

    Importing Paddle sets OMP_NUM_THREADS to 1 in the environment unless it is set, so a 1 found now
    may be nobody's wish: it counts only when the process was started with it.
    """
    if _check_environment():
        return
    if os.environ.get("OMP_NUM_THREADS") == "1" and not _variable_at_start("OMP_NUM_THREADS"):
        set_num_threads(len(os.sched_getaffinity(0)))


def set_num_threads(count: int) -> None:
    """Sets how many threads the CPU kernels use.

    The default is PADDLE_FUSED_NUM_THREADS, else OMP_NUM_THREADS as the process was started with,
    else every core that the process may run on. Results do not depend on it. Small inputs use one
    thread in any case, and so do processes that were forked after the import.

    Args:
        count: Number of threads, at least 1.

    Raises:
        TypeError: count is not an int.
        ValueError: count is below 1.

    Examples:
        >>> import paddle_fused
        >>> before = paddle_fused.get_num_threads()
        >>> paddle_fused.set_num_threads(1)
        >>> paddle_fused.get_num_threads()
        1
        >>> paddle_fused.set_num_threads(before)
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"set_num_threads(): count: expected an int, got {type(count).__name__}")
    if count < 1:
        raise ValueError(f"set_num_threads(): count: expected at least 1, got {count}")
    _handle().paddle_fused_set_num_threads(min(count, MAX_THREADS))


def get_num_threads() -> int:
    """How many threads the CPU kernels use.

    Returns:
        The number that set_num_threads() set, or the default.
    """
    return _handle().paddle_fused_get_num_threads()


def cpu_target() -> str:
    """The instruction set whose kernels run: "portable", "avx2" or "avx512"."""
    return _handle().paddle_fused_cpu_target().decode()


def keep_cpu_memory() -> bool:
    """Tells the C library to keep freed memory instead of giving it back to the system.

    Paddle asks the C library for the memory of every CPU tensor. Large blocks come fresh from the
    system each time, and clearing their pages costs more than a fused operator does. After this
    call freed blocks are used again. The price: memory that was in use once stays with the process.
    Affects the whole process, from now on, and cannot be undone.

    Returns:
        False where the C library has no such setting (it is not glibc), else True.

    Examples:
        >>> import paddle_fused
        >>> kept = paddle_fused.keep_cpu_memory()
    """
    mmap_threshold, trim_threshold, mmap_max = -3, -1, -4  # M_* of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    largest = 2**31 - 1
    settings = ((mmap_max, 0), (trim_threshold, largest), (mmap_threshold, 2**25))
    return all([mallopt(option, value) == 1 for option, value in settings])
