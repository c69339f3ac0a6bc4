"""From runs to rows: bytes, seconds to the fixed loss, the loss at the end, and their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from benchmarks.sync.rank import Run
from benchmarks.sync.variants import EXACT

Spread = tuple[float, float]  # of a figure over seeds: the mean, and the standard deviation


@dataclass(frozen=True)
class Row:
    """A variant over all its seeds. ``seconds_to_loss`` has only the seeds that came there.
    ``bytes_predicted``: with what follows from the counts that a run has logged.
    """

    variant: str
    bytes_predicted: float
    bytes_counted: Spread
    seconds_to_loss: Spread | None
    steps_to_loss: Spread | None
    final_loss: Spread
    exposed_s: Spread
    step_s: Spread
    reached: int
    seeds: int

    @property
    def has_lost(self) -> bool:
        """Whether a seed never came to the loss."""
        return self.reached < self.seeds

    @property
    def bytes_off(self) -> float:
        return self.bytes_counted[0] / self.bytes_predicted - 1

    def verdict(self, exact: Row) -> str:
        """How the loss at the end stands beside the spread of exact's seeds."""
        gap = self.final_loss[0] - exact.final_loss[0]
        if abs(gap) <= exact.final_loss[1]:
            return "equal"
        return "lower" if gap < 0 else "higher"

    def as_json(self) -> dict[str, Any]:
        """The means, and their standard deviations under ``spread``."""
        names = ("bytes_counted", "seconds_to_loss", "final_loss", "exposed_s")
        figures = {name: getattr(self, name) for name in names}
        if self.has_lost:
            figures["seconds_to_loss"] = None
        means = {name: each and each[0] for name, each in figures.items()}
        around = {name: each and each[1] for name, each in figures.items()}
        head = {"variant": self.variant, "bytes_predicted": self.bytes_predicted}
        return {**head, **means, "spread": around}


def target_loss(runs: Sequence[Run], step: int) -> float:
    """The loss that exact has come to behind this step with every seed: the highest of them."""
    curves = [run.curve for run in runs if run.variant == EXACT]
    return max(min(loss for at, _, loss in curve if at <= step) for curve in curves)


def rows(runs: Sequence[Run], predicted: dict[str, float], target: float) -> list[Row]:
    """A row for each variant, in the order in which they are predicted."""
    return [
        row(name, each, [run for run in runs if run.variant == name], target)
        for name, each in predicted.items()
    ]


def row(name: str, predicted: float, runs: Sequence[Run], target: float) -> Row:
    """The row of one variant from its runs with all seeds."""
    arrivals = [first for run in runs if (first := arrival(run, target))]
    return Row(
        variant=name,
        bytes_predicted=predicted + mean(run.logged_bytes for run in runs),
        bytes_counted=spread([run.counted_bytes for run in runs]),
        seconds_to_loss=spread([seconds for _, seconds in arrivals]) if arrivals else None,
        steps_to_loss=spread([step for step, _ in arrivals]) if arrivals else None,
        final_loss=spread([run.curve[-1][2] for run in runs]),
        exposed_s=spread([run.exposed_s for run in runs]),
        step_s=spread([run.step_s for run in runs]),
        reached=len(arrivals),
        seeds=len(runs),
    )


def arrival(run: Run, target: float) -> tuple[int, float] | None:
    """Steps and seconds at the first look at the held-out loss that is at most the target."""
    return next(((step, seconds) for step, seconds, loss in run.curve if loss <= target), None)


def spread(values: Sequence[float]) -> Spread:
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def table(found: Sequence[Row]) -> str:
    """All rows as a table of Markdown; variants that never came to the loss say so."""
    exact = next(each for each in found if each.variant == EXACT)
    head = (
        "variant", "kB predicted", "kB counted", "off", "step ms", "exposed ms", "steps to loss",
        "seconds to loss", "exact / it", "final loss", "beside exact's",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 2) + "---|"]
    return "\n".join([*lines, *(_line(each, exact) for each in found)])


def _line(it: Row, exact: Row) -> str:
    cells = (
        it.variant, f"{it.bytes_predicted / 1e3:.1f}", f"{it.bytes_counted[0] / 1e3:.1f}",
        f"{it.bytes_off:+.1%}", _text(it.step_s, 0, 1e3), _text(it.exposed_s, 0, 1e3),
        *_to_loss(it, exact), _text(it.final_loss, 3), it.verdict(exact),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _to_loss(it: Row, exact: Row) -> tuple[str, str, str]:
    """Steps, seconds, and how much faster than exact sums."""
    if it.has_lost or not it.seconds_to_loss or not it.steps_to_loss:
        return "-", f"{it.reached} of {it.seeds} seeds" if it.reached else "never", "-"
    ratio = exact.seconds_to_loss[0] / it.seconds_to_loss[0] if exact.seconds_to_loss else 0.0
    return _text(it.steps_to_loss, 0), _text(it.seconds_to_loss, 1), f"{ratio:.2f}"


def _text(each: Spread, digits: int, scale: float = 1.0) -> str:
    middle, around = (value * scale for value in each)
    return f"{middle:.{digits}f} ± {around:.{digits}f}"
