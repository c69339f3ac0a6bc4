"""All ranks of a program in one process: a thread per rank, and a stand-in for torch.distributed.

Between start and wait a result holds poison (NaN, or the smallest integer), so a missing wait shows. Members of a
group that call different collectives, or of different shapes, are named; so is who waits for whom.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
from torch import Tensor

from partc.errors import RunError
from partc.mesh import Mesh

T = TypeVar("T")
SUM, MAX = c10d.ReduceOp.SUM, c10d.ReduceOp.MAX


@dataclass(frozen=True)
class Group:
    """The ranks of one process group, in group order, and which mesh axis they lie on."""

    ranks: tuple[int, ...]
    axis: str = ""
    here: int = 0  # the global rank that holds this handle

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.here)


@dataclass(frozen=True)
class ThreadMesh:
    """One rank's view of the mesh, as a DeviceMesh gives it."""

    mesh: Mesh
    rank: int

    def get_group(self, mesh_dim: Any = None) -> Group:
        return Group(tuple(self.mesh.peers(self.rank, mesh_dim)), mesh_dim, self.rank)

    def get_local_rank(self, mesh_dim: Any = None) -> int:
        return self.mesh.coords(self.rank)[mesh_dim]


@dataclass
class Call:
    """One rank's part in a collective: a copy of what it sent, and where the result goes."""

    kind: str
    detail: str
    sent: Tensor
    copy: Tensor
    result: Tensor
    line: str

    @property
    def agreed(self) -> tuple[str, str, tuple[int, ...], torch.dtype]:
        """What must be equal on all members."""
        return self.kind, self.detail, tuple(self.copy.shape), self.copy.dtype

    def __str__(self) -> str:
        dtype = str(self.copy.dtype).removeprefix("torch.")
        detail = f" {self.detail}" if self.detail else ""
        return f"{self.kind}{detail} of {dtype}{list(self.copy.shape)} at {self.line}"


@dataclass
class Meeting:
    """The n-th collective of a group: complete when every member has called."""

    group: Group
    number: int
    compute: Callable[[list[Tensor]], list[Tensor]]
    calls: dict[int, Call] = field(default_factory=dict)
    results: dict[int, Tensor] | None = None

    def __str__(self) -> str:
        missing = [rank for rank in self.group.ranks if rank not in self.calls]
        return f"collective {self.number} of {self.group.axis or 'group'} {list(self.group.ranks)}, missing {missing}"


class StopRank(Exception):
    """Ends a rank's thread after another rank has failed."""


