"""The ``del`` lines of a block's methods: as few as keep their memory near the least.

What a method binds lives until it returns, and so does what it unpacks. Its memory is lowest where
everything goes after its last use; this prints a ``del`` only where the method would otherwise
rise over a limit, as late as that allows, so that one line drops all that has died by then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from partc.codegen.bodies.body import Body
from partc.codegen.calls.statements import Statement, deleted
from partc.codegen.calls.storage import copies, num_bytes, owner, shares
from partc.codegen.text import Line
from partc.graph import is_tensor

SLACK = 22  # the part of the least by which blocks may hold more: it is not worth a line
SMALL = 64  # the part of a method's least that is not worth a name in a `del`


@dataclass(eq=False)
class Piece:
    """One memory: what holds it, from which statement on and to which one it is read."""

    num_bytes: int
    born: int
    last: int
    names: dict[str, None] = field(default_factory=dict)
    unpacked: str = ""  # the list that holds it too
    stays: bool = False  # others hold it as well

    def lives(self, i: int) -> bool:
        """Whether a statement finds it, if nothing is dropped."""
        return self.born <= i and (self.stays or bool(self.names) or i <= self.last)


class Ledger:
    """What one method holds at each of its statements.

    ``lists`` has the statements that unpack an argument, by the argument's name; ``given`` are
    arguments that the caller holds.
    """

    def __init__(
        self, statements: Sequence[Statement], body: Body, lists: Mapping[str, Statement],
        given: Iterable[fx.Node],
    ) -> None:  # fmt: skip
        self.statements, self.body, self.lists = statements, body, lists
        unpacked = [node for statement in lists.values() for node in statement.binds]
        self.own = {*body.order, *map(self._memory, unpacked)}
        self.pieces: dict[fx.Node, Piece] = {}
        for i, statement in enumerate(statements):
            self._enter(i, statement)
        for word, statement in lists.items():
            for piece in self._pieces(statement.binds):
                piece.unpacked = word
        self._transfers()
        self._stay([*body.kept, *body.stored])
        outside = sum(map(num_bytes, dict.fromkeys(map(owner, given))))
        self.held_bytes = [outside + self._held(i) for i in range(len(statements))]
        self.small = 0
        self.small = self.least() // SMALL

    def least(self) -> int:
        """The most bytes at a time if everything goes after its last use."""
        return max(held - _bytes(self._dead(i)) for i, held in enumerate(self.held_bytes))

    def free(self, limit: int) -> None:
        """Add the lines that keep the method under a limit, as far as it can be."""
        gone: list[Piece] = []
        names: dict[str, None] = {}
        i = self._rises(1, limit, gone)
        while i < len(self.statements):
            dead = self._worth(i, limit, gone)
            new = dict.fromkeys(n for piece in dead for n in piece.names if n not in names)
            if new:
                self.statements[i - 1].lines.append(deleted(new))
            names |= new
            gone += dead
            i = self._rises(i + 1, limit, gone)
        for word in dict.fromkeys(piece.unpacked for piece in gone if piece.unpacked):
            self.lists[word].lines.append(Line(f"{word}.clear()"))

    def _rises(self, start: int, limit: int, gone: Sequence[Piece]) -> int:
        """The first statement, from one on, during which more is held than the limit."""
        end, most = len(self.statements), limit + _bytes(gone)
        return next((i for i in range(start, end) if self.held_bytes[i] > most), end)

    def _worth(self, i: int, limit: int, gone: list[Piece]) -> list[Piece]:
        """The fewest dead pieces that keep the method under its limit for as long as all do."""
        dead = [piece for piece in self._dead(i) if piece not in gone]
        dead.sort(key=lambda piece: -piece.num_bytes)
        latest = self._rises(i, limit, [*gone, *dead])
        enough = (n for n in range(len(dead)) if self._rises(i, limit, gone + dead[:n]) == latest)
        return dead[: next(enough, len(dead))]

    def _held(self, i: int) -> int:
        """The bytes that live during a statement if nothing is dropped."""
        passing = [n for n in self._unnamed(self.statements[i]) if n not in self.pieces]
        alive = [piece for piece in self.pieces.values() if piece.lives(i)]
        return _bytes(alive) + sum(map(num_bytes, passing))

    def _dead(self, i: int) -> list[Piece]:
        """What nobody reads from a statement on, and is worth a name."""
        freed = (p for p in self.pieces.values() if p.last < i and p.num_bytes > self.small)
        return [piece for piece in freed if piece.names and not piece.stays]

    # what is held -----------------------------------------------------------------------------
    def _enter(self, i: int, statement: Statement) -> None:
        for node in filter(is_tensor, statement.binds):
            memory, name = self._memory(node), str(self.body.text(node))
            if memory.op != "call_function" or memory not in self.own:
                continue
            for other in self.pieces.values():
                other.names.pop(name, None)  # a transfer's result takes over the name
            piece = self.pieces.setdefault(memory, Piece(num_bytes(memory), i, i))
            piece.names[name] = None
            piece.stays |= not name.isidentifier()
        for node in self._unnamed(statement):
            if node in self.body.stored:
                self.pieces[node] = Piece(num_bytes(node), i, i)
        for node in (*statement.binds, *statement.reads):
            memory = self._memory(node)
            if memory in self.pieces:
                self.pieces[memory].last = i

    def _memory(self, node: fx.Node) -> fx.Node:
        """The call that has allocated what a value lies in."""
        while node.op == "call_function":
            if node in self.body.accumulated:
                node = self.body.accumulated[node]
            elif node in self.body.in_place or (shares(node) and not copies(node)):
                node = node.all_input_nodes[0]
            else:
                break
        return node

    def _unnamed(self, statement: Statement) -> list[fx.Node]:
        """What a statement allocates and binds no name to: gradients, and what it reads itself."""
        mine = [n for n in statement.calls if is_tensor(n) and self._memory(n) is n]
        return [n for n in mine if n not in statement.binds]

    def _transfers(self) -> None:
        """A handle holds what it moves until it goes itself, and one that is given away longer."""
        for statement in self.statements:
            for line in statement.lines:
                handle = re.match(r"(?:\w+, )?(\w+_done) = ", line.code)
                moved = [*statement.binds, *statement.reads]
                if "reduced.append" in line.code:
                    self._stay(moved)
                elif handle:
                    self._hold(handle.group(1), moved)

    def _hold(self, handle: str, moved: Sequence[fx.Node]) -> None:
        waits = [
            i
            for i, statement in enumerate(self.statements)
            if any(line.code == f"{handle}.wait()" for line in statement.lines)
        ]
        if not waits:
            self._stay(moved)
        for piece in self._pieces(moved):
            piece.names[handle] = None
            piece.last = max([piece.last, *waits])

    def _stay(self, nodes: Iterable[fx.Node]) -> None:
        for piece in self._pieces(nodes):
            piece.stays = True

    def _pieces(self, nodes: Iterable[fx.Node]) -> list[Piece]:
        memories = dict.fromkeys(map(self._memory, nodes))
        return [self.pieces[memory] for memory in memories if memory in self.pieces]


def _bytes(pieces: Iterable[Piece]) -> int:
    return sum(piece.num_bytes for piece in pieces)


def free_blocks(methods: Sequence[Ledger]) -> None:
    """Let the methods of equal blocks hold little more than the worst of them has to.

    They run while the same is kept of the other blocks, so that only the worst one counts.
    """
    least = max(method.least() for method in methods)
    for method in methods:
        method.free(least + least // SLACK)
