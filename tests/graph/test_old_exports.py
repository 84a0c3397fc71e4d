"""Models that earlier versions exported: they load here and give the numbers that they gave then.

tests/tools/write_export.py writes one folder per release; folders are never rewritten.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import paddle.inference
import pytest

import paddle_fused
from helpers.numeric import assert_ulp

FOLDERS = sorted((Path(__file__).resolve().parents[1] / "data").glob("export-*"))
# Both versions may use their bounds of up to 5 ULP, in opposite directions; a sum a little more.
MAX_ULP = 16.0


def test_this_version_has_kept_one():
    assert f"export-{paddle_fused.__version__}" in {folder.name for folder in FOLDERS}


def kept(folder, prefix):
    with np.load(folder / "results.npz") as file:
        return [file[name] for name in sorted(file.files) if name.startswith(prefix)]


def check(actual, expected, what):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    if actual.dtype.kind == "i":  # a value beside a tie may go either way
        assert (np.abs(actual.astype(int) - expected) <= 1).all(), what
        return
    scale = np.full_like(expected, np.abs(expected).max(), dtype=np.float64)
    assert_ulp(actual, expected.astype(np.float64), MAX_ULP, scale, what)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("how", ["jit.load", "predictor"])
def test_old_export(folder, how):
    inputs = [paddle.to_tensor(a) for a in kept(folder, "in")]
    prefix = str(folder / "model")
    if how == "jit.load":
        results = paddle.jit.load(prefix)(*inputs)
    else:
        config = paddle.inference.Config(prefix + ".json", prefix + ".pdiparams")
        config.disable_glog_info()
        predictor = paddle.inference.create_predictor(config)
        order = ["x", "weight", "table", "ids"]
        results = predictor.run([inputs[order.index(n)] for n in predictor.get_input_names()])
    expected = kept(folder, "out")
    assert len(results) == len(expected) > 20
    for index, (result, array) in enumerate(zip(results, expected)):
        check(result.numpy(), array, f"result {index} of {folder.name}")
