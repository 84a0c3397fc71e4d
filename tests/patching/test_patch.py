"""patch, unpatch and patched: what is replaced, when, for whom, and that it all comes back."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
import threading
from unittest import mock

import numpy as np
import paddle
import paddle.incubate.nn.functional as incubate
import pytest

import paddle_fused
from helpers import numeric, oracle
from helpers.amp import auto_cast
from helpers.arrays import random_array, to_numpy, to_paddle
from paddle_fused import patching
from paddle_fused.patching.state import TABLES

PADDLE_ROWS = TABLES["paddle"]
BY_VALUE = "from paddle.nn.functional import swiglu as fused_swiglu"


def current():
    """What stands at each of Paddle's places, in a container that no patch looks into."""
    return {row.name: getattr(sys.modules[row.module], row.attribute) for row in PADDLE_ROWS}


def half(*shape):
    """A tensor of a dtype that Paddle's CPU swiglu refuses: only ours gives a result."""
    return paddle.ones(shape, dtype="bfloat16")


def is_ours() -> bool:
    """Whether paddle.nn.functional.swiglu computes what only this package can."""
    try:
        paddle.nn.functional.swiglu(half(2, 4))
    except (RuntimeError, TypeError):
        return False
    return True


def test_every_place_of_paddle_is_replaced_and_restored_identically():
    before = current()
    report = paddle_fused.patch("paddle")
    after = current()
    assert [name for name in before if before[name] is after[name]] == []
    assert report.replaced == [row.name for row in PADDLE_ROWS]
    paddle_fused.unpatch()
    restored = current()
    assert [name for name in before if before[name] is not restored[name]] == []


def test_originals_can_not_do_on_a_cpu_what_patched_can():
    assert not is_ours()
    paddle_fused.patch()
    assert is_ours()
    paddle_fused.unpatch()
    assert not is_ours()


def test_patch_twice_and_unpatch_twice():
    before = current()
    paddle_fused.patch()
    once = current()
    paddle_fused.patch()
    twice = current()
    assert [name for name in once if once[name] is not twice[name]] == []
    paddle_fused.unpatch()
    paddle_fused.unpatch()
    assert [name for name in before if current()[name] is not before[name]] == []


def test_only_the_ops_asked_for():
    before = current()
    paddle_fused.patch(ops="rope")
    changed = {name for name, value in current().items() if value is not before[name]}
    assert changed == {row.name for row in PADDLE_ROWS if row.op == "rope"}
    paddle_fused.patch(ops=["swiglu"])  # adds
    changed = {name for name, value in current().items() if value is not before[name]}
    assert changed == {row.name for row in PADDLE_ROWS if row.op in ("rope", "swiglu")}


def test_blocks_nest():
    before = current()
    with paddle_fused.patched(ops=["swiglu"]):
        with paddle_fused.patched():
            assert all(current()[name] is not before[name] for name in before)
        left = {name for name, value in current().items() if value is not before[name]}
        assert left == {row.name for row in PADDLE_ROWS if row.op == "swiglu"}
    assert all(current()[name] is before[name] for name in before)


def test_a_block_inside_patch_takes_nothing_away():
    paddle_fused.patch()
    with paddle_fused.patched(ops=["swiglu"]):
        pass
    assert is_ours()


def test_unpatch_leaves_an_open_block_alone():
    with paddle_fused.patched():
        paddle_fused.patch()
        paddle_fused.unpatch()
        assert is_ours()
    assert not is_ours()


def test_a_block_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), paddle_fused.patched():
        raise ZeroDivisionError
    assert not is_ours()


def test_patched_decorates():
    decorated = paddle_fused.patched()(is_ours)
    assert decorated() and decorated()
    assert not is_ours()


def test_names_imported_by_value_before_and_after(user_module):
    earlier = user_module("users_model_1", BY_VALUE)
    original = [paddle.nn.functional.swiglu]
    report = paddle_fused.patch()
    later = user_module("users_model_2", BY_VALUE)
    for module in (earlier, later):
        assert module.fused_swiglu(half(2, 4)).shape == [2, 2]
    (line,) = [line for line in report.lines if line.name == "paddle.nn.functional.swiglu"]
    assert {"users_model_1.fused_swiglu", "users_model_2.fused_swiglu"} <= set(line.copies)
    assert line.hits == 2
    paddle_fused.unpatch()
    assert earlier.fused_swiglu is original[0] and later.fused_swiglu is original[0]


