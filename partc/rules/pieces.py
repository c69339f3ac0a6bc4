"""A call as one rank writes it: in goes a call and a strategy, out comes what every rank runs on its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from partc import collectives
from partc.rules.experiment import Results
from partc.rules.signature import Signature, results_list
from partc.rules.strategy import Strategy


@dataclass(frozen=True)
class LocalCall:
    """The call on one rank's pieces as a small graph; ``unchanged`` where it reads as the whole's call."""

    graph: fx.Graph
    unchanged: bool

    @classmethod
    def of(cls, signature: Signature, strategy: Strategy, num: int) -> LocalCall:
        """The call written for pieces that are ``num`` equal ones."""
        node = signature.node()
        node.graph.output(node)
        return cls(node.graph, unchanged=not strategy.variant)

    def run(self, rank: int, pieces: Sequence[Tensor]) -> Results:
        """What a rank gets from its pieces."""
        return results_list(_OnRank(self.graph, rank).run(*pieces))


class _OnRank(fx.Interpreter):
    """Runs a graph as one rank of its only axis."""

    def __init__(self, graph: fx.Graph, rank: int) -> None:
        super().__init__(fx.GraphModule({}, graph), garbage_collect_values=False)
        self.rank = rank

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is collectives.axis_index:
            return self.rank
        return super().call_function(target, args, kwargs)
