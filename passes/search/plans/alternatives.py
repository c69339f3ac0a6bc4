"""The next best plan for each choice of the chosen plan, and the best plan on other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from partc.errors import PlanError
from partc.machines.what_if import changes_to_try
from partc.passes.search.plans.candidate import Candidate
from partc.passes.search.plans.candidates import sizes_of
from partc.passes.search.plans.search_plans import Ranked, Search, Taken
from partc.plan.mesh import Mesh


def _axes(one: Candidate) -> str:
    return str(one.mesh(None)) or "one device"


def _data(one: Candidate) -> str:
    return "hsdp" if one.data == "fsdp" and one.replicate > 1 else one.data


def _tensor(one: Candidate) -> str:
    return one.word if one.tp > 1 else "none"


def _microbatches(one: Candidate) -> str:
    return str(one.microbatches)


def _schedule(one: Candidate) -> str:
    if one.pp == 1:
        return "none"
    return one.schedule + (f", {one.chunks} virtual stages" if one.chunks > 1 else "")


def _recompute(one: Candidate) -> str:
    return one.recompute


# The choices of a candidate by name. The axes come first: others are compared on equal axes.
CHOICES: dict[str, Callable[[Candidate], str]] = {
    "axes": _axes,
    "data sharding": _data,
    "tensor preset": _tensor,
    "microbatches": _microbatches,
    "schedule": _schedule,
    "recompute": _recompute,
}


@dataclass(frozen=True)
class Alternative:
    """The best candidate that makes one choice otherwise; ``instead`` says how it differs."""

    choice: str
    taken: str
    instead: str
    ranked: Ranked | None


@dataclass(frozen=True)
class WhatIf:
    """The best plan on machines with one change (None if none fits).

    ``instead`` says how it differs from the chosen plan, "" if it does not.
    """

    change: str
    ranked: Ranked | None
    instead: str


def alternatives(search: Search, chosen: Candidate) -> list[Alternative]:
    """Per choice the best candidate that makes this choice otherwise, if there is one."""
    found = []
    for name, say in CHOICES.items():
        other = _next_best(search, chosen, name)
        if other is not None:
            instead = _differences(other.candidate, chosen, name)
            found.append(Alternative(name, say(chosen), instead, other))
    return found


def only_changed(search: Search, chosen: Candidate) -> Iterator[tuple[str, Ranked]]:
    """Per choice, without the axes, the best fitting candidate that differs in this choice alone.

    Each with the difference in words.
    """
    for name in list(CHOICES)[1:]:
        best = search.best(_differs_in(name, chosen))
        if best is not None:
            yield _said(name, best.candidate), best


def _next_best(search: Search, chosen: Candidate, name: str) -> Ranked | None:
    """The best candidate that differs in this choice alone, whether it fits or not.

    If there is none, the best that differs in other choices too. The axes that a user gave are
    compared with all other axes of the same number of devices.
    """
    if name == "axes" and search.mesh.axes:
        search = replace(search, mesh=Mesh((), search.mesh.hardware))
    if name != "axes":
        alone = search.ascending(_differs_in(name, chosen))
        if (found := next(alone, None)) is not None:
            return found

    def accept(one: Candidate) -> bool:
        changed = list(_changed(one, chosen))
        return name in changed and (name == "axes" or "axes" not in changed)

    return search.best(accept) or next(search.ascending(accept), None)


def _differs_in(name: str, chosen: Candidate) -> Callable[[Candidate], bool]:
    """The function that says whether a candidate differs from ``chosen`` in this choice alone."""
    return lambda one: list(_changed(one, chosen)) == [name]


def _changed(one: Candidate, chosen: Candidate) -> Iterator[str]:
    for name, say in CHOICES.items():
        same = _sizes(one) == _sizes(chosen) if name == "axes" else say(one) == say(chosen)
        if not same:
            yield name


def _sizes(one: Candidate) -> tuple[int, int, int, int]:
    """The axis sizes of a candidate, whatever the axes' names."""
    return one.pp, one.replicate, one.shard, one.tp


def _differences(one: Candidate, chosen: Candidate, first: str = "") -> str:
    """The choices that differ from ``chosen``, in words, the choice ``first`` before the others."""
    names = sorted(_changed(one, chosen), key=lambda name: name != first)
    return "; ".join(CHOICES[n](one) if n == first else _said(n, one) for n in names)


def _said(name: str, one: Candidate) -> str:
    """A choice in words that need no heading: ``4 microbatches`` instead of ``4``."""
    text = CHOICES[name](one)
    if name == "microbatches":
        return f"{text} microbatch" + ("es" if text != "1" else "")
    if name == "recompute":
        return f"recompute {text}"
    if text == "none":
        return "no pipeline" if name == "schedule" else "no tensor ranks"
    return text


def what_ifs(taken: Taken) -> list[WhatIf]:
    """The best plan with more memory, faster parts or more devices.

    For a user's own plan, the same plan there; changes of memory are left out, as it fits already.
    """
    search, chosen, found = taken.search, taken.candidate, []
    for change in changes_to_try(search.mesh.hardware):
        if change.memory_bytes and not taken.searched:
            continue
        try:
            other = search.on(change.apply(search.mesh.hardware), more_bytes=change.memory_bytes)
        except PlanError:
            continue  # machines that cannot be so many
        ranked = other.best() if taken.searched else grown(chosen, other)
        instead = _differences(ranked.candidate, chosen) if ranked else ""
        found.append(WhatIf(str(change), ranked, instead))
    return found


def grown(chosen: Candidate, there: Search) -> Ranked | None:
    """The chosen candidate on the axes of another search, where a data axis may be larger.

    None if the batch is not divisible by the data ranks times the microbatches.
    """
    if not there.mesh.axes:
        return there.estimate(chosen)
    _, replicated, shards, _ = sizes_of(there.mesh)
    moved = replace(chosen, replicate=replicated, shard=shards, given=there.mesh)
    if there.space.dp_divides % (moved.data_ranks * moved.microbatches):
        return None
    return there.estimate(moved)
