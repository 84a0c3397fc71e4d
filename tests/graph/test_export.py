"""Exported models in a fresh process that imports paddle_fused and nothing else of this project."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

import paddle_fused
import paddle_fused.nn.functional as F
from helpers import models
from helpers.arrays import random_array, to_numpy, to_paddle
from helpers.cases import BY_NAME
from helpers.numeric import assert_bit_equal
from helpers.running import as_tuple
from paddle_fused import reference
from paddle_fused.nn import RMSNorm, RotaryEmbedding, SwiGLUMLP

BATCHES = (1, 3, 8, 0)
HIDDEN, HEADS, LENGTH = 16, 2, 5
# One of each family and each way to take optional inputs.
EXPORTED = [
    "swiglu",
    "swiglu_pair",
    "swiglu_weighted",
    "swiglu_weighted_bwd_column",
    "rms_norm",
    "rms_norm_weight_residual",
    "fused_rms_norm",
    "fused_rms_norm_norm_bias",
    "fused_rms_norm_norm_bias_bias_residual",
    "fused_rms_norm_two_axes",
    "fused_rms_norm_int8_sum",
    "fused_rms_norm_ext",
    "fused_rms_norm_ext_grad",
    "rope_qkv",
    "rope_qk_ids",
    "rope_time_major",
    "rope_generated_ids",
    "apply_rotary_pos_emb_1",
    "fused_partial_rope",
]

# What a user's process does: it knows files, and no function of this package.
CHILD = """
import json, sys
import numpy as np
import paddle_fused
import paddle, paddle.inference

work = json.load(open(sys.argv[1]))
results = {}

def predictor_of(prefix, onednn):
    config = paddle.inference.Config(prefix + ".json", prefix + ".pdiparams")
    if not onednn:
        config.disable_mkldnn()
    config.disable_glog_info()
    return paddle.inference.create_predictor(config)

def predict(prefix, batches, onednn):
    predictor = predictor_of(prefix, onednn)
    for path in batches:
        batch = np.load(path)
        tensors = [paddle.to_tensor(batch[name]) for name in predictor.get_input_names()]
        yield [out.numpy() for out in predictor.run(tensors)]

def predict_by_handles(prefix, batches, onednn):
    predictor = predictor_of(prefix, onednn)
    for path in batches:
        batch = np.load(path)
        for name in predictor.get_input_names():
            predictor.get_input_handle(name).copy_from_cpu(batch[name])
        predictor.run()
        names = predictor.get_output_names()
        yield [predictor.get_output_handle(name).copy_to_cpu() for name in names]

def call(prefix, batches, onednn):
    layer = paddle.jit.load(prefix)
    for path in batches:
        batch = np.load(path)
        names = sorted(batch.files, key=lambda name: int(name[len("input"):]))
        out = layer(*[paddle.to_tensor(batch[name]) for name in names])
        yield [one.numpy() for one in (out if isinstance(out, (list, tuple)) else [out])]

for job in work:
    run = {"predict": predict, "handles": predict_by_handles, "call": call}[job["how"]]
    for index, outputs in enumerate(run(job["prefix"], job["batches"], job["onednn"])):
        np.savez(f"{job['out']}_{index}.npz", *outputs)
