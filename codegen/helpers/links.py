"""Transfers between pipeline ranks, as generated programs carry them.

Each link is one-way, in order, and a process group of its own: NCCL knows no tags and runs all
transfers of a group one after the other, so that in a shared group a receive that is posted early
would hold up what has to be sent before.
"""
# mypy: disable-error-code="misc, union-attr, no-any-return"
# (torch may give no Work)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from partc.codegen.helpers.printed import Reduced

Link = tuple[dist.ProcessGroup, int, int]  # a group of its own, from rank, to rank


class Links(dict[tuple[str, int], Link]):
    """This rank's links by what they carry (`x` or `d`) and the stage to which they lead."""

    def __init__(
        self, mesh: DeviceMesh, rank_of: range | list[int], to: dict[str, range | list[int]]
    ) -> None:
        """Make a group for every link of every pipeline, on all ranks in one order, as torch asks.

        `rank_of`: the pipeline rank of every stage; `to`: the stages that receive `x`, or `d`.
        """
        super().__init__()
        self.device: torch.device | None = None
        dim = mesh.mesh_dim_names.index("pp")
        pipelines = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
        # every second stage first: links that share no rank are then made at the same time
        order = [(what, i) for odd in (0, 1) for what in to for i in to[what] if i % 2 == odd]
        for what, stage in order:
            sender = rank_of[stage - 1 if what == "x" else stage + 1]
            for ranks in pipelines:
                ends = ranks[sender], ranks[rank_of[stage]]
                group = dist.new_group([*ends])
                if dist.get_rank() in ends:
                    self[what, stage] = (group, *ends)

    def meet(self, device: torch.device) -> None:
        """Before the first step, pass one element over every link, in the order of all ranks.

        NCCL connects two ranks at their first transfer, and there each waits for the other.
        """
        if device != self.device:
            for group, source, target in self.values():
                x = torch.zeros(1, device=device)
                if dist.get_rank() == source:
                    dist.isend(x, target, group=group).wait()
                else:
                    dist.irecv(x, source, group=group).wait()
            self.device = device


class Inbox:
    """Receives a stage's tensors, microbatch after microbatch, one ahead of what is taken."""

    def __init__(self, link: Link, likes: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.group, self.source, _ = link
        self.likes = likes

    def begin(self, num: int, device: torch.device) -> None:
        """Begin a step of `num` microbatches."""
        self.left, self.device = num, device
        self.posted: list[list[tuple[Tensor, dist.Work]]] = []
        self.post()

    def post(self) -> None:
        """Start to receive one microbatch's tensors, if any are left."""
        if self.left:
            self.left -= 1
            new = [torch.empty(s, dtype=d, device=self.device) for s, d in self.likes]
            self.posted.append([(x, dist.irecv(x, self.source, group=self.group)) for x in new])

    def take(self) -> list[Tensor]:
        """The next microbatch's tensors; those after it start to arrive."""
        here = self.posted.pop(0)
        for _, done in here:
            done.wait()
        self.post()
        return [x for x, _ in here]


class Outbox:
    """Sends a stage's tensors; at most `bound` microbatches are under way at a time."""

    def __init__(self, link: Link, bound: int) -> None:
        self.group, _, self.target = link
        self.bound = bound
        self.sent: list[list[tuple[Tensor, dist.Work]]] = []

    def put(self, tensors: tuple[Tensor, ...]) -> None:
        """Start to send one microbatch's tensors."""
        whole = [x.contiguous() for x in tensors]
        self.sent.append([(x, dist.isend(x, self.target, group=self.group)) for x in whole])
        self.wait(self.bound)

    def wait(self, bound: int = 0) -> None:
        """Wait until no more than `bound` microbatches are under way."""
        while len(self.sent) > bound:
            for _, done in self.sent.pop(0):
                done.wait()


class Shelf:
    """Hands a stage's tensors to the next one on the same rank."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, ...]] = []

    def put(self, tensors: tuple[Tensor, ...]) -> None:
        self.kept.append(tensors)

    def take(self) -> tuple[Tensor, ...]:
        return self.kept.pop(0)


class Nothing:
    """Where the pipeline begins and ends."""

    def put(self, tensors: tuple[Tensor, ...]) -> None:
        """There is no stage behind."""

    def take(self) -> tuple[Tensor, ...]:
        return ()


class Partials(dict[nn.Parameter, Tensor]):
    """This rank's parts of gradients, of all microbatches so far, which ranks have yet to sum."""

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        self[param] = self[param].add_(grad) if param in self else grad

    def add_product(self, weight: nn.Parameter, d_y: Tensor, x: Tensor) -> None:
        """Add the gradient of the weight in `y = x @ weight.T`."""
        d_y, x = d_y.flatten(0, -2), x.flatten(0, -2)
        if weight in self:
            self[weight].addmm_(d_y.T, x)
        else:
            self[weight] = d_y.T @ x

    def take(self, params: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Hand over the parts of some gradients."""
        return {param: self.pop(param) for param in params if param in self}

    def buckets(self, params: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
        """The parameters in groups, of up to `limit` bytes of gradients, each for one transfer."""
        groups: list[list[nn.Parameter]] = []
        filled = 0
        for param in (p for p in params if p in self):
            if not groups or filled + self[param].nbytes > limit:
                groups.append([])
                filled = 0
            groups[-1].append(param)
            filled += self[param].nbytes
        return groups


class ReducedParts(Reduced):
    """Parts of gradients that ranks are summing, to be added to those of all microbatches."""

    def __init__(self, partials: Partials) -> None:
        super().__init__()
        self.partials = partials

    def finish(self) -> None:
        """Wait for all transfers, and add what they bring to the parts."""
        while self:
            self[0][1].wait()
            for param, grad in self.pop(0)[0].items():  # the handle holds what was sent
                grad = grad.sum(0) if grad.dim() > param.dim() else grad  # all ranks' pieces
                self.partials.add(param, grad)


def sum_tied(
    param: nn.Parameter, before: Tensor, ranks: list[int], group: dist.ProcessGroup
) -> None:
    """Add the gradients that several pipeline ranks have for one parameter to what was there.

    Of two ranks the lower one sends first: on NCCL two sends that meet wait for each other.
    """
    mine = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
    here, works = dist.get_rank(group), []
    parts = {rank: mine if rank == here else torch.empty_like(mine) for rank in ranks}
    for rank in [rank for rank in ranks if rank != here]:
        peer = dist.get_global_rank(group, rank)
        ways = [(dist.isend, mine), (dist.irecv, parts[rank])]
        for start, x in ways if here < rank else reversed(ways):
            works.append(start(x, peer, group=group))
    for work in works:
        work.wait()
    total = sum(parts.values())
    param.grad = total if before is None else before.add_(total)
