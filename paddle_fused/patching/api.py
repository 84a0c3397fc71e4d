"""patch, unpatch, patched and patch_report."""

from __future__ import annotations

import contextlib

import paddle

from paddle_fused import _checks as checks
from paddle_fused.patching.report import Report
from paddle_fused.patching.state import OPS, STATE, TABLES, is_installed

_PATCH = "patch"  # the token of all calls of patch()


def patch(targets="auto", ops=("swiglu", "rms_norm", "rope"), model=None):
    """Reroutes Paddle's own functions, and model libraries that use them, to this package.

    Works before and after the model is built, and before and after its library is imported. Where a
    call is not one that this package computes (a dtype, a device, an activation), the original is
    called. An error of this package's functions reaches the caller.

    A process has one state: a second call adds what the first did not ask for, and nothing twice.
    Safe from several threads. :func:`unpatch` takes everything back.

    Args:
        targets (str|list[str], optional): "auto": Paddle and the known libraries that are
            installed. Or names of them: "paddle", "paddleformers".
        ops (str|list[str], optional): Which of "swiglu", "rms_norm" and "rope".
        model (paddle.nn.Layer, optional): A model that is built already: its norms and feed-forward
            blocks of known classes get the forward of this package, one by one, whatever their
            class does. Parameters and the keys of the state dict stay. ``targets=[]`` leaves it at
            that and changes nothing else.

    Returns:
        Report: prints what was replaced, what not and why, and counts calls from now on.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a target or an op is unknown.
        ImportError: a target that was named is not installed.

    Examples:
        >>> import paddle
        >>> import paddle_fused
        >>> report = paddle_fused.patch(ops=["swiglu"])
        >>> x = paddle.ones([2, 4], dtype="bfloat16")  # which Paddle cannot do on a CPU
        >>> print(paddle.nn.functional.swiglu(x).shape, report.hits)
        paddle.Size([2, 2]) 1
        >>> paddle_fused.unpatch()
    """
    targets, ops = _checked("patch", targets, ops, model)
    STATE.hold(_PATCH, targets, ops, model)
    return _report(targets, ops, model)


def unpatch():
    """Takes back all that :func:`patch` did: every name holds the very object it held before.

    Replacements that an open ``with patched(...)`` asked for stay until its end. Without a patch it
    does nothing.

    Examples:
        >>> import paddle
        >>> import paddle_fused
        >>> before = [paddle.nn.functional.swiglu]
        >>> _ = paddle_fused.patch()
        >>> paddle_fused.unpatch()
        >>> print(paddle.nn.functional.swiglu is before[0])
        True
    """
    STATE.release(_PATCH)


@contextlib.contextmanager
def patched(targets="auto", ops=("swiglu", "rms_norm", "rope"), model=None):
    """:func:`patch` for a block; nests, and leaves what was there before.

    For the whole process while the block runs, not for its thread. Also a decorator.

    Args:
        targets (str|list[str], optional): As in :func:`patch`.
        ops (str|list[str], optional): As in :func:`patch`.
        model (paddle.nn.Layer, optional): As in :func:`patch`.

    Yields:
        Report: as :func:`patch` returns.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a target or an op is unknown.
        ImportError: a target that was named is not installed.

    Examples:
        >>> import paddle
        >>> import paddle_fused
        >>> x = paddle.ones([2, 4], dtype="float16")
        >>> with paddle_fused.patched() as report:
        ...     print(paddle.nn.functional.swiglu(x).shape)
        paddle.Size([2, 2])
        >>> print(report.hits, report.fall_throughs)
        1 0
    """
    targets, ops = _checked("patched", targets, ops, model)
    token = object()
    STATE.hold(token, targets, ops, model)
    try:
        yield _report(targets, ops, model)
    finally:
        STATE.release(token)


def patch_report():
    """The state of every known place now, and how many calls it took so far.

    Returns:
        Report: as :func:`patch` returns, of all targets and ops.

    Examples:
        >>> import paddle_fused
        >>> print(paddle_fused.patch_report().replaced)
        []
    """
    return Report(lambda: STATE.lines(tuple(TABLES), OPS), from_now=False)


def _report(targets, ops, model) -> Report:
    with_layers = model is not None
    return Report(lambda: STATE.lines(targets, ops, with_layers))


def _checked(function: str, targets, ops, model):
    automatic = isinstance(targets, str) and targets == "auto"
    targets = tuple(TABLES) if automatic else _names(function, "targets", targets, TABLES)
    ops = _names(function, "ops", ops, OPS)
    if not automatic:
        for target in targets:
            if not is_installed(target):
                raise ImportError(f"{function}(): targets: {target} is not installed")
    if model is not None and not isinstance(model, paddle.nn.Layer):
        raise checks.wrong_type(function, "model", "a paddle.nn.Layer", type(model).__name__)
    return targets, ops


def _names(function: str, argument: str, value, known) -> tuple[str, ...]:
    """A name or several, all of them known."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(
        isinstance(name, str) for name in names
    ):
        raise checks.wrong_type(function, argument, "a str or a list of them", repr(value))
    for name in names:
        if name not in known:
            raise checks.wrong_value(function, argument, f"of {list(known)}", repr(name))
    return tuple(names)
