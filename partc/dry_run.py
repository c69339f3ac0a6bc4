"""A rank program executed line by line on tensors without data: what it holds at its worst, where.

This is the program itself, so function boundaries, ``del``, in-place sums and handles count as they
do at run time. It needs no process group, no other rank and no memory.
"""

from __future__ import annotations

import linecache
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from partc.dry_turns import KnownTurns, Lines, NotSteady, Turns
from partc.fake_calls import FakeCalls, tensors_in
from partc.mesh import Mesh
from partc.passes.workspaces import workspace_of
from partc.role import RankMesh, Role


@dataclass(frozen=True)
class Holder:
    """Memory that is live at the peak, by the source line that allocated it."""

    line: int
    text: str
    num_bytes: int

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass(frozen=True)
class DryRun:
    """The most bytes live at a time beside parameters, buffers and inputs, and where that is."""

    peak_bytes: int
    line: int
    holders: tuple[Holder, ...]  # largest first


def dry_run(role: Role, rank: int = 0, known: KnownTurns | None = None) -> DryRun:
    """Execute one step of a role on fakes; its gradients are new, as after ``zero_grad()``.

    Microbatches that do what others did are not executed (``dry_turns``); ``known`` keeps what
    they do for further ranks that run the same file.
    """
    try:
        return execute(role, rank, {} if known is None else known)
    except NotSteady:
        return execute(role, rank, None)


def execute(role: Role, rank: int, known: KnownTurns | None) -> DryRun:
    """The same with all microbatches where ``known`` is None; NotSteady if some cannot be left
    out.
    """
    file = role.module.Step.__init__.__code__.co_filename
    watch = _Live(file)
    with alone(role, rank) as here, torch.no_grad(), FakeTensorMode():
        step: Any = role.build(here)
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in role.inputs.values()]
        watch.leave_out([*step.parameters(), *step.buffers(), *inputs])
        if known is not None and hasattr(step, "stages") and not role.is_inference:
            Turns(watch, known).take_over([*step.stages.values()])
        with watch:
            kept = step(*inputs) if role.is_inference else step.step(*inputs)
    del kept
    holders = [Holder(line, _text(file, line), size) for line, size in watch.at_peak()]
    return DryRun(watch.peak_bytes, watch.peak_line, tuple(_joined(holders)))


@contextmanager
def alone(role: Role, rank: int) -> Iterator[RankMesh]:
    """Let one rank of a role run without the others: its collectives then move nothing."""
    dist = role.module.__dict__["dist"]
    here = _Here(role.mesh, rank)
    role.module.__dict__["dist"] = _Dist(here)
    try:
        yield here
    finally:
        role.module.__dict__["dist"] = dist


def _text(file: str, line: int) -> str:
    """A line of a loaded role, its comment left out."""
    return linecache.getline(file, line).partition("  #")[0].strip()


def _joined(holders: Sequence[Holder]) -> list[Holder]:
    """One entry per line, loops having allocated in one line several times; largest first."""
    total: dict[tuple[int, str], int] = {}
    for holder in holders:
        key = holder.line, holder.text
        total[key] = total.get(key, 0) + holder.num_bytes
    found = [Holder(line, text, size) for (line, text), size in total.items()]
    return sorted(found, key=lambda h: (-h.num_bytes, h.line))


@dataclass
class _Piece:
    """One storage: its bytes, the line that made it, and between which calls it was alive."""

    num_bytes: int
    line: int
    born: int
    died: int | None = None


@dataclass
class _Since:
    """The most that is live since a call began, and what was alive then."""

    total: int = 0
    peak_bytes: int = 1 << 62
    line: int = 0
    at_call: int = 0
    alive: set[int] = field(default_factory=set)


