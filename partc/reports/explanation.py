"""Explain a saved program: the plan's choices and their alternatives, what bounds the step, what
fills the memory, and what other machines would change.

Everything is read or estimated from the program's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partc.amounts import amount, time_text
from partc.cost.cost_parts import peak_memory
from partc.cost.prediction import Prediction
from partc.machines.objective import Objective, per_million
from partc.machines.topology import Topology
from partc.passes.search.plans.alternatives import Alternative, WhatIf, alternatives, what_ifs
from partc.passes.search.plans.search_plans import Ranked, Search, Taken
from partc.program import Program

Texts = Sequence[Sequence[str]]
TOP = 8  # holders of memory that are shown
_BOUNDS = {"arithmetic": "compute", "memory": "memory", "launches": "launches", "bubble": "bubble"}


@dataclass(frozen=True)
class Estimated:
    """The search's estimates of the plan taken, of its alternatives, and of changed machines."""

    taken: Taken
    chosen: Ranked
    choices: tuple[Alternative, ...]
    changes: tuple[WhatIf, ...]

    @classmethod
    def of(cls, taken: Taken) -> Estimated:
        search, one = taken.search, taken.candidate
        return cls(
            taken, search.estimate(one), tuple(alternatives(search, one)), tuple(what_ifs(taken))
        )

    @property
    def search(self) -> Search:
        return self.taken.search

    def heads(self) -> tuple[str, ...]:
        """The names of the columns of ``costs``."""
        return ("step", "memory") if self.search.objective == "time" else ("step", "cost", "memory")

    def costs(self, one: Ranked | None) -> tuple[str, ...]:
        """A candidate's time and memory; the time is relative to the chosen plan.

        With another objective than time, the relative cost by that objective too.
        """
        if one is None:
            return ("nothing fits", *[""] * (len(self.heads()) - 1))
        step = _more(one.estimate.step_s / self.chosen.estimate.step_s - 1)
        cost = _more(self.search.cost(one) / self.search.cost(self.chosen) - 1)
        memory = _gigabytes(one.estimate.peak_bytes)
        return (step, memory) if self.search.objective == "time" else (step, cost, memory)

    def as_json(self) -> dict[str, Any]:
        """The estimates as plain data, in seconds and bytes."""
        return {
            "objective": self.search.objective,
            "searched": self.taken.searched,
            "candidates": len(self.search.candidates),
            "limit_bytes": self.search.limit,
            **_numbers(self.chosen, self.search),
            "choices": [
                {"choice": each.choice, "taken": each.taken, "instead": each.instead}
                | _numbers(each.ranked, self.search)
                for each in self.choices
            ],
            "changes": [
                {"change": each.change, "instead": each.instead}
                | _numbers(each.ranked, self.search)
                for each in self.changes
            ],
        }


