"""What autograd may bring: no_grad, missing and changed gradients; and sparse tensors."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import paddle_fused.nn.functional as F
from helpers import numeric


def trained(*shape):
    """A tensor that wants its gradient."""
    value = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    return paddle.to_tensor(value, stop_gradient=False)


def calls():
    """Every differentiable form: name to (function, inputs), the first output being used."""
    x, y, w, b = trained(4, 8), trained(4, 8), trained(8), trained(8)
    q, k, table = trained(2, 3, 2, 4), trained(2, 3, 1, 4), paddle.ones([3, 4])
    partial = table.reshape([1, 3, 1, 4])
    return {
        "swiglu": (F.swiglu, [x]),
        "swiglu pair": (F.swiglu, [x, y]),
        "weighted": (F.fused_swiglu_weighted, [x, paddle.ones([4])]),
        "rms_norm": (F.rms_norm, [x, w]),
        "rms_norm unweighted": (F.rms_norm, [x]),
        "rms_norm residual": (lambda a, r: F.rms_norm(a, w, residual=r)[0], [x, y]),
        "fused_rms_norm": (lambda a: F.fused_rms_norm(a, w, b, 1e-6)[0], [x]),
        "fused_rms_norm bias": (lambda a: F.fused_rms_norm(a, w, b, 1e-6, bias=b)[0], [x]),
        "ext": (lambda a: F.fused_rms_norm_ext(a, w)[0], [x]),
        "rope": (lambda a: F.fused_rotary_position_embedding(a)[0], [q]),
        "rope qk": (lambda a, c: F.fused_rotary_position_embedding(a, c)[0], [q, k]),
        "apply": (lambda a, c: F.apply_rotary_pos_emb(a, c, table, table, None, 2)[0], [q, k]),
        "partial": (lambda a: F.fused_partial_rope(a, partial, partial), [q]),
    }


NAMES = list(calls())


@pytest.mark.parametrize("name", NAMES)
def test_no_grad_records_nothing(name):
    function, inputs = calls()[name]
    with paddle.no_grad():
        silent = function(*inputs)
    loud = function(*inputs)
    assert silent.stop_gradient is True
    assert loud.stop_gradient is False
    numeric.assert_bit_equal(silent.numpy(), loud.numpy())


@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_another_shape_is_refused(name):
    """A hook returns one row of the gradient: reading the others would leave its memory."""
    function, inputs = calls()[name]
    out = function(*inputs)
    out.register_hook(lambda grad: grad[:1] + 0)
    with pytest.raises(ValueError, match="gradient that came"):
        out.sum().backward()


class Silent(paddle.autograd.PyLayer):
    """Hands back no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("name", NAMES)
def test_missing_gradient_is_zero_or_an_error(name):
    function, inputs = calls()[name]
    loss = Silent.apply(function(*inputs))
    try:
        loss.backward()
    except ValueError as error:
        assert "no gradient came" in str(error)
        return
    for tensor in inputs:
        if tensor.grad is not None:
            assert not tensor.grad.numpy().any()


X, W, Q = paddle.ones([4, 8]), paddle.ones([8]), paddle.ones([2, 3, 2, 4])
SPARSE = {
    "swiglu x": lambda: F.swiglu(X.to_sparse_coo(2)),
    "swiglu csr": lambda: F.swiglu(X.to_sparse_csr()),
    "swiglu y": lambda: F.swiglu(X, X.to_sparse_coo(2)),
    "probs": lambda: F.fused_swiglu_weighted(X, paddle.ones([4]).to_sparse_coo(1)),
    "rms_norm x": lambda: F.rms_norm(X.to_sparse_coo(2), W),
    "rms_norm weight": lambda: F.rms_norm(X, W.to_sparse_coo(1)),
    "rope q": lambda: F.fused_rotary_position_embedding(Q.to_sparse_coo(4)),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_are_refused(name):
    with pytest.raises(TypeError, match="dense tensor"):
        SPARSE[name]()


@pytest.mark.parametrize("epsilon", [1e-300, 1e-46, 1e300])
def test_epsilon_keeps_its_range_in_float64(epsilon):
    x = paddle.full([1, 4], np.sqrt(epsilon), "float64")
    out = F.rms_norm(x, epsilon=epsilon).numpy()
    np.testing.assert_allclose(out, np.sqrt(0.5), rtol=1e-14)


def test_numbers_beyond_floats_are_refused():
    with pytest.raises(ValueError, match=r"rms_norm\(\): epsilon"):
        F.rms_norm(X, W, epsilon=10**400)


def test_one_table_per_sequence_equals_the_reference():
    import paddle_fused.reference as R

    rng = np.random.default_rng(3)
    q = trained(2, 3, 2, 4)
    cos, sin = (paddle.to_tensor(rng.random((2, 5, 1, 4)).astype("float32")) for _ in range(2))
    for ids in (None, paddle.to_tensor([[4, 0, 1], [2, 2, 3]])):
        ours = F.fused_rotary_position_embedding(q, sin=sin, cos=cos, position_ids=ids)[0]
        plain = R.fused_rotary_position_embedding(q, sin=sin, cos=cos, position_ids=ids)[0]
        np.testing.assert_allclose(ours.numpy(), plain.numpy(), rtol=1e-6, atol=1e-7)
