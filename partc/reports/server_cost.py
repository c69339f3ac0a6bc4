"""What it costs that servers own parameters: the bytes of every island, and the time of a step.

A server's link carries the gradients of all islands that compute, and then the parameters for all
of them, where a ring shares both among all links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from partc.cost.bytes import sent_share
from partc.cost.collective_cost import collective_seconds
from partc.plan.mesh import ISLAND, Mesh
from partc.plan.servers import Servers, shared_out
from partc.program.role import Shard

BUCKET_BYTES = 100_000_000  # as `served_by` fills messages
LOSS_BYTES = 8


@dataclass(frozen=True)
class ServerLoad:
    """Bytes of gradients and of parameters that a rank of an island sends and receives in a step,
    in so many messages each way.
    """

    grads_out: int
    grads_in: int
    params_out: int
    params_in: int
    count: int

    @property
    def sent_bytes(self) -> int:
        return self.grads_out + self.params_out

    def seconds(self, mesh: Mesh) -> float:
        """How long this rank's link is busy: parameters wait for the optimizer, and so for all
        gradients.
        """
        one = collective_seconds("send", 0, mesh, ISLAND)
        times = (
            collective_seconds("send", max(pair), mesh, ISLAND) - one
            for pair in ((self.grads_out, self.grads_in), (self.params_out, self.params_in))
        )
        return sum(times) + self.count * one


def server_loads(how: Servers, mesh: Mesh, sizes: Sequence[int]) -> list[ServerLoad]:
    """What a rank of each island sends and receives; ``sizes``: bytes of its trained parameters."""
    serving, workers = how.serving(mesh), how.workers(mesh)
    owned = dict(zip(serving, shared_out(sizes, how.count), strict=True))
    loads = []
    for island in range(mesh.islands):
        own = owned.get(island, 0)
        others = sum(island != worker for worker in workers)  # that send to it, if it owns anything
        away = (sum(sizes) - own) * (island in workers)
        kept = others * own
        messages = others * ceil(own / BUCKET_BYTES)
        messages += (island in workers) * sum(
            ceil(size / BUCKET_BYTES) for server, size in owned.items() if server != island
        )
        loads.append(ServerLoad(away, kept, kept, away, 2 * messages))
    return loads


def sizes_of(params: Sequence[Shard], mesh: Mesh) -> list[int]:
    """The bytes of a rank's piece of each parameter."""
    return [prod(s.local_shape(mesh)) * s.dtype.itemsize for s in params]


def ring_seconds(how: Servers, mesh: Mesh, sizes: Sequence[int]) -> float:
    """How long the islands that compute would take to sum the same gradients in a ring."""
    num = len(how.workers(mesh))
    if num == 1:
        return 0.0
    top, bottom = sent_share("all_reduce", num)
    each = sum(sizes) * top / bottom
    start = collective_seconds("send", 0, mesh, ISLAND)
    return collective_seconds("send", each, mesh, ISLAND) + (2 * (num - 1) - 1) * start
