"""A rank program executed line by line on tensors without data: what it holds at its worst, where.

This is the program itself, so function boundaries, ``del``, in-place sums and handles count as they
do at run time. It needs no process group, no other rank and no memory.
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

from partc.dry_layers import deep_stacks, most_of_all, shorten
from partc.dry_turns import KnownTurns, NotSteady, Turns
from partc.live_memory import Lines, LiveMemory
from partc.mesh import Mesh
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


Known = dict[int, KnownTurns]  # by how many layers of a stack were left out


def dry_run(role: Role, rank: int = 0, known: Known | None = None, library: str = "gloo") -> DryRun:
    """Execute one step of a role on fakes; its gradients are new, as after ``zero_grad()``.

    Microbatches that do what others did are not executed (``dry_turns``), and of deep stacks of
    layers as few as say what all need (``dry_layers``); ``known`` keeps what turns do for further
    ranks that run the same file. ``library`` is what moves data (``topology.LIBRARIES``).
    """
    turns: Known = {} if known is None else known

    def shortened(left_out: int) -> LiveMemory:
        try:
            return execute(role, rank, turns.setdefault(left_out, {}), left_out, library)
        except NotSteady:
            return execute(role, rank, None, left_out, library)

    peak_bytes, line, lines = most_of_all(shortened, depth(role, rank))
    return _report(role, peak_bytes, line, lines)


def dry_run_all(role: Role, rank: int = 0) -> DryRun:
    """The same, every microbatch and layer executed."""
    live = execute(role, rank, None, 0)
    peak = live.peak()
    return _report(role, peak.num_bytes, peak.line, live.lines_at(peak))


def execute(
    role: Role, rank: int, known: KnownTurns | None, left_out: int, library: str = "gloo"
) -> LiveMemory:
    """Run a step with some layers of every stack ``left_out``, and all microbatches where ``known``
    is None; NotSteady if a microbatch cannot be left out.
    """
    live = LiveMemory(_file(role))
    eager = torch.compiler.set_stance("force_eager") if role.compiles else nullcontext()
    with alone(role, rank, library) as here, torch.no_grad(), FakeTensorMode(), eager:
        step: Any = role.build(here)
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in role.inputs.values()]
        if left_out:
            shorten(step, left_out, live)
        live.leave_out([*step.parameters(), *step.buffers(), *inputs])
        if known is not None and hasattr(step, "stages") and not role.is_inference:
            Turns(live, known).take_over([*step.stages.values()])
        with live:
            kept = step(*inputs) if role.is_inference else step.step(*inputs)
    del kept
    return live


def depth(role: Role, rank: int) -> int:
    """The length of the shortest deep stack of a role's equal layers; 0 if there is none."""
    with alone(role, rank) as here, torch.no_grad(), FakeTensorMode():
        return min((len(stack) for stack in deep_stacks(role.build(here))), default=0)


def _file(role: Role) -> str:
    return str(role.module.Step.__init__.__code__.co_filename)


def _report(role: Role, peak_bytes: int, line: int, lines: Lines) -> DryRun:
    file = _file(role)
    holders = [Holder(line, _text(file, line), size) for line, size in lines.items()]
    return DryRun(peak_bytes, line, tuple(sorted(holders, key=lambda h: (-h.num_bytes, h.line))))


@contextmanager
def alone(role: Role, rank: int, library: str = "gloo") -> Iterator[RankMesh]:
    """Let one rank of a role run without the others: its collectives then move nothing."""
    dist = role.module.__dict__.get("dist")  # the program of one rank alone needs none
    here = _Here(role.mesh, rank)
    role.module.__dict__["dist"] = _Dist(here, library)
    try:
        yield here
    finally:
        role.module.__dict__["dist"] = dist


def _text(file: str, line: int) -> str:
    """A line of a loaded role, its comment left out."""
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
    """A collective under way: as c10d's handles do, it keeps its tensors until it is dropped."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        """Nothing to wait for."""


class _Dist:
    """The functions of torch.distributed that rank programs call, without effect.

    A transfer holds its operand and its result, as those of gloo and NCCL do.
    """

    ReduceOp = c10d.ReduceOp

    def __init__(self, here: _Here, library: str) -> None:
        self.here, self.library = here, library

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
        return self.library

    def new_group(self, *args: Any, **named: Any) -> str:
        return "pair"

    all_gather_single = all_to_all_single = all_gather_into_tensor
    reduce_scatter_single = reduce_scatter_tensor = all_gather_into_tensor
