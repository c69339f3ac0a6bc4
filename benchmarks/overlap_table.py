"""How much of a step's communication is hidden: the figures, and the table they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from benchmarks.call_tape import Event

_HEAD = (
    "layout", "Mbit/s", "step ms", "compute ms", "communication ms", "sum ms", "hidden",
    "own order ms", "hidden at most", "peer", "peer ms", "partc/peer",
)  # fmt: skip


@dataclass(frozen=True)
class Round:
    """Seconds of the slowest rank in one round: forward and backward, no optimizer.

    ``own_order`` is what the step would take if its transfers cost the processor nothing; None
    where ranks also wait for what others compute.
    """

    step: float
    compute: float
    communication: float
    own_order: float | None
    peer: float

    @property
    def hidden(self) -> float:
        return hidden_share(self.step, self.compute, self.communication)

    @property
    def hidden_at_most(self) -> float | None:
        if self.own_order is None:
            return None
        return hidden_share(self.own_order, self.compute, self.communication)


@dataclass(frozen=True)
class Row:
    """A layout at one bandwidth, with all its rounds."""

    layout: str
    mbit_per_s: float
    peer: str
    rounds: tuple[Round, ...]
    switch_cpu_s: float = 0.0  # of the whole run, other steps and loading included

    def __str__(self) -> str:
        r = self.rounds
        sums = [each.compute + each.communication for each in r]
        orders = [each.own_order for each in r if each.own_order is not None]
        bounds = [each.hidden_at_most for each in r if each.hidden_at_most is not None]
        cells = (
            self.layout, f"{self.mbit_per_s:g}", _ms([e.step for e in r]),
            _ms([e.compute for e in r]), _ms([e.communication for e in r]), _ms(sums),
            _share([e.hidden for e in r]), _ms(orders) if orders else "-",
            _share(bounds) if bounds else "-", self.peer, _ms([e.peer for e in r]),
            _share([e.step / e.peer for e in r]),
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


def hidden_share(step: float, compute: float, communication: float) -> float:
    """``(sum - step) / (sum - max)``: 1 if the shorter of the two is hidden, 0 if they add up.

    >>> hidden_share(step=450.0, compute=300.0, communication=250.0)
    0.4
    """
    total = compute + communication
    return (total - step) / (total - max(compute, communication))


def own_order(events: Sequence[Event], compute_s: float, transfer_s: Sequence[float]) -> float:
    """Seconds of a step with this order, if transfers leave the processor alone.

    One transfer runs at a time, in the order of their starts; computing stops at waits only.
    """
    late, network_free = 0.0, 0.0
    done = [0.0] * len(transfer_s)
    for event in events:
        now = event.at_s + late
        if event.waits:
            late += max(0.0, done[event.call] - now)
        else:
            network_free = max(network_free, now) + transfer_s[event.call]
            done[event.call] = network_free
    return compute_s + late


def table(rows: Sequence[Row]) -> str:
    """Medians, and the middle half of the rounds in brackets."""
    return "\n".join([f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|", *map(str, rows)])


def _ms(seconds: Sequence[float]) -> str:
    low, middle, high = _quartiles([each * 1e3 for each in seconds])
    return f"{middle:.0f} ({low:.0f}-{high:.0f})"


def _share(values: Sequence[float]) -> str:
    low, middle, high = _quartiles(values)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high
