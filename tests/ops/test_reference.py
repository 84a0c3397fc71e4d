"""The plain Paddle reference against the oracle, for each function and dtype, in ULP."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import numeric, oracle
from helpers.arrays import DTYPES, random_array, to_numpy, to_paddle

paddle = pytest.importorskip("paddle")
reference = pytest.importorskip("paddle_fused.reference")

EPSILON = 1e-6
MODES = ("llama", "gemma", "none")


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


def run(function, inputs, grads):
    """Outputs of function(*inputs), and the gradients of the inputs for the outputs' grads.

    inputs and grads are arrays; an output whose entry in grads is None gets no gradient.
    """
    tensors = [to_paddle(array, stop_gradient=False) for array in inputs]
    outputs = function(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = [(out, to_paddle(g)) for out, g in zip(outputs, grads) if g is not None]
    reached = paddle.grad([out for out, _ in pairs], tensors, [g for _, g in pairs])
    return [to_numpy(out) for out in outputs], [to_numpy(grad) for grad in reached]


def check(actual, expected, scale=None, terms=1, what="", dtype=None):
    """Within the elementwise bound, or within that of a sum of so many terms."""
    if dtype is not None:
        assert numeric.dtype_name(actual.dtype) == dtype
    kind = actual.dtype
    bound = numeric.elementwise_bound(kind) if terms == 1 else numeric.sum_bound(kind, terms)
    numeric.assert_ulp(actual, expected, bound, scale=scale, what=what)


def check_rounded_on_the_way(actual, expected, scale, terms, what, max_ulp=2.0):
    """For a gradient that Paddle's casts round to a half dtype on its way, before its sums."""
    if numeric.dtype_name(actual.dtype) not in numeric.HALVES:
        check(actual, expected, scale, terms, what)
        return
    error = np.abs(actual.astype(np.float64) - expected)
    worst = (error / numeric.spacing(scale, actual.dtype)).max()
    assert worst <= max_ulp, f"{what}: {worst} ULP of the sum of magnitudes"


def test_arrays_keep_their_bits(rng, dtype):
    array = random_array(rng, (3, 4), dtype)
    for view in (array, array.T, array[:, ::2], array[1, 1], array[:0]):
        numeric.assert_bit_equal(to_numpy(to_paddle(view)), np.asarray(view))


# SwiGLU


@pytest.mark.parametrize("joined", [True, False])
def test_swiglu(rng, dtype, joined):
    g = random_array(rng, (5, 3, 24), dtype)
    if joined:
        x, y = random_array(rng, (5, 3, 48), dtype, 3.0), None
        (out,), grads = run(reference.swiglu, [x], [g])
        expected, scales = [oracle.swiglu_grad(x, y, g)], [oracle.swiglu_grad_scale(x, y, g)]
    else:
        x, y = random_array(rng, g.shape, dtype, 3.0), random_array(rng, g.shape, dtype)
        (out,), grads = run(reference.swiglu, [x, y], [g])
        expected, scales = oracle.swiglu_grad(x, y, g), oracle.swiglu_grad_scale(x, y, g)
    check(out, oracle.swiglu(x, y), dtype=dtype)
    for name, grad, value, scale in zip(("dx", "dy"), grads, expected, scales):
        check(grad, value, scale, what=name, dtype=dtype)


@pytest.mark.parametrize("keep", [True, False])
def test_fused_swiglu_weighted(rng, dtype, keep):
    x = random_array(rng, (4, 3, 48), dtype, 3.0)
    g = random_array(rng, (4, 3, 24), dtype)
    probs = random_array(rng, (4, 3, 1) if keep else (4, 3), "float32")
    do1, probs_grad, o2_s = oracle.fused_swiglu_weighted_bwd(x, g, probs)
    do1_scale = oracle.swiglu_grad_scale(x, None, g.astype(np.float64) * probs.reshape(4, 3, 1))
    probs_scale = oracle.probs_grad_scale(x, g, probs)

    (out,), (dx, dprobs) = run(reference.fused_swiglu_weighted, [x, probs], [g])
    check(out, o2_s, dtype=dtype)
    check(dx, do1, do1_scale, what="dx", dtype=dtype)
    check(dprobs, probs_grad, probs_scale, 24, what="dprobs", dtype="float32")

    arguments = [to_paddle(array) for array in (x, g, probs)]
    results = [to_numpy(r) for r in reference.fused_swiglu_weighted_bwd(*arguments)]
    check(results[0], do1, do1_scale, what="do1", dtype=dtype)
    check(results[1], probs_grad, probs_scale, 24, what="probs_grad", dtype="float32")
    check(results[2], o2_s, what="o2_s", dtype=dtype)


