"""Which stages of a pipeline stand for the others: those in the middle of a stack of equal blocks
differ in nothing but the numbers of their layers.

In: a folded joint graph, and where the plan's stages begin. Out: which blocks need not be traced,
inside of stages and whole stages of them; ``repeat_stages`` makes these of those that were
compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from partc.graph import Graph
from partc.graph.folds import RepeatedBlocks, StageLike, TracedStages, list_member
from partc.passes.stages.stage_units import chain_names

MARGIN = 2  # blocks that stay at each end of a stage: what moves between them and others differs


def keep_stages(graph: Graph, points: Sequence[str]) -> TracedStages | None:
    """What to trace for stages that begin at ``points``.

    None where nothing can be left out, as where a stage begins inside of a unit.
    """
    names = chain_names(graph)
    if not graph.folds or not set(points) <= set(names):
        return None
    edges = [0, *map(names.index, points), len(names)]
    if edges != sorted(set(edges)):
        return None
    stages = [names[first:end] for first, end in pairwise(edges)]
    likes = _likes(stages, graph.folds)
    own = [stage for stage, like in zip(stages, likes, strict=True) if not like.shift]
    gaps = [_whole(stage) for stage, like in zip(stages, likes, strict=True) if like.shift]
    middles = [fold for stage in own for fold in _middles(stage, graph.folds)]
    return TracedStages(
        tuple(stage[0] for stage in own[1:]), tuple(middles), tuple(gaps), tuple(likes)
    )


def _likes(stages: Sequence[Sequence[str]], folds: Sequence[RepeatedBlocks]) -> list[StageLike]:
    """Per stage the one that stands for it: the first of as many blocks of the same span."""
    found: list[StageLike] = []
    first_of: dict[tuple[RepeatedBlocks, int], tuple[int, int]] = {}
    num = 0
    for units in stages:
        span = next((fold for fold in folds if _consists_of(units, fold)), None)
        first = list_member(units[0])[1]
        known = first_of.get((span, len(units))) if span else None
        if span and known and all(map(span.covers, units)):
            found.append(StageLike(known[0], span.path, first - known[1]))
            continue
        if span and not known:
            first_of[span, len(units)] = num, first
        found.append(StageLike(num))
        num += 1
    return found


def _consists_of(units: Sequence[str], fold: RepeatedBlocks) -> bool:
    """Whether these are blocks of a fold: those left out, the one before them, the one behind."""
    places = range(fold.first - 1, fold.last + 2)
    return all(_is_member(unit, fold.path) and list_member(unit)[1] in places for unit in units)


def _is_member(unit: str, path: str) -> bool:
    at, index = list_member(unit)
    return at == path and unit == f"{path}.{index}"


def _whole(units: Sequence[str]) -> RepeatedBlocks:
    (path, first), (_, last) = list_member(units[0]), list_member(units[-1])
    return RepeatedBlocks(path, first, last)


def _middles(units: Sequence[str], folds: Sequence[RepeatedBlocks]) -> Iterator[RepeatedBlocks]:
    """The equal blocks of a stage but those at its ends."""
    for fold in folds:
        own = [list_member(unit)[1] for unit in units if _is_member(unit, fold.path)]
        if own:
            first, last = max(own[0] + MARGIN, fold.first), min(own[-1] - MARGIN, fold.last)
            if first <= last:
                yield RepeatedBlocks(fold.path, first, last)
