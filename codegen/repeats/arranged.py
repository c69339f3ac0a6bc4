"""Decides which runs of equal blocks a text has as loops, and what each loop reads and returns."""

from __future__ import annotations

from partc.codegen.repeats.blocks import Item, Loop, Run, arrange
from partc.codegen.repeats.numbers import read_from_attributes
from partc.codegen.repeats.slots import Interface, Unfit, interfaces
from partc.graph import Graph
from partc.passes.canonical.dedupe_layers import Unfolded


def arranged(graph: Graph) -> tuple[list[Item], dict[Loop, Interface]]:
    """The items of a step (calls and loops), and what each loop reads and returns.

    A run of blocks that no single method can serve is printed call by call. Raises Unfolded if the
    graph leaves out blocks of such a run (``graph.folds``): then all blocks have to be traced.
    """
    given_up: set[Run] = set()
    while True:
        items = arrange(graph, {run.layers for run in given_up})
        try:
            sides = interfaces(graph, [item for item in items if isinstance(item, Loop)])
        except Unfit as unfit:
            given_up.add(unfit.run)
            continue
        printed = {layer for side in sides for layer in side.run.layers}
        for fold in graph.folds:
            if f"{fold.path}.{fold.first}" not in printed:
                raise Unfolded(f"{fold.path} stands in line")
            for loop, side in sides.items():
                if side.of("listed") and f"{fold.path}.{fold.first}" in loop.run.layers:
                    raise Unfolded(f"{fold.path} takes a value for each block")
        for run in dict.fromkeys(loop.run for loop in sides):
            if run.numbers:
                phases = (run.forward, run.backward, run.weights)
                read_from_attributes(run.layers, phases, run.numbers)
        return items, sides