class _Live(TorchDispatchMode):
    """Counts the bytes of storages that are alive after every op; a storage tells when it dies."""

    def __init__(self, file: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.file = file
        self.run = FakeCalls(_with_workspace)
        self.outside: list[Tensor] = []  # keeps what is not counted alive, so that it stays known
        self.alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Piece]] = {}
        self.pieces: list[_Piece] = []
        self.calls = self.total = 0
        self.peak_bytes = self.peak_line = self.peak_call = 0
        self.at_meeting: Lines | None = None  # what is live at the peak, where a stand-in has it
        self.since = _Since()
        self.made_line = 0

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """Do not count these."""
        self.outside += tensors
        for tensor in tensors:
            self._add(tensor.untyped_storage(), counts=False)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result, workspace_bytes = self.run(func, args, kwargs or {})
        self.calls += 1
        for tensor in tensors_in(result):
            self._add(tensor.untyped_storage())
        now = self.total + workspace_bytes
        if now > self.peak_bytes:
            self.peak_bytes, self.at_meeting = now, None
            self.peak_line, self.peak_call = self._line(), self.calls
        if now > self.since.peak_bytes:
            self.since.peak_bytes = now
            self.since.line, self.since.at_call = self._line(), self.calls
        return result

    def _add(self, storage: torch.UntypedStorage, *, counts: bool = True) -> None:
        key = storage._cdata
        if key not in self.alive:
            piece = _Piece(storage.nbytes() if counts else 0, self._line(), self.calls)
            self.alive[key] = weakref.ref(storage, lambda _: self._died(key)), piece
            self.total += piece.num_bytes
            self.pieces.append(piece)

    def _died(self, key: int) -> None:
        _, piece = self.alive.pop(key)
        piece.died = self.calls
        self.total -= piece.num_bytes

    def at_peak(self) -> list[tuple[int, int]]:
        """Line and bytes of what was alive when most was."""
        if self.at_meeting is not None:
            return sorted((line, size) for line, size in self.at_meeting.items() if size)
        return [(piece.line, piece.num_bytes) for piece in self._alive_at(self.peak_call)]

    def _alive_at(self, call: int) -> list[_Piece]:
        return [
            piece
            for piece in self.pieces
            if piece.num_bytes and piece.born <= call and (piece.died is None or piece.died >= call)
        ]

    # for stand-ins -----------------------------------------------------------------------------
    def begin(self) -> None:
        """Start to note the most that is live from here on."""
        alive = {id(piece) for _, piece in self.alive.values()}
        self.since = _Since(self.total, self.total, self._line(), self.calls, alive)

    def inner_peak(self) -> tuple[int, int, Lines]:
        """That, the line where it is, and what is live there more than at the beginning."""
        since = self.since
        there = {id(piece): piece for piece in self._alive_at(since.at_call)}
        extra: Lines = Counter()
        for key, piece in there.items():
            if key not in since.alive:
                extra[piece.line] += piece.num_bytes
        for piece in self.pieces:
            if id(piece) in since.alive and id(piece) not in there:
                extra[piece.line] -= piece.num_bytes
        return since.peak_bytes - since.total, since.line, extra

    def alive_lines(self) -> dict[int, tuple[int, int]]:
        """Line and bytes of every storage that is alive, by its address."""
        return {key: (piece.line, piece.num_bytes) for key, (_, piece) in self.alive.items()}

    def made_at(self, line: int, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that counts as made at a line."""
        self.made_line = line
        made = make()
        self.made_line = 0
        return made

    def meet(self, num_bytes: int, line: int, extra: Lines) -> None:
        """So many bytes are live for a moment, beside what is live now."""
        if num_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_line = num_bytes, line
            self.at_meeting = Counter()
            for _, piece in self.alive.values():
                self.at_meeting[piece.line] += piece.num_bytes
            self.at_meeting.update(extra)

    def _line(self) -> int:
        """The line of the program that is being executed."""
        if self.made_line:
            return self.made_line
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back  # type: ignore[assignment]
        return frame.f_lineno if frame is not None else 0


def _with_workspace(func: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, int]:
    """A call's result, and the bytes that its kernel takes beside it."""
    result = func(*args, **kwargs)
    return result, workspace_of(func, result, args, kwargs)


@dataclass(frozen=True)
class _Here:
    """One rank's view of the mesh, as a DeviceMesh gives it."""

    mesh: Mesh
    rank: int

    def get_group(self, mesh_dim: Any = None) -> str:
        return str(mesh_dim)

    def get_local_rank(self, mesh_dim: Any = None) -> int:
        return self.mesh.coords(self.rank)[mesh_dim]


class _Started:
    """A collective under way: as c10d's handles do, it keeps its tensors until it is dropped."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        """Nothing to wait for."""


class _Dist:
    """The functions of torch.distributed that rank programs call, without effect.

    They hold on the CPU what gloo holds: its reduce_scatter sums a copy, and lets the operand go.
    """

    ReduceOp = c10d.ReduceOp

    def __init__(self, here: _Here) -> None:
        self.here = here

    def get_rank(self, group: str) -> int:
        """This rank's place along an axis; groups are called by their axes."""
        return self.here.get_local_rank(group)

    def all_reduce(self, tensor: Tensor, **named: Any) -> _Started:
        return _Started(tensor)

    def all_gather_into_tensor(self, output: Tensor, input: Tensor, **named: Any) -> _Started:
        return _Started(output, input)

    def get_global_rank(self, group: Any, rank: int) -> int:
        return rank

    def isend(self, tensor: Tensor, *args: Any, **named: Any) -> _Started:
        return _Started(tensor)

    irecv = broadcast = isend

    def get_backend(self, group: Any = None) -> str:
        return "none"

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor, **named: Any) -> _Started:
        return _Started(output, input.clone())

    all_gather_single = all_to_all_single = all_gather_into_tensor
    reduce_scatter_single = reduce_scatter_tensor