assert not [name for name in sys.modules if name.startswith("helpers")]
"""


def bits(array):
    """NumPy files hold bfloat16 as its bits, which is also how Paddle takes it."""
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


class Function(paddle.nn.Layer):
    """A function as a layer; its parameters are named, which an export wants."""

    def __init__(self, call, count):
        super().__init__()
        self.call = call
        self.count = count

    def forward(self, a, b=None, c=None, d=None, e=None, f=None):
        out = self.call(*[a, b, c, d, e, f][: self.count])
        return [one for one in out if one is not None] if isinstance(out, (list, tuple)) else out


class LlamaBlock(paddle.nn.Layer):
    """Attention with rotary embedding, a dense and a weighted feed-forward block."""

    def __init__(self):
        super().__init__()
        linear = {"bias_attr": False}
        self.input_layernorm = RMSNorm(HIDDEN)
        self.q_proj = paddle.nn.Linear(HIDDEN, HIDDEN, **linear)
        self.k_proj = paddle.nn.Linear(HIDDEN, HIDDEN // 2, **linear)
        self.v_proj = paddle.nn.Linear(HIDDEN, HIDDEN // 2, **linear)
        self.o_proj = paddle.nn.Linear(HIDDEN, HIDDEN, **linear)
        self.rotary = RotaryEmbedding(HIDDEN // HEADS, max_position_embeddings=32)
        self.post_attention_layernorm = RMSNorm(HIDDEN)
        self.mlp = SwiGLUMLP(HIDDEN, 24)
        self.router = paddle.nn.Linear(HIDDEN, 1, **linear)
        self.expert_in = paddle.nn.Linear(HIDDEN, 48, **linear)
        self.expert_out = paddle.nn.Linear(24, HIDDEN, **linear)

    def forward(self, x, position_ids):
        batch, length = paddle.shape(x)[0], paddle.shape(x)[1]
        dim = HIDDEN // HEADS
        normed = self.input_layernorm(x)
        q = paddle.reshape(self.q_proj(normed), [batch, length, HEADS, dim])
        k = paddle.reshape(self.k_proj(normed), [batch, length, 1, dim])
        v = paddle.reshape(self.v_proj(normed), [batch, length, 1, dim])
        q, k = self.rotary(q, k, position_ids)
        scores = paddle.matmul(q.transpose([0, 2, 1, 3]), k.transpose([0, 2, 3, 1]))
        weights = paddle.nn.functional.softmax(scores / dim**0.5, axis=-1)
        mixed = paddle.matmul(weights, v.transpose([0, 2, 1, 3])).transpose([0, 2, 1, 3])
        attention = self.o_proj(paddle.reshape(mixed, [batch, length, HIDDEN]))
        normed, total = self.post_attention_layernorm(attention, x)
        probs = paddle.nn.functional.sigmoid(self.router(normed))
        expert = F.fused_swiglu_weighted(self.expert_in(normed), probs)
        return total + self.mlp(normed) + self.expert_out(expert)


def specs_of(case, dtype):
    return [
        InputSpec(
            [None if size < 0 else size for size in one.unknown()],
            one.dtype or dtype,
            f"input{index}",
        )
        for index, one in enumerate(case.inputs)
    ]


class Jobs:
    """Exports here, and what the other process has to compute with them."""

    def __init__(self, folder):
        self.folder = folder
        self.jobs = []
        self.expected = {}

    def inputs_of(self, name, batches):
        """Writes the inputs of each batch, named input0, input1, ..."""
        paths = []
        for index, arrays in enumerate(batches):
            path = str(self.folder / f"{name}_inputs_{index}.npz")
            np.savez(path, **{f"input{i}": bits(array) for i, array in enumerate(arrays)})
            paths.append(path)
        return paths

    def add(self, name, prefix, how, paths, expected):
        out = str(self.folder / f"{name}_{how}_out")
        # oneDNN's reshape and matmul, which Paddle picks on a CPU, refuse an empty batch.
        onednn = not name.startswith(("fused_rms_norm_two_axes", "block", "chain"))
        job = {"how": how, "prefix": prefix, "batches": paths, "out": out, "onednn": onednn}
        self.jobs.append(job)
        self.expected[name, how] = out, expected

    def export_layer(self, name, layer, specs, batches):
        """By jit.save, to be run by jit.load and by the predictor."""
        layer.eval()
        prefix = str(self.folder / name / "model")
        with paddle.no_grad():
            expected = [
                [to_numpy(out) for out in as_tuple(layer(*map(to_paddle, arrays)))]
                for arrays in batches
            ]
        paddle.jit.save(layer, prefix, input_spec=specs)
        paths = self.inputs_of(name, batches)
        for how in ("call", "predict"):
            self.add(name, prefix, how, paths, expected)

    def export_program(self, name, case, dtype, batches):
        """By save_inference_model, from a static program."""
        prefix = str(self.folder / name / "model")
        expected = [
            [to_numpy(out) for out in as_tuple(case.call(*map(to_paddle, arrays)))]
            for arrays in batches
        ]
        paddle.enable_static()
        try:
            program = paddle.static.Program()
            with paddle.static.program_guard(program, paddle.static.Program()):
                inputs = [
                    paddle.static.data(f"input{i}", one.unknown(), one.dtype or dtype)
                    for i, one in enumerate(case.inputs)
                ]
                outputs = as_tuple(case.call(*inputs))
                executor = paddle.static.Executor(paddle.CPUPlace())
                paddle.static.save_inference_model(
                    prefix, inputs, list(outputs), executor, program=program
                )
        finally:
            paddle.disable_static()
        paths = self.inputs_of(name, batches)
        self.add(name, prefix, "predict", paths, expected)
        if dtype == "float32":  # copy_to_cpu cannot read bfloat16
            self.add(name, prefix, "handles", paths, expected)

    def run(self):
        work = self.folder / "work.json"
        work.write_text(json.dumps(self.jobs))
        run_child(CHILD, str(work))


def run_child(code, *arguments, check=True):
    """A fresh interpreter that finds paddle_fused wherever this one found it."""
    root = os.path.dirname(os.path.dirname(paddle_fused.__file__))
    paths = [root, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        cwd="/",  # not the source folder, whose package is not built
        timeout=300,
        check=False,
    )
    if check:
        assert result.returncode == 0, result.stderr[-4000:]
    return result


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Everything exported and computed again in one other process."""
    rng = np.random.default_rng(11)
    jobs = Jobs(tmp_path_factory.mktemp("exported"))
    for dtype in ("float32", "bfloat16"):
        for name in EXPORTED:
            case = BY_NAME[name]
            batches = [case.arrays(rng, batch, dtype) for batch in BATCHES]
            layer = Function(case.call, len(case.inputs))
            jobs.export_layer(f"{name}_{dtype}", layer, specs_of(case, dtype), batches)
            jobs.export_program(f"{name}_{dtype}_program", case, dtype, batches)
    paddle.seed(3)
    block = LlamaBlock()
    specs = [
        InputSpec([None, None, HIDDEN], "float32", "input0"),
        InputSpec([None, None], "int64", "input1"),
    ]
    batches = [
        [
            random_array(rng, (batch, LENGTH, HIDDEN), "float32"),
            rng.integers(0, 32, (batch, LENGTH)),
        ]
        for batch in BATCHES
    ]
    jobs.export_layer("block", block, specs, batches)
    chain = models.OneChain().astype("bfloat16")
    specs = [InputSpec([None, None, models.HIDDEN], "bfloat16", "input0")]
    batches = [[random_array(rng, (batch, LENGTH, models.HIDDEN), "bfloat16")] for batch in BATCHES]
    jobs.export_layer("chain", chain, specs, batches)
    jobs.run()
    return jobs


