"""What `patch` replaced and what not, printed as a table."""

from __future__ import annotations

from dataclasses import dataclass, replace

REPLACED, NOT_REPLACED, WAITING = "replaced", "not replaced", "waiting"


@dataclass(frozen=True)
class Line:
    """One place.

    Attributes:
        target: the library.
        name: the place in full.
        op: "swiglu", "rms_norm" or "rope".
        status: "replaced", "not replaced", or "waiting" for its module to be imported.
        reason: why not; what it waits for.
        copies: names that were imported by value, as "module.name".
        layers: layers of a live model whose forward is ours.
        hits: calls that this package took.
        left: calls left to the original, by reason.
    """

    target: str
    name: str
    op: str
    status: str
    reason: str
    copies: tuple[str, ...]
    layers: int
    hits: int
    left: dict[str, int]


class Report:
    """The places that a call of `patch` asked for: their state when it is looked at.

    Attributes:
        lines: a list of `Line`; calls count from the making of the report on.
        replaced: names of the places that are replaced.
        hits: calls that this package took, of all places.
        fall_throughs: calls left to the originals.
    """

    def __init__(self, collect, from_now=True):
        self._collect = collect
        before = collect() if from_now else []
        self._before = {line.name: line for line in before}

    @property
    def lines(self) -> list[Line]:
        """One per place, in the order of the tables."""
        return [_since(line, self._before.get(line.name)) for line in self._collect()]

    @property
    def replaced(self) -> list[str]:
        """Names of the places that are replaced now."""
        return [line.name for line in self.lines if line.status == REPLACED]

    @property
    def hits(self) -> int:
        """Calls that this package took."""
        return sum(line.hits for line in self.lines)

    @property
    def fall_throughs(self) -> int:
        """Calls left to the originals."""
        return sum(sum(line.left.values()) for line in self.lines)

    def __str__(self) -> str:
        lines = self.lines
        cells = [("place", "state", "calls", "left to it")]
        for line in lines:
            count = sum(line.left.values())
            name = line.name
            if line.copies:
                name += f" and {len(line.copies)} by value"
            if line.layers:
                name += f" of {line.layers} layers"
            cells.append((name, line.status, str(line.hits), str(count)))
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        text = []
        for index, row in enumerate(cells):
            note = "" if index == 0 else _note(lines[index - 1])
            padded = (
                f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  "
                f"{row[3]:>{widths[3]}}  {note}"
            )
            text.append(padded.rstrip())
        return "\n".join(text)

    __repr__ = __str__


def _since(line: Line, before: Line | None) -> Line:
    """The line without the calls that were counted before."""
    if before is None:
        return line
    left = {reason: count - before.left.get(reason, 0) for reason, count in line.left.items()}
    left = {reason: count for reason, count in left.items() if count}
    return replace(line, hits=line.hits - before.hits, left=left)


def _note(line: Line) -> str:
    if line.status != REPLACED:
        return line.reason
    return "; ".join(f"{reason} ({count})" for reason, count in line.left.items())
