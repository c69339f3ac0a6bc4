"""The memory of transfers: what is packed for them, what they keep, and what arrives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from partc.codegen.account.memory import Held, Memory, Piece
from partc.codegen.calls.storage import num_bytes
from partc.cost.bytes import put_in_bytes
from partc.graph import collectives, fake_of, tensor_args
from partc.graph.moves import Move, code_of, kind_of, moved, moves


@dataclass
class Gathering:
    """Weights that are on their way: what was sent, and the memory in which all pieces arrive."""

    start: fx.Node
    sent: Held
    arriving: Piece | None  # None: there is none yet of what is sent with fewer bytes


@dataclass
class Reduction:
    """A last reduction of gradients that the step has yet to wait for."""

    start: fx.Node
    sent: Held
    result: Held
    names: Sequence[str]  # of the parameters whose gradients it reduces


@dataclass
class Transfers:
    """Starts and ends transfers in memory, as the printed functions of a backend do it.

    ``in_pieces``: gradients that are scattered arrive in pieces of all ranks, which this rank adds
    up. With ``messages`` it receives each other rank's piece by itself.
    """

    memory: Memory
    in_pieces: bool
    messages: bool
    grads: dict[str, list[Held]] = field(default_factory=dict)  # by parameter, to the step's end

    # weights ---------------------------------------------------------------------------------
    def gather(self, start: fx.Node) -> Gathering:
        """Start to gather weights: shards of several are packed into one memory, casts made."""
        if code_of(start):
            return self._coded(start)
        size, shards = _sent_bytes(start), tensor_args(start)
        cast = self.memory.piece(size) if start.kwargs.get("dtype") is not None else None
        packed = self.memory.piece(size) if len(shards) > 1 else cast
        arriving = self.memory.piece(_num(start) * size)
        self.memory.meet(start.name)
        return Gathering(start, packed, arriving)

    def _coded(self, start: fx.Node) -> Gathering:
        """Start to gather weights with fewer bytes: numbers are divided by scales before."""
        size = put_in_bytes(start)
        sent, arriving = self.memory.piece(size), self.memory.piece(_num(start) * size)
        self.memory.meet(start.name, 2 * _sent_bytes(start))
        return Gathering(start, [sent, arriving], None)

    def take(self, gathered: list[Gathering]) -> dict[fx.Node, Held]:
        """Wait for gathered weights: the memory of each whole one, by the nodes that are it.

        Weights of one transfer are copied apart. Those that are cut on another dim than 0 are
        copied once more, when all have arrived.
        """
        whole = [weight for each in _emptied(gathered) for weight in self._apart(each)]
        if any(map(_is_cut, (move for _, move, _ in whole))):
            whole = [(node, m, self._joined(m, piece)) for node, m, piece in whole]
            self.memory.meet("join")
        found: dict[fx.Node, Held] = {}
        for start, move, piece in whole:
            alone = start.target not in collectives.JOINED
            found |= dict.fromkeys([start, *start.users] if alone else [], piece)
            found |= {move.result: piece} if move.result is not None else {}
        return found

    def _apart(self, each: Gathering) -> list[tuple[fx.Node, Move, Piece]]:
        parts, start = moves(each.start), each.start
        arrived = each.arriving if len(parts) == 1 else None
        found = [(start, m, arrived or self._whole(m)) for m in parts]
        decoded = max(map(_bytes_of, parts)) * _num(start) if code_of(start) else 0
        self.memory.meet(start.name, decoded)
        return found

    def _whole(self, move: Move) -> Piece:
        return self.memory.piece(int(move.kwargs["num"]) * _bytes_of(move))

    def _joined(self, move: Move, piece: Piece) -> Piece:
        return self._whole(move) if _is_cut(move) else piece

    # values ----------------------------------------------------------------------------------
    def start(self, start: fx.Node, operands: Sequence[Held], room: Held) -> tuple[Held, Held]:
        """Start a transfer: what its handle keeps, and the memory of the result.

        ``room``: memory that has the operands of an all_reduce already, None if there is none.
        """
        size = sum(map(num_bytes, moved(start)))
        kept, result = self._started(start, size, operands, room)
        self.memory.meet(start.name)
        return [kept, result], result

    def _started(
        self, start: fx.Node, size: int, operands: Sequence[Held], room: Held
    ) -> tuple[Held, Held]:
        packs, num = len(operands) > 1, _num(start)
        if kind_of(start) == "all_reduce":
            return None, room if room is not None else self.memory.piece(size)
        if kind_of(start) == "all_to_all":
            k = start.kwargs
            packs = (k["to_dim"], k.get("to_outer", 1)) != (0, 1)
        elif kind_of(start) == "reduce_scatter":
            packs = packs or any(map(_is_cut, moves(start)))
        sent = self.memory.piece(size) if packs else operands[0]
        if kind_of(start) == "reduce_scatter":
            return [sent, *self._pieces(start, size)], self._total(start, size)
        more = num if kind_of(start) == "all_gather" else 1
        return sent, self.memory.piece(more * size)

    def _total(self, start: fx.Node, size: int) -> Piece:
        """The memory of a scattered sum, or that in which pieces of gradients arrive."""
        return self.memory.piece(size if self.comes_in_pieces(start) else size // _num(start))

    def comes_in_pieces(self, start: fx.Node) -> bool:
        """Whether a sum of gradients arrives in pieces."""
        return self.in_pieces and kind_of(start) == "reduce_scatter" and _is_of_grads(start)

    def _pieces(self, start: fx.Node, size: int) -> Iterator[Held]:
        """What arrives beside the memory of the result."""
        if self.in_pieces and not _is_of_grads(start):
            yield self.memory.piece(size)
        for _ in range(_num(start) - 2 if self.messages else 0):
            yield self.memory.piece(size // _num(start))

    def lets_go(self, start: fx.Node) -> bool:
        """Whether the handle of a transfer keeps no tensors once it has been waited for."""
        by_messages = self.messages and kind_of(start) == "all_gather"
        return by_messages or start.target is collectives.reduce_scatter

    def wait(self, start: fx.Node) -> Held:
        """Wait for a transfer: the memory of its result if that is a copy of what has arrived."""
        k = start.kwargs
        scattered = self.comes_in_pieces(start)
        joined = start.target in (collectives.all_gather, collectives.all_to_all)
        if not scattered and not (joined and (k["dim"], k.get("outer", 1)) != (0, 1)):
            return None
        size = sum(map(num_bytes, moved(start)))
        num = {"all_gather": _num(start), "all_to_all": 1}.get(kind_of(start))
        copy = self.memory.piece(size // _num(start) if num is None else num * size)
        self.memory.meet(start.name)
        return copy

    # gradients -------------------------------------------------------------------------------
    def store(self, names: Iterable[str], held: Held) -> None:
        """Keep the memory of a gradient; equal blocks that the graph leaves out add theirs."""
        for name in names:
            self.grads.setdefault(name, []).append(held)

    def finish(self, reduced: list[Reduction], *, summed: bool = False) -> None:
        """Wait for gradients that ranks are summing; what was sent goes.

        ``summed``: they are added to gradients that are there.
        """
        while reduced:
            each = reduced.pop(0)
            each.sent = None
            found = self._finished(each)
            for name, held in zip(each.names, found, strict=False):
                self.store([] if summed else [name], held)
            del found

    def _finished(self, each: Reduction) -> list[Held]:
        """The memory of each reduced gradient: its part of what has arrived, or a sum of pieces."""
        operands = moved(each.start)
        if not self.comes_in_pieces(each.start):
            return [each.result] * len(operands)
        sizes = [num_bytes(operand) // _num(each.start) for operand in operands]
        sums: list[Held] = [self.memory.piece(size) for size in sizes]
        self.memory.meet("finish")
        return sums


def _emptied(gathered: list[Gathering]) -> Iterator[Gathering]:
    """Each gathering, of which nothing is kept when the next one comes."""
    while gathered:
        yield gathered.pop(0)


def _num(start: fx.Node) -> int:
    return int(str(start.kwargs["num"]))


def _sent_bytes(start: fx.Node) -> int:
    return sum(map(_bytes_of, moves(start)))


def _bytes_of(move: Move) -> int:
    """The bytes of a shard, in the dtype in which it is gathered."""
    fake = fake_of(move.operand)
    return int(fake.numel() * (move.kwargs.get("dtype") or fake.dtype).itemsize)


def _is_cut(move: Move) -> bool:
    """Whether a tensor is sharded on another dim than 0, or in parts of it."""
    return (move.kwargs["dim"], move.kwargs.get("outer", 1)) != (0, 1)


def _is_of_grads(start: fx.Node) -> bool:
    """Whether a scattered sum is one of a dict of gradients."""
    return start.target in collectives.JOINED or _ends(start)


def _ends(start: fx.Node) -> bool:
    waits = [user for user in start.users if user.target is collectives.wait]
    return bool(waits) and all(user.op == "output" for wait in waits for user in wait.users)