def test_what_keeps_our_function_where_none_looks_gets_the_original_back():
    paddle_fused.patch()
    kept = [paddle.nn.functional.swiglu]
    paddle_fused.unpatch()
    x = paddle.randn([2, 6])
    np.testing.assert_array_equal(kept[0](x).numpy(), paddle.nn.functional.swiglu(x).numpy())
    with pytest.raises((RuntimeError, TypeError)):
        kept[0](half(2, 4))
    paddle_fused.patch()
    assert kept[0] is paddle.nn.functional.swiglu
    assert kept[0](half(2, 4)).shape == [2, 2]


def test_a_function_put_on_top_of_ours_stays(user_module):
    copy_of_it = user_module("users_model", BY_VALUE)
    saved = [paddle.nn.functional.swiglu]
    paddle_fused.patch()
    below = [paddle.nn.functional.swiglu]

    def theirs(x):
        return below[0](x)

    paddle.nn.functional.swiglu = theirs
    try:
        paddle_fused.unpatch()
        assert paddle.nn.functional.swiglu is theirs
        assert copy_of_it.fused_swiglu is saved[0]
        x = paddle.randn([2, 6])
        np.testing.assert_array_equal(theirs(x).numpy(), saved[0](x).numpy())
    finally:
        paddle.nn.functional.swiglu = saved[0]


def test_a_function_put_on_top_stays_on_top_of_a_block(library):
    """What a block, or an import, settles is not what somebody else put there."""
    saved = [paddle.nn.functional.swiglu]
    paddle_fused.patch()
    below = [paddle.nn.functional.swiglu]

    def swiglu(x, y=None, name=None):
        return below[0](x)

    paddle.nn.functional.swiglu = swiglu
    try:
        with paddle_fused.patched(ops=["rope"]):
            importlib.import_module("paddleformers.transformers.llama.modeling")
            assert paddle.nn.functional.swiglu is swiglu
        assert paddle.nn.functional.swiglu is swiglu
        paddle_fused.patch()  # once more: ours is there, below theirs
        assert paddle.nn.functional.swiglu is swiglu
        assert is_ours()
        paddle_fused.unpatch()
        assert paddle.nn.functional.swiglu is swiglu
        assert not is_ours()
    finally:
        paddle.nn.functional.swiglu = saved[0]


@pytest.mark.parametrize("again", ["patch", "patched"])
def test_a_function_put_on_top_breaks_nothing_below_it(user_module, again):
    """Names taken by value keep ours, and so does the place when theirs has gone."""
    copy_of_it = user_module("users_model", BY_VALUE)
    paddle_fused.patch()
    with mock.patch.object(paddle.nn.functional, "swiglu"):
        if again == "patch":
            paddle_fused.patch()
        else:
            with paddle_fused.patched():
                pass
        assert copy_of_it.fused_swiglu(half(2, 4)).shape == [2, 2]
    assert is_ours()
    assert copy_of_it.fused_swiglu(half(2, 4)).shape == [2, 2]


def test_another_original_gets_a_patch_of_its_own():
    saved = [paddle.nn.functional.swiglu]
    paddle_fused.patch()
    paddle_fused.unpatch()

    def swiglu(x, y=None, name=None):
        return "theirs"

    paddle.nn.functional.swiglu = swiglu
    try:
        paddle_fused.patch()
        assert is_ours()
        assert paddle.nn.functional.swiglu(paddle.ones([2], dtype="int64")) == "theirs"
        paddle_fused.unpatch()
        assert paddle.nn.functional.swiglu is swiglu
    finally:
        paddle.nn.functional.swiglu = saved[0]


def test_another_signature_is_left_alone():
    saved = [paddle.nn.functional.swiglu]

    def swiglu(x, gate, scale=1.0):
        return x

    paddle.nn.functional.swiglu = swiglu
    try:
        report = paddle_fused.patch()
        (line,) = [line for line in report.lines if line.name == "paddle.nn.functional.swiglu"]
        assert paddle.nn.functional.swiglu is swiglu
        assert line.status == "not replaced"
        assert line.reason == "its signature is another one: (x, gate, scale)"
    finally:
        paddle.nn.functional.swiglu = saved[0]


def test_a_place_that_is_missing_is_reported():
    saved = [incubate.fused_partial_rope]
    del incubate.fused_partial_rope
    try:
        report = paddle_fused.patch(ops=["rope"])
        assert "not in this version" in str(report)
        assert f"{incubate.__name__}.fused_partial_rope" not in report.replaced
    finally:
        paddle_fused.unpatch()
        incubate.fused_partial_rope = saved[0]


