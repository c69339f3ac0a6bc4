"""The numbers of blocks inside of blocks, and what the block around them gives for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from partc.codegen.repeats.equal import Group
from partc.codegen.repeats.numbers import Number, Place, Varied, numbers_at, varied
from partc.codegen.repeats.runs import PHASES, Run, runs_within

Named = Mapping[tuple[fx.Node, Place], tuple[str, Number]]


def with_numbers(runs: Sequence[Run]) -> list[Run]:
    """The runs, in which those of one kin have the numbers in which all of their blocks differ.

    A run inside of another one also has what is given for each of its numbers.
    """
    kins: dict[str, list[Run]] = defaultdict(list)
    for run in runs_within(runs):
        kins[run.kin or run.layers[0]].append(run)
    rows: dict[Run, tuple[Varied, ...]] = {}
    named: dict[Run, Named] = {}
    inner = {each for run in runs_within(runs) for each in run.inner}
    for members in kins.values():
        members.sort(key=lambda run: run.follows)
        if members[0].kin and (not inner.isdisjoint(members) or len(members) > 1):
            rows |= _rows(members)
        else:
            rows |= {run: run.numbers for run in members}
        if any(run.inner for run in members) or not inner.isdisjoint(members):
            named |= dict.fromkeys(members, _named(members, rows))
    return [_with(run, rows, named) for run in runs]


def layers_of(run: Run) -> list[str]:
    """The paths of a run's blocks, or of the same block inside of all blocks around it."""
    layers = (g.layer for block in run.alike for g in [*block.values()][:1] if g is not None)
    return [*run.layers, *layers]


def phases_of(runs: Iterable[Run]) -> list[list[Group]]:
    """For each phase the calls of all blocks, in the order of ``layers_of``."""
    every = [*runs]
    return [[group for run in every for group in _groups(run, phase)] for phase in PHASES]


def _groups(run: Run, phase: str) -> Iterator[Group]:
    yield from run.of(phase)  # type: ignore[arg-type]
    yield from (g for block in run.alike if (g := block[phase]) is not None)  # type: ignore[index]


def joined(runs: Sequence[Run]) -> list[Varied]:
    """The numbers of several runs of one kin, each with its values in all of their blocks."""
    numbers = zip(*(run.numbers for run in runs), strict=True)
    return [
        Varied(each[0].name, tuple(v for row in each for v in row.values), each[0].word)
        for each in numbers
    ]


def _rows(runs: Sequence[Run]) -> dict[Run, tuple[Varied, ...]]:
    layers = [layer for run in runs for layer in layers_of(run)]
    rows, start = varied(layers, phases_of(runs), sizes=True), 0
    found = {}
    for run in runs:
        end = start + len(layers_of(run))
        found[run] = tuple(Varied(row.name, row.values[start:end], row.word) for row in rows)
        start = end
    return found


def _named(runs: Sequence[Run], rows: Mapping[Run, tuple[Varied, ...]]) -> Named:
    """The number that each call of some runs of one kin reads, with its value."""
    layers = [layer for run in runs for layer in layers_of(run)]
    every = joined([replace(run, numbers=rows[run]) for run in runs])
    return numbers_at(layers, phases_of(runs), every, sizes=bool(runs[0].kin))


def _with(
    run: Run, rows: Mapping[Run, tuple[Varied, ...]], named: Mapping[Run, Named],
    around: Named | None = None,
) -> Run:  # fmt: skip
    given: dict[str, str | Number] = {}
    for at, (name, number) in named.get(run, {}).items() if around is not None else ():
        if at[0] in {n for phase in PHASES for g in run.of(phase) for n in g.nodes}:
            given.setdefault(name, around[at][0] if around is not None and at in around else number)
    inner = tuple(_with(each, rows, named, named[run]) for each in run.inner)
    passed = tuple(given[row.name] for row in rows[run] if around is not None)
    return replace(run, numbers=rows[run], inner=inner, given=passed)
