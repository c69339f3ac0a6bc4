"""Parameters that several pipeline stages hold: a tied embedding, for example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partc.graph import Graph
from partc.schedules.actions import Schedule


@dataclass(frozen=True)
class Tied:
    """A parameter's name, and the stages that hold it, in order."""

    name: str
    stages: tuple[int, ...]

    def ranks(self, schedule: Schedule) -> tuple[int, ...]:
        """The pipeline ranks that hold it, in the order in which its gradients are added."""
        return tuple(dict.fromkeys(schedule.rank_of[stage] for stage in self.stages))


def tied_parameters(graphs: Sequence[Graph]) -> list[Tied]:
    """The parameters that stand on several of these stages; ``graphs`` are those of all."""
    found: dict[str, list[int]] = {}
    for number, graph in enumerate(graphs):
        for name in graph.params:
            found.setdefault(name, []).append(number)
    return [Tied(name, tuple(stages)) for name, stages in found.items() if len(stages) > 1]