class World:
    """The meeting place of all rank threads; one lock guards everything."""

    def __init__(self, num: int, timeout: float) -> None:
        self.num, self.timeout = num, timeout
        self.changed = threading.Condition()
        self.here = threading.local()
        self.meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}
        self.counts: dict[tuple[tuple[int, ...], int], int] = {}  # (group, rank) -> calls so far
        self.waiting: dict[int, Meeting] = {}
        self.open: dict[int, list[Call]] = {rank: [] for rank in range(num)}
        self.finished: set[int] = set()
        self.failure: BaseException | None = None

    def start(
        self, group: Group, call: Call, compute: Callable[[list[Tensor]], list[Tensor]]
    ) -> Done:
        """Enter this rank's next collective of the group."""
        rank = self.here.rank
        with self.changed:
            self._stop_if_failed()
            number = self.counts.get((group.ranks, rank), 0)
            self.counts[group.ranks, rank] = number + 1
            key = (group.ranks, number)
            meeting = self.meetings.setdefault(key, Meeting(group, number, compute))
            meeting.calls[rank] = call
            self.open[rank].append(call)
            if len(meeting.calls) == len(group.ranks):
                self._complete(meeting)
                del self.meetings[key]
            return Done(self, meeting, call, rank)

    def wait(self, meeting: Meeting, rank: int) -> Tensor:
        """Block until the meeting is complete; RunError if it never can be."""
        with self.changed:
            self.waiting[rank] = meeting
            self._fail_if_stuck()
            done = self.changed.wait_for(lambda: meeting.results or self.failure, self.timeout)
            del self.waiting[rank]
            if not done:
                self.fail(self._hang(f"nothing happened for {self.timeout:g} s"))
            self._stop_if_failed()
            assert meeting.results is not None
            return meeting.results[rank]

    def finish(self, rank: int) -> None:
        """The rank's function returned: it must have waited for everything that it started."""
        with self.changed:
            if self.open[rank]:
                self.fail(_unwaited(rank, self.open[rank]))
            self.finished.add(rank)
            self._fail_if_stuck()

    def fail(self, error: BaseException) -> None:
        """Keep the first failure and wake everyone."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def _complete(self, meeting: Meeting) -> None:
        ranks = meeting.group.ranks
        calls = [meeting.calls[rank] for rank in ranks]
        if len({call.agreed for call in calls}) > 1:
            self.fail(_disagreement(meeting))
        else:
            results = meeting.compute([call.copy for call in calls])
            meeting.results = dict(zip(ranks, results, strict=True))
        self.changed.notify_all()
        self._stop_if_failed()

    def _stop_if_failed(self) -> None:
        if self.failure is not None:
            raise StopRank

    def _fail_if_stuck(self) -> None:
        """Everyone waits or has finished, and no awaited meeting is complete: nothing will change."""
        idle = self.finished | set(self.waiting)
        stuck = not any(meeting.results for meeting in self.waiting.values())
        if self.waiting and len(idle) == self.num and stuck:
            self.fail(self._hang("every rank waits or has finished"))

    def _hang(self, why: str) -> RunError:
        lines = [
            f"  rank {rank} waits at {meeting.calls[rank].line} in {meeting}"
            for rank, meeting in sorted(self.waiting.items())
        ]
        ended = f"\n  finished: {sorted(self.finished)}" if self.finished else ""
        return RunError(
            where="ranks in threads",
            what="the ranks wait for each other",
            why=why,
            do="The members of a group must call the same collectives:\n" + "\n".join(lines) + ended,
        )


@dataclass
class Done:
    """A started collective, as ``dist.Work``."""

    world: World
    meeting: Meeting
    call: Call
    rank: int

    def wait(self, timeout: Any = None) -> bool:
        """Put the result where the program expects it; a second wait does nothing."""
        opened = self.world.open[self.rank]
        if not any(call is self.call for call in opened):
            return True
        result = self.world.wait(self.meeting, self.rank)
        opened[:] = [call for call in opened if call is not self.call]
        if self.call.sent is not self.call.result:
            self._check_sent()
        self.call.result.copy_(result.view(self.call.result.shape))
        return True

    def is_completed(self) -> bool:
        return self.meeting.results is not None

    def _check_sent(self) -> None:
        """A buffer that is being sent must not change: the network may read it at any time."""
        if not torch.equal(_as_bytes(self.call.sent), _as_bytes(self.call.copy)):
            raise RunError(
                where=f"rank {self.rank}, {self.call.line}",
                what="the tensor being sent was written to before the wait",
                why=f"it is in flight: {self.call}",
                do="Wait first, or write to a copy.",
            )


class ThreadDist:
    """The functions of ``torch.distributed`` that rank programs call, over a World."""

    ReduceOp, Work, ProcessGroup = c10d.ReduceOp, c10d.Work, c10d.ProcessGroup

    def __init__(self, world: World) -> None:
        self._world = world

    def get_rank(self, group: Group | None = None) -> int:
        rank: int = self._world.here.rank
        return rank if group is None else group.ranks.index(rank)

    def get_world_size(self, group: Group | None = None) -> int:
        return self._world.num if group is None else group.size()

    def get_global_rank(self, group: Group, group_rank: int) -> int:
        return group.ranks[group_rank]

    def all_reduce(
        self, tensor: Tensor, op: Any = SUM, group: Group | None = None, async_op: bool = False
    ) -> Done | None:
        reduce = _reduction(op)
        return self._call(
            "all_reduce", reduce.__name__, tensor, tensor, group, async_op,
            lambda sent: [reduce(torch.stack(sent))] * len(sent),
        )  # fmt: skip

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor,
        group: Group | None = None, async_op: bool = False,
    ) -> Done | None:  # fmt: skip
        return self._call(
            "all_gather_into_tensor", "", input_tensor, output_tensor, group, async_op,
            lambda sent: [torch.cat([t.flatten() for t in sent])] * len(sent),
        )  # fmt: skip

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Any = SUM,
        group: Group | None = None, async_op: bool = False,
    ) -> Done | None:  # fmt: skip
        reduce = _reduction(op)
        return self._call(
            "reduce_scatter_tensor", reduce.__name__, input, output, group, async_op,
            lambda sent: list(reduce(torch.stack(sent)).flatten().chunk(len(sent))),
        )  # fmt: skip

    all_gather_single = all_gather_into_tensor  # the names that torch 2.13 prefers
    reduce_scatter_single = reduce_scatter_tensor

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: Any = None,
        input_split_sizes: Any = None, group: Group | None = None, async_op: bool = False,
    ) -> Done | None:  # fmt: skip
        assert output_split_sizes is None, "rank programs exchange equal pieces"
        assert input_split_sizes is None, "rank programs exchange equal pieces"

        def exchange(sent: list[Tensor]) -> list[Tensor]:
            pieces = [t.chunk(len(sent)) for t in sent]
            return [torch.cat([p[i].flatten() for p in pieces]) for i in range(len(sent))]

        return self._call("all_to_all_single", "", input, output, group, async_op, exchange)

    def broadcast(
        self, tensor: Tensor, src: int | None = None, group: Group | None = None,
        async_op: bool = False, group_src: int | None = None,
    ) -> Done | None:  # fmt: skip
        ranks = self._group(group).ranks
        source = ranks.index(src) if src is not None else int(group_src or 0)
        return self._call(
            "broadcast", f"from rank {ranks[source]}", tensor, tensor, group, async_op,
            lambda sent: [sent[source]] * len(sent),
        )  # fmt: skip

    def barrier(self, group: Group | None = None, async_op: bool = False) -> Done | None:
        none = torch.zeros(1)
        return self._call("barrier", "", none, none, group, async_op, lambda sent: sent)

    def _group(self, group: Group | None) -> Group:
        return group or Group(tuple(range(self._world.num)), "world", self._world.here.rank)

    def _call(
        self, kind: str, detail: str, sent: Tensor, result: Tensor, group: Group | None,
        async_op: bool, compute: Callable[[list[Tensor]], list[Tensor]],
    ) -> Done | None:  # fmt: skip
        group = self._group(group)
        call = Call(kind, detail, sent, sent.detach().clone(), result, _caller())
        _check_call(call, group)
        _poison(result)
        done = self._world.start(group, call, compute)
        if async_op:
            return done
        done.wait()
        return None


def run_ranks(num: int, run: Callable[[int, ThreadDist], T], *, timeout: float = 120.0) -> list[T]:
    """``run(rank, dist)`` in one thread per rank; what each returns, in rank order.

    The first error ends all ranks and is raised here, with a note that names its rank.
    """
    world = World(num, timeout)
    dist = ThreadDist(world)
    results: dict[int, T] = {}

    def thread(rank: int) -> None:
        world.here.rank = rank
        try:
            results[rank] = run(rank, dist)
            world.finish(rank)
        except StopRank:
            pass
        except BaseException as error:
            error.add_note(f"on rank {rank} of {num}")
            world.fail(error)

    threads = [threading.Thread(target=thread, args=(r,), name=f"rank {r}") for r in range(num)]
    for each in threads:
        each.daemon = True
        each.start()
    for each in threads:
        each.join()
    if world.failure is not None:
        raise world.failure
    return [results[rank] for rank in range(num)]


def _sum(stacked: Tensor) -> Tensor:
    return stacked.sum(0, dtype=stacked.dtype)


def _max(stacked: Tensor) -> Tensor:
    return stacked.amax(0)


def _min(stacked: Tensor) -> Tensor:
    return stacked.amin(0)


def _mean(stacked: Tensor) -> Tensor:
    return stacked.mean(0)


_REDUCTIONS: Mapping[Any, Callable[[Tensor], Tensor]] = {
    SUM: _sum, MAX: _max, c10d.ReduceOp.MIN: _min, c10d.ReduceOp.AVG: _mean
}  # fmt: skip


def _reduction(op: Any) -> Callable[[Tensor], Tensor]:
    return next(reduce for known, reduce in _REDUCTIONS.items() if known == op)


def _check_call(call: Call, group: Group) -> None:
    """The size of the result must be what the collective makes of what is sent."""
    num = group.size()
    expected = {
        "all_gather_into_tensor": call.copy.numel() * num,
        "reduce_scatter_tensor": call.copy.numel() / num,
    }.get(call.kind, call.copy.numel())
    same_dtype = call.result.dtype == call.copy.dtype
    if call.result.numel() != expected or not same_dtype or not call.result.is_contiguous():
        raise RunError(
            where=call.line,
            what=f"the result of {call.kind} does not fit",
            why=f"it is {call.result.dtype}{list(call.result.shape)} for {call} among {num} ranks",
            do="Give it a contiguous tensor of the right size and dtype.",
        )


def _poison(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _caller() -> str:
    """File and line of the program's call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _disagreement(meeting: Meeting) -> RunError:
    lines = [f"  rank {rank}: {call}" for rank, call in sorted(meeting.calls.items())]
    return RunError(
        where=f"collective {meeting.number} of {meeting.group.axis or 'group'} {list(meeting.group.ranks)}",
        what="its members do not call the same collective",
        why="each rank runs its own order",
        do="Compare these lines:\n" + "\n".join(lines),
    )


def _unwaited(rank: int, calls: list[Call]) -> RunError:
    return RunError(
        where=f"rank {rank}",
        what=f"{len(calls)} started collectives are never waited for",
        why="their results are not there when the step ends",
        do="Wait for:\n" + "\n".join(f"  {call}" for call in calls),
    )