@dataclass(frozen=True)
class Explanation:
    """Everything that ``partc explain`` shows of a program.

    ``estimated`` is None where the plan is none of the search's candidates.
    """

    prediction: Prediction | None
    prices: Mapping[str, float]  # of a million tokens: in kWh, and in $ where devices have a price
    peak_bytes: int
    holders: tuple[tuple[str, int], ...]
    estimated: Estimated | None

    def __str__(self) -> str:
        first = [*self.choices_text(), *self.bounds_text()]
        return "\n".join([*first, *self.holders_text(), *self.changes_text()])

    # text ----------------------------------------------------------------------------------------
    def choices_text(self) -> list[str]:
        """What was chosen, and what each choice would cost otherwise; none without estimates."""
        found = self.estimated
        if found is None:
            return []
        own = found.chosen.estimate
        num = len(found.search.candidates)
        of = f"the next best of {num} candidates" if found.taken.searched else "others near it"
        price = found.search.price(found.chosen)
        title = (
            f"choices, and {of}; estimated {time_text(own.step_s)} a step, "
            f"{_gigabytes(own.peak_bytes)} of {_gigabytes(found.search.limit)} a rank"
            f"{', ' if price else ''}{price}"
        )
        rows = [("choice", "taken", "instead", *found.heads(), "")]
        for each in found.choices:
            fits = each.ranked is None or found.search.fits(each.ranked)
            cost = (*found.costs(each.ranked), "" if fits else "does not fit")
            rows.append((each.choice, each.taken, each.instead, *cost))
        return [title, *columns(rows, right=range(3, len(rows[0]) - 1)), ""]

    def bounds_text(self) -> list[str]:
        """By phase of the step the shares of computing, memory and waits."""
        step = self.prediction
        if step is None:
            return []
        names = list(dict.fromkeys(name for phase in step.phases for name in phase.parts))
        names.sort(key=lambda name: [*_BOUNDS, name].index(name))
        rows = [("phase", *(_BOUNDS.get(name, f"over {name}") for name in names), "all")]
        for phase in step.phases:
            each = [phase.parts.get(name, 0.0) for name in names]
            rows.append((phase.name, *(_share(s, step.seconds) for s in (*each, phase.seconds))))
        sums = [sum(p.parts.get(name, 0.0) for p in step.phases) for name in names]
        rows.append(("all", *(_share(s, step.seconds) for s in (*sums, step.seconds))))
        title = f"what bounds the step, as predicted {time_text(step.seconds)}"
        much = ", ".join(f"{price:.3g} {unit}" for unit, price in self.prices.items())
        price = [f"  a million {step.work.batch.unit} take {much}"] if much else []
        return [title, *columns(rows, right=range(1, len(names) + 2)), *price, ""]

    def holders_text(self) -> list[str]:
        """Who holds memory at the peak, the largest first."""
        rows = [(amount(size, "B"), _share(size, self.peak_bytes), who)
                for who, size in self.holders[:TOP]]  # fmt: skip
        if not rows:
            return []
        title = f"who holds memory, at the peak {amount(self.peak_bytes, 'B')}"
        return [title, *columns(rows, right=(0, 1)), ""]

    def changes_text(self) -> list[str]:
        """What other machines would change, by estimate."""
        found = self.estimated
        if found is None:
            return []
        rows = [("what if", *found.heads(), "plan")]
        for each in found.changes:
            rows.append((each.change, *found.costs(each.ranked), each.instead or "the same"))
        title = "what other machines would change"
        return [title, *columns(rows, right=range(1, len(rows[0]) - 1)), ""]

    def as_json(self) -> dict[str, Any]:
        """The explanation as plain data, in seconds and bytes."""
        return {
            "prediction": self.prediction.as_json() if self.prediction else None,
            "per_million": dict(self.prices),
            "peak_bytes": self.peak_bytes,
            "holders": [list(holder) for holder in self.holders[:TOP]],
            "estimated": self.estimated.as_json() if self.estimated else None,
        }


def explain_program(program: Program) -> Explanation:
    """The explanation of a saved program."""
    cost = program.cost.as_json() or {}
    told = cost.get("prediction")
    peak, holders = peak_memory(cost)
    taken = program.basis.taken
    step = Prediction.of_json(told) if told else None
    return Explanation(
        prediction=step,
        prices=_prices(step, program.basis.topology()) if step else {},
        peak_bytes=peak,
        holders=holders,
        estimated=Estimated.of(taken) if taken else None,
    )


def explain_program_memory(program: Program) -> tuple[int, tuple[tuple[str, int], ...]]:
    """The peak of the program's fullest rank, and what it holds there, largest first."""
    return peak_memory(program.cost.as_json() or {})


def _prices(step: Prediction, topology: Topology) -> dict[str, float]:
    """The price of a million tokens, in kWh and in $, where the device's file has the data."""
    units: dict[str, Objective] = {"kWh": "energy", "$": "dollars"}
    prices = {
        unit: per_million(objective, step.seconds, step.devices, topology, step.work.batch)
        for unit, objective in units.items()
    }
    return {unit: price for unit, price in prices.items() if price is not None}


def _more(ratio: float) -> str:
    return f"{100 * ratio:+.1f} %" if abs(ratio) >= 5e-4 else "the same"


def _numbers(one: Ranked | None, search: Search) -> dict[str, Any]:
    if one is None:
        nothing = dict.fromkeys(("plan", "step_s", "peak_bytes", "per_million"))
        return {**nothing, "fits": False}
    estimate = one.estimate
    return {
        "plan": str(one.candidate), "step_s": estimate.step_s, "peak_bytes": estimate.peak_bytes,
        "per_million": search.per_million(one), "fits": search.fits(one),
    }  # fmt: skip


def _gigabytes(size: float) -> str:
    return amount(round(size), "B")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if part else "-"


def columns(rows: Texts, right: Sequence[int] = ()) -> list[str]:
    """Rows as aligned, indented lines; the columns numbered in ``right`` are right-aligned."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        ("  " + "  ".join(
            f"{text:>{w}}" if i in right else f"{text:<{w}}"
            for i, (text, w) in enumerate(zip(row, wide, strict=True))
        )).rstrip()
        for row in rows
    ]  # fmt: skip
