"""Run all ranks of a program in one process, as threads, with a stand-in for torch.distributed.

Between start and wait a result is filled with NaN, or with the smallest integer, so that a program
which reads the result before the wait gives a wrong loss.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
from torch import Tensor

from partc.dryrun.as_c10d_takes import FILE, as_c10d_takes
from partc.errors import RunError
from partc.program.role import MeshView
from partc.verification.rendezvous import Call, Done, Group, StopRank, World

T = TypeVar("T")
SUM, MAX = c10d.ReduceOp.SUM, c10d.ReduceOp.MAX


class ThreadMesh(MeshView):
    """One rank's view of the mesh, where ranks are threads."""

    def get_group(self, mesh_dim: Any = None) -> Group:
        return Group(tuple(self.layout.peers(self.rank, mesh_dim)), mesh_dim, self.rank)


@as_c10d_takes
class ThreadDist:
    """The functions of ``torch.distributed`` that rank programs call, for ranks in threads."""

    ReduceOp, Work, ProcessGroup = c10d.ReduceOp, c10d.Work, c10d.ProcessGroup

    def __init__(self, world: World) -> None:
        self._world = world

    def get_rank(self, group: Group | None = None) -> int:
        rank: int = self._world.here.rank
        return rank if group is None else group.ranks.index(rank)

    def get_world_size(self, group: Group | None = None) -> int:
        return self._world.num if group is None else group.size()

    def new_group(self, ranks: list[int]) -> Group:
        """A group beside those of the mesh; RunError unless all ranks make the same ones."""
        members = tuple(sorted(ranks))
        number = self._world.make_group(members, _caller())
        return Group(members, "link", self._world.here.rank, f"group {number}")

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

    def isend(
        self, tensor: Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0,
        group_dst: int | None = None,
    ) -> Done:  # fmt: skip
        ranks = self._group(group).ranks
        target = ranks[group_dst] if group_dst is not None else int(dst or 0)
        return self._transfer(tensor, self._world.here.rank, target, group, tag)

    def irecv(
        self, tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0,
        group_src: int | None = None,
    ) -> Done:  # fmt: skip
        ranks = self._group(group).ranks
        source = ranks[group_src] if group_src is not None else int(src or 0)
        _poison(tensor)
        return self._transfer(tensor, source, self._world.here.rank, group, tag)

    def _transfer(
        self, tensor: Tensor, source: int, target: int, group: Group | None, tag: int
    ) -> Done:
        """A send or a receive, as a collective of the two ranks."""
        shared = self._group(group)
        lane = f"{shared.lane or shared.axis} tag {tag}"
        pair = Group((source, target), shared.axis, self._world.here.rank, lane)
        call = Call("transfer", lane, tensor, tensor.detach().clone(), tensor, _caller())
        return self._world.start(pair, call, lambda sent: [sent[0], sent[0]])

    def get_backend_config(self, group: Group | None = None) -> str:
        return "cpu:gloo"  # so that programs take the code paths of the CPU

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
    """Run ``run(rank, dist)`` in one thread per rank; return the results in rank order.

    The first error ends all ranks, and is raised here with a note that names the rank.
    """
    world = World(num, timeout)
    dist = ThreadDist(world)
    results: dict[int, T] = {}

    def thread(rank: int) -> None:
        world.here.rank = rank
        try:
            with world.turn:
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
    """RunError unless the operand is contiguous, as NCCL wants it, and the result is contiguous, of
    the operand's dtype and of the right size.
    """
    num = group.size()
    if not call.sent.is_contiguous():
        raise RunError(
            where=call.line, what=f"what {call.kind} sends is not contiguous",
            why=f"its strides are {call.sent.stride()}, and NCCL sends contiguous tensors alone",
            do="Send a contiguous() copy.",
        )  # fmt: skip
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


def _caller() -> str:
    """File and line of the program's call: the innermost frame outside of the stand-in."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, FILE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