def test_saturated_gates_are_finite():
    gate = np.array([-1e4, 1e4, 0.0, 80.0, -80.0], dtype=np.float32)
    up, probs = np.full_like(gate, 2.0), np.ones(1, dtype=np.float32)
    check(to_numpy(reference.swiglu(to_paddle(gate), to_paddle(up))), oracle.swiglu(gate, up))
    arrays = np.concatenate([gate, up]), np.ones_like(gate), probs
    results = reference.fused_swiglu_weighted_bwd(*(to_paddle(array) for array in arrays))
    expected = oracle.fused_swiglu_weighted_bwd(*arrays)
    scale = oracle.swiglu_grad_scale(arrays[0], None, arrays[1])
    check(to_numpy(results[0]), expected[0], scale, what="do1")
    check(to_numpy(results[1]), expected[1], oracle.probs_grad_scale(*arrays), 5, "probs_grad")
    check(to_numpy(results[2]), expected[2], what="o2_s")


# RMSNorm


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(rng, dtype, mode, offset):
    x, g = (random_array(rng, (6, 4, 40), dtype) for _ in range(2))
    weight = random_array(rng, (40,), dtype)

    def function(x, w):
        return reference.rms_norm(x, w, EPSILON, offset=offset, casting_mode=mode)

    (out,), (dx, dweight) = run(function, [x, weight], [g])
    assert numeric.dtype_name(out.dtype) == dtype
    rounded = oracle.rms_norm_rounded(x, weight, EPSILON, offset, mode, dtype)
    is_half = dtype in numeric.HALVES
    if mode == "none" and is_half:
        numeric.assert_ulp(out, rounded, 4.0)
    else:
        exact = oracle.rms_norm(x, weight, EPSILON, offset)
        numeric.assert_ulp(out, exact, numeric.rms_norm_bound(dtype, mode))
    if is_half:
        equal = numeric.round_to(rounded, dtype) == out.astype(np.float64)
        assert equal.mean() > 0.98

    expected = oracle.rms_norm_grad(x, weight, g, EPSILON, offset, mode, dtype)
    scales = oracle.rms_norm_grad_scale(x, weight, g, EPSILON, offset)
    for name, grad, value, scale, terms in zip(
        ("dx", "dweight"), (dx, dweight), expected, scales, (40, 24)
    ):
        assert numeric.dtype_name(grad.dtype) == dtype
        if mode == "gemma":
            check(grad, value, scale, terms, name)
        else:
            check_rounded_on_the_way(grad, value, scale, terms, name)


@pytest.mark.parametrize("mode", MODES)
def test_rms_norm_without_weight(rng, dtype, mode):
    x, g = (random_array(rng, (6, 40), dtype) for _ in range(2))
    (out,), (dx,) = run(
        lambda x: reference.rms_norm(x, epsilon=EPSILON, casting_mode=mode), [x], [g]
    )
    # Without a weight x·r is the only product, so "llama" rounds once.
    expected = oracle.rms_norm(x, None, EPSILON)
    if mode == "none" and dtype in numeric.HALVES:
        rounded = oracle.rms_norm_rounded(x, None, EPSILON, 0.0, mode, dtype)
        numeric.assert_ulp(out, rounded, 4.0)
    else:
        check(out, expected, dtype=dtype)
    scale, _ = oracle.rms_norm_grad_scale(x, np.ones(40), g, EPSILON)
    expected, _ = oracle.rms_norm_grad(x, None, g, EPSILON)
    check_rounded_on_the_way(dx, expected, scale, 40, "dx")


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_rms_norm_weight_of_another_dtype(rng, weight_dtype):
    x, g = (random_array(rng, (6, 40), "float16") for _ in range(2))
    weight = random_array(rng, (40,), weight_dtype)
    (out,), (_, dweight) = run(
        lambda x, w: reference.rms_norm(x, w, casting_mode="gemma"), [x, weight], [g]
    )
    check(out, oracle.rms_norm(x, weight), dtype="float16")
    scale = oracle.rms_norm_grad_scale(x, weight, g)[1]
    check(dweight, oracle.rms_norm_grad(x, weight, g)[1], scale, 6, "dweight", weight_dtype)


