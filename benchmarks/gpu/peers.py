"""Public implementations of a workload, each as a function of its buffers.

PyTorch through torch.compile (dynamic=False) and F.rms_norm; Liger-Kernel's Triton and CuTe kernels
and QuACK's kernels where they are installed, called below autograd; and the structure of Paddle's
own kernel where Paddle has one. A saved 1 / rms is ready where a peer wants it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F

from .workloads import Workload

EPSILON = 1e-6
LLAMA = 0  # Liger-Kernel's number of that casting mode


@dataclass
class Peer:
    """call(prepare(buffers)) returns the tensors that the workload writes, in its order.

    Attributes:
        check: buffers -> these tensors, where prepare changes the inputs, for comparisons.
    """

    name: str
    call: Callable
    prepare: Callable = lambda buffers: buffers
    check: Callable | None = None


def _import(name: str):
    """A module, or None where it, or something that it needs, is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def versions() -> dict[str, str]:
    """Of every peer; "not installed" where it is not."""
    found = {"torch": torch.__version__}
    for name, package, module in (
        ("Liger-Kernel", "liger-kernel", "liger_kernel.ops.rms_norm"),
        ("QuACK", "quack-kernels", "quack.rmsnorm"),
        ("CuTe DSL", "nvidia-cutlass-dsl", "cutlass.cute"),
    ):
        there = _import(module) is not None
        found[name] = importlib.metadata.version(package) if there else "not installed"
    return found


def _compiled(function, arguments) -> Peer:
    call = torch.compile(function, dynamic=False)
    return Peer("torch.compile", lambda b: call(*arguments(b)))


def _cute(module: str):
    """A module of Liger-Kernel's CuTe kernels, or None."""
    if _import("cutlass.cute") is None:
        return None
    return _import(f"liger_kernel.ops.backends._cutedsl.{module}")


def _inverse_rms(x) -> torch.Tensor:
    return torch.rsqrt(x.float().square().mean(-1) + EPSILON)


# SwiGLU


def swiglu_forward(w: Workload, kernels):
    """The weighted one: nobody but Paddle has it."""

    def forward(x, probs):
        gate, up = x.float().chunk(2, -1)
        return ((F.silu(gate) * up * probs[:, None]).to(x.dtype),)

    yield _compiled(forward, lambda b: b[:2])


def swiglu_backward(w: Workload, kernels):
    """torch.compile, and Paddle's structure."""

    def backward(x, g, probs):
        gate, up = x.float().chunk(2, -1)
        s, gf = torch.sigmoid(gate), g.float()
        weighted, silu = gf * probs[:, None], gate * s
        gate_grad = weighted * up * s * (1 + gate * (1 - s))
        dx = torch.cat([gate_grad, weighted * silu], -1).to(x.dtype)
        return dx, (gf * silu * up).sum(-1), (silu * up * probs[:, None]).to(x.dtype)

    yield _compiled(backward, lambda b: b[:3])
    rows, cols = map(int, w.shape.split("x"))

    def four_wide(buffers):
        pointers = [c_void_p(b.data_ptr()) for b in buffers]
        kernels.call(
            "pf_four_wide_swiglu_backward", *pointers, c_int64(rows), cols, kernels.stream()
        )
        return buffers[3:]

    def own_outputs(buffers):
        return (*buffers[:3], *map(torch.empty_like, buffers[3:]))

    yield Peer("Paddle's structure", four_wide, own_outputs)


def plain_swiglu_forward(w: Workload, kernels):
    """torch.compile, Liger-Kernel's packed form and its CuTe form of two tensors."""

    def forward(x):
        gate, up = x.float().chunk(2, -1)
        return ((F.silu(gate) * up).to(x.dtype),)

    yield _compiled(forward, lambda b: b[:1])
    if liger := _import("liger_kernel.ops.swiglu"):
        yield Peer("Liger", lambda b: (liger.swiglu_fused_gate_up_forward(b[0]),))
    if cute := _cute("swiglu"):
        halves = lambda b: [half.contiguous() for half in b[0].chunk(2, -1)]  # noqa: E731
        call = lambda b: cute._swiglu_cutedsl_forward(*b, 1.0, 1.0)[2:]  # noqa: E731
        yield Peer("Liger CuTe", call, halves)


