"""Stand-ins for ``torch.distributed`` that move nothing, and record what a rank's text starts."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as c10d
from torch import Tensor

from partc.dryrun.as_c10d_takes import as_c10d_takes
from partc.dryrun.live_memory import LiveMemory
from partc.errors import CheckError
from partc.plan.mesh import Mesh

SEND, RECEIVE = "isend", "irecv"
TRANSFERS = (
    "all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast",
    SEND, RECEIVE,
)  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    """One transfer as a rank's text starts it.

    ``lane``: the queue that it stands in: its group's ranks, and for a message both ends and the
    tag. ``moved``: kind, reduction, source, shape and dtype, which all members must give alike.
    """

    kind: str
    lane: tuple[Any, ...]
    members: tuple[int, ...]
    moved: tuple[Any, ...]
    place: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.moved[-1]}{list(self.moved[-2])} at {self.place}"


Event = tuple[str, int]  # "start" or "wait", and the number of the transfer


@dataclass
class Record:
    """The transfers of one rank's step, and the order of their starts and waits."""

    rank: int
    transfers: list[Transfer] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def start(self, transfer: Transfer) -> int:
        self.transfers.append(transfer)
        self.events.append(("start", len(self.transfers) - 1))
        return len(self.transfers) - 1


@dataclass(frozen=True)
class Group:
    """A process group that the text makes itself; ``number`` counts those of the same ranks."""

    ranks: tuple[int, ...]
    number: int

    def size(self) -> int:
        return len(self.ranks)


class Started:
    """The handle of a transfer under way; like c10d's, it keeps the tensors."""

    def __init__(self, dist: RecordingDist, number: int, stream: int, tensors: Any) -> None:
        self.dist, self.number, self.stream, self.tensors = dist, number, stream, tensors
        self.waited = False

    def wait(self, timeout: Any = None) -> bool:
        if self.waited:
            raise CheckError(
                where=self.dist.live.place(),
                what=f"{self.dist.found.transfers[self.number].kind} is waited for twice",
                why="its handle was waited for before",
                do="Wait once; another transfer may lack its wait.",
            )
        self.waited = True
        self.dist.found.events.append(("wait", self.number))
        self.dist.live.streams.wait(self.stream)
        return True


