"""Compute pieces of what is computed whole, though every reader takes a piece of it.

    whole = embedding(positions, w); y = x + whole.chunk(2)[rank]
    piece = embedding(positions.chunk(2)[rank], w); y = x + piece

Layouts are chosen in order of execution, so a value of replicated operands is replicated. Whether
all of its readers then cut it in one way is known behind the walk alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import fx

from partc.graph import Graph, is_tensor, is_weight, results_of, tensor_args
from partc.graph.draws import draws_numbers
from partc.passes.shard.price import Choices, Prices
from partc.plan.sharding import Layout, R
from partc.rules import Strategy, has_rule, strategies_for


@dataclass
class PiecesFirst:
    """Decides again on one axis, from the last call to the first.

    ``fixed`` has the calls that stay as they are: those that the plan pins, and on the axis of
    microbatches those that are computed once for all. ``take`` notes a decision.
    """

    graph: Graph
    axis: str
    choices: Choices
    made: dict[fx.Node, list[Layout]]
    prices: Prices
    fixed: Collection[fx.Node]
    take: Callable[[fx.Node, Strategy], None]

    def run(self) -> None:
        for node in reversed(list(self.graph.calls())):
            wanted = self._wanted(node)
            best = self._for(node, wanted) if wanted is not None else None
            if best is not None:
                self.take(node, best)

    def _wanted(self, node: fx.Node) -> Layout | None:
        """The one way in which all readers cut a replicated value; None if there is none."""
        if node in self.fixed or self.axis in self.choices.get(node, {}) or not is_tensor(node):
            return None
        if len(results_of(node)) != 1 or draws_numbers(node) or not has_rule(node.target):
            return None
        layouts = {layout for user in node.users for layout in self._read(user, node)}
        (only, *others) = layouts or {R}
        return only if not others and only.kind == "cut" and not only.permuted else None

    def _read(self, user: fx.Node, node: fx.Node) -> list[Layout]:
        """The layouts in which a call reads a value; whole where it is a result of the step."""
        chosen = self.choices.get(user, {}).get(self.axis)
        if user.op != "call_function" or chosen is None:
            return [R]
        read = zip(tensor_args(user), chosen.ins, strict=True)
        return [layout for operand, layout in read if operand is node]

    def _for(self, node: fx.Node, wanted: Layout) -> Strategy | None:
        """The cheapest strategy with this result that sends nothing; None if there is none."""
        operands = tensor_args(node)
        known = strategies_for(node, self.prices.num, [(len(operands), wanted)])
        free = [s for s in known if s.outs == (wanted,) and self._is_free(operands, s)]
        costs = [self.prices.local(node, operands, s) for s in free]
        fits = [i for i, s in enumerate(free) if self.prices.fits(node, operands, s)]
        return free[min(fits, key=costs.__getitem__)] if fits else None

    def _is_free(self, operands: list[fx.Node], strategy: Strategy) -> bool:
        """Whether each operand is at hand, or is whole and cut without a transfer.

        A weight is not cut so: where that pays, the plan has it in shards. Pieces in an order of
        their own are not cut from a whole.
        """
        return all(
            want in self.made[operand]
            or (
                want.kind == "cut"
                and not want.permuted
                and R in self.made[operand]
                and not is_weight(operand)
            )
            for operand, want in zip(operands, strategy.ins, strict=True)
        )