def plain_swiglu_backward(w: Workload, kernels):
    """As the forward."""

    def backward(x, g):
        gate, up = x.float().chunk(2, -1)
        s, gf = torch.sigmoid(gate), g.float()
        gate_grad = gf * up * s * (1 + gate * (1 - s))
        return (torch.cat([gate_grad, gf * gate * s], -1).to(x.dtype),)

    yield _compiled(backward, lambda b: b[:2])
    if liger := _import("liger_kernel.ops.swiglu"):
        yield Peer("Liger", lambda b: (liger.swiglu_fused_gate_up_backward(b[0], b[1]),))
    if cute := _cute("swiglu"):

        def prepare(b):
            return (b[1], *(half.contiguous() for half in b[0].chunk(2, -1)))

        # Two tensors instead of one packed one: no joint result to compare.
        def call(b):
            cute._swiglu_cutedsl_backward(*b, 1.0, 1.0)

        yield Peer("Liger CuTe", call, prepare)


# RMSNorm


def rms_norm_forward(w: Workload, kernels):
    """Out only: nobody stores 1 / rms."""
    cols = w.width

    def forward(x, weight):
        return (F.rms_norm(x, (cols,), weight, EPSILON),)

    yield _compiled(forward, lambda b: b[:2])
    yield Peer("F.rms_norm", lambda b: forward(*b[:2]))
    if liger := _import("liger_kernel.ops.rms_norm"):
        call = liger.rms_norm_forward
        yield Peer("Liger", lambda b: call(b[0], b[1], EPSILON, 0.0, "llama", None)[:1])
    if quack := _import("quack.rmsnorm"):
        yield Peer("QuACK", lambda b: quack.rmsnorm_fwd(b[0], b[1], eps=EPSILON)[:1])


def rms_norm_backward(w: Workload, kernels):
    """The gradients of x and of the weight."""
    cols = w.width

    def backward(x, g, weight):
        xf, gf = x.float(), g.float()
        r = torch.rsqrt(xf.square().mean(-1, keepdim=True) + EPSILON)
        z, m = xf * r, gf * weight.float()
        dx = r * (m - z * (m * z).mean(-1, keepdim=True))
        return dx.to(x.dtype), (gf * z).sum(0).to(weight.dtype)

    def derived(x, g, weight):
        _, pull = torch.func.vjp(lambda x, w: F.rms_norm(x, (cols,), w, EPSILON), x, weight)
        return pull(g)

    def with_inverse(b):
        return (*b[:3], _inverse_rms(b[0]))

    yield _compiled(backward, lambda b: b[:3])
    automatic = _compiled(derived, lambda b: b[:3])
    yield Peer("torch.compile, autograd", automatic.call)
    native = torch.ops.aten._fused_rms_norm_backward
    yield Peer(
        "F.rms_norm",
        lambda b: native(b[1], b[0], (cols,), b[3][:, None], b[2], [True, True]),
        with_inverse,
    )
    if liger := _import("liger_kernel.ops.rms_norm"):
        kept = _liger_backward(liger, in_place=False)
        yield Peer(
            *("Liger", _liger_backward(liger, in_place=True), _overwritable),
            check=lambda b: kept(with_inverse(b)),
        )
    if (cute := _cute("rms_norm")) and cols <= cute._BWD_MAX_TILE_CUTEDSL:

        def cute_backward(b):
            x, g, weight, inverse = b
            return cute._rms_norm_cutedsl_backward(g, x, weight, inverse, False, LLAMA)

        yield Peer("Liger CuTe", cute_backward, with_inverse)
    if quack := _import("quack.rmsnorm"):
        yield Peer("QuACK", lambda b: quack.rmsnorm_bwd(b[0], b[2], b[1], b[3])[:2], with_inverse)


def _overwritable(b):
    """Buffers for a kernel that writes dx over dy.

    Its weights are 1 and -1: dy stays in range however often it is overwritten.
    """
    return b[0], b[1].clone(), torch.where(b[2] < 0, -1.0, 1.0).to(b[2].dtype), _inverse_rms(b[0])


def _liger_backward(liger, in_place):
    """In place is the default of Liger-Kernel's module; else it clears a new tensor first."""
    settings = importlib.import_module("liger_kernel.ops.utils").calculate_settings

    def call(b):
        x, g, weight, inverse = b
        return liger.rms_norm_backward(
            *(g, x, weight, inverse, 0.0, LLAMA, *settings(x.shape[-1]), in_place, None)
        )[:2]

    return call


