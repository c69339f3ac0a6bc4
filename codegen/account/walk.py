"""Goes through the calls and loops of one function of a step, with the memory that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import fx

from partc.codegen.account.blocks import Shape
from partc.codegen.account.function import Function
from partc.codegen.bodies.block_arguments import passed
from partc.codegen.bodies.gathers_ahead import begin_at
from partc.codegen.calls.path_names import inside
from partc.codegen.calls.statements import Statement, free_early
from partc.codegen.repeats.runs import LATER, Item, Loop, sections
from partc.codegen.repeats.slots import Slot
from partc.graph.moves import gathers_param


@dataclass
class Looped(Statement):
    """A loop over blocks: the gathers that its last iteration starts, and those of which loop."""

    loop: Loop | None = None
    early: Sequence[Statement] = ()
    begun: Loop | None = None


@dataclass
class Begun(Statement):
    """The start of the gathers of a loop's first blocks."""

    loop: Loop | None = None
    num: int = 0


@dataclass
class Walk:
    """One function of a step: ``items`` are its calls and loops, as for ``StepBody``.

    ``kept`` has the values that something outside reads; ``lasting`` has values that no ``del``
    drops. ``prefetch``: of how many blocks weights are gathered ahead of a loop.
    """

    shape: Shape
    items: Sequence[Item]
    kept: set[fx.Node]
    lasting: set[fx.Node]
    prefetch: int = 1
    function: Function = field(init=False)
    statements: list[Statement] = field(init=False)

    def __post_init__(self) -> None:
        order = [item for item in self.items if isinstance(item, fx.Node)]
        self.function = self.shape.function(
            order, self.kept, same=dict(self._carried()), loops=[*self._loops()]
        )
        self.statements = free_early([*self._all()], self.function.text, self.lasting)

    # statements ------------------------------------------------------------------------------
    def _all(self) -> Iterator[Statement]:
        """The statements of all calls and loops, as ``StepBody`` puts them."""
        stretches = sections(self.items)
        for index, (loop, nodes) in enumerate(stretches):
            early = [*takewhile(gathers_param, nodes)]
            following = next((other for other, _ in stretches[index + 1 :]), None)
            begun = self._begun_in(loop, following)
            rest, starts = nodes[len(early) :], self.function.statements(early)
            if loop is not None:
                yield self._loop(loop, starts, begun)
            else:
                yield from starts
            if following is not None and begun is None and self._gathers(following):
                num = self.prefetch if loop is not None and rest else 1
                at = begin_at(rest, following, num)
                yield from self.function.statements(rest[:at])
                yield Begun([], loop=following, num=min(num, len(following.run.layers)))
                rest = rest[at:]
            yield from self.function.statements(rest)

    def _gathers(self, loop: Loop) -> bool:
        block = self.shape.block(loop)
        return bool(block.gathers) and not block.is_steady

    def _begun_in(self, loop: Loop | None, following: Loop | None) -> Loop | None:
        """The loop whose gathers the last iteration of the one before starts, if it does."""
        if loop is None or following is None or loop.run is following.run:
            return None
        single = loop.run.is_single or following.run.is_single
        return following if single and self._gathers(following) else None

    def _loop(self, loop: Loop, early: Sequence[Statement], begun: Loop | None) -> Looped:
        side = self.shape.sides[loop]
        own = {n for group in loop.groups for n in group.nodes}
        reads = [n for slot in passed(side) for n in slot.nodes if n not in own]
        binds = [loop.groups[-1].nodes[p] for p in side.carried if p not in side.unread]
        section = inside(loop.run.layers[0].rpartition(".")[0], "")
        return Looped([], reads, binds, [], section, loop=loop, early=early, begun=begun)

    def _loops(self) -> Iterator[int]:
        """For each loop how many calls stand before it."""
        calls = 0
        for item in self.items:
            calls += isinstance(item, fx.Node)
            if isinstance(item, Loop):
                yield calls

    def _carried(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """What the last block gives, with the value before the loop whose variable it has."""
        for loop in (item for item in self.items if isinstance(item, Loop)):
            for slot in [] if loop.run.is_single else self.shape.sides[loop].of("carried"):
                if self._runs_through(loop, slot):
                    yield loop.groups[-1].nodes[slot.position], slot.nodes[0]

    def _runs_through(self, loop: Loop, slot: Slot) -> bool:
        """Whether a value that a loop begins with is read by its first block alone."""
        later = [loop.run.of(phase) for phase in LATER] if loop.phase == "F" else []
        first = {*loop.groups[0].nodes} | {n for groups in later if groups for n in groups[0].nodes}
        return set(slot.nodes[0].users) <= first
