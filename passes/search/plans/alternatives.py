"""What a chosen plan was preferred to, choice by choice, and what other machines would change."""

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
    return one.schedule + (f", {one.chunks} chunks" if one.chunks > 1 else "")


def _recompute(one: Candidate) -> str:
    return one.recompute


# By name, what a candidate chooses. The axes come first: other choices are compared on the same.
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
    """The next best for one choice, or None where nothing else can be: what it changes."""

    choice: str
    taken: str
    instead: str
    ranked: Ranked | None


@dataclass(frozen=True)
class WhatIf:
    """The best plan on a machine with one change, None where none fits; whether it is another."""

    change: str
    ranked: Ranked | None
    instead: str


def alternatives(search: Search, chosen: Candidate) -> list[Alternative]:
    """For every choice that there was, the best candidate that differs in it."""
    found = []
    for name, say in CHOICES.items():
        other = _next_best(search, chosen, name)
        if other is not None:
            instead = _differences(other.candidate, chosen, name)
            found.append(Alternative(name, say(chosen), instead, other))
    return found


def only_changed(search: Search, chosen: Candidate) -> Iterator[tuple[str, Ranked]]:
    """Per choice the best that fits and differs in it alone, on the same axes, and how."""
    for name in list(CHOICES)[1:]:
        best = search.best(_differs_in(name, chosen))
        if best is not None:
            yield _said(name, best.candidate), best


def _next_best(search: Search, chosen: Candidate, name: str) -> Ranked | None:
    """The best that differs in this alone, fitting or not; else the best that fits.

    Axes that the user has given are compared with all others of so many devices.
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
    """Whether a candidate differs from another in this alone."""
    return lambda one: list(_changed(one, chosen)) == [name]


def _changed(one: Candidate, chosen: Candidate) -> Iterator[str]:
    for name, say in CHOICES.items():
        same = _sizes(one) == _sizes(chosen) if name == "axes" else say(one) == say(chosen)
        if not same:
            yield name


def _sizes(one: Candidate) -> tuple[int, int, int, int]:
    """Of the axes, whatever their names."""
    return one.pp, one.replicate, one.shard, one.tp


def _differences(one: Candidate, chosen: Candidate, first: str = "") -> str:
    """What a candidate does otherwise, one choice before the others; "" if nothing."""
    names = sorted(_changed(one, chosen), key=lambda name: name != first)
    return "; ".join(CHOICES[n](one) if n == first else _said(n, one) for n in names)


def _said(name: str, one: Candidate) -> str:
    """A choice in words that stand by themselves."""
    text = CHOICES[name](one)
    if name == "microbatches":
        return f"{text} microbatch" + ("es" if text != "1" else "")
    if name == "recompute":
        return f"recompute {text}"
    if text == "none":
        return "no pipeline" if name == "schedule" else "no tensor ranks"
    return text


def what_ifs(taken: Taken) -> list[WhatIf]:
    """What more memory, faster parts or more devices would buy: the best plan there if one was
    searched, or the same plan by hand, which has no use for more memory.
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
    """The same plan on the axes of another search, where a data axis may be longer; None where the
    batch cannot be cut so.
    """
    if not there.mesh.axes:
        return there.estimate(chosen)
    _, replicated, shards, _ = sizes_of(there.mesh)
    moved = replace(chosen, replicate=replicated, shard=shards, given=there.mesh)
    if there.space.dp_divides % (moved.data_ranks * moved.microbatches):
        return None
    return there.estimate(moved)
