"""The measured sides of one layout as a markdown table, with partc as a ratio to each peer."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, quantiles

from benchmarks.workload import Reference

_HEAD = (
    "| side | step ms | fwd+bwd ms | CPU ms | peak MB | sent MB | collectives | worst error "
    "| partc / this: step | fwd+bwd | CPU | peak | sent |"
)


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

    def error(self, expected: Reference) -> float:
        """The worst relative difference of a loss or the gradient norm from one process."""
        pairs = zip(
            (*self.losses, self.grad_norm), (*expected.losses, expected.grad_norm), strict=True
        )
        return max(abs(got - want) / abs(want) for got, want in pairs)


def table(sides: list[Measured], expected: Reference) -> str:
    """Medians over the rounds; ratios are medians of the ratios within a round, with quartiles."""
    ours = next((side for side in sides if side.name == "partc"), None)
    rows = [_HEAD, "|---" + "|---:" * 12 + "|"]
    return "\n".join(rows + [_row(side, ours, expected) for side in sides])


def _row(side: Measured, ours: Measured | None, expected: Reference) -> str:
    cells = [
        side.name,
        f"{median(side.step_s) * 1e3:.0f}",
        f"{median(side.forward_backward_s) * 1e3:.0f}",
        f"{median(side.cpu_s) * 1e3:.0f}",
        f"{side.peak_bytes / 1e6:.1f}" if side.peak_bytes else "not counted",
        f"{median(side.sent_bytes) / 1e6:.1f}" if side.sent_bytes else "not counted",
        str(sum(side.collectives.values())),
        f"{side.error(expected):.1e}",
    ]
    ratios = [""] * 5 if ours is None or ours is side else _ratios(ours, side)
    return "| " + " | ".join([*cells, *ratios]) + " |"


def _ratios(ours: Measured, peer: Measured) -> list[str]:
    return [
        _ratio(ours.step_s, peer.step_s),
        _ratio(ours.forward_backward_s, peer.forward_backward_s),
        _ratio(ours.cpu_s, peer.cpu_s),
        f"{ours.peak_bytes / peer.peak_bytes:.2f}" if ours.peak_bytes and peer.peak_bytes else "",
        f"{median(ours.sent_bytes) / median(peer.sent_bytes):.2f}" if peer.sent_bytes else "",
    ]


def _ratio(ours: list[float], peer: list[float]) -> str:
    """``0.93 (0.90-0.97)``: median and quartiles of the ratios within each round."""
    each = [a / b for a, b in zip(ours, peer, strict=True)]
    if len(each) < 2:
        return f"{each[0]:.2f}"
    low, middle, high = quantiles(each, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"
