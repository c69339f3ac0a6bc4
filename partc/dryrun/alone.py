"""Run one rank's program without the others: stand-ins for its mesh and ``torch.distributed``.

They move no data. A transfer's handle keeps operand and result alive, as those of gloo and NCCL do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as c10d
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from partc.dryrun.as_c10d_takes import as_c10d_takes
from partc.dryrun.live_memory import LiveMemory
from partc.plan.wires import THRESHOLD, WIRES
from partc.program.role import MeshView, Role


@contextmanager
def alone(
    role: Role, rank: int, library: str = "gloo", live: LiveMemory | None = None
) -> Iterator[LoneMesh]:
    """Replace ``torch.distributed`` in a role's module by functions that move nothing.

    Args:
        rank: the rank of the mesh that runs, which the others need not.
        library: what carries tensors (``topology.LIBRARIES``).
        live: counts memory and checks streams, if given.
    """
    here = LoneMesh(role.mesh, rank)
    with in_place_of_dist(role, LoneDist(here, library, live)):
        yield here


@contextmanager
def in_place_of_dist(role: Role, dist: Any) -> Iterator[None]:
    """Let a role's module call ``dist`` for ``torch.distributed``, and sums by threshold send as
    many numbers as the plan expects: fakes have none that could be counted.
    """
    module = role.module.__dict__
    before = module.get("dist")  # the program of one rank alone needs none
    module["dist"] = dist
    counted = module.get(WIRES[THRESHOLD].helper)
    if counted is not None:
        expected = {"read": lambda own, counts: [own.k], "log": []}
        module[counted.__name__] = type(counted.__name__, (counted,), expected)
    try:
        yield
    finally:
        module["dist"] = before
        module |= {} if counted is None else {counted.__name__: counted}


class _Ranks(Tensor):
    """Numbers that a program computes with, and reads, also where all other tensors are fake."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unset_fake_temporarily():
            return super().__torch_function__(  # type: ignore[no-untyped-call]
                func, types, args, kwargs or {}
            )


class LoneMesh(MeshView):
    """One rank's view of the mesh; a group is named by its axis."""

    @property
    def mesh(self) -> Tensor:
        with unset_fake_temporarily():
            return super().mesh.as_subclass(_Ranks)

    def get_group(self, mesh_dim: Any = None) -> str:
        return str(mesh_dim)


class Started:
    """The handle of a transfer; like c10d's handles, it keeps the tensors until it is deleted."""

    def __init__(self, tensors: tuple[Tensor, ...], dist: LoneDist, number: int) -> None:
        self.tensors, self.dist, self.number = tensors, dist, number

    def wait(self) -> None:
        self.dist.wait(self.number)


@dataclass(frozen=True)
class Transfer:
    """What a program starts: ``send`` and ``receive`` have a ``peer``, collectives have None."""

    name: str
    group: Any
    peer: int | None
    sent: tuple[Tensor, ...]
    arriving: tuple[Tensor, ...]


@as_c10d_takes
class LoneDist:
    """The functions of ``torch.distributed`` that rank programs call."""

    ReduceOp, Work = c10d.ReduceOp, c10d.Work

    def __init__(self, here: LoneMesh, library: str, live: LiveMemory | None) -> None:
        self.here, self.library, self.live = here, library, live

    def get_rank(self, group: Any = None) -> int:
        """This rank's number, or its coordinate on an axis."""
        return self.here.rank if group is None else self.here.get_local_rank(group)

    def get_global_rank(self, group: Any, group_rank: int) -> int:
        return self.here.layout.peers(self.here.rank, group)[group_rank]

    def get_backend_config(self, group: Any = None) -> str:
        return f"cpu:{self.library}"

    def new_group(self, ranks: list[int]) -> Any:
        return tuple(sorted(ranks))

    def all_reduce(
        self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Started:
        return self._start(Transfer("all_reduce", group, None, (), (tensor,)), async_op)

    def all_gather_single(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> Started:
        return self._start(Transfer("all_gather", group, None, (input,), (output,)), async_op)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, op: Any = None, group: Any = None,
        async_op: bool = False,
    ) -> Started:  # fmt: skip
        return self._start(Transfer("reduce_scatter", group, None, (input,), (output,)), async_op)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> Started:
        return self._start(Transfer("all_to_all", group, None, (input,), (output,)), async_op)

    def broadcast(
        self, tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False,
        group_src: int | None = None,
    ) -> Started:  # fmt: skip
        return self._start(Transfer("broadcast", group, None, (), (tensor,)), async_op)

    def isend(
        self, tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0,
        group_dst: int | None = None,
    ) -> Started:  # fmt: skip
        peer = dst if group_dst is None else self.get_global_rank(group, group_dst)
        return self._start(Transfer("send", group, peer, (tensor,), ()), True)

    def irecv(
        self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0,
        group_src: int | None = None,
    ) -> Started:  # fmt: skip
        peer = src if group_src is None else self.get_global_rank(group, group_src)
        return self._start(Transfer("receive", group, peer, (), (tensor,)), True)

    def begin(self, transfer: Transfer) -> int:
        """Note the start of a transfer; return its number."""
        if self.live is None:
            return 0
        place, streams = self.live.place(), self.live.streams
        return streams.start(transfer.name, place, transfer.sent, transfer.arriving)

    def wait(self, number: int) -> None:
        """Note a wait for a transfer."""
        if self.live is not None:
            self.live.streams.wait(number)

    def _start(self, transfer: Transfer, later: bool) -> Started:
        number = self.begin(transfer)
        if not later:
            self.wait(number)
        return Started((*transfer.sent, *transfer.arriving), self, number)
