"""Tied parameters on several pipeline stages: an embedding that is also the head's weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partc.graph import Graph
from partc.schedules.actions import Schedule


@dataclass(frozen=True)
class Tied:
    """A parameter's name, and the pipeline stages that hold the parameter, in order."""

    name: str
    stages: tuple[int, ...]

    def ranks(self, schedule: Schedule) -> tuple[int, ...]:
        """The pipeline ranks that hold the parameter, in the order in which gradients are added."""
        return tuple(dict.fromkeys(schedule.rank_of[stage] for stage in self.stages))


def tied_parameters(graphs: Sequence[Graph]) -> list[Tied]:
    """The parameters of more than one stage, given the graphs of all pipeline stages in order."""
    found: dict[str, list[int]] = {}
    for number, graph in enumerate(graphs):
        for name in graph.params:
            found.setdefault(name, []).append(number)
    return [Tied(name, tuple(stages)) for name, stages in found.items() if len(stages) > 1]
