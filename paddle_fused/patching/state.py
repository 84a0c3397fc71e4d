"""Who asked for which replacement, and the carrying out of it. One instance per process."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
import weakref
from importlib import metadata

from paddle_fused.patching import paddle_table, paddleformers_table, places
from paddle_fused.patching.report import NOT_REPLACED, REPLACED, WAITING, Line
from paddle_fused.patching.routes import ATTRIBUTE, LAYER, METHOD, Calls, Route, Row

TABLES = {"paddle": paddle_table.ROWS, "paddleformers": paddleformers_table.ROWS}
OPS = ("swiglu", "rms_norm", "rope")


def is_installed(target: str) -> bool:
    """Whether the library can be imported; a folder of that name is not the library."""
    if target in sys.modules:
        spec = getattr(sys.modules[target], "__spec__", None)
        return spec is None or spec.origin is not None
    spec = importlib.util.find_spec(target)
    return spec is not None and spec.origin is not None


def _version(target: str) -> str | None:
    found = getattr(sys.modules[target], "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return metadata.version(target)
    except metadata.PackageNotFoundError:  # a source folder on the path
        return None


def _misfit(row: Row) -> str:
    """Why the installed version is not the one that the row was written for, or nothing."""
    version = _version(row.target)
    if version is None:
        return f"the version of {row.target} is unknown"
    first, beyond = row.versions
    parts = _parts(version)
    if parts < _parts(first) and any(parts):  # 0.0.0: a development build
        return f"{row.target} {version}, known from {first} on"
    if beyond is not None and parts >= _parts(beyond):
        return f"{row.target} {version}, known below {beyond}"
    return ""


def _parts(version: str) -> tuple[int, ...]:
    numbers = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, number)) or 0) for number in numbers)


class _Place:
    """One row, who wants it replaced, and what stands where.

    It is replaced while somebody holds it: `patch` with its one token, or a `patched` block each
    with its own. Layers of a model are held one by one.
    """

    def __init__(self, row: Row):
        self.row = row
        self.holders: set = set()
        self.layers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.calls = Calls()
        self.route: Route | None = None
        self.original = None
        self.ours = None
        self.placed = False  # ours stands there, or under what somebody put on top of it
        self.spread: list[tuple] = []  # (ours, original) of what modules may hold copies of
        self.problem = ""

    def install(self) -> list[tuple]:
        """Puts ours there, if it is held. Returns (old, new) of copies that have to follow."""
        if self.row.kind == LAYER or not self.holders or self.row.module not in sys.modules:
            return []
        changed = []
        try:
            if self.prepare() is not self.ours and not self.placed:
                places.write(self.row, self.ours)
                self.placed = True
                # A class that is taken by value is a base class there: that stays the library's.
                if self.row.kind == ATTRIBUTE:
                    changed.append((self.original, self.ours))
                    self.spread.append((self.ours, self.original))
        except places.NotThereError as error:
            self.problem = str(error)
        self._activate()
        return changed

    def prepare(self):
        """Makes the route to what stands there now, and returns that.

        What somebody put on top of ours since stays, and calls ours or not, as they like.

        Raises:
            NotThereError: this row does not fit.
        """
        self.problem = _misfit(self.row)
        if self.problem:
            raise places.NotThereError(self.problem)
        current = places.read(self.row)
        known = current is self.original or current is self.ours
        if not known and not self.placed:
            route, ours = places.make_route(self.row, current, self.calls)
            if self.route is not None:
                self.route.active = False  # the new one may lead there
            self.route, self.ours, self.original = route, ours, current
        return current

    def _activate(self) -> None:
        if self.route is not None:
            self.route.active = bool(self.layers) or (bool(self.holders) and not self.problem)

    def uninstall(self) -> list[tuple]:
        """Puts the original back, if nobody holds it. Returns as `install`."""
        self._activate()
        if self.holders or self.ours is None or self.row.kind == LAYER:
            return []
        self.placed = False
        try:
            # Somebody may have put another function on top of ours: it is not ours to remove.
            if places.read(self.row) is self.ours:
                places.write(self.row, self.original)
        except places.NotThereError:
            pass
        changed, self.spread = self.spread, []
        return changed

    def may_hold_layers(self) -> bool:
        """Whether a live model can have layers of this row's class."""
        return self.row.kind in (METHOD, LAYER) and self.row.module in sys.modules

    def hold_layers(self, token, model) -> None:
        """Gives the model's layers of this class our forward; parameters and keys stay."""
        if not self.may_hold_layers():
            return
        try:
            self.prepare()
        except places.NotThereError as error:
            self.problem = str(error)
            return
        for layer in model.sublayers(include_self=True):
            if _stock(type(layer).forward) is self.original:
                layer.forward = types.MethodType(self.route.dispatcher, layer)
                self.layers.setdefault(layer, set()).add(token)
        self._activate()

    def release(self, token) -> None:
        """Withdraws what a token holds."""
        self.holders.discard(token)
        for layer, tokens in list(self.layers.items()):
            tokens.discard(token)
            if not tokens:
                bound = vars(layer).get("forward")
                if getattr(bound, "__func__", None) is self.route.dispatcher:
                    del vars(layer)["forward"]
                del self.layers[layer]

    def line(self, copies: tuple[str, ...]) -> Line:
        """For the report."""
        hits, left = self.calls.totals()
        status, reason = REPLACED, ""
        if self.row.kind == LAYER and not self.layers:
            status, reason = NOT_REPLACED, "of layers that exist: patch(model=...)"
        elif not self.layers and not self.holders:
            status, reason = NOT_REPLACED, "not asked for, or restored"
        elif self.problem:
            status, reason = NOT_REPLACED, self.problem
        elif self.row.module not in sys.modules:
            status, reason = WAITING, "for its module to be imported"
        row, layers = self.row, len(self.layers)
        return Line(row.target, row.name, row.op, status, reason, copies, layers, hits, left)


