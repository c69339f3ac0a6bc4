"""Count the bytes that are live while a program runs on tensors without data."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partc.cost.workspaces import workspace_of
from partc.dryrun.streams import Streams
from partc.errors import CheckError
from partc.graph.fake_calls import FakeCalls, as_torch_has_it, tensors_in
from partc.program.user_lines import file_of
from partc.rules.strides import misread

Lines = Counter[int]  # bytes by source line
Turn = Hashable  # which call of a stage's method is running: stage, method, microbatch
Place = Hashable  # where in the turn: in which block of a stack


@dataclass
class Peak:
    """The largest number of live bytes at a place, and the line and call of it.

    A turn that is not executed has no call; then ``lines`` has the bytes live before the turn by
    line, and ``extra`` those of the turn.
    """

    num_bytes: int = -1
    line: int = 0
    call: int = 0
    lines: Lines | None = None
    extra: tuple[tuple[int, int], ...] = ()


@dataclass
class Piece:
    """One storage: its bytes, the line that allocated it, and the calls between which it lived."""

    num_bytes: int
    line: int
    born: int
    died: int | None = None


class Held:
    """Counts pieces of memory as live, without tensors, until this object is deleted."""

    def __init__(self, live: LiveMemory, pieces: list[Piece]) -> None:
        self.live, self.pieces = live, pieces
        live.pieces += pieces
        for piece in pieces:
            live.total += piece.num_bytes
            live.lines[piece.line] += piece.num_bytes

    def __del__(self) -> None:
        for piece in self.pieces:
            self.live.drop(piece)


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all live storages after every op; a weak reference tells when one dies.

    ``peaks``: the peak of every turn and place that ``enter`` has announced.
    """

    def __init__(self, file: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.file = file
        self.outside: list[Tensor] = []  # not counted; kept, so that no other gets its address
        self.alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Piece]] = {}
        self.pieces: list[Piece] = []
        self.lines: Lines = Counter()
        self.calls = self.total = self.made_line = 0
        self.peaks: dict[tuple[Turn, Place], Peak] = {}
        self.turn: Turn = None
        self.streams = Streams()
        self.enter(None, None)

    def enter(self, turn: Turn, place: Place) -> None:
        """Announce the turn and place in which the program now is."""
        self.turn = turn
        self.here = self.peaks.setdefault((turn, place), Peak())

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """Exclude tensors (parameters, buffers, inputs) from the count."""
        self.outside += tensors
        for tensor in tensors:
            self._add(tensor.untyped_storage(), counts=False)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if self.streams.under_way:
            self.streams.call(func, args, kwargs or {}, self.place)
        if wrong := misread(func, args):
            raise _misread(str(func), wrong, self.place())
        result, workspace_bytes = _CALLS(func, args, kwargs or {})
        self.calls += 1
        for tensor in tensors_in(result):
            self._add(tensor.untyped_storage())
        self._called(self.total + workspace_bytes)
        return result

    def _called(self, num_bytes: int) -> None:
        """Note the bytes that were live during a call, its kernel's workspace among them."""
        here = self.here
        if num_bytes > here.num_bytes:
            here.num_bytes, here.line = num_bytes, self._line()
            here.call, here.lines = self.calls, None

    def _add(self, storage: torch.UntypedStorage, *, counts: bool = True) -> None:
        key = storage._cdata
        if key not in self.alive:
            piece = Piece(storage.nbytes() if counts else 0, self._line(), self.calls)
            self.alive[key] = weakref.ref(storage, lambda _: self._died(key)), piece
            self.total += piece.num_bytes
            self.lines[piece.line] += piece.num_bytes
            self.pieces.append(piece)

    def _died(self, key: int) -> None:
        _, piece = self.alive.pop(key)
        self.drop(piece)

    def drop(self, piece: Piece) -> None:
        """Note that a piece of memory is freed."""
        piece.died = self.calls
        self.total -= piece.num_bytes
        self.lines[piece.line] -= piece.num_bytes

    def place(self) -> str:
        """The file and line of the program that is being executed, for messages."""
        file = file_of(self.file)
        return f"{file}:{self._line()}"

    def _line(self) -> int:
        """The line of the program that is being executed, or that ``made_at`` has set."""
        if self.made_line:
            return self.made_line
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back  # type: ignore[assignment]
        return frame.f_lineno if frame is not None else 0

    # what was live --------------------------------------------------------------------------
    def peak(self) -> Peak:
        """The highest peak of all turns and places; of equal ones the first."""
        return max(self.peaks.values(), key=lambda peak: (peak.num_bytes, -peak.call))

    def lines_at(self, peak: Peak) -> Lines:
        """The bytes that were live at a peak, by the line that allocated them."""
        found: Lines = Counter()
        if peak.lines is not None:
            found.update(peak.lines)
            found.update(dict(peak.extra))
        else:
            for piece in self._alive_at(peak.call):
                found[piece.line] += piece.num_bytes
        return Counter({line: size for line, size in sorted(found.items()) if size})

    def _alive_at(self, call: int) -> list[Piece]:
        return [
            piece
            for piece in self.pieces
            if piece.num_bytes and piece.born <= call and (piece.died is None or piece.died >= call)
        ]

    # for what is not executed ---------------------------------------------------------------
    def hold(self, lines: Sequence[tuple[int, int]]) -> Held:
        """Count (line, bytes) as live for as long as the returned object is kept."""
        return Held(self, [Piece(size, line, self.calls) for line, size in lines])

    def alive_pieces(self) -> dict[int, Piece]:
        """Every live storage by its address; a later storage may get the same address."""
        return {key: piece for key, (_, piece) in self.alive.items()}

    def made_at(self, line: int, make: Callable[[], Tensor]) -> Tensor:
        """Make a tensor that counts as allocated by a given line."""
        self.made_line = line
        made = make()
        self.made_line = 0
        return made

    def meet(self, turn: Turn, peaks: Sequence[tuple[Place, Peak]]) -> None:
        """Note peaks of a turn that is not executed, each in bytes above what is live now."""
        lines = Counter(self.lines)
        for place, more in peaks:
            self.peaks[turn, place] = Peak(
                self.total + more.num_bytes, more.line, self.calls, lines, more.extra
            )


def _with_workspace(func: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, int]:
    """A call's result, and the bytes of its kernel's workspace."""
    result = as_torch_has_it(func, args, kwargs)
    return result, workspace_of(func, result, args, kwargs)


# Shared by all runs: it keeps the shapes of results for equal calls, and no tensors.
_CALLS = FakeCalls(_with_workspace)


def _misread(call: str, arguments: Sequence[str], place: str) -> CheckError:
    return CheckError(
        where=place,
        what=f"{call} does not look at the strides of {', '.join(arguments)}",
        why="the operand is not contiguous there, so that the kernel reads other numbers",
        do="Report this, with the model; in a program of your own give it x.contiguous().",
    )
