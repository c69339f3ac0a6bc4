"""The methods of the blocks of a graph before they are printed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from torch import fx

from partc.codegen.account.function import Function
from partc.codegen.bodies.block_arguments import passed
from partc.codegen.bodies.block_gathers import first_gathers
from partc.codegen.bodies.frees import Ledger, free_blocks, held_inside
from partc.codegen.bodies.inner_blocks import lists_of, read_around
from partc.codegen.calls.names import is_given, wishes
from partc.codegen.calls.statements import InnerCall, Statement
from partc.codegen.calls.transfers import weights_of
from partc.codegen.calls.wishes import Wishes
from partc.codegen.repeats.equal import ends_step, made_in_step
from partc.codegen.repeats.runs import LATER, Item, Loop, Run
from partc.codegen.repeats.slots import Interface
from partc.graph import Graph, Phase, is_forward, value


@dataclass
class InnerLoop(InnerCall):
    """The call of a method of a block inside of this one."""

    loop: Loop | None = None


@dataclass
class Block:
    """One method of the blocks of a run: its statements, ``del`` lines among them."""

    shape: Shape
    side: Interface
    function: Function
    gathers: list[fx.Node]  # of the block's own weights, with which the method begins
    statements: list[Statement] = field(default_factory=list)

    @cached_property
    def unpacked(self) -> list[fx.Node]:
        """The saved values that the method takes, but for those in lists of inner blocks."""
        return [n for phase in self.taken_from for n in self.saved_from(phase)]

    @cached_property
    def taken_from(self) -> list[Phase]:
        """The earlier phases that save something for this one."""
        return [*dict.fromkeys(slot.made_in for slot in self.side.of("saved"))]

    def saved_from(self, before: Phase) -> list[fx.Node]:
        """The values that an earlier phase saves for this one, but for those in inner lists."""
        mine = read_around(self.side.loop, self.shape.sides)
        slots = [slot for slot in self.side.of("saved") if slot.made_in == before]
        saved = [self.side.own(slot) for slot in slots]
        return [node for node in saved if mine is None or node in mine]

    def lists_from(self, before: Phase) -> dict[str, list[fx.Node]]:
        """The lists that an earlier phase of inner blocks leaves for this one."""
        then = self.side.loop.phase
        inner = ((run, self.shape.side(run, then)) for run in self.side.loop.run.inner)
        found = ((run, lists_of(side, before)) for run, side in inner if side is not None)
        return {list_name(run, before, then): nodes for run, nodes in found if nodes}

    @cached_property
    def is_steady(self) -> bool:
        """Whether a step gathers the weights once for all microbatches."""
        return bool(self.gathers) and all(value(n).phase == "S" for n in self.gathers)

    @cached_property
    def reduces(self) -> bool:
        """Whether the method starts reductions that the step waits for later."""
        graph = self.function.graph
        users = (user for node in self.side.group.nodes for user in node.users)
        return any(user.op == "call_function" and ends_step(graph, user) for user in users)

    def ledger(self) -> Ledger:
        """The account of the method's statements, which are noted here."""
        made_before = {*self._whole()}
        order = [n for n in self.function.order if n not in made_before]
        self.statements = [*self._all(order)]
        within = {k: v for p in self.taken_from for k, v in self.lists_from(p).items()}
        taken = {"saved": Statement([], binds=self.unpacked, lists=within)}
        lists = taken if self.unpacked or within else {}
        given = [self.side.own(s) for s in (*self.side.of("carried"), *self.side.of("listed"))]
        opening = [*lists.values(), *([Statement([])] if self.gathers else [])]
        self.statements = [*opening, *self.statements]
        return Ledger(self.statements, self.function, lists, given)

    def _all(self, order: Sequence[fx.Node]) -> Iterator[Statement]:
        """The statements of all calls, and one for each inner block."""
        mine, items = {*order}, self.side.loop.items()
        for is_loop, each in groupby(items, key=lambda item: isinstance(item, Loop)):
            if is_loop:
                yield from (self._inner(loop) for loop in each if isinstance(loop, Loop))
            else:
                yield from self.function.statements([n for n in each if n in mine])

    def _inner(self, loop: Loop) -> InnerLoop:
        side, nodes = self.shape.sides[loop], loop.group.nodes
        reads = [side.own(slot) for slot in (*side.of("saved"), *passed(side))]
        read = [p for p in (*side.carried, *side.listed) if p not in side.unread]
        left = self.shape.lists_left(loop)
        held = self.shape.held(loop)
        return InnerLoop([], reads, [nodes[p] for p in read], [*nodes], "", left, held, loop)

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

    def side(self, run: Run, phase: Phase) -> Interface | None:
        """What a phase of a run reads and returns; None if the run has no such phase."""
        sides = (side for loop, side in self.sides.items() if loop.run is run)
        return next((side for side in sides if side.loop.phase == phase), None)

    def lists_left(self, loop: Loop) -> dict[str, list[fx.Node]]:
        """The lists that a method of an inner block leaves for its later phases."""
        found: dict[str, list[fx.Node]] = {}
        for then in LATER:
            side = self.side(loop.run, then)
            nodes = lists_of(side, loop.phase) if side is not None else []
            found |= {list_name(loop.run, loop.phase, then): nodes} if nodes else {}
        return found

    def held(self, loop: Loop) -> int:
        """The bytes that a method holds while it runs beside what it is given and leaves."""
        mine = {lp: side for lp, side in self.sides.items() if lp.run is loop.run}
        ledgers = {lp: self._block(side).ledger() for lp, side in mine.items()}
        return held_inside([*ledgers.values()], ledgers[loop])

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
        items = side.loop.items()
        order = [item for item in items if isinstance(item, fx.Node)]
        num = [sum(isinstance(x, fx.Node) for x in items[:i]) for i, item in enumerate(items)
               if isinstance(item, Loop)]  # fmt: skip
        function = self.function(order, kept, group.layer, loops=num)
        return Block(self, side, function, first_gathers(self.graph, side))

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


def list_name(run: Run, before: Phase, then: Phase) -> str:
    """The name of the list that a phase of an inner block leaves for a later one."""
    return f"{run.layers[0]} {before}{then}"
