"""The measured sides of one layout as a markdown table, with partc as a ratio to each peer."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, quantiles

from benchmarks.workload import Reference

_SIDES = (
    "| side | step ms | fwd+bwd ms | CPU ms | peak MB | sent MB | collectives "
    "| loss error | gradient norm error |"
)
_RATIOS = "| size | layout | peer | step | fwd+bwd | CPU | peak memory | sent |"


@dataclass(frozen=True)
class Measured:
    """One side of one layout: what its first steps gave, and one figure per round."""

    name: str
    losses: tuple[float, ...]
    grad_norm: float
    peak_bytes: int | None
    collectives: dict[str, int]
    forward_backward_s: list[float]
    step_s: list[float]
    cpu_s: list[float]
    sent_bytes: list[int]

    def loss_error(self, expected: Reference) -> float:
        """The worst relative difference of a step's loss from one process."""
        pairs = zip(self.losses, expected.losses, strict=True)
        return max(abs(got - want) / abs(want) for got, want in pairs)

    def norm_error(self, expected: Reference) -> float:
        """The relative difference of the gradient's norm from one process."""
        return abs(self.grad_norm - expected.grad_norm) / expected.grad_norm


def side_table(sides: list[Measured], expected: Reference) -> str:
    """Every side of one layout: medians over the rounds."""
    return _table(_SIDES, [_side_row(side, expected) for side in sides])


def ratio_table(measured: list[tuple[str, str, list[Measured]]]) -> str:
    """partc over each peer, by size and layout; "" where partc was left out."""
    rows = [
        [size, layout, peer.name, *_ratios(ours, peer)]
        for size, layout, sides in measured
        for ours in sides
        if ours.name == "partc"
        for peer in sides
        if peer is not ours
    ]
    return _table(_RATIOS, rows) if rows else ""


def _table(head: str, rows: list[list[str]]) -> str:
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _side_row(side: Measured, expected: Reference) -> list[str]:
    return [
        side.name,
        f"{median(side.step_s) * 1e3:.0f}",
        f"{median(side.forward_backward_s) * 1e3:.0f}",
        f"{median(side.cpu_s) * 1e3:.0f}",
        f"{side.peak_bytes / 1e6:.1f}" if side.peak_bytes else "not counted",
        f"{median(side.sent_bytes) / 1e6:.1f}" if side.sent_bytes else "not counted",
        str(sum(side.collectives.values())),
        f"{side.loss_error(expected):.1e}",
        f"{side.norm_error(expected):.1e}",
    ]


def _ratios(ours: Measured, peer: Measured) -> list[str]:
    peak = ours.peak_bytes / peer.peak_bytes if ours.peak_bytes and peer.peak_bytes else None
    counted = ours.sent_bytes and peer.sent_bytes
    sent = median(ours.sent_bytes) / median(peer.sent_bytes) if counted else None
    return [
        ratio(ours.step_s, peer.step_s),
        ratio(ours.forward_backward_s, peer.forward_backward_s),
        ratio(ours.cpu_s, peer.cpu_s),
        f"{peak:.2f}" if peak else "not counted",
        f"{sent:.2f}" if sent else "not counted",
    ]


def ratio(ours: list[float], peer: list[float]) -> str:
    """``0.93 (0.90-0.97)``: median and quartiles of the ratios within each round."""
    each = [a / b for a, b in zip(ours, peer, strict=True)]
    if len(each) < 2:
        return f"{each[0]:.2f}"
    low, middle, high = quantiles(each, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"