def test_wrong_arguments():
    for call in (paddle_fused.patch, lambda **k: paddle_fused.patched(**k).__enter__()):
        with pytest.raises(ValueError, match=r"targets: expected of \['paddle', 'paddleformers'\]"):
            call(targets="torch")
        with pytest.raises(ValueError, match=r"ops: expected of .*'swiglu'.*, got 'gelu'"):
            call(ops=["rope", "gelu"])
        with pytest.raises(TypeError, match="targets: expected a str or a list of them, got 3"):
            call(targets=3)
        with pytest.raises(TypeError, match="ops: expected a str or a list of them"):
            call(ops=[paddle.nn.functional.swiglu])
        with pytest.raises(TypeError, match=r"model: expected a paddle\.nn\.Layer, got str"):
            call(model="llama")
    assert not is_ours()


def test_a_named_target_must_be_installed(monkeypatch):
    monkeypatch.setattr(patching.api, "is_installed", lambda target: target == "paddle")
    monkeypatch.setattr(patching.state, "is_installed", lambda target: target == "paddle")
    with pytest.raises(ImportError, match="patch\\(\\): targets: paddleformers is not installed"):
        paddle_fused.patch(["paddle", "paddleformers"])
    assert not is_ours()
    report = paddle_fused.patch()
    assert is_ours()
    assert report.lines[-1].reason == "not installed"


@pytest.mark.skipif(
    importlib.util.find_spec("paddleformers") is not None, reason="PaddleFormers is installed"
)
@pytest.mark.parametrize("imported", [False, True])
def test_a_folder_of_the_name_is_not_the_library(tmp_path, monkeypatch, imported):
    (tmp_path / "paddleformers").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    if imported:
        monkeypatch.setitem(sys.modules, "paddleformers", importlib.import_module("paddleformers"))
    report = paddle_fused.patch()
    assert report.lines[-1].reason == "not installed"
    with pytest.raises(ImportError, match="paddleformers is not installed"):
        paddle_fused.patch("paddleformers")


# What is left to the original


def test_what_we_do_not_compute_falls_through_and_is_counted():
    report = paddle_fused.patch()
    with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
        paddle.nn.functional.swiglu(paddle.ones([2, 4], dtype="int64"))
    assert "expected dtype" not in str(error.value)  # not our text
    (line,) = [line for line in report.lines if line.name == "paddle.nn.functional.swiglu"]
    assert (line.hits, line.left) == (0, {"x is int64": 1})
    assert "x is int64 (1)" in str(report)
    assert report.fall_throughs == 1


def test_quantising_to_float8_falls_through():
    report = paddle_fused.patch(ops=["rms_norm"])
    x, weight = paddle.ones([2, 4]), paddle.ones([4])
    with pytest.raises(Exception):  # noqa: B017 - whatever Paddle's CPU says to it
        incubate.fused_rms_norm(
            x.astype("float16"), weight, None, 1e-6, 1, None, None, 1.0, 0, 448.0, -448.0
        )
    (line,) = [line for line in report.lines if line.name.endswith(".fused_rms_norm")]
    assert line.left == {"quantises to another type than int8": 1}


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: paddle.nn.functional.swiglu(half(2, 5)), r"swiglu\(\): x: expected an even size"),
        (lambda: incubate.fused_rms_norm_ext(half(2, 4), half(3)), "scale: expected shape"),
        (
            lambda: incubate.fused_rotary_position_embedding(half(1, 2, 1, 4), sin=half(2, 4)),
            "cos: expected a tensor",
        ),
        (
            lambda: incubate.fused_swiglu_weighted_bwd(half(2, 4), half(2, 3), paddle.ones([2, 1])),
            "do2_s: expected shape",
        ),
    ],
)
def test_our_errors_reach_the_caller(call, text):
    paddle_fused.patch()
    with pytest.raises(ValueError, match=text):
        call()


def test_a_wrong_call_names_the_function():
    paddle_fused.patch()
    with pytest.raises(TypeError, match="swiglu"):
        paddle.nn.functional.swiglu()
    with pytest.raises(TypeError, match="fused_rms_norm_ext"):
        incubate.fused_rms_norm_ext(half(2, 4), scales=half(4))


# Calls by other ways