def check(jobs, name, how):
    out, expected = jobs.expected[name, how]
    for index, values in enumerate(expected):
        with np.load(f"{out}_{index}.npz") as results:
            actual = [results[key] for key in results.files]
        assert len(actual) == len(values)
        for one, value in zip(actual, values):
            yield one, value, f"{name} by {how}, batch {index}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", EXPORTED)
def test_operators_compute_the_same_bits_elsewhere(exported, name, dtype):
    runs = [
        (f"{name}_{dtype}", "call"),
        (f"{name}_{dtype}", "predict"),
        (f"{name}_{dtype}_program", "predict"),
        (f"{name}_{dtype}_program", "handles"),
    ]
    for exported_name, how in runs if dtype == "float32" else runs[:3]:
        for actual, value, what in check(exported, exported_name, how):
            assert_bit_equal(actual, bits(value), what)


@pytest.mark.parametrize("how", ["call", "predict"])
def test_llama_block(exported, how):
    """Close, not the same bits: the predictor may order Paddle's matrix products differently."""
    for actual, value, what in check(exported, "block", how):
        np.testing.assert_allclose(actual, value, rtol=1e-4, atol=1e-5, err_msg=what)


@pytest.mark.parametrize("how", ["call", "predict"])
def test_bfloat16_chain(exported, how):
    for actual, value, what in check(exported, "chain", how):
        assert_bit_equal(actual, bits(value), what)


