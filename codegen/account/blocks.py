"""The methods of the blocks of a graph before they are printed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from partc.codegen.account.function import Function
from partc.codegen.bodies.block_gathers import first_gathers
from partc.codegen.bodies.frees import Ledger, free_blocks
from partc.codegen.calls.names import is_given, wishes
from partc.codegen.calls.statements import Statement
from partc.codegen.calls.transfers import weights_of
from partc.codegen.calls.wishes import Wishes
from partc.codegen.repeats.equal import ends_step, made_in_step
from partc.codegen.repeats.runs import Item, Loop, Run
from partc.codegen.repeats.slots import Interface
from partc.graph import Graph, Phase, is_forward, value


@dataclass
class Block:
    """One method of the blocks of a run: its statements, ``del`` lines among them."""

    side: Interface
    function: Function
    gathers: list[fx.Node]  # of the block's own weights, with which the method begins
    statements: list[Statement] = field(default_factory=list)

    @property
    def unpacked(self) -> list[fx.Node]:
        """The saved values that the method takes."""
        return [self.side.own(slot) for slot in self.side.of("saved")]

    @cached_property
    def is_steady(self) -> bool:
        """Whether a step gathers the weights once for all microbatches."""
        return bool(self.gathers) and all(value(n).phase == "S" for n in self.gathers)

    @cached_property
    def reduces(self) -> bool:
        """Whether the method starts reductions that the step waits for later."""
        graph = self.function.graph
        users = (user for node in self.function.order for user in node.users)
        return any(user.op == "call_function" and ends_step(graph, user) for user in users)

    def ledger(self) -> Ledger:
        """The account of the method's statements, which are noted here."""
        made_before = {*self._whole()}
        order = [n for n in self.function.order if n not in made_before]
        self.statements = self.function.statements(order)
        lists = {"saved": Statement([], binds=self.unpacked)} if self.unpacked else {}
        given = [self.side.own(s) for s in (*self.side.of("carried"), *self.side.of("listed"))]
        opening = [*lists.values(), *([Statement([])] if self.gathers else [])]
        self.statements = [*opening, *self.statements]
        return Ledger(self.statements, self.function, lists, given)

    def _whole(self) -> Iterator[fx.Node]:
        """The gathers of weights that run before the method, and what they give."""
        for start in self.gathers:
            yield from (start, *start.users)
            yield from (weight for weight in weights_of(start) if weight is not None)


@dataclass
class Shape:
    """A graph as it will be printed: calls and loops, and the methods of its blocks.

    ``sums``: whether gradients of microbatches are added up before ranks sum them.
    """

    graph: Graph
    items: Sequence[Item]
    sides: Mapping[Loop, Interface]

    @cached_property
    def wishes(self) -> Wishes:
        return wishes(self.graph)

    @cached_property
    def named(self) -> set[fx.Node]:
        """The values of the forward that the user's code names."""
        calls = filter(is_forward, self.graph.calls())
        return {node for node in calls if is_given(node, self.wishes.get(node))}

    @cached_property
    def blocks(self) -> dict[tuple[Run, Phase], Block]:
        """The methods of each run of blocks."""
        found = {(lp.run, lp.phase): self._block(side) for lp, side in self.sides.items()}
        for run in dict.fromkeys(run for run, _ in found):
            free_blocks([block.ledger() for (of, _), block in found.items() if of is run])
        return found

    def block(self, loop: Loop) -> Block:
        return self.blocks[loop.run, loop.phase]

    def _block(self, side: Interface) -> Block:
        group = side.group
        kept = {group.nodes[p] for p in [*side.carried, *side.listed]}
        kept |= {n for nodes in side.saved.values() for n in nodes}
        kept |= {*self.graph.outputs.buffers.values()} & {*group.nodes}
        function = self.function(group.nodes, kept, group.layer)
        return Block(side, function, first_gathers(self.graph, side))

    def function(
        self, order: Sequence[fx.Node], kept: set[fx.Node], prefix: str = "",
        same: Mapping[fx.Node, fx.Node] | None = None, loops: Collection[int] = (),
    ) -> Function:  # fmt: skip
        """A function of some calls; ``same`` and ``loops`` as for Function."""
        inside, stored = {*order}, dict[fx.Node, list[str]]()
        for name, node in self.graph.grads.items():
            if made_in_step(self.graph, node) in inside:
                stored.setdefault(node, []).append(name)
        named = self.named & inside
        return Function(
            self.graph, order, kept, stored, named, self.wishes, prefix, same or {}, loops
        )  # fmt: skip
