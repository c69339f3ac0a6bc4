"""The errors of a search in which no candidate fits the memory.

They name each of the user's pins without which a plan would fit, with its time and memory; else the
number of devices on which one would, and the candidate that needs least memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from partc.amounts import amount, time_text
from partc.errors import MemoryLimitError, PlanError
from partc.passes.search.plans.alternatives import only_changed
from partc.passes.search.plans.candidate import RECOMPUTE
from partc.passes.search.plans.search_plans import Ranked, Search, Taken
from partc.plan.mesh import Mesh

HOLDERS = 3  # the largest kinds of memory that an error names
MOST_FACTOR = 64  # up to so many times more (or fewer) devices are tried


@dataclass(frozen=True)
class Release:
    """A pin of the user's, and the best candidate that fits without it."""

    pin: str
    ranked: Ranked

    def __str__(self) -> str:
        return f"without {self.pin}: {_text(self.ranked)}"


class NothingFitsError(PlanError):
    """No candidate fits; ``least`` needs least memory, by the estimate of ``search``."""

    least: Ranked | None = None
    search: Search | None = None

    def needing(self, num_bytes: int) -> PlanError:
        """The same with the limit under which a program of ``least`` was counted to fit."""
        assert self.least is not None
        enough = max(num_bytes, ceil(self.least.estimate.peak_bytes))
        do = self.do.removesuffix(".") + f": with memory_bytes = {enough} a program fits."
        return PlanError(where=self.where, what=self.what, why=self.why, do=do)


def nothing_fits(search: Search) -> PlanError:
    """The error that says why no candidate fits, and which change would help."""
    tried = list(search.ascending())
    found = sorted(releases(search), key=lambda one: one.ranked.estimate.step_s)
    others = [] if any(one.pin != _memory(search) for one in found) else [_other_devices(search)]
    helps = "; ".join([*map(str, found), *filter(None, others)])
    helps = f"By estimate it fits {helps}. " if helps else ""
    if not tried:
        return PlanError(
            where=f"mesh {search.mesh}",
            what="no way to cut the step fits the axes",
            why=f"data ranks times microbatches have to divide {search.space.dp_divides}, and the "
            f"model has {search.space.units} units to make stages of",
            do=helps + "Change the batch size or the number of devices.",
        )
    least = min(tried, key=lambda each: each.estimate.peak_bytes)
    holders = sorted(least.estimate.bytes.items(), key=lambda item: -item[1])
    held = ", ".join(f"{what} {amount(round(size), 'B')}" for what, size in holders[:HOLDERS])
    needs = amount(round(least.estimate.peak_bytes), "B")
    error = NothingFitsError(
        where=f"plan 'auto' on {search.mesh}",
        what=f"nothing fits {amount(round(search.limit), 'B')} on a device",
        why=f"by estimate the least is {needs}: {least.candidate} ({held})",
        do=f"{helps}Take more devices, a smaller batch, or more memory.",
    )
    error.least, error.search = least, search
    return error


def releases(search: Search) -> Iterator[Release]:
    """The pins without one of which some candidate fits."""
    for pin, freed in _freed(search):
        best = freed.best()
        if best is not None:
            yield Release(pin, best)


def _freed(search: Search) -> Iterator[tuple[str, Search]]:
    """Each pin of the user's in words, and the search without it."""
    hardware = search.mesh.hardware
    if search.mesh.axes:
        yield f"the axes {search.mesh}", replace(search, mesh=Mesh((), hardware))
    if search.microbatches:
        pin = f"microbatches={search.microbatches}"
        yield pin, replace(search, microbatches=None)
    if search.schedule not in ("", "auto"):
        yield f"schedule={search.schedule!r}", replace(search, schedule="")
    if len(search.recompute) == 1:
        pin = f"recompute={search.recompute[0]!r}"
        yield pin, replace(search, recompute=RECOMPUTE)
    if search.memory_bytes:
        yield _memory(search), replace(search, memory_bytes=0)


def _memory(search: Search) -> str:
    return f"memory_bytes={search.memory_bytes}"


def _other_devices(search: Search) -> str:
    """The nearest number of devices on which a plan fits, in words; "" if none is found."""
    devices, factor = search.devices, 2
    while factor <= MOST_FACTOR:
        for number in (devices * factor, devices // factor if devices % factor == 0 else 0):
            best = _best_on(search, number) if number > 1 else None
            if best is not None:
                return f"on {number} devices: {_text(best)}"
        factor *= 2
    return ""


def _best_on(search: Search, devices: int) -> Ranked | None:
    try:
        return search.on(search.mesh.hardware.resized(devices)).best()
    except PlanError:
        return None  # machines that cannot be so many, or axes that cannot grow


def too_large(error: MemoryLimitError, taken: Taken | None) -> MemoryLimitError:
    """The error for a user's plan that is too large, with the single changes that let it fit."""
    found = list(_that_fit(taken)) if taken else []
    if not found:
        return error
    names = "; ".join(found)
    return MemoryLimitError(
        where=error.where, what=error.what, why=error.why,
        do=f"By estimate it fits with {names}. {error.do}",
    )  # fmt: skip


def _that_fit(taken: Taken) -> Iterator[str]:
    search, chosen = taken.search, taken.candidate
    than = search.estimate(chosen).estimate.step_s
    for words, one in only_changed(search, chosen):
        slower = one.estimate.step_s / than - 1
        yield f"{words} ({slower:+.0%} time, {amount(round(one.estimate.peak_bytes), 'B')})"


def _text(one: Ranked) -> str:
    estimate = one.estimate
    return (
        f"{one.candidate}, {time_text(estimate.step_s)} a step, "
        f"{amount(round(estimate.peak_bytes), 'B')}"
    )
