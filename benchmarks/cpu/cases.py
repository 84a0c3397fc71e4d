"""What is measured: operators, dtypes and sizes, and the bytes that each has to move at least.

Knows no framework: every worker process imports it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = ("float32", "bfloat16")
# tiny: the cost of a call. cache: [64, 1024], within a core's caches. llc: a few MiB. memory: 64
# MiB a tensor, beyond the last-level cache.
SIZES = ("tiny", "cache", "llc", "memory")
DIRECTIONS = ("forward", "backward")
HEAD_DIM = 128

# Tensors of the row's width that are read and written, in units of the output of the forward pass.
STREAMS = {
    ("rms_norm", "forward"): (1, 1),
    ("rms_norm", "backward"): (2, 1),
    ("swiglu", "forward"): (2, 1),
    ("swiglu", "backward"): (3, 2),
    ("swiglu_weighted", "forward"): (2, 1),
    ("swiglu_weighted", "backward"): (3, 2),
    # The hand-written backward pass, which also gives the forward's result again.
    ("fused_swiglu_weighted_bwd", "backward"): (3, 3),
    ("rope", "forward"): (1, 1),
    ("rope", "backward"): (1, 1),
}


@dataclass(frozen=True)
class Case:
    """One operator in one direction on one size."""

    operator: str
    direction: str
    dtype: str
    size: str

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, width] of the forward's output; of q (and of k) for rope: [B, S, heads, D]."""
        item = ITEM[self.dtype]
        if self.operator == "rope":
            return {
                "tiny": (1, 1, 1, 64),
                "cache": (1, 64, 4, HEAD_DIM),
                "llc": (1, (2 << 20) // (8 * HEAD_DIM * item), 8, HEAD_DIM),
                "memory": (4, (32 << 20) // (4 * 16 * HEAD_DIM * item), 16, HEAD_DIM),
            }[self.size]
        halves = 1 if self.operator == "rms_norm" else 2  # SwiGLU's input is two tensors wide
        return {
            "tiny": (1, 64),
            "cache": (64, 1024),
            "llc": ((4 << 20) // (1024 * item * halves), 1024),
            "memory": ((64 << 20) // (4096 * item), 4096 // halves),
        }[self.size]

    @property
    def elements(self) -> int:
        """Elements of one stream: of the output, of q and k together for rope."""
        product = 1
        for size in self.shape:
            product *= size
        return 2 * product if self.operator == "rope" else product

    @property
    def streams(self) -> tuple[int, int]:
        """Streams read and written."""
        return STREAMS[self.operator, self.direction]

    @property
    def bytes(self) -> int:
        """Bytes that have to be moved at least; weights, tables and probs are not counted."""
        return sum(self.streams) * self.elements * ITEM[self.dtype]

    def __str__(self) -> str:
        return f"{self.operator} {self.direction} {self.dtype} {self.size}"

    def to_json(self) -> dict:
        """For the pipe to a worker."""
        return asdict(self)


def all_cases(operators, dtypes, sizes) -> list[Case]:
    """Every combination, in the order of the table."""
    return [
        Case(operator, direction, dtype, size)
        for operator, direction in STREAMS
        for size in sizes
        for dtype in dtypes
        if not operators or operator in operators
    ]
