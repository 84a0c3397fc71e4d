"""Every test starts and ends unpatched."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

import paddle_fused
from helpers import model_library
from paddle_fused.patching.places import copies
from paddle_fused.patching.state import TABLES


def places():
    """{name: object} of every place of the tables whose module is loaded."""
    found = {}
    for rows in TABLES.values():
        for row in rows:
            owner = sys.modules.get(row.module)
            if "[" in row.attribute and owner is not None:
                found[row.name] = owner.Norm._global_mapping["rms_norm"]
                continue
            for part in row.attribute.split("."):
                owner = None if owner is None else vars(owner).get(part)
            found[row.name] = owner
    return found


@pytest.fixture(autouse=True)
def restored():
    """Fails a test that leaves a place other than it was."""
    for module in {row.module for row in TABLES["paddle"]}:
        importlib.import_module(module)
    before = places()
    objects = [one for one in before.values() if one is not None]
    copied = {tuple(place) for *place, _ in copies(objects)}
    finders = list(sys.meta_path)
    yield
    paddle_fused.unpatch()
    after = places()
    assert [name for name in before if before[name] is not after[name]] == []
    assert copied <= {tuple(place) for *place, _ in copies(objects)}
    assert sys.meta_path == finders


@pytest.fixture
def library(tmp_path):
    """The stand-in for PaddleFormers, not imported yet."""
    with model_library.installed(tmp_path):
        yield
        paddle_fused.unpatch()


@pytest.fixture
def user_module():
    """Makes modules as users write them: from source, under a name."""
    made = []

    def make(name, source):
        module = types.ModuleType(name)
        sys.modules[name] = module
        made.append(name)
        exec(source, vars(module))
        return module

    yield make
    for name in made:
        del sys.modules[name]
