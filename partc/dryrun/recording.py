"""Record what one rank's program asks of ``torch.distributed``, without running the other ranks.

In: a role and a rank of its mesh. Out: the rank's groups, transfers and waits, in their order. A
program's control flow reads no tensor, so this is what the rank asks in training, too.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensorMode

from partc.dryrun.alone import LoneDist, LoneMesh, Transfer, in_place_of_dist
from partc.program.role import Role
from partc.program.step.given_out import whole_step
from partc.program.user_lines import TEXT, file_of

# whether torch counts the groups of some ranks too, in the names of later ones
COUNTS_ALL = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


class Communicator(NamedTuple):
    """A process group: the name by which its members find each other, and its global ranks."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"group {self.name} of ranks {[*self.ranks]}"


@dataclass(frozen=True)
class MakeGroup:
    """A call of ``new_group``; ``everyone``: by all ranks, as torch asks, not by members alone."""

    group: Communicator
    everyone: bool
    place: str

    def __str__(self) -> str:
        return f"makes a group of ranks {[*self.group.ranks]}"


@dataclass(frozen=True)
class Start:
    """The start of a transfer; ``peer`` is the other rank of a message, None for a collective."""

    number: int
    name: str
    group: Communicator
    peer: int | None
    size: str  # what ranks must agree on: ``float32[30]``
    place: str

    def __str__(self) -> str:
        to = {"send": f" to rank {self.peer}", "receive": f" from rank {self.peer}"}
        return f"{self.name}{to.get(self.name, f' over {self.group.name}')} at {self.place}"


@dataclass(frozen=True)
class Wait:
    """The wait for the transfer of this number."""

    number: int
    place: str


Event = MakeGroup | Start | Wait


def record(role: Role, rank: int, *, steps: int = 1) -> tuple[Event, ...]:
    """What a rank asks of ``torch.distributed`` while its program is built and runs some steps.

    The program runs on tensors without data, and needs no process group. A rank's own errors, of
    shapes for example, are raised as they are.
    """
    here = LoneMesh(role.mesh, rank)
    dist = Recorder(here)
    eager = torch.compiler.set_stance("force_eager") if role.compiles else nullcontext()
    with in_place_of_dist(role, dist), torch.no_grad(), FakeTensorMode(), eager:
        step: Any = role.build(here)
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in role.inputs.values()]
        for _ in range(steps):
            role.take_one_microbatch(step)
            step(*inputs) if role.is_inference else whole_step(step, step.step, inputs)
            role.drain(step)
    return tuple(dist.events)


class Recorder(LoneDist):
    """``torch.distributed`` for one rank, which moves nothing and notes what is asked."""

    def __init__(self, here: LoneMesh, library: str = "nccl") -> None:
        super().__init__(here, library, None)
        self.events: list[Event] = []
        self.started = 0
        # The default group and those of the mesh exist; every rank counts the same number.
        self.made = self.held = 1 + len(here.layout.axes)

    def get_rank(self, group: Any = None) -> int:
        return self.here.rank if group is None else self._of(group).ranks.index(self.here.rank)

    def get_global_rank(self, group: Any, group_rank: int) -> int:
        return self._of(group).ranks[group_rank]

    def new_group(self, ranks: Sequence[int], use_local_synchronization: bool = False) -> Any:
        members = tuple(sorted(ranks))
        if use_local_synchronization and self.here.rank not in members:
            return None
        name = group_name(members, use_local_synchronization, self.made, self.held)
        self.made += COUNTS_ALL or not use_local_synchronization
        self.held += self.here.rank in members
        group = Communicator(name, members)
        self.events.append(MakeGroup(group, not use_local_synchronization, _place()))
        return group

    def begin(self, transfer: Transfer) -> int:
        self.started += 1
        moved = (*transfer.sent, *transfer.arriving)[0]
        size = f"{str(moved.dtype).removeprefix('torch.')}[{moved.numel()}]"
        name, group, peer = transfer.name, self._of(transfer.group), transfer.peer
        self.events.append(Start(self.started, name, group, peer, size, _place()))
        return self.started

    def wait(self, number: int) -> None:
        self.events.append(Wait(number, _place()))

    def _of(self, group: Any) -> Communicator:
        if isinstance(group, Communicator):
            return group
        layout, rank = self.here.layout, self.here.rank
        if group is None:
            return Communicator("world", tuple(range(layout.num_ranks)))
        return Communicator(group, tuple(layout.peers(rank, group)))


def group_name(ranks: Sequence[int], local: bool, made: int, held: int) -> str:
    """The name that torch gives to a new group, under which its members look for each other.

    ``made``: the groups that this rank has made so far, before torch 2.14 those with all ranks;
    ``held``: those of which it is a member. With ``local`` (``use_local_synchronization``) the name
    is a hash of a number of groups too, ``made`` or before torch 2.14 ``held``, so that members
    with different numbers never meet.

    >>> group_name([0, 1], False, 3, 2)
    '3'
    """
    if not local:
        return str(made)
    text = "_".join([*map(str, ranks), str(made if COUNTS_ALL else held)])
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _place() -> str:
    """The file and line of the program that makes the call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(TEXT):
        frame = frame.f_back
    file = file_of(frame.f_code.co_filename)
    return f"{file}:{frame.f_lineno}"
