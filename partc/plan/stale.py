"""The table ``[stale]`` of a plan: islands share gradients while later steps compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from partc.plan.entries import Entries, is_number, is_whole, of_steps

STALE = "stale"  # the word of ``allow``, and the name of the table
MOST_STEPS = 64
LATE, THEN = "late", "then"  # in the names of what a slot keeps of a parameter: ``w_late0@island``


@dataclass(frozen=True)
class Stale:
    """How late islands apply the gradients that they share: the plan's table ``[stale]``.

    Gradients become their mean over islands while the next ``steps`` steps compute, and are applied
    so many steps late: theta[t+1] = theta[t] - Opt(mean of g(theta[t-k])). In the first ``steps``
    steps nothing is applied. ``compensation``: the lambda of delay compensation (DC-ASGD, Zheng et
    al. 2017), here of the mean: g + lambda * g * g * (theta[t] - theta[t-k]). ``start_step``: in so
    many first steps gradients are applied at once.
    """

    steps: int
    compensation: float = 0.0
    start_step: int = 0

    @property
    def keeps(self) -> tuple[str, ...]:
        """What islands keep of each parameter from one step to the next, by word."""
        words = (LATE, THEN) if self.compensation else (LATE,)
        return tuple(f"{word}{slot}" for slot in range(self.steps) for word in words)

    def lines(self) -> dict[str, str]:
        """The entries of the table as TOML, by name: those that say something."""
        every = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: repr(given) for name, (given, usual) in every.items() if given != usual}


def read_stale(table: Mapping[str, Any], where: str) -> Stale:
    """The table of a plan.toml as Stale; PlanError for an unknown or wrong entry."""
    made: Stale = _ENTRIES.read(table, where)
    return made


def _is_steps(given: Any) -> str:
    fits = is_whole(given) and 1 <= given <= MOST_STEPS
    return "" if fits else f"it says how many steps late gradients are, from 1 to {MOST_STEPS}"


def _is_compensation(given: Any) -> str:
    return "" if is_number(given) and 0 <= given < 1e6 else "it is a number from 0"


_ENTRIES = Entries(
    STALE, Stale,
    {"steps": _is_steps, "compensation": _is_compensation, "start_step": of_steps},
    "steps = 1", "it does not say how many steps late gradients are",
    told=dict.fromkeys(
        ("delay", "staleness", "late", "max_steps_late", "bound"),
        "Write steps = 1, how many steps late gradients are.",
    ),
)  # fmt: skip
