"""Where originals stand in a library: looking there, putting ours there, and taking it away."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import sys
import types

from paddle_fused.patching.routes import REGISTRY, Calls, Route, Row

_OWN = "paddle_fused"


class NotThereError(LookupError):
    """The place cannot be patched; the text says why."""


def _module(row: Row) -> types.ModuleType:
    module = sys.modules.get(row.module)
    if module is None:
        raise NotThereError("its module is not loaded")
    return module


def _registry(row: Row):
    """(registry class, key) of "Name['key']"."""
    name, _, rest = row.attribute.partition("[")
    registry = getattr(_module(row), name, None)
    if not hasattr(registry, "register"):
        raise NotThereError("not in this version")
    return registry, rest.strip("]'")


def _owner(row: Row):
    """(object that holds the attribute, name of the attribute)."""
    owner = _module(row)
    *path, name = row.attribute.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    return owner, name


def read(row: Row):
    """What stands at the place now.

    Raises:
        NotThereError: nothing does.
    """
    if row.kind == REGISTRY:
        registry, key = _registry(row)
        value = registry._global_mapping.get(key)
    else:
        owner, name = _owner(row)
        value = None if owner is None else vars(owner).get(name)
    if value is None:
        raise NotThereError("not in this version")
    return value


def write(row: Row, value) -> None:
    """Puts a value at the place."""
    if row.kind == REGISTRY:
        registry, key = _registry(row)
        registry.register(key, value)
    else:
        owner, name = _owner(row)
        setattr(owner, name, value)


def make_route(row: Row, original, calls: Calls) -> tuple[Route, object]:
    """(route, what to put at the place) for an original.

    Raises:
        NotThereError: the original is not what the table was written for.
    """
    function = original
    if row.kind == REGISTRY:
        stock = getattr(_module(row), "RMSNorm", None)
        if original is not stock:
            raise NotThereError(f"{original.__module__}.{original.__qualname__} is registered")
        function = vars(original).get("forward")
    _check_signature(row, function)
    route = Route(row, function, calls)
    if row.kind != REGISTRY:
        return route, route.dispatcher
    # A class of the stock one's name: what prints or tests the type of a layer sees no other.
    members = {"forward": route.dispatcher, "__module__": original.__module__}
    return route, type(original.__name__, (original,), members)


def _check_signature(row: Row, function) -> None:
    if not callable(function):
        raise NotThereError("not in this version")
    if row.parameters is None:
        return
    try:
        found = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise NotThereError("its signature cannot be read") from None
    if found != row.parameters[: len(found)]:
        raise NotThereError(f"its signature is another one: ({', '.join(found)})")


def copies(objects) -> list[tuple[str, str, object]]:
    """Where modules hold one of these objects: (module, name, object).

    Looks at the names of every module that is loaded, whenever and by whom it was; not at ours.
    """
    wanted = {id(one) for one in objects}
    found = []
    for module_name, module in list(sys.modules.items()):
        own = module_name == _OWN or module_name.startswith(_OWN + ".")
        if own or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in wanted:
                found.append((module_name, name, value))
    return found


def replace_copies(replacements) -> None:
    """Puts the second of each pair where modules hold the first."""
    new = {id(old): new for old, new in replacements}
    for module_name, name, value in copies([old for old, _ in replacements]):
        vars(sys.modules[module_name])[name] = new[id(value)]


class ImportHook(importlib.abc.MetaPathFinder):
    """Calls back when one of some modules has been imported."""

    def __init__(self, names, callback):
        self._names = frozenset(names)
        self._callback = callback

    def find_spec(self, fullname, path=None, target=None):
        """The spec that the other finders give, with a loader that calls back."""
        if fullname not in self._names:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                self._wrap(spec)
                return spec
        return None

    def _wrap(self, spec) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module):
            execute(module)
            self._callback(module.__name__)

        loader.exec_module = exec_module
