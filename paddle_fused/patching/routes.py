"""One place in a library, the function that stands there, and ours that takes its calls."""

from __future__ import annotations

import functools
import threading
import types
from collections import Counter
from dataclasses import dataclass
from typing import Callable

from paddle_fused._ops import static_unit

ATTRIBUTE = "attribute"  # of a module, and every name that was imported from it by value
METHOD = "method"  # of a class
REGISTRY = "registry"  # an entry of a library's own registry of classes
LAYER = "layer"  # of a class whose instances are changed one by one, in a model that exists


@dataclass(frozen=True)
class Row:
    """A line of a library's table.

    Attributes:
        target: name of the library, as `patch` takes it.
        module: where the original lives.
        attribute: its name there; "Class.forward" for a method.
        op: "swiglu", "rms_norm" or "rope".
        replacement: takes the original's arguments and computes the same.
        unsupported: takes the same arguments; a reason to call the original instead, or None. Cheap
            and without side effects. An error of ours is not a reason: it reaches the caller.
        parameters: the original's parameters; None where it does not tell. It may have fewer, as an
            older version may.
        versions: first version of the library that fits, and the first that is not known to.
        kind: what sort of place it is.
    """

    target: str
    module: str
    attribute: str
    op: str
    replacement: Callable
    unsupported: Callable
    parameters: tuple[str, ...] | None = None
    versions: tuple[str, str | None] = ("0", None)
    kind: str = ATTRIBUTE

    @property
    def name(self) -> str:
        """The place in full."""
        return f"{self.module}.{self.attribute}"


class Calls:
    """Counts the calls at one place, whatever thread they come from."""

    def __init__(self):
        self._lock = threading.Lock()
        self._hits = 0
        self._reasons: Counter[str] = Counter()

    def count(self, reason: str | None) -> None:
        with self._lock:
            if reason is None:
                self._hits += 1
            else:
                self._reasons[reason] += 1

    def totals(self) -> tuple[int, dict[str, int]]:
        """(calls that we took, calls left to the original by reason)."""
        with self._lock:
            return self._hits, dict(self._reasons)


def _named_like(predicate, original):
    """A copy that a call with wrong arguments blames on the original."""
    named = types.FunctionType(
        predicate.__code__,
        predicate.__globals__,
        original.__name__,
        predicate.__defaults__,
        predicate.__closure__,
    )
    named.__qualname__ = original.__qualname__
    return named


class Route:
    """Sends the calls of one original to our replacement while it is active, and counts them.

    A dispatcher that someone keeps where it cannot be found again is harmless: when the route is
    not active it calls the original and nothing else.
    """

    def __init__(self, row: Row, original, calls: Calls):
        self.row = row
        self.original = original
        self.active = False
        self.calls = calls
        self.dispatcher = self._make_dispatcher()

    def _make_dispatcher(self):
        original, replacement = self.original, self.row.replacement
        unsupported = _named_like(self.row.unsupported, original)

        @functools.wraps(original)
        def dispatch(*args, **kwargs):
            if not self.active:
                return original(*args, **kwargs)
            reason = unsupported(*args, **kwargs)
            self.calls.count(reason)
            if reason is not None:
                return original(*args, **kwargs)
            return replacement(*args, **kwargs)

        # to_static records the call as it stands, whatever it did with the original.
        return static_unit(dispatch)
