"""Empty modules in the place of paddlefleet, which half of PaddleFormers' models import.

PaddleFleet is a package for GPUs and on no public index. The models that are built without it (the
classes called "...Deprecated", DeepSeek-V3, Qwen3-Next) only have to get past their imports.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types

PACKAGES = ("paddlefleet", "paddlefleet_ops")


class _Module(types.ModuleType):
    __version__ = "0.3.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("is_"):
            value = _unavailable
        else:
            members = {"encoder_or_decoder": 1, "transform_rules": {}}
            value = type(name, (), {**members, "__init__": lambda self, *a, **k: None})
        setattr(self, name, value)
        return value


def _unavailable(*_args, **_kwargs) -> bool:
    return False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] not in PACKAGES:
            return None
        return importlib.util.spec_from_file_location(
            fullname, __file__, loader=self, submodule_search_locations=[]
        )

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def install() -> None:
    """Once per process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