def test_rms_norm_with_residual(rng, dtype):
    x, residual, g, extra = (random_array(rng, (6, 40), dtype) for _ in range(4))
    weight = random_array(rng, (40,), dtype)

    def function(x, residual, weight):
        return reference.rms_norm(x, weight, EPSILON, casting_mode="gemma", residual=residual)

    (out, total), (dx, dresidual, _) = run(function, [x, residual, weight], [g, extra])
    expected_total = oracle.residual_sum(x, residual)
    np.testing.assert_array_equal(total.astype(np.float64), expected_total)
    assert numeric.dtype_name(total.dtype) == dtype
    check(out, oracle.rms_norm(expected_total, weight, EPSILON), dtype=dtype)
    expected = oracle.rms_norm_grad(expected_total, weight, g, EPSILON)[0]
    scale = oracle.rms_norm_grad_scale(expected_total, weight, g, EPSILON)[0]
    expected, scale = expected + oracle.f64(extra), scale + np.abs(oracle.f64(extra))
    check_rounded_on_the_way(dx, expected, scale, 40, "dx")
    numeric.assert_bit_equal(dx, dresidual)


def test_none_mode_keeps_small_rows_finite(rng):
    # The gradient of the mean square grows with r³, here beyond float16.
    x = random_array(rng, (3, 32), "float16", 0.01)
    weight, g = random_array(rng, (32,), "float16"), random_array(rng, (3, 32), "float16")
    _, (dx, _) = run(lambda x, w: reference.rms_norm(x, w, casting_mode="none"), [x, weight], [g])
    scale = oracle.rms_norm_grad_scale(x, weight, g)[0]
    check_rounded_on_the_way(dx, oracle.rms_norm_grad(x, weight, g)[0], scale, 32, "dx", 8.0)


def test_none_mode_overflows_as_its_operators_do():
    x = to_paddle(np.full((1, 4), 300.0, dtype=np.float16))
    assert to_numpy(reference.rms_norm(x, casting_mode="none")).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("added", ["", "bias", "residual", "bias residual"])
def test_fused_rms_norm(rng, dtype, axis, added):
    x, residual, g, extra = (random_array(rng, (4, 3, 8), dtype) for _ in range(4))
    size = 24 if axis == 1 else 8
    weight, norm_bias, bias = (random_array(rng, (size,), dtype) for _ in range(3))
    bias = bias if "bias" in added else None
    residual = residual if "residual" in added else None
    optional = [array for array in (bias, residual) if array is not None]

    def function(x, weight, norm_bias, *rest):
        rest = list(rest)
        return reference.fused_rms_norm(
            x,
            weight,
            norm_bias,
            EPSILON,
            axis,
            bias=rest.pop(0) if bias is not None else None,
            residual=rest.pop(0) if residual is not None else None,
        )

    if not added:
        assert function(*(to_paddle(a) for a in (x, weight, norm_bias)))[1] is None
        extra = None
    outputs, grads = run(
        lambda *a: tuple(o for o in function(*a) if o is not None),
        [x, weight, norm_bias, *optional],
        [g, extra],
    )
    total = oracle.residual_sum(x, residual, bias, axis)
    if added:
        # Three numbers take two additions, and their order is free.
        terms = [
            oracle.f64(a).reshape(x.shape[axis:]) if a is bias else oracle.f64(a)
            for a in (x, *optional)
        ]
        magnitude = sum(np.abs(term) for term in terms)
        numeric.assert_ulp(outputs[1], total, 1.0 if len(optional) == 2 else 0.0, magnitude)
        total = oracle.f64(outputs[1])
    normed = oracle.fused_rms_norm(total, weight, None, EPSILON, axis)
    magnitude = np.abs(normed) + np.abs(oracle.f64(norm_bias)).reshape(x.shape[axis:])
    expected = oracle.fused_rms_norm(total, weight, norm_bias, EPSILON, axis)
    check(outputs[0], expected, magnitude, what="out", dtype=dtype)

    dx, dw, dnorm_bias, dbias = oracle.fused_rms_norm_grad(total, weight, g, EPSILON, axis, extra)
    rows = x.size // size
    flat_g = oracle.f64(g).reshape(rows, size)
    dx_scale, dw_scale = oracle.rms_norm_grad_scale(
        total.reshape(rows, size), weight, flat_g, EPSILON
    )
    dx_scale = dx_scale + (0.0 if extra is None else np.abs(oracle.f64(extra)).reshape(rows, size))
    check_rounded_on_the_way(grads[0], dx, dx_scale.reshape(x.shape), size, "dx")
    check(grads[1], dw, dw_scale, rows, "dweight")
    check(grads[2], dnorm_bias, np.abs(flat_g).sum(0), rows, "dnorm_bias")
    if bias is not None:
        check_rounded_on_the_way(grads[3], dbias, dx_scale.sum(0), rows * size, "dbias")
    if residual is not None:
        numeric.assert_bit_equal(grads[-1], grads[0])