def _stock(forward):
    """The method behind a dispatcher of ours."""
    return getattr(forward, "__wrapped__", forward)


def _missing(target: str) -> Line:
    return Line(target, target, "", NOT_REPLACED, "not installed", (), 0, 0, {})


class State:
    """The places of all tables, behind one lock."""

    def __init__(self):
        self._lock = threading.RLock()
        self._places = [_Place(row) for rows in TABLES.values() for row in rows]
        later = {p.row.module for p in self._places if p.row.target != "paddle"}
        self._hook = places.ImportHook(later, self._imported)

    def hold(self, token, targets, ops, model=None) -> None:
        """Replaces the places of these targets and ops on behalf of a token."""
        with self._lock:
            asked = [place for place in self._places if place.row.op in ops]
            for place in asked:
                if place.row.target in targets and is_installed(place.row.target):
                    place.holders.add(token)
                if model is not None:
                    place.hold_layers(token, model)
            self._follow([place.install() for place in asked])

    def release(self, token) -> None:
        """Withdraws all that a token asked for; what nobody else holds is restored."""
        with self._lock:
            for place in self._places:
                place.release(token)
            self._follow([place.uninstall() for place in self._places])

    def _imported(self, module: str) -> None:
        with self._lock:
            executed = [place for place in self._places if place.row.module == module]
            for place in executed:
                place.placed = False  # a module that is executed again has its originals again
            self._follow([place.install() for place in executed])

    def _follow(self, changes) -> None:
        """Lets copies by value follow, and listens for imports while somebody wants to know."""
        pairs = [pair for change in changes for pair in change]
        if pairs:
            places.replace_copies(pairs)
        held = any(place.holders for place in self._places if place.row.target != "paddle")
        if held and self._hook not in sys.meta_path:
            sys.meta_path.insert(0, self._hook)
        elif not held and self._hook in sys.meta_path:
            sys.meta_path.remove(self._hook)

    def lines(self, targets, ops, with_layers=False) -> list[Line]:
        """The report's lines of these targets and ops, and of classes of a model's layers."""
        with self._lock:
            chosen = [
                place
                for place in self._places
                if place.row.op in ops
                and is_installed(place.row.target)
                and (place.row.target in targets or (with_layers and place.may_hold_layers()))
            ]
            names = {}
            for module, name, value in places.copies([p.ours for p in chosen if p.ours]):
                names.setdefault(id(value), []).append(f"{module}.{name}")
            lines = []
            for place in chosen:
                found = names.get(id(place.ours), []) if place.row.kind == ATTRIBUTE else []
                found = [n for n in found if n != place.row.name and not n.startswith("paddle.")]
                lines.append(place.line(tuple(found)))
            for target in targets:
                if not is_installed(target):
                    lines.append(_missing(target))
            return lines


STATE = State()