@as_c10d_takes
class RecordingDist:
    """The functions of ``torch.distributed`` that rank programs call; they record, move nothing."""

    ReduceOp, Work, ProcessGroup = c10d.ReduceOp, c10d.Work, c10d.ProcessGroup

    def __init__(self, found: Record, mesh: Mesh, live: LiveMemory, library: str) -> None:
        self.found, self.mesh, self.live, self.library = found, mesh, live, library
        self.groups: Counter[tuple[int, ...]] = Counter()

    # groups ----------------------------------------------------------------------------------
    def get_rank(self, group: Any = None) -> int:
        return self._ranks(group).index(self.found.rank) if group else self.found.rank

    def get_world_size(self, group: Any = None) -> int:
        return len(self._ranks(group))

    def get_global_rank(self, group: Any, group_rank: int) -> int:
        return self._ranks(group)[group_rank]

    def get_backend_config(self, group: Any = None) -> str:
        return f"cpu:{self.library}"

    def new_group(self, ranks: Any = None, *args: Any, **named: Any) -> Group:
        members = tuple(ranks) if ranks else self._ranks(None)
        self.groups[members] += 1
        return Group(members, self.groups[members])

    def _ranks(self, group: Any) -> tuple[int, ...]:
        if group is None:
            return tuple(range(self.mesh.num_ranks))
        if isinstance(group, Group):
            return group.ranks
        return tuple(self.mesh.peers(self.found.rank, group))

    # collectives -----------------------------------------------------------------------------
    def all_reduce(
        self, tensor: Tensor, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        return self._together("all_reduce", str(op), (), (tensor,), group, async_op)

    def all_gather_single(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        self._check_sizes("all_gather_single", output, input, len(self._ranks(group)))
        return self._together("all_gather_single", "", (input,), (output,), group, async_op)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, op: Any = c10d.ReduceOp.SUM, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        self._check_sizes("reduce_scatter_single", input, output, len(self._ranks(group)))
        return self._together(
            "reduce_scatter_single", str(op), (input,), (output,), group, async_op
        )

    all_gather_into_tensor, reduce_scatter_tensor = all_gather_single, reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        self._check_sizes("all_to_all_single", output, input, 1)
        return self._together("all_to_all_single", "", (input,), (output,), group, async_op)

    def broadcast(
        self, tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:  # fmt: skip
        source = src if src is not None else self._ranks(group)[int(group_src or 0)]
        return self._together("broadcast", source, (), (tensor,), group, async_op)

    # messages --------------------------------------------------------------------------------
    def isend(
        self, tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0,
        group_dst: int | None = None,
    ) -> Started:  # fmt: skip
        target = dst if dst is not None else self._ranks(group)[int(group_dst or 0)]
        return self._message(SEND, tensor, (self.found.rank, target), group, tag)

    def irecv(
        self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0,
        group_src: int | None = None,
    ) -> Started:  # fmt: skip
        source = src if src is not None else self._ranks(group)[int(group_src or 0)]
        return self._message(RECEIVE, tensor, (source, self.found.rank), group, tag)

    def send(self, tensor: Tensor, dst: int | None = None, **named: Any) -> None:
        self.isend(tensor, dst, **named).wait()

    def recv(self, tensor: Tensor, src: int | None = None, **named: Any) -> None:
        self.irecv(tensor, src, **named).wait()

    # inside ----------------------------------------------------------------------------------
    def _message(
        self, kind: str, tensor: Tensor, ends: tuple[int, int], group: Any, tag: int
    ) -> Started:
        sent, arriving = ((tensor,), ()) if kind == SEND else ((), (tensor,))
        number = group.number if isinstance(group, Group) else 0
        lane = ("message", ends, number, tag)
        return self._start(kind, lane, ends, (tuple(tensor.shape), tensor.dtype), sent, arriving)

    def _together(
        self, kind: str, detail: Any, sent: tuple[Tensor, ...], arriving: tuple[Tensor, ...],
        group: Any, later: bool,
    ) -> Started | None:  # fmt: skip
        ranks = self._ranks(group)
        number = group.number if isinstance(group, Group) else 0
        tensor = (sent or arriving)[0]
        moved = (kind, detail, tuple(tensor.shape), tensor.dtype)
        started = self._start(kind, ("group", ranks, number), ranks, moved, sent, arriving)
        if later:
            return started
        started.wait()
        return None

    def _start(
        self, kind: str, lane: tuple[Any, ...], members: tuple[int, ...], moved: tuple[Any, ...],
        sent: tuple[Tensor, ...], arriving: tuple[Tensor, ...],
    ) -> Started:  # fmt: skip
        place = self.live.place()
        for tensor in (*sent, *arriving):
            self._check_memory(kind, tensor, place)
        stream = self.live.streams.start(kind, place, sent, arriving)
        number = self.found.start(Transfer(kind, lane, members, moved, place))
        return Started(self, number, stream, (*sent, *arriving))

    def _check_memory(self, kind: str, tensor: Tensor, place: str) -> None:
        if not tensor.is_contiguous():
            raise CheckError(
                where=place,
                what=f"{kind} of a tensor that is not contiguous",
                why=f"it has shape {list(tensor.shape)} and strides {tensor.stride()}",
                do="Make it contiguous first.",
            )

    def _check_sizes(self, kind: str, large: Tensor, small: Tensor, num: int) -> None:
        if large.numel() != num * small.numel() or large.dtype != small.dtype:
            raise CheckError(
                where=self.live.place(),
                what=f"the tensors of {kind} do not fit",
                why=f"{large.dtype}{list(large.shape)} is not {num} times "
                f"{small.dtype}{list(small.shape)}",
                do="Give a result of the right size and dtype.",
            )


def check_names(text: str, file: str) -> None:
    """CheckError for a function of ``torch.distributed`` that is none of the above."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "dist":
            continue
        if node.attr.startswith("_") or not hasattr(RecordingDist, node.attr):
            raise CheckError(
                where=f"{file}:{node.lineno}",
                what=f"dist.{node.attr} is none of the transfers that a program may use",
                why="the check follows " + ", ".join(TRANSFERS),
                do="Undo the edit, or use one of these.",
            )