def add_rms_norm_forward(w: Workload, kernels):
    """Out and the sum."""
    cols = w.width

    def forward(x, residual, weight):
        total = x + residual
        return F.rms_norm(total, (cols,), weight, EPSILON), total

    yield _compiled(forward, lambda b: (b[0], b[3], b[1]))
    if liger := _import("liger_kernel.ops.fused_add_rms_norm"):
        call = liger.fused_add_rms_norm_forward
        yield Peer("Liger", lambda b: call(b[0], b[3], b[1], EPSILON, 0.0, "llama")[:2])
    if quack := _import("quack.rmsnorm"):
        yield Peer("QuACK", lambda b: quack.rmsnorm_fwd(b[0], b[1], residual=b[3], eps=EPSILON)[:2])


def add_rms_norm_backward(w: Workload, kernels):
    """With the gradient that reaches the sum from elsewhere."""

    def backward(x, g, weight, more):
        xf, gf = x.float(), g.float()
        r = torch.rsqrt(xf.square().mean(-1, keepdim=True) + EPSILON)
        z, m = xf * r, gf * weight.float()
        dx = r * (m - z * (m * z).mean(-1, keepdim=True)) + more.float()
        return dx.to(x.dtype), (gf * z).sum(0).to(weight.dtype)

    def with_inverse(b):
        return (*b[:3], b[6], _inverse_rms(b[0]))

    yield _compiled(backward, lambda b: (*b[:3], b[6]))
    if liger := _import("liger_kernel.ops.fused_add_rms_norm"):
        utils = importlib.import_module("liger_kernel.ops.utils")

        def fused(b):
            x, g, weight, more, inverse = b
            block, warps = utils.calculate_settings(x.shape[-1])
            dx, _, dw = liger.fused_add_rms_norm_backward(
                *(g, more, x, weight, inverse, 0.0, LLAMA, block, warps, 2, False)
            )
            return dx, dw

        yield Peer("Liger", fused, with_inverse)
    if quack := _import("quack.rmsnorm"):
        yield Peer(
            "QuACK",
            lambda b: quack.rmsnorm_bwd(b[0], b[2], b[1], b[4], dresidual_out=b[3])[:2],
            with_inverse,
        )


# RoPE


def rope(w: Workload, kernels):
    """Q and k; QuACK takes a launch for each."""
    adjoint = w.name == "rope_bwd"

    def rotate(q, k, cos, sin):
        def one(t):
            a, b = t.chunk(2, -1)
            turned = torch.cat([b, -a], -1) if adjoint else torch.cat([-b, a], -1)
            return (t * cos[:, None] + turned * sin[:, None]).to(t.dtype)

        return one(q), one(k)

    yield _compiled(rotate, lambda b: (*b[0], *b[2]))
    if liger := _import("liger_kernel.ops.rope"):
        call = liger.rope_backward if adjoint else liger.rope_forward

        def in_place(b):  # it takes [B, heads, S, D] and writes over storage of [B, S, heads, D]
            (q, k), (cos, sin) = b
            return [t.transpose(1, 2) for t in call(q, k, cos, sin)[:2]]

        def prepare(b):
            return [t.clone().transpose(1, 2) for t in b[0]], b[2]

        yield Peer("Liger", in_place, prepare)
    if quack := _import("quack.rotary"):

        def both(b):
            tensors, (cos, sin) = b
            return [quack.apply_rotary(t, cos, sin, conjugate=adjoint) for t in tensors]

        def half_tables(b):
            return b[0], [t[:, : t.shape[-1] // 2].contiguous() for t in b[2]]

        yield Peer("QuACK", both, half_tables)


FACTORIES = {
    "swiglu_fwd": swiglu_forward,
    "swiglu_bwd": swiglu_backward,
    "plain_swiglu_fwd": plain_swiglu_forward,
    "plain_swiglu_bwd": plain_swiglu_backward,
    "rms_fwd": rms_norm_forward,
    "rms_bwd": rms_norm_backward,
    "add_rms_fwd": add_rms_norm_forward,
    "add_rms_bwd": add_rms_norm_backward,
    "rope_fwd": rope,
    "rope_bwd": rope,
}


def peers_of(workload: Workload, kernels) -> list[Peer]:
    """Every peer of a workload that is installed."""
    return list(FACTORIES[workload.name](workload, kernels))


def disagreement(peer: Peer, workload: Workload, buffers) -> float:
    """How far a peer's results lie from ours: the largest relative difference of a tensor.

    By its Frobenius norm, over the results that the peer gives; ours lie in the buffers.
    """
    theirs = peer.check(buffers) if peer.check else peer.call(peer.prepare(buffers))
    if theirs is None:
        return 0.0
    worst = 0.0
    for got, want in zip(theirs, workload.results(buffers)):
        got, want = got.float(), want.float()
        worst = max(worst, float((got - want).norm() / want.norm()))
    return worst