@pytest.mark.parametrize("round_type", [0, 1])
def test_fused_rms_norm_quantised(rng, dtype, round_type):
    x = random_array(rng, (8, 64), dtype)
    weight = random_array(rng, (64,), dtype)
    out, _ = reference.fused_rms_norm(
        to_paddle(x), to_paddle(weight), None, EPSILON, 1, None, None, 0.4, round_type, 127, -127
    )
    assert out.dtype == paddle.int8
    normed = oracle.rms_norm(x, weight, EPSILON)
    expected = oracle.quantize_int8(normed, 0.4, round_type, 127, -127)
    assert {-127, 127} & set(expected.reshape(-1).tolist())
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("round_type, expected", [(0, [2, 2, -2, 4, 0]), (1, [2, 3, -3, 4, 1])])
def test_quantised_ties(round_type, expected):
    # The weight is 0, so that norm_bias is what is quantised.
    x, zero = paddle.ones([1, 5]), paddle.zeros([5])
    norm_bias = paddle.to_tensor([1.5, 2.5, -2.5, 3.5, 0.5])
    out, _ = reference.fused_rms_norm(
        x, zero, norm_bias, EPSILON, 1, None, None, 1.0 / 128, round_type, 128, -127
    )
    np.testing.assert_array_equal(out.numpy(), [expected])


@pytest.mark.parametrize("name", ["fused_rms_norm_ext", "fast_rms_norm"])
def test_fused_rms_norm_ext(rng, dtype, name):
    x = random_array(rng, (6, 4, 40), dtype)
    scale_dtype = "float32" if dtype == "float16" else dtype
    scale = random_array(rng, (40,), scale_dtype)
    g = random_array(rng, x.shape, scale_dtype)
    (y, invvar), (dx, dscale) = run(getattr(reference, name), [x, scale], [g, None])
    expected_y, expected_invvar = oracle.fused_rms_norm_ext(x, scale)
    check(y, expected_y, what="y", dtype=scale_dtype)
    check(invvar, expected_invvar, what="invvar", dtype="float32")
    scales = oracle.rms_norm_grad_scale(x, scale, g, 1e-5)
    for actual, expected, magnitude, terms in zip(
        (dx, dscale), oracle.rms_norm_grad(x, scale, g, 1e-5), scales, (40, 24)
    ):
        check(actual, expected, magnitude, terms)

    arguments = [to_paddle(array) for array in (x, scale, invvar, g)]
    results = reference.fused_rms_norm_ext_grad(*arguments, 1e-5)
    expected = oracle.fused_rms_norm_ext_grad(x, scale, invvar, g)
    for actual, value, magnitude, terms, kind in zip(
        results, expected, scales, (40, 24), (dtype, scale_dtype)
    ):
        check(to_numpy(actual), value, magnitude, terms, dtype=kind)


@pytest.mark.parametrize("epsilon", [-1.0, float("nan"), float("inf")])
def test_epsilon_is_checked(epsilon):
    x, w = paddle.ones([2, 4]), paddle.ones([4])
    for call in (
        lambda: reference.rms_norm(x, w, epsilon),
        lambda: reference.fused_rms_norm(x, w, None, epsilon),
        lambda: reference.fused_rms_norm_ext(x, w, epsilon),
        lambda: reference.fast_rms_norm(x, w, epsilon),
    ):
        with pytest.raises(ValueError, match="epsilon"):
            call()


