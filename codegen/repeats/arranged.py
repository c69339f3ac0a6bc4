"""Decides which runs of equal blocks a text has as loops, and what each loop reads and returns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from partc.codegen.repeats.blocks import arrange
from partc.codegen.repeats.equal import printing
from partc.codegen.repeats.inner_numbers import joined, layers_of, phases_of
from partc.codegen.repeats.numbers import read_from_attributes
from partc.codegen.repeats.runs import PHASES, Item, Loop, Run
from partc.codegen.repeats.slots import Interface, Unfit, interfaces
from partc.graph import Graph
from partc.passes.canonical.dedupe_layers import Unfolded


def arranged(
    graph: Graph, apart: Collection[tuple[str, ...]] | None = None
) -> tuple[list[Item], dict[Loop, Interface]]:
    """The items of a step (calls and loops), and what each loop reads and returns.

    A run of blocks that no single method can serve is printed call by call. Unless ``apart`` is
    None blocks that differ in sizes alone share a class, but for runs in ``apart`` (by their
    ``layers``). Raises Unfolded if the graph leaves out blocks of a run that is printed call by
    call (``graph.folds``): then all blocks have to be traced.
    """
    with printing(graph):
        return _arranged(graph, apart)


def _arranged(
    graph: Graph, apart: Collection[tuple[str, ...]] | None
) -> tuple[list[Item], dict[Loop, Interface]]:
    given_up: set[tuple[str, ...]] = set()
    unlike = set(apart or ())
    while True:
        items = arrange(graph, given_up, None if apart is None else unlike)
        try:
            sides = interfaces(graph, [item for item in items if isinstance(item, Loop)])
        except Unfit as unfit:
            # A run that is unfit for its kin may still be a loop of its own.
            (unlike if unfit.run.kin else given_up).add(unfit.run.layers)
            continue
        printed = {layer for side in sides for layer in side.run.layers}
        for fold in graph.folds:
            if f"{fold.path}.{fold.first}" not in printed:
                raise Unfolded(f"{fold.path} stands in line")
            for loop, side in sides.items():
                if side.of("listed") and f"{fold.path}.{fold.first}" in loop.run.layers:
                    raise Unfolded(f"{fold.path} takes a value for each block")
        _read_numbers(dict.fromkeys(loop.run for loop in sides))
        return items, sides


def _read_numbers(runs: Iterable[Run]) -> None:
    """Let the first block of each run, from which its class is printed, read its own numbers."""
    kin: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        kin[run.kin or run.layers[0]].append(run)
    for members in kin.values():
        members.sort(key=lambda run: run.follows)
        layers = [layer for run in members for layer in layers_of(run)]
        inner = [each for run in members for each in run.inner]
        nodes = {n for run in inner for phase in PHASES for g in run.of(phase) for n in g.nodes}
        read_from_attributes(
            layers, phases_of(members), joined(members), [run.layers[0] for run in members],
            sizes=bool(members[0].kin), inner=nodes,
        )  # fmt: skip