def test_backward_written_by_hand(rng):
    """The norm's and SwiGLU's gradients through paddle._C_ops, as PyLayers call them."""

    class Norm(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x, scale, epsilon):
            y, invvar = incubate.fused_rms_norm_ext(x, scale, epsilon)
            ctx.save_for_backward(x, scale, invvar)
            ctx.epsilon = epsilon
            return y

        @staticmethod
        def backward(ctx, grad):
            x, scale, invvar = ctx.saved_tensor()
            return paddle._C_ops.fused_rms_norm_ext_grad(x, scale, invvar, grad, ctx.epsilon)

    class Swiglu(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return paddle.nn.functional.swiglu(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensor()
            dx, _ = paddle._C_ops.swiglu_grad(x, None, grad)
            return dx

    x, scale = random_array(rng, (5, 12), "float32"), random_array(rng, (12,), "float32")
    g = random_array(rng, (5, 6), "float32")
    with paddle_fused.patched():
        leaves = [to_paddle(value, stop_gradient=False) for value in (x, scale)]
        out = Swiglu.apply(Norm.apply(*leaves, 1e-5))
        paddle.autograd.backward([out], [to_paddle(g)])
    normed, _ = oracle.fused_rms_norm_ext(x, scale, 1e-5)
    inner = oracle.swiglu_grad(normed, None, g)
    _, invvar = oracle.fused_rms_norm_ext(x, scale, 1e-5)
    dx, dscale = oracle.fused_rms_norm_ext_grad(x, scale, invvar, inner)
    np.testing.assert_allclose(out.numpy(), oracle.swiglu(normed), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(leaves[0].grad.numpy(), dx, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(leaves[1].grad.numpy(), dscale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "pair"])
def test_swiglu_grad_operator(rng, dtype, packed):
    x = random_array(rng, (3, 4, 10), dtype)
    y = None if packed else random_array(rng, (3, 4, 10), dtype)
    g = random_array(rng, (3, 4, 5 if packed else 10), dtype)
    with paddle_fused.patched():
        tensors = [None if a is None else to_paddle(a) for a in (x, y, g)]
        dx, dy = paddle._C_ops.swiglu_grad(*tensors)
    expected = oracle.swiglu_grad(x, y, g)
    scale = oracle.swiglu_grad_scale(x, y, g)
    bound = numeric.elementwise_bound(dtype)
    if packed:
        assert dy is None
        numeric.assert_ulp(to_numpy(dx), expected, bound, scale)
    else:
        for one, wanted, size in zip((dx, dy), expected, scale):
            numeric.assert_ulp(to_numpy(one), wanted, bound, size)


@pytest.mark.parametrize("axes", [[8], [2, 8]], ids=["last", "two"])
@pytest.mark.parametrize("weighted", [True, False])
def test_nn_functional_rms_norm(rng, dtype, axes, weighted):
    x = random_array(rng, (3, 2, 8), dtype)
    weight = random_array(rng, axes, dtype) if weighted else None
    with paddle_fused.patched():
        out, invvar = paddle.nn.functional.rms_norm(
            to_paddle(x), axes, None if weight is None else to_paddle(weight), 1e-5
        )
    rows = x.reshape(-1, int(np.prod(axes)))
    flat = np.ones(rows.shape[-1]) if weight is None else oracle.f64(weight).reshape(-1)
    expected = oracle.rms_norm(rows, flat, 1e-5).reshape(x.shape)
    numeric.assert_ulp(to_numpy(out), expected, numeric.rms_norm_bound(dtype, "gemma"))
    assert invvar.dtype == paddle.float32
    assert invvar.shape == list(x.shape[: 3 - len(axes)])


def test_nn_functional_rms_norm_refuses_other_shapes():
    with paddle_fused.patched():
        for axes in ([3], [8, 2], []):
            with pytest.raises(ValueError, match="normalized_shape"):
                paddle.nn.functional.rms_norm(half(3, 2, 8), axes)
        with pytest.raises(ValueError, match="weight: expected shape"):
            paddle.nn.functional.rms_norm(half(3, 2, 8), [2, 8], half(16))
        with pytest.raises(TypeError, match="weight"):
            paddle.nn.functional.rms_norm(half(3, 2, 8), [8], paddle.ones([8]))


def test_nn_functional_rms_norm_under_auto_cast():
    """A float32 weight beside half precision, as O1 leaves it: computed in float32."""
    x, weight = half(3, 8), paddle.ones([8])
    with paddle_fused.patched(), auto_cast():
        out, _ = paddle.nn.functional.rms_norm(x, [8], weight)
    assert out.dtype == paddle.float32
    np.testing.assert_allclose(out.numpy(), np.ones((3, 8)), rtol=1e-5)


def test_an_epsilon_that_is_a_tensor_falls_through():
    report = paddle_fused.patch(ops=["rms_norm"])
    with pytest.raises(Exception):  # noqa: B017 - whatever Paddle's CPU says to bfloat16
        incubate.fused_rms_norm(half(2, 4), half(4), None, paddle.to_tensor(1e-5), 1)
    (line,) = [line for line in report.lines if line.name.endswith(".fused_rms_norm")]
    assert line.left == {"epsilon is a tensor": 1}


@pytest.mark.parametrize("full_graph", [True, False], ids=["ast", "sot"])
def test_to_static_records_ours(full_graph):
    net = paddle.nn.Linear(4, 8)

    def forward(x):
        return paddle.nn.functional.swiglu(net(x))

    x = paddle.randn([3, 4])
    plain = forward(x).numpy()
    with paddle_fused.patched() as report:
        static = paddle.jit.to_static(forward, full_graph=full_graph)
        np.testing.assert_allclose(static(x).numpy(), plain, rtol=1e-6, atol=1e-7)
        assert report.hits >= 1
        if full_graph:
            text = str(static.main_program)
            assert "paddle_fused_swiglu" in text
            assert "pd_op.swiglu" not in text


def test_static_program_takes_ours():
    paddle.enable_static()
    try:
        with paddle_fused.patched(), paddle.static.program_guard(paddle.static.Program()):
            x = paddle.static.data("x", [-1, 4, 6], "float32")
            out, _ = paddle.nn.functional.rms_norm(x, [6])
            paddle.nn.functional.swiglu(out)
            text = str(paddle.static.default_main_program())
    finally:
        paddle.disable_static()
    assert "paddle_fused_rms_norm_ext" in text and "paddle_fused_swiglu" in text


def test_dispatchers_copy_and_pickle():
    paddle_fused.patch()
    ours = [paddle.nn.functional.swiglu]
    assert copy.deepcopy(ours[0]) is ours[0]
    data = pickle.dumps(ours[0])
    assert pickle.loads(data) is ours[0]
    paddle_fused.unpatch()
    assert pickle.loads(data) is paddle.nn.functional.swiglu


def test_threads_patch_and_unpatch_at_will():
    """Each block sees itself patched, whatever the others do; in the end all is as it was."""
    before = current()
    failures = []
    start = threading.Barrier(8)

    def work(seed):
        generator = np.random.default_rng(seed)
        start.wait()
        for _ in range(6):
            ops = ["swiglu"] if generator.random() < 0.5 else ["swiglu", "rope", "rms_norm"]
            try:
                with paddle_fused.patched(ops=ops):
                    paddle.nn.functional.swiglu(half(2, 4))
                    if generator.random() < 0.3:
                        paddle_fused.patch(ops=["rope"])
                        paddle_fused.unpatch()
                    paddle.nn.functional.swiglu(half(2, 4))
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [name for name in before if current()[name] is not before[name]] == []


def test_counting_loses_nothing_between_threads():
    with paddle_fused.patched() as report:
        (before,) = [n for n in report.lines if n.name == "paddle.nn.functional.swiglu"]

        def work():
            for _ in range(200):
                paddle.nn.functional.swiglu(half(1, 2))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (after,) = [n for n in report.lines if n.name == "paddle.nn.functional.swiglu"]
    assert after.hits - before.hits == 800


def test_report_prints_a_line_per_place():
    report = paddle_fused.patch("paddle")
    text = str(report)
    assert len(text.splitlines()) == 1 + len(PADDLE_ROWS)
    assert text.splitlines()[0].split() == ["place", "state", "calls", "left", "to", "it"]
    assert "replaced" in text and "not replaced" not in text
    paddle_fused.unpatch()
    assert report.replaced == [] and "restored" in str(report)


def test_importing_the_package_imports_and_hooks_nothing(tmp_path):
    from helpers import model_library

    model_library.write(tmp_path)
    code = (
        "import sys; before = None\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import paddle; before = list(sys.meta_path)\n"
        "import paddle_fused\n"
        "assert sys.meta_path == before\n"
        "assert not any(m.startswith('paddleformers') for m in sys.modules)\n"
        "paddle_fused.patch()\n"
        "assert 'paddleformers' not in sys.modules\n"
        "paddle_fused.unpatch()\n"
        "assert sys.meta_path == before\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=120
    )
    assert result.returncode == 0, result.stderr