# RoPE


def check_rope(run_result, arrays, grads, cos, sin, style, dtype):
    outputs, derivatives = run_result
    for out, dx, x, g in zip(outputs, derivatives, arrays, grads):
        scale = oracle.rope_scale(x, cos, sin, style)
        check(out, oracle.rope(x, cos, sin, style), scale, 2, "out", dtype)
        scale = oracle.rope_grad_scale(g, cos, sin, style)
        check(dx, oracle.rope_grad(g, cos, sin, style), scale, 2, "dx", dtype)


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("time_major", [True, False])
@pytest.mark.parametrize("ids", [None, "int32", "int64"])
@pytest.mark.parametrize("rotary", [8, 4])
def test_fused_rotary_position_embedding(rng, dtype, pairs, time_major, ids, rotary):
    lead = (5, 2) if time_major else (2, 5)
    arrays, grads = (
        [random_array(rng, (*lead, heads, 8), dtype) for heads in (4, 2, 1)] for _ in range(2)
    )
    rows = 5 if ids is None else 9
    table_dtype = "float32" if dtype == "float16" else dtype
    cos, sin = (random_array(rng, (rows, rotary), table_dtype) for _ in range(2))
    position_ids = None if ids is None else rng.integers(0, rows, (2, 5)).astype(ids)
    shape = (rows, rotary) if rotary == 8 else (1, rows, 1, rotary)

    def function(q, k, v):
        return reference.fused_rotary_position_embedding(
            q,
            k,
            v,
            to_paddle(sin.reshape(shape)),
            to_paddle(cos.reshape(shape)),
            None if ids is None else to_paddle(position_ids),
            pairs,
            time_major,
        )

    tables = oracle.fused_rope_tables(cos, sin, position_ids, time_major)
    style = oracle.PAIRS if pairs else oracle.HALVES_STYLE
    check_rope(run(function, arrays, grads), arrays, grads, *tables, style, dtype)


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("has_ids", [True, False])
def test_generated_tables(rng, dtype, pairs, has_ids):
    q, g = (random_array(rng, (2, 5, 3, 8), dtype) for _ in range(2))
    positions = rng.integers(0, 100000, (2, 5)) if has_ids else np.arange(5)[None]

    def function(q):
        out, *absent = reference.fused_rotary_position_embedding(
            q,
            position_ids=to_paddle(positions) if has_ids else None,
            use_neox_rotary_style=pairs,
            rotary_emb_base=500.0,
        )
        assert absent == [None, None]
        return out

    style = oracle.PAIRS if pairs else oracle.HALVES_STYLE
    cos, sin = (t[:, :, None] for t in oracle.rope_tables(positions, 8, 500.0, style))
    outputs, (dx,) = run(function, [q], [g])
    # A float64 angle's last bit may turn a table entry's rounding: one ULP of float32.
    cos_sin_error = 2.0**-23
    for actual, expected, x in (
        (outputs[0], oracle.rope(q, cos, sin, style), q),
        (dx, oracle.rope_grad(g, cos, sin, style), g),
    ):
        error = np.abs(actual.astype(np.float64) - expected)
        allowed = cos_sin_error * 4 * np.abs(oracle.f64(x)).max()
        assert (error <= allowed + numeric.spacing(expected, dtype)).all()


def test_a_longer_table_uses_its_first_rows(rng):
    q = random_array(rng, (1, 3, 2, 4), "float32")
    cos, sin = (random_array(rng, (7, 4), "float32") for _ in range(2))
    out = reference.fused_rotary_position_embedding(
        to_paddle(q), sin=to_paddle(sin), cos=to_paddle(cos)
    )[0]
    tables = oracle.fused_rope_tables(cos, sin, length=3)
    check(
        to_numpy(out),
        oracle.rope(q, *tables, oracle.PAIRS),
        oracle.rope_scale(q, *tables, oracle.PAIRS),
        2,
    )


