"""The ``del`` lines of a block's methods: as few as keep the peak memory near the least possible.

A value with a name lives until the method returns, and so does a saved value that was unpacked. The
peak is lowest if every value goes right after its last reader. That would be a ``del`` behind
nearly every line. So a ``del`` is printed only where the method would otherwise rise over a limit,
and as late as the limit allows: one line then drops all that has died by then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import fx

from partc.codegen.calls.statements import InnerCall, Statement, deleted
from partc.codegen.calls.storage import copies, num_bytes, owner, shares
from partc.codegen.text import Line, Text
from partc.graph import is_tensor, value

SLACK = 22  # methods may hold 1/22 more than the least possible peak: less is not worth a line
SMALL = 64  # a value of up to 1/64 of the peak is not worth a name in a `del`


@dataclass(eq=False)
class Piece:
    """One allocation: from statement ``born`` on, last read by statement ``last``.

    ``names`` are the variables that hold the memory: values, views of them, handles of transfers.
    """

    num_bytes: int
    born: int
    last: int
    names: dict[str, None] = field(default_factory=dict)
    unpacked: str = ""  # the argument, a list of saved values, that holds the memory too
    stays: bool = False  # held from outside as well, so that no `del` frees it

    def lives(self, i: int) -> bool:
        """Whether the memory is live during statement ``i``, if there is no ``del``."""
        return self.born <= i and (self.stays or bool(self.names) or i <= self.last)


class Values(Protocol):
    """What a Ledger has to know of a function: its calls, and where their values are written."""

    order: Sequence[fx.Node]
    kept: set[fx.Node]
    stored: dict[fx.Node, list[str]]
    accumulated: dict[fx.Node, fx.Node]
    in_place: set[fx.Node]

    def text(self, node: fx.Node) -> Text: ...


class Ledger:
    """What one method holds in memory at each of its statements.

    ``lists`` has the statements that unpack a list of saved values, by the argument's name.
    ``given`` are arguments that the caller holds, which no ``del`` here can free.
    """

    def __init__(
        self, statements: Sequence[Statement], body: Values, lists: Mapping[str, Statement],
        given: Iterable[fx.Node],
    ) -> None:  # fmt: skip
        self.statements, self.body, self.lists = statements, body, lists
        unpacked = [node for statement in lists.values() for node in _held_by(statement)]
        inner = [node for s in statements if isinstance(s, InnerCall) for node in s.calls]
        self.own = {*body.order, *inner, *map(self._memory, unpacked)}
        self.pieces: dict[fx.Node, Piece] = {}
        for i, statement in enumerate(statements):
            self._enter(i, statement)
        for word, statement in lists.items():
            for piece in self._pieces(_held_by(statement)):
                piece.unpacked = word
        self._transfers()
        self._stay([*body.kept, *body.stored])
        self.outside = sum(map(num_bytes, dict.fromkeys(map(owner, given))))
        self.held_bytes = [self.outside + self._held(i) for i in range(len(statements))]
        self.small = 0  # `least` counts every value first
        self.small = self.least() // SMALL

    def least(self) -> int:
        """The peak in bytes if every value goes right after its last reader."""
        return max(held - _bytes(self._dead(i)) for i, held in enumerate(self.held_bytes))

    def free(self, limit: int) -> None:
        """Add the ``del`` lines that keep the method under a limit of bytes, as far as possible."""
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
        """The first statement from ``start`` on with more than ``limit`` bytes, ``gone`` freed."""
        end, most = len(self.statements), limit + _bytes(gone)
        return next((i for i in range(start, end) if self.held_bytes[i] > most), end)

    def _worth(self, i: int, limit: int, gone: list[Piece]) -> list[Piece]:
        """The fewest dead pieces, biggest first, that serve as long as dropping all of them would.

        They keep the method under its limit up to the same statement.
        """
        dead = [piece for piece in self._dead(i) if piece not in gone]
        dead.sort(key=lambda piece: -piece.num_bytes)
        latest = self._rises(i, limit, [*gone, *dead])
        enough = (n for n in range(len(dead)) if self._rises(i, limit, gone + dead[:n]) == latest)
        return dead[: next(enough, len(dead))]

    def _held(self, i: int) -> int:
        """The bytes that are live during statement ``i`` if there is no ``del``."""
        passing = [n for n in self._unnamed(self.statements[i]) if n not in self.pieces]
        alive = [piece for piece in self.pieces.values() if piece.lives(i)]
        return _bytes(alive) + sum(map(num_bytes, passing)) + self._inside(i)

    def _inside(self, i: int) -> int:
        """The bytes that statement ``i`` holds in a method of an inner block."""
        statement = self.statements[i]
        return statement.held if isinstance(statement, InnerCall) else 0

    def _dead(self, i: int) -> list[Piece]:
        """The pieces that a ``del`` before statement ``i`` can free and that are worth a name."""
        freed = (p for p in self.pieces.values() if p.last < i and p.num_bytes > self.small)
        return [piece for piece in freed if piece.names and not piece.stays]

    # what is held -----------------------------------------------------------------------------
    def _enter(self, i: int, statement: Statement) -> None:
        """Note what statement ``i`` allocates, which names hold that, and what it reads."""
        for node in filter(is_tensor, statement.binds):
            memory, name = self._memory(node), str(self.body.text(node))
            if memory not in self.own or value(memory).kind in ("param", "buffer"):
                continue
            for other in self.pieces.values():
                other.names.pop(name, None)  # a transfer's result takes over the name
            piece = self.pieces.setdefault(memory, Piece(num_bytes(memory), i, i))
            piece.names[name] = None
            piece.stays |= not name.isidentifier()
        for node in self._unnamed(statement):
            if node in self.body.stored:
                self.pieces[node] = Piece(num_bytes(node), i, i)
        for name, nodes in statement.lists.items():
            for node in filter(is_tensor, nodes):
                self._enter_listed(i, name, self._memory(node))
        for node in (*statement.binds, *statement.reads):
            memory = self._memory(node)
            if memory in self.pieces:
                self.pieces[memory].last = i

    def _enter_listed(self, i: int, name: str, memory: fx.Node) -> None:
        """Note that a list holds the memory of a value."""
        if memory in self.own and value(memory).kind not in ("param", "buffer"):
            piece = self.pieces.setdefault(memory, Piece(num_bytes(memory), i, i))
            piece.names[name] = None

    def _memory(self, node: fx.Node) -> fx.Node:
        """The call that allocated the memory of a value, through views and calls in place."""
        while node.op == "call_function":
            if node in self.body.accumulated:
                node = self.body.accumulated[node]
            elif node in self.body.in_place or (shares(node) and not copies(node)):
                node = node.all_input_nodes[0]
            else:
                break
        return node

    def _unnamed(self, statement: Statement) -> list[fx.Node]:
        """The calls whose results a statement allocates without a name: inlined, or gradients."""
        if isinstance(statement, InnerCall):
            return []
        mine = [n for n in statement.calls if is_tensor(n) and self._memory(n) is n]
        return [n for n in mine if n not in statement.binds]

    def _transfers(self) -> None:
        """Note what handles of transfers hold: c10d keeps the tensors that a handle moves.

        A handle in ``reduced`` outlives the method.
        """
        for statement in self.statements:
            for line in statement.lines:
                handle = re.match(r"(?:\w+, )?(\w+_done) = ", line.code)
                moved = [*statement.binds, *statement.reads]
                if "reduced.append" in line.code:
                    self._stay(moved)
                elif handle:
                    self._hold(handle.group(1), moved)

    def _hold(self, handle: str, moved: Sequence[fx.Node]) -> None:
        """Note that a handle holds what it moved, at least until it is waited for."""
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


def _held_by(statement: Statement) -> list[fx.Node]:
    """The values that the names which a statement binds hold, also those in lists."""
    return [*statement.binds, *(node for nodes in statement.lists.values() for node in nodes)]


def held_inside(methods: Sequence[Ledger], method: Ledger) -> int:
    """The bytes that one of a class's methods holds beside what it is given and leaves."""
    peak = min(max(method.held_bytes, default=0), _limit(methods))
    known = [p for p in method.pieces.values() if p.stays or p.unpacked]
    return max(0, peak - method.outside - _bytes(known))


def _limit(methods: Sequence[Ledger]) -> int:
    least = max(method.least() for method in methods)
    return least + least // SLACK


def free_blocks(methods: Sequence[Ledger]) -> None:
    """Add ``del`` lines to the methods of a block class, under one limit for all of them.

    The limit is the highest of their least peaks, and 1/22 more. While any of them runs the other
    blocks hold the same, so only the method with the highest peak counts.
    """
    limit = _limit(methods)
    for method in methods:
        method.free(limit)
