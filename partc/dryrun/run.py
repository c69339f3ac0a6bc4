"""Run a rank's program line by line on fake tensors, and find its peak of memory.

The program itself runs, so function boundaries, ``del``, in-place sums and handles of transfers
free and keep memory as they do in training. A dry run needs no process group, no other rank and no
memory for tensors. CheckError where a call touches memory of a transfer under way (``streams.py``).
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch._subclasses import FakeTensorMode

from partc.dryrun.layers import deep_stacks, most_of_all, shorten
from partc.dryrun.lines import SourceLines
from partc.dryrun.live_memory import Lines, LiveMemory
from partc.dryrun.turns import KnownTurns, NotSteady, Turns
from partc.plan.mesh import Mesh
from partc.program.role import RankMesh, Role


@dataclass(frozen=True)
class Holder:
    """The bytes that are live at the peak and were allocated by one source line."""

    line: int
    text: str
    num_bytes: int

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass(frozen=True)
class DryRun:
    """The peak of live bytes, without parameters, buffers and inputs, and the line of the peak."""

    peak_bytes: int
    line: int
    holders: tuple[Holder, ...]  # largest first


Known = dict[int, KnownTurns]  # by the number of layers left out of each stack


def dry_run(role: Role, rank: int = 0, known: Known | None = None, library: str = "gloo") -> DryRun:
    """Execute one step of a role on fakes; its gradients are new, as after ``zero_grad()``.

    Microbatches that repeat earlier ones are not executed (``turns.py``), and neither are most
    layers of deep stacks (``layers.py``). ``known`` keeps what turns did, for further pipeline
    ranks. ``library``: the library of collectives (``topology.LIBRARIES``).
    """
    turns: Known = {} if known is None else known

    def shortened(left_out: int) -> LiveMemory:
        try:
            return execute(role, rank, turns.setdefault(left_out, KnownTurns()), left_out, library)
        except NotSteady:
            return execute(role, rank, None, left_out, library)

    peak_bytes, line, lines = most_of_all(shortened, depth(role, rank))
    return report(role, peak_bytes, line, lines)


def execute(
    role: Role, rank: int, known: KnownTurns | None, left_out: int, library: str = "gloo"
) -> LiveMemory:
    """Run a step on fakes without ``left_out`` layers of every deep stack.

    With ``known``, microbatches that repeat earlier ones are not executed; NotSteady if one that
    was left out has a turn that cannot be.
    """
    live = LiveMemory(_file(role))
    eager = torch.compiler.set_stance("force_eager") if role.compiles else nullcontext()
    with alone(role, rank, library, live) as here, torch.no_grad(), FakeTensorMode(), eager:
        step: Any = role.build(here)
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in role.inputs.values()]
        if left_out:
            shorten(step, left_out, live)
        live.leave_out([*step.parameters(), *step.buffers(), *inputs])
        if known is not None and hasattr(step, "stages") and not role.is_inference:
            Turns(live, known, SourceLines.of(_file(role))).take_over([*step.stages.values()])
        with live:
            kept = step(*inputs) if role.is_inference else step.step(*inputs)
    del kept
    live.streams.end()
    return live


def depth(role: Role, rank: int) -> int:
    """The number of layers of a role's shortest deep stack; 0 if there is none."""
    with alone(role, rank) as here, torch.no_grad(), FakeTensorMode():
        return min((len(stack) for stack in deep_stacks(role.build(here))), default=0)


def _file(role: Role) -> str:
    return str(role.module.Step.__init__.__code__.co_filename)


def report(role: Role, peak_bytes: int, line: int, lines: Lines) -> DryRun:
    """A DryRun of a peak; its holders have the text of the lines that allocated the memory."""
    file = _file(role)
    holders = [Holder(line, _text(file, line), size) for line, size in lines.items()]
    return DryRun(peak_bytes, line, tuple(sorted(holders, key=lambda h: (-h.num_bytes, h.line))))


@contextmanager
def alone(
    role: Role, rank: int, library: str = "gloo", live: LiveMemory | None = None
) -> Iterator[RankMesh]:
    """Replace ``torch.distributed`` in a role's module by functions that move nothing.

    One rank can then run without the others.
    """
    dist = role.module.__dict__.get("dist")  # the program of one rank alone needs none
    here = _Here(role.mesh, rank)
    role.module.__dict__["dist"] = _Dist(here, library, live)
    try:
        yield here
    finally:
        role.module.__dict__["dist"] = dist


def _text(file: str, line: int) -> str:
    """A line of a loaded role, without the comment."""
    return linecache.getline(file, line).partition("  #")[0].strip()


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
    """The handle of a transfer; like c10d's handles, it keeps the tensors until it is deleted."""

    def __init__(self, tensors: tuple[Tensor, ...], live: LiveMemory | None, number: int) -> None:
        self.tensors, self.live, self.number = tensors, live, number

    def wait(self) -> None:
        if self.live is not None:
            self.live.streams.wait(self.number)


class _Dist:
    """The functions of torch.distributed that rank programs call; they move no data.

    The handle of a transfer keeps operand and result alive, as those of gloo and NCCL do.
    """

    ReduceOp, Work = c10d.ReduceOp, c10d.Work

    def __init__(self, here: _Here, library: str, live: LiveMemory | None) -> None:
        self.here, self.library, self.live = here, library, live

    def get_rank(self, group: str) -> int:
        """This rank's coordinate on an axis; a group is named by its axis here."""
        return self.here.get_local_rank(group)

    def all_reduce(self, tensor: Tensor, async_op: bool = False, **named: Any) -> _Started:
        return self._start("all_reduce", (), (tensor,), async_op)

    def all_gather_single(
        self, output: Tensor, input: Tensor, async_op: bool = False, **named: Any
    ) -> _Started:
        return self._start("all_gather", (input,), (output,), async_op)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, async_op: bool = False, **named: Any
    ) -> _Started:
        return self._start("reduce_scatter", (input,), (output,), async_op)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, async_op: bool = False, **named: Any
    ) -> _Started:
        return self._start("all_to_all", (input,), (output,), async_op)

    def broadcast(self, tensor: Tensor, async_op: bool = False, **named: Any) -> _Started:
        return self._start("broadcast", (), (tensor,), async_op)

    def isend(self, tensor: Tensor, *args: Any, **named: Any) -> _Started:
        return self._start("send", (tensor,), (), True)

    def irecv(self, tensor: Tensor, *args: Any, **named: Any) -> _Started:
        return self._start("receive", (), (tensor,), True)

    def get_global_rank(self, group: Any, rank: int) -> int:
        return rank

    def get_backend(self, group: Any = None) -> str:
        return self.library

    def new_group(self, *args: Any, **named: Any) -> str:
        return "pair"

    def _start(
        self, name: str, sent: tuple[Tensor, ...], arriving: tuple[Tensor, ...], later: bool
    ) -> _Started:
        number = 0
        if self.live is not None:
            number = self.live.streams.start(name, self.live.place(), sent, arriving)
            if not later:
                self.live.streams.wait(number)
        return _Started((*sent, *arriving), self.live, number)