def test_documented_example():
    x = paddle.to_tensor([1.0, 2.0, 3.0, 4.0]).reshape([1, 1, 1, 4])
    one, zero = paddle.ones([1, 4]), paddle.zeros([1, 4])
    for pairs, expected in ((True, [-2, 1, -4, 3]), (False, [-3, -4, 1, 2])):
        out = reference.fused_rotary_position_embedding(
            x, sin=one, cos=zero, use_neox_rotary_style=pairs
        )[0]
        assert out.flatten().tolist() == expected


def test_rope_misuse():
    x, table = paddle.ones([1, 1, 1, 4]), paddle.ones([1, 4])
    with pytest.raises(ValueError, match="together"):
        reference.fused_rotary_position_embedding(x, sin=table)
    for base in (0.0, float("inf")):
        with pytest.raises(ValueError, match="rotary_emb_base"):
            reference.fused_rotary_position_embedding(x, rotary_emb_base=base)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("table", ["shared", "one", "batch", "ids"])
@pytest.mark.parametrize("rotary", [8, 6])
def test_apply_rotary_pos_emb(rng, dtype, unsqueeze_dim, table, rotary):
    shapes = [(2, h, 5, 8) if unsqueeze_dim == 1 else (2, 5, h, 8) for h in (4, 2)]
    arrays, grads = ([random_array(rng, shape, dtype) for shape in shapes] for _ in range(2))
    lead = {"shared": (5,), "one": (1, 5), "batch": (2, 5), "ids": (9,)}[table]
    cos, sin = (random_array(rng, (*lead, rotary), "float32") for _ in range(2))
    ids = rng.integers(0, 9, (2, 5)) if table == "ids" else None

    def function(q, k):
        return reference.apply_rotary_pos_emb(
            q,
            k,
            to_paddle(cos),
            to_paddle(sin),
            None if ids is None else to_paddle(ids),
            unsqueeze_dim,
        )

    tables = oracle.applied_rope_tables(cos, sin, ids, unsqueeze_dim)
    result = run(function, arrays, grads)
    check_rope(result, arrays, grads, *tables, oracle.HALVES_STYLE, dtype)


@pytest.mark.parametrize("rotary", [8, 4])
def test_fused_partial_rope(rng, dtype, rotary):
    x, g = (random_array(rng, (2, 5, 3, 8), dtype) for _ in range(2))
    cos, sin = (random_array(rng, (1, 5, 1, rotary), dtype) for _ in range(2))
    (out,), (dx,) = run(
        lambda x: reference.fused_partial_rope(x, to_paddle(cos), to_paddle(sin)), [x], [g]
    )
    scale = oracle.partial_rope_scale(x, cos, sin)
    check(out, oracle.partial_rope(x, cos, sin), scale, 2, "out", dtype)
    scale = oracle.partial_rope_grad_scale(g, cos, sin)
    check(dx, oracle.partial_rope_grad(g, cos, sin), scale, 2, "dx", dtype)


def test_tables_get_no_gradient(rng):
    q = to_paddle(random_array(rng, (1, 3, 2, 4), "float32"), stop_gradient=False)
    cos, sin = (to_paddle(random_array(rng, (3, 4), "float32"), False) for _ in range(2))
    for out in (
        reference.fused_rotary_position_embedding(q, sin=sin, cos=cos)[0],
        reference.apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=2)[0],
        reference.fused_partial_rope(q, cos.reshape([1, 3, 1, 4]), sin.reshape([1, 3, 1, 4])),
    ):
        out.sum().backward()
    assert cos.grad is None and sin.grad is None and q.grad is not None


# Static graphs


# Named functions, since to_static reads their source and cannot read a lambda inside a dict.


def _swiglu(x):
    return reference.swiglu(x)


def _swiglu_weighted(x):
    return reference.fused_swiglu_weighted(x, x[..., :1])


def _swiglu_weighted_bwd(x):
    return reference.fused_swiglu_weighted_bwd(x, x[..., 4:], x[..., 0])


def _rms_norm(x):
    return reference.rms_norm(x, x[0, 0], offset=1.0, residual=x)


def _fused_rms_norm(x):
    return reference.fused_rms_norm(x, x[0].flatten(), None, 1e-6, 1)[0]


def _fused_rms_norm_quantised(x):
    return reference.fused_rms_norm(x, x[0, 0], None, 1e-6, 2, None, x, 0.1, 1, 127, -127)


