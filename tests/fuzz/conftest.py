"""How long to search: PADDLE_FUSED_FUZZ=ci (the default, the same examples every time) or long.

Each test counts its examples; PADDLE_FUSED_FUZZ_REPORT names a file for the counts.
"""

from __future__ import annotations

import json
import os

import drawing
import pytest
from hypothesis import HealthCheck, settings

from helpers.targets import TARGETS, Target

COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", derandomize=True, database=None, max_examples=600, **COMMON)
settings.register_profile("long", max_examples=3000, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("PADDLE_FUSED_FUZZ", "ci"))


@pytest.fixture(scope="session")
def other_targets():
    """Processes with the kernels of the instruction sets that do not run here."""
    from paddle_fused._runtime import cpu_target

    targets = [Target(name) for name in TARGETS if name != cpu_target()]
    yield [target for target in targets if target.active != cpu_target()]
    for target in targets:
        target.close()


def pytest_sessionfinish():
    """Writes how many examples each test ran."""
    path = os.environ.get("PADDLE_FUSED_FUZZ_REPORT")
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(drawing.EXAMPLES, file)
