"""Runs a walk: what each of its statements, and each iteration of its loops, does to memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from partc.codegen.account.blocks import Block, InnerLoop, list_name
from partc.codegen.account.frame import Frame
from partc.codegen.account.memory import Held, Memory
from partc.codegen.account.transfers import Gathering, Reduction, Transfers
from partc.codegen.account.walk import Begun, Looped, Walk
from partc.codegen.bodies.block_arguments import passed
from partc.codegen.repeats.equal import Group
from partc.codegen.repeats.runs import LATER, Loop, Run
from partc.codegen.repeats.slots import Slot
from partc.graph import Phase

Saved = dict[tuple[Run, Phase, Phase], list[list[Held]]]  # by run, and the two phases


@dataclass
class Execution:
    """One function that runs.

    ``saved`` has what blocks leave for their later phases, ``whole`` the weights that are gathered
    for blocks that run next.
    """

    walk: Walk
    frame: Frame
    saved: Saved = field(default_factory=lambda: defaultdict(list))
    whole: dict[tuple[Loop, int], list[Gathering]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, walk: Walk, memory: Memory, transfers: Transfers, temporary: Mapping[fx.Node, int]
    ) -> Execution:
        return cls(walk, Frame(walk.function, memory, transfers, temporary))

    def run(self) -> None:
        """Go through all statements; last reductions that they start are waited for."""
        for statement in self.walk.statements:
            if isinstance(statement, Begun) and statement.loop is not None:
                for index in range(statement.num):
                    self._begin(statement.loop, index)
            elif isinstance(statement, Looped) and statement.loop is not None:
                self._loop(statement, statement.loop)
                self.frame.drop(statement)
            else:
                self.frame.one(statement)
        self._finish(self.frame.reduced)

    def _finish(self, reduced: list[Reduction]) -> None:
        self.frame.transfers.finish(reduced, summed=self.frame.summed)

    def _begin(self, loop: Loop, index: int) -> None:
        """Start the gathers of one block, if they have not been."""
        block = self.walk.shape.block(loop)
        if (loop, index) not in self.whole and block.gathers and not block.is_steady:
            self.whole[loop, index] = [self.frame.transfers.gather(n) for n in block.gathers]

    # loops -----------------------------------------------------------------------------------
    def _loop(self, statement: Looped, loop: Loop) -> None:
        """All iterations of a loop."""
        side, block = self.walk.shape.sides[loop], self.walk.shape.block(loop)
        carried = {slot.position: self.frame.held(slot.nodes[0]) for slot in side.of("carried")}
        for slot in side.of("carried"):
            self._let_go(loop, slot)
        listed: dict[int, list[Held]] = {position: [] for position in side.listed}
        turns = [group for group in loop.groups for _ in range(self._times(group))]
        for index, group in enumerate(turns):
            made = self._frame(loop, block, group, carried)
            carried.clear()
            before = self.frame.reduced
            self.frame.reduced = [] if block.reduces else before
            self._gather_ahead(statement, loop, index, index + 1 == len(turns))
            made.reduced = self.frame.reduced
            self._method(made, block, self.whole.pop((loop, index), []))
            if block.reduces:
                self._finish(before)
            carried = {p: made.held(side.group.nodes[p]) for p in side.carried}
            for position, values in listed.items():
                values.append(made.held(side.group.nodes[position]))
            self._save(loop, made)
            del made
        self._bind(loop, carried, listed)

    def _times(self, group: Group) -> int:
        return self.walk.shape.graph.times(group.nodes[0])

    def _let_go(self, loop: Loop, slot: Slot) -> None:
        """Drop the variable of a value that the loop's variable takes over."""
        name = str(self.walk.function.text(slot.nodes[0]))
        if str(self.walk.function.text(loop.groups[-1].nodes[slot.position])) == name:
            self.frame.variables.pop(name, None)

    def _frame(
        self, loop: Loop, block: Block, group: Group, carried: Mapping[int, Held]
    ) -> Frame:  # fmt: skip
        """The variables with which a block's method begins, and those of its caller beside it."""
        side, index = block.side, loop.groups.index(group)
        made = replace(
            self.frame, function=block.function, variables={}, passing={}, gathered={}, rooms={}
        )
        for slot in side.of("shared"):
            made.bind(side.own(slot), self.frame.held(slot.nodes[0]))
        for slot in side.of("listed"):
            made.bind(side.own(slot), self.frame.held(slot.nodes[index]))
        for slot in side.of("carried"):
            made.bind(side.own(slot), carried[slot.position])
        for phase in block.taken_from:
            self._unpack(loop, made, phase)
        return made

    def _unpack(self, loop: Loop, made: Frame, phase: Phase) -> None:
        """Hand over what the block's earlier phase has saved: the last, or in their order."""
        descends = loop.groups[0].layer != loop.run.layers[0] and phase == "F"
        saved = self.saved[loop.run, phase, loop.phase].pop(-1 if descends else 0)
        _bind(made, self.walk.shape.block(loop), phase, saved)

    def _gather_ahead(self, statement: Looped, loop: Loop, index: int, last: bool) -> None:
        """Start the gathers of the next block; behind the last block what comes behind the loop."""
        if not last:
            self._begin(loop, index + 1)
            return
        self.frame.run(statement.early)
        if statement.begun is not None:
            self._begin(statement.begun, 0)

    def _method(self, made: Frame, block: Block, gathered: list[Gathering]) -> None:
        """A block's method; the caller holds its arguments until it returns."""
        side = block.side
        arguments = [slot for kind in ("carried", "shared", "listed") for slot in side.of(kind)]
        held = [made.held(side.own(slot)) for slot in arguments]
        for node, weight in made.transfers.take(gathered).items():
            made.bind(node, weight)
        for statement in block.statements:
            if isinstance(statement, InnerLoop) and statement.loop is not None:
                self._inner(made, statement.loop)
                made.drop(statement)
            elif statement.calls:
                made.one(statement)
            else:
                made.drop(statement)
        del held

    def _inner(self, around: Frame, loop: Loop) -> None:
        """A method of an inner block, which the method around calls."""
        shape = self.walk.shape
        side, block, nodes = shape.sides[loop], shape.block(loop), loop.group.nodes
        made = replace(around, function=block.function, variables={}, passing={}, gathered={},
                       rooms={})  # fmt: skip
        for slot in passed(side):
            made.bind(side.own(slot), around.held(slot.nodes[0]))
        for phase in block.taken_from:
            saved = around.variables[list_name(loop.run, phase, loop.phase)]
            _bind(made, block, phase, saved)  # type: ignore[arg-type]
            if any(line.code.endswith(".clear()") for line in block.statements[0].lines):
                saved.clear()  # type: ignore[union-attr]
        self._method(made, block, [])
        for name, held in self._left(loop, made).items():
            around.variables[name] = held
        for position in (*side.carried, *side.listed):
            if position not in side.unread:
                around.bind(nodes[position], made.held(nodes[position]))

    def _save(self, loop: Loop, made: Frame) -> None:
        for then in LATER:
            if self.walk.shape.side(loop.run, then) is not None:
                saved = self._left(loop, made).get(list_name(loop.run, loop.phase, then), [])
                self.saved[loop.run, loop.phase, then].append(saved)

    def _left(self, loop: Loop, made: Frame) -> dict[str, list[Held]]:
        """The lists that a method leaves for later phases: inner lists first, then values."""
        found: dict[str, list[Held]] = {}
        for then in LATER:
            if self.walk.shape.side(loop.run, then) is None:
                continue
            later = self.walk.shape.blocks[loop.run, then]
            held = [made.variables[name] for name in later.lists_from(loop.phase)]
            held += [made.held(node) for node in later.saved_from(loop.phase)]
            if held:
                found[list_name(loop.run, loop.phase, then)] = held
        return found

    def _bind(
        self, loop: Loop, carried: Mapping[int, Held], listed: Mapping[int, Sequence[Held]]
    ) -> None:
        """Let the variables behind a loop hold what its blocks gave."""
        for position, held in carried.items():
            self.frame.bind(loop.groups[-1].nodes[position], held)
        for position, values in listed.items():
            for group, held in zip(loop.groups, values, strict=False):
                self.frame.bind(group.nodes[position], held)


def _bind(made: Frame, block: Block, phase: Phase, saved: Sequence[Held]) -> None:
    """Let the variables of a method hold what an earlier phase of its block has saved."""
    lists = [*block.lists_from(phase)]
    made.variables |= dict(zip(lists, saved, strict=False))
    for node, held in zip(block.saved_from(phase), saved[len(lists) :], strict=True):
        made.bind(node, held)