def _fused_rms_norm_ext(x):
    return reference.fused_rms_norm_ext(x, x[0, 0])


def _fused_rms_norm_ext_grad(x):
    return reference.fused_rms_norm_ext_grad(x, x[0, 0], x[..., 0], x, 1e-5)


def _generated_rope(x):
    heads = x.unsqueeze(2)
    return reference.fused_rotary_position_embedding(heads, use_neox_rotary_style=False)[0]


def _fused_rope(x):
    table = x[0, :, :4]
    ids = (x[:, :, 0] > 0).astype("int64")
    return reference.fused_rotary_position_embedding(x.unsqueeze(2), None, None, table, table, ids)


def _applied_rope(x):
    heads, table = x.unsqueeze(2), x[0]
    return reference.apply_rotary_pos_emb(heads, heads, table, table, unsqueeze_dim=2)


def _partial_rope(x):
    table = x[:1, :, :4].unsqueeze(2)
    return reference.fused_partial_rope(x.unsqueeze(2), table, table)


STATIC = [
    _swiglu,
    _swiglu_weighted,
    _swiglu_weighted_bwd,
    _rms_norm,
    _fused_rms_norm,
    _fused_rms_norm_quantised,
    _fused_rms_norm_ext,
    _fused_rms_norm_ext_grad,
    _generated_rope,
    _fused_rope,
    _applied_rope,
    _partial_rope,
]


@pytest.mark.parametrize("shape", [[2, 4, 8], [-1, -1, 8]])
@pytest.mark.parametrize("function", STATIC)
def test_static_graph_gives_the_same(rng, function, shape):
    x = to_paddle(random_array(rng, (2, 4, 8), "float32"))
    spec = [paddle.static.InputSpec(shape, "float32", "x")]
    static = paddle.jit.to_static(function, input_spec=spec, full_graph=True)
    actual, expected = static(x), function(x)
    if not isinstance(expected, (tuple, list)):
        actual, expected = [actual], [expected]
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        if b is None:
            assert a is None
            continue
        assert a.dtype == b.dtype
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-6, atol=1e-6)


# Second order and empty inputs


def _double_grad(function, x, weight, g, v, u):
    """Gradients of ⟨v, dx⟩ + ⟨u, dweight⟩ in x, weight and g."""
    tensors = [to_paddle(array, stop_gradient=False) for array in (x, weight, g)]
    out = function(*tensors[:2])
    first = paddle.grad([out], tensors[:2], [tensors[2]], create_graph=True)
    second = paddle.grad(first, tensors, [to_paddle(v), to_paddle(u)])
    return [to_numpy(grad) for grad in second]


def test_second_order_gradients(rng):
    x, g, v = (random_array(rng, (3, 4), "float64") for _ in range(3))
    y, u = (random_array(rng, (3, 4), "float64") for _ in range(2))
    actual = _double_grad(reference.swiglu, x, y, g, v, u)
    for a, b in zip(actual, oracle.swiglu_double_grad(x, y, g, v, u)):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    actual = _double_grad(reference.rms_norm, x, y[0], g, v, u[0])
    for a, b in zip(actual, oracle.rms_norm_double_grad(x, y[0], g, v, u[0])):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_no_rows(dtype):
    def empty(*shape):
        return random_array(np.random.default_rng(0), shape, dtype)

    (out,), (dx, dweight) = run(reference.rms_norm, [empty(0, 8), empty(8)], [empty(0, 8)])
    assert out.shape == dx.shape == (0, 8)
    assert dweight.astype(np.float64).tolist() == [0.0] * 8
    (out,), (dx,) = run(reference.swiglu, [empty(0, 8)], [empty(0, 4)])
    assert (out.shape, dx.shape) == ((0, 4), (0, 8))
    arrays = empty(0, 8), empty(0, 4), np.empty((0, 1), np.float32)
    results = reference.fused_swiglu_weighted_bwd(*(to_paddle(array) for array in arrays))
    assert [list(r.shape) for r in results] == [[0, 8], [0, 1], [0, 4]]
    (out,), (dq,) = run(
        lambda q: reference.fused_rotary_position_embedding(q)[0],
        [empty(0, 3, 2, 4)],
        [empty(0, 3, 2, 4)],
    )
    assert out.shape == dq.shape == (0, 3, 2, 4)
