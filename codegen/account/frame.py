"""Goes through the statements of one function, with the memory that its variables hold."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from partc.codegen.account.function import Function
from partc.codegen.account.memory import Held, Memory
from partc.codegen.account.transfers import Gathering, Reduction, Transfers
from partc.codegen.calls.statements import Statement
from partc.codegen.calls.storage import num_bytes
from partc.graph import collectives, is_tensor, ops, results_of
from partc.graph.moves import gathers_param, moved, moves


@dataclass
class Frame:
    """The variables of a function that runs, and what they hold.

    ``temporary`` has the bytes that each call needs beside its results. ``passing`` has values
    without a variable, until the call that reads them is done. ``summed`` are parameters that have
    a gradient already, to which this function adds.
    """

    function: Function
    memory: Memory
    transfers: Transfers
    temporary: Mapping[fx.Node, int]
    reduced: list[Reduction] = field(default_factory=list)
    summed: bool = False
    variables: dict[str, Held] = field(default_factory=dict)
    passing: dict[fx.Node, Held] = field(default_factory=dict)
    gathered: dict[fx.Node, Gathering] = field(default_factory=dict)
    rooms: dict[fx.Node, Held] = field(default_factory=dict)

    def run(self, statements: Sequence[Statement]) -> None:
        """Go through statements, and what their ``del`` lines drop."""
        for statement in statements:
            self.one(statement)

    def one(self, statement: Statement) -> None:
        """Go through one statement: its calls, the variables it binds, its ``del`` line."""
        self._evaluate(statement.calls[0])
        for node in statement.binds:
            self.bind(node, self.held(node))
        self.passing.clear()
        self.drop(statement)

    def drop(self, statement: Statement) -> None:
        """Forget the variables that stand in a statement's ``del`` line."""
        for line in statement.lines:
            if line.code.startswith("del "):
                for name in line.code.removeprefix("del ").strip("()").split(", "):
                    self.variables.pop(name, None)

    def bind(self, node: fx.Node, held: Held) -> None:
        """Let the variable of a value hold memory."""
        self.variables[str(self.function.text(node))] = held

    def held(self, node: fx.Node) -> Held:
        """The memory in which a value lies."""
        while node not in self.passing:
            name = str(self.function.text(node))
            if name in self.variables:
                return self.variables[name]
            before = self.function.source(node) if node in self.function.place else None
            if before is None:
                return None
            node = before
        return self.passing[node]

    def _evaluate(self, node: fx.Node) -> None:
        """Make a call, those inside of its expression first, which hold memory until it is done."""
        inner = [n for n in node.all_input_nodes if n in {*self.function.written_in(node)}]
        for operand in inner:
            self._evaluate(operand)
        self._call(node)
        for operand in inner:
            self.passing.pop(operand, None)

    def _call(self, node: fx.Node) -> None:
        function = self.function
        if gathers_param(node):
            self.gathered[node] = self.transfers.gather(node)
        elif node.target is collectives.wait and gathers_param(node.all_input_nodes[0]):
            self.passing |= self.transfers.take([self.gathered.pop(node.all_input_nodes[0])])
        elif function.is_start(node):
            self._start(node)
        elif node.target is collectives.wait:
            self._wait(node)
        elif function.has_room(node):
            self._write(node)
        elif is_tensor(node):
            self._compute(node)
        else:
            self._several(node)

    # calls -----------------------------------------------------------------------------------
    def _compute(self, node: fx.Node) -> None:
        adds = node in self.function.stored and self.summed
        if adds and node.target is ops.weight_grad:
            self.memory.meet(node.name, self.temporary.get(node, 0))
            return
        before = self.function.source(node)
        held = self.memory.piece(num_bytes(node)) if before is None else self.held(before)
        self.memory.meet(node.name, self.temporary.get(node, 0))
        self.passing[node] = held
        if not adds:
            self.transfers.store(self.function.stored.get(node, ()), held)

    def _several(self, node: fx.Node) -> None:
        """A call with several results, each in a memory of its own, or views of one."""
        picks = {u.args[1]: u for u in node.users if u.target is operator.getitem}
        for each in filter(self.function.has_room, picks.values()):
            self._room(self.function.joint.place[each][0])  # it is made before the call
        unread: list[Held] = []
        for index, fake in enumerate(results_of(node)):
            pick = picks.get(index)
            viewed = self.function.source(pick) if pick is not None else None
            if fake is None or not hasattr(fake, "numel"):
                continue
            if pick is not None and viewed is not None:
                self.passing[pick] = self.held(node.all_input_nodes[0])
                continue
            held = self.memory.piece(fake.numel() * fake.element_size())
            if pick is None:
                unread.append(held)
            else:
                self.passing[pick] = held
        self.memory.meet(node.name, self.temporary.get(node, 0))
        for pick in picks.values() if not self.summed else ():
            if pick in self.passing:
                self.transfers.store(self.function.stored.get(pick, ()), self.passing[pick])

    def _write(self, node: fx.Node) -> None:
        """A gradient that is written to its part of the memory that is sent."""
        self._room(self.function.joint.place[node][0])
        apart = 0 if node.target is ops.weight_grad else num_bytes(node)
        self.memory.meet(node.name, apart + self.temporary.get(node, 0))

    def _room(self, start: fx.Node) -> None:
        """Make the memory that a reduction sends, if it is not there."""
        if start not in self.rooms:
            self.rooms[start] = self.memory.piece(sum(map(num_bytes, moved(start))))

    # transfers -------------------------------------------------------------------------------
    def _start(self, node: fx.Node) -> None:
        function, operands = self.function, [self.held(x) for x in moved(node)]
        room = self.rooms.pop(node, None)
        if node in function.in_place:
            room = operands[0]
        kept, result = self.transfers.start(node, operands, room)
        del room, operands
        for operand in moved(node):
            if operand in function.joint.place:
                self.variables.pop(str(function.text(operand)), None)
        if function.is_last(node):
            self.reduced.append(Reduction(node, kept, result, function.reduces(node)))
            return
        self.passing[node] = result
        self.variables[function.handle(node)] = kept
        for move in moves(node):
            if move.result is not None and move.result is not node:
                self.bind(move.result, result)

    def _wait(self, node: fx.Node) -> None:
        start = node.all_input_nodes[0]
        self.passing[node] = self.held(start)
        if self.transfers.lets_go(start):
            self.variables[self.function.handle(start)] = None
        copy = self.transfers.wait(start)
        if self.function.is_at_once(start):
            self.variables.pop(self.function.handle(start))
        if copy is None:
            return
        self.passing[node] = copy
        for move in moves(start):
            if move.result is not None and move.result is not start:
                self.bind(move.result, copy)
