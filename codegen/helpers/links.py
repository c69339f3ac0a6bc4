"""Transfers between pipeline ranks, as generated programs carry them.

Each link is one-way and in order: on NCCL it has a communicator of its own, so that it never
stands behind another; on gloo a tag does the same.
"""
# mypy: disable-error-code="attr-defined, misc, union-attr, no-any-return"
# (a parameter keeps its part of a gradient as an attribute; torch may give no Work)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

Link = tuple[dist.ProcessGroup, int, int, int]  # communicator, from rank, to rank, first tag


class Inbox:
    """Receives a stage's tensors, microbatch after microbatch, one ahead of what is taken."""

    def __init__(self, link: Link, likes: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.group, self.source, _, self.tag = link
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
            self.posted.append([
                (x, dist.irecv(x, self.source, group=self.group, tag=self.tag + i))
                for i, x in enumerate(new)
            ])  # fmt: skip

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
        self.group, _, self.target, self.tag = link
        self.bound = bound
        self.sent: list[list[tuple[Tensor, dist.Work]]] = []

    def put(self, tensors: tuple[Tensor, ...]) -> None:
        """Start to send one microbatch's tensors."""
        whole = [x.contiguous() for x in tensors]
        self.sent.append([
            (x, dist.isend(x, self.target, group=self.group, tag=self.tag + i))
            for i, x in enumerate(whole)
        ])  # fmt: skip
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


def link_groups(
    pp: dist.ProcessGroup, links: dict[tuple[str, int], tuple[int, int]]
) -> dict[tuple[str, int], Link]:
    """Every link, from rank to rank.

    On NCCL each has a communicator of its own; both ends make theirs in the order of names.
    """
    alone = dist.get_backend(pp) == "nccl"
    found = {}
    for (what, stage), ends in sorted(links.items()):
        source, target = (dist.get_global_rank(pp, rank) for rank in ends)
        group = dist.new_group([source, target], use_local_synchronization=True) if alone else pp
        found[what, stage] = (group, source, target, 64 * (2 * stage + (what == "d")))
    return found


def add_partial(param: nn.Parameter, grad: Tensor) -> None:
    """Add to this rank's part of a gradient that the ranks have yet to sum."""
    param.partial = grad if param.partial is None else param.partial.add_(grad)


def add_weight_partial(weight: nn.Parameter, d_y: Tensor, x: Tensor) -> None:
    """Add this rank's part of the gradient of the weight in `y = x @ weight.T`."""
    d_y, x = d_y.flatten(0, -2), x.flatten(0, -2)
    if weight.partial is None:
        weight.partial = d_y.T @ x
    else:
        weight.partial.addmm_(d_y.T, x)


def finish_partials(reduced: list[tuple[dict[nn.Parameter, Tensor], dist.Work]]) -> None:
    """Wait for reduced parts of gradients and add them up; the list is left empty."""
    while reduced:
        grads, done = reduced.pop(0)
        done.wait()
        del done  # which holds what was sent
        for param in list(grads):
            grad = grads.pop(param)
            add_partial(param, grad.sum(0) if grad.dim() > param.dim() else grad)


def take_partials(params: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """This rank's parts of gradients, of all microbatches; what another stage has taken is gone."""
    parts = {p: p.partial for p in params if p.partial is not None}
    for param in parts:
        param.partial = None
    return parts


def with_partials(module: nn.Module) -> None:
    """Give every parameter a place for its part of a gradient."""
    for param in module.parameters():
        param.partial = None


def in_buckets(grads: dict[nn.Parameter, Tensor], limit: int) -> list[dict[nn.Parameter, Tensor]]:
    """Gradients in groups of up to `limit` bytes, each for one transfer."""
    buckets: list[dict[nn.Parameter, Tensor]] = [{}]
    filled = 0
    for param, grad in grads.items():
        if filled and filled + grad.nbytes > limit:
            buckets.append({})
            filled = 0
        buckets[-1][param] = grad
        filled += grad.nbytes
    return buckets if grads else []


def sum_tied(
    param: nn.Parameter, before: Tensor, ranks: list[int], tag: int, group: dist.ProcessGroup
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
            works.append(start(x, peer, group=group, tag=tag))
    for work in works:
        work.wait()
    total = sum(parts.values())
    param.grad = total if before is None else before.add_(total)
