"""PyTorch's side: eager, torch.nn.functional.rms_norm, torch.compile."""

from __future__ import annotations

import sys

import torch

from benchmarks.cpu import cases, worker

F = torch.nn.functional


def tensor(rng, shape, dtype, trains=False):
    """Random values."""
    value = torch.from_numpy(rng.standard_normal(shape, dtype="float32")).to(getattr(torch, dtype))
    return value.requires_grad_(trains)


def rms_norm(x, weight):
    """Hugging Face's LlamaRMSNorm."""
    wide = x.float()
    hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * hat.to(x.dtype)


def swiglu(x):
    """As a model writes it."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_weighted(x, probs):
    """In float32 with one rounding, as mixtures of experts write it."""
    gate, up = x.chunk(2, -1)
    return (F.silu(gate.float()) * up.float() * probs[:, None]).to(x.dtype)


def swiglu_weighted_bwd(x, grad, probs):
    """The formula of fused_swiglu_weighted_bwd."""
    gate, up = (half.float() for half in x.chunk(2, -1))
    grad = grad.float()
    sigmoid = torch.sigmoid(gate)
    silu, scaled = gate * sigmoid, grad * probs[:, None]
    gate_grad = scaled * up * sigmoid * (1 + gate * (1 - sigmoid))
    do1 = torch.cat([gate_grad, scaled * silu], -1).to(x.dtype)
    value = silu * up
    return do1, (grad * value).sum(-1), (value * probs[:, None]).to(x.dtype)


def _rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rope(q, k, sin, cos):
    """Hugging Face's apply_rotary_pos_emb; tables in the tensors' dtype, as there."""
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def both_ways(case, function, inputs, trained, ready):
    """(prepare, call) of the forward or of the backward pass."""
    if case.direction == "forward":

        def forward(_):
            with torch.no_grad():
                return function(*inputs)

        return None, forward

    def prepare():
        outputs = function(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return prepare, lambda outputs: torch.autograd.grad(outputs, trained, ready)


def make_case(case: cases.Case, rng) -> dict:
    """The providers of a case."""
    trains = case.direction == "backward"
    ready = [tensor(rng, case.shape, case.dtype)]
    functions = {}
    if case.operator == "rms_norm":
        inputs = [tensor(rng, shape, case.dtype, trains) for shape in (case.shape, case.shape[-1:])]
        trained, function = inputs, rms_norm
        functions["F.rms_norm"] = lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6)
    elif case.operator == "rope":
        q, k = (tensor(rng, case.shape, case.dtype, trains) for _ in range(2))
        tables = [tensor(rng, (case.shape[1], 1, case.shape[3]), case.dtype) for _ in range(2)]
        inputs, trained, function = [q, k, *tables], [q, k], rope
        ready.append(tensor(rng, case.shape, case.dtype))
    else:
        rows, width = case.shape
        weighted = case.operator != "swiglu"
        by_hand = case.operator == "fused_swiglu_weighted_bwd"
        x = tensor(rng, (rows, 2 * width), case.dtype, trains and not by_hand)
        probs = tensor(rng, (rows,), "float32", trains and not by_hand)
        inputs = trained = [x, probs] if weighted else [x]
        function = swiglu_weighted if weighted else swiglu
        if by_hand:
            inputs, function = [x, ready[0], probs], swiglu_weighted_bwd
            case = cases.Case(case.operator, "forward", case.dtype, case.size)
    functions["PyTorch eager"] = function
    torch._dynamo.reset()
    functions["torch.compile"] = torch.compile(function, dynamic=False)
    return {name: both_ways(case, each, inputs, trained, ready) for name, each in functions.items()}


def main() -> None:
    """Serves until the driver closes the pipe."""
    torch.set_num_threads(int(sys.argv[1]))
    if sys.argv[2] == "keep":
        worker.keep_freed_memory()
    worker.serve({"torch": torch.__version__}, make_case)


if __name__ == "__main__":
    main()