class Feedforward(paddle.nn.Layer):
    """One input, several parameters; with the functions of this package or of the reference."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions
        self.norm = RMSNorm(HIDDEN)
        self.up = paddle.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = paddle.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        normed = self.functions.rms_norm(x, self.norm.weight)
        return self.down(self.functions.swiglu(self.up(normed)))


def save_feedforward(folder, functions=F):
    paddle.seed(5)
    layer = Feedforward(functions)
    layer.eval()
    prefix = str(folder / "model")
    paddle.jit.save(layer, prefix, [InputSpec([None, None, HIDDEN], "float32", "x")])
    return layer, prefix


def test_reference_exports_plain_operators(tmp_path):
    _, prefix = save_feedforward(tmp_path / "plain", reference)
    assert "paddle_fused" not in Path(prefix + ".json").read_text()
    _, prefix = save_feedforward(tmp_path / "fused")
    assert "paddle_fused_rms_norm" in Path(prefix + ".json").read_text()


# Each way starts in a process of its own: what is registered stays registered.
PREDICT = """
import sys, numpy as np, paddle, paddle.inference
config = paddle.inference.Config(sys.argv[1] + ".json", sys.argv[1] + ".pdiparams")
config.disable_glog_info()
def predict():
    predictor = paddle.inference.create_predictor(config)
    np.save(sys.argv[3], predictor.run([paddle.full([2, 3, 16], 0.5)])[0].numpy())
"""
LOADED_BY_PADDLE = (
    PREDICT
    + """
from paddle.utils.cpp_extension import load_op_meta_info_and_register_op
load_op_meta_info_and_register_op(sys.argv[2])
predict()
"""
)
LOADED_BY_THE_LINKER = (
    PREDICT
    + """
import ctypes
ctypes.CDLL(sys.argv[2])
config.enable_new_ir(True)
config.enable_new_executor(True)
predict()
"""
)


@pytest.mark.parametrize("code", [LOADED_BY_PADDLE, LOADED_BY_THE_LINKER], ids=["paddle", "dlopen"])
def test_predictor_with_the_library_alone(code, tmp_path):
    """The ways of docs/deploy.md that need no import of paddle_fused."""
    layer, prefix = save_feedforward(tmp_path)
    result = tmp_path / "result.npy"
    run_child(code, prefix, paddle_fused.library_path(), str(result))
    expected = layer(paddle.full([2, 3, HIDDEN], 0.5)).numpy()
    np.testing.assert_allclose(np.load(result), expected, rtol=1e-5, atol=1e-6)


def test_what_happens_without_the_library(tmp_path):
    """As docs/deploy.md says: Paddle names no operator, and a loaded layer may end the process."""
    _, prefix = save_feedforward(tmp_path)
    failed = run_child(PREDICT + "predict()", prefix, "", "", check=False)
    assert failed.returncode != 0
    assert "kernel output args (0) defs should equal op outputs (1)" in failed.stderr
    code = "import sys, paddle; paddle.jit.load(sys.argv[1])(paddle.ones([2, 3, 16]))"
    assert run_child(code, prefix, check=False).returncode != 0


SOURCE = Path(__file__).resolve().parents[2] / "examples" / "predictor.cc"


def compile_command(source, target):
    """As docs/deploy.md has it."""
    home = os.path.dirname(paddle.__file__)
    python = sysconfig.get_config_var("LIBDIR")
    return [
        *("g++", "-std=c++17", "-O2", str(source), "-o", str(target)),
        *(f"-I{home}/include", f"-I{home}/include/third_party"),
        *(f"-L{home}/base", f"-L{home}/libs", "-l:libpaddle.so", "-lphi", "-lphi_core", "-lcommon"),
        *(f"-L{python}", "-lpython" + sysconfig.get_config_var("LDVERSION")),
        f"-Wl,-rpath,{home}/base:{home}/libs:{python}",
    ]


@pytest.mark.skipif(not SOURCE.is_file(), reason="the examples are not here")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.skipif(not sysconfig.get_config_var("Py_ENABLE_SHARED"), reason="no libpython.so")
def test_cpp_predictor(tmp_path, rng):
    layer, prefix = save_feedforward(tmp_path)
    program = tmp_path / "predictor"
    subprocess.run(compile_command(SOURCE, program), check=True, timeout=120)
    for batch in BATCHES:
        x = random_array(rng, (batch, LENGTH, HIDDEN), "float32")
        x.tofile(tmp_path / "in")
        sizes = [str(size) for size in x.shape]
        files = [str(tmp_path / name) for name in ("in", "out")]
        subprocess.run(
            [program, paddle_fused.library_path(), prefix, *files, *sizes], check=True, timeout=60
        )
        actual = np.fromfile(tmp_path / "out", "float32").reshape(x.shape)
        expected = layer(paddle.to_tensor(x)).numpy()
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
