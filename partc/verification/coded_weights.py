"""What weights are that ranks gather with fewer bytes, by the definition of the plan's code.

In: a program whose plan has ``[compress_weights]``, and a loaded role of it. Out: the weights with
which all ranks have to compute, for the reference; and what the printed classes make of weights,
compared with these. Never: the classes' own idea of a block or a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from partc.plan import Plan
from partc.plan.batch import DATA_AXES
from partc.plan.coded import Coded
from partc.plan.compress import Compress
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.program.role import Role, Shard
from partc.program.tensors.holders import roles_of
from partc.verification.defined_sums import rounded
from partc.verification.exact_gathers import Gathering, classes_of, gathering_by
from partc.verification.lossy import BOUNDS_OF_PIECES, SLACK, SentError
from partc.verification.lossy import GATHERED as OF_WEIGHTS

GATHERED = "gathered weight"
Compared = tuple[str, str, float]  # of which kind, of which tensor, and its error


def how_of(plan: str) -> Coded | None:
    """How a plan, given as text, has weights gathered; None for as they are."""
    return Plan.parse(plan).compress_weights


def decoded(x: Tensor, how: Coded) -> Tensor:
    """The numbers of a rank's shard as they arrive: from blocks of its own, in their order."""
    flat = x.detach().flatten()
    flat = flat if flat.dtype == torch.float64 else flat.to(torch.float32)
    if not how.code.has_blocks:
        return _bfloat16(flat).to(x.dtype).view(x.shape)
    whole = nn.functional.pad(flat, (0, -len(flat) % how.block))
    halves = torch.full_like(whole, 0.5)
    found = rounded(whole, Compress(how.wire, block=how.block), len(flat), halves)
    return found[: len(flat)].to(x.dtype).view(x.shape)


def _bfloat16(x: Tensor) -> Tensor:
    """The nearest numbers with 8 binary digits, of two the even one; in the dtype of ``x``."""
    digits, exponent = torch.frexp(x)
    return torch.ldexp((digits * 256).round() / 256, exponent).to(x.dtype)


def weights_of(program: Program) -> Callable[[str, Tensor], Tensor] | None:
    """What all ranks compute with, of each weight of the model by name; None for what they are."""
    how, mesh = how_of(program.plan), program.mesh
    if how is None:
        return None
    shards = {shard.name: shard for role in roles_of(program) for shard in role.params}

    def found(name: str, whole: Tensor) -> Tensor:
        shard = shards.get(name)
        stored = shard is not None and any(axis in DATA_AXES for axis, *_ in shard.cuts)
        if shard is None or not stored or not how.sends(name):
            return whole
        return _of_shards(whole, shard, mesh, how)

    return found


def _of_shards(whole: Tensor, shard: Shard, mesh: Mesh, how: Coded) -> Tensor:
    """A weight of which each rank's shard has arrived."""
    at, made = torch.arange(whole.numel()).view(whole.shape), whole.flatten().clone()
    for rank in range(mesh.num_ranks):
        mine = shard.take(at, mesh, mesh.coords(rank)).flatten()
        made[mine] = decoded(whole.flatten()[mine], how)
    return made.view(whole.shape)


# the classes themselves ---------------------------------------------------------------------------
@dataclass
class Comparing:
    """Notes what printed classes make of weights, and of which.

    ``names``: of weights, by their memory; another one is known by the number of its gather.
    ``found``: for each gather of a weight the shards of all ranks, and what has arrived of them.
    """

    dist: Any
    how: Coded
    names: Mapping[int, str]
    count: int = 0
    found: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def watched(self, made: Callable[..., Any]) -> Callable[..., Any]:
        """A printed class of which this is told."""

        def call(shards: list[Tensor], num: int, block: int, group: Any) -> Any:
            self.count += 1
            names = [
                self.names.get(shard.data_ptr(), f"gather {self.count}, weight {i + 1}")
                for i, shard in enumerate(shards)
            ]
            exact = Gathering(self.dist, shards, num, group, lambda shard: shard).pieces
            done = made(shards, num, block, group)
            arrive = done.wait

            def wait() -> bool:
                arrive()
                for name, *pieces in zip(names, exact, done.pieces, strict=True):
                    self.found.setdefault(name, []).append((pieces[0], pieces[1]))
                return True

            done.wait = wait
            return done

        return call

    def rows(self) -> Iterator[Compared]:
        """The largest error of each weight, over its largest number, in each gather of it; a text
        that gathers none is wrong.
        """
        if not self.found:
            yield GATHERED, "any", inf
        for name, gathers in self.found.items():
            for pieces, arrived in gathers:
                wanted = torch.stack([decoded(piece, self.how) for piece in pieces])
                off, most = float((wanted - arrived).abs().max()), float(wanted.abs().max())
                yield GATHERED, name, off / (most or 1.0) if isfinite(off) else inf

    def errors(self) -> Iterator[SentError]:
        """Of each weight how far it is from the exact one, beside the bound of the code."""
        how = Compress(self.how.wire, block=self.how.block)
        bound = BOUNDS_OF_PIECES[self.how.wire]
        for name, [(pieces, arrived), *_] in self.found.items():
            every = pieces.detach().flatten(1).double()
            norm = float(every.norm()) or 1.0
            most = sum(bound(each[None], how, []) ** 2 for each in every) ** 0.5
            error = float((arrived.detach().flatten(1).double() - every).norm())
            yield SentError(
                f"{name}{OF_WEIGHTS}", every.numel(), error / norm, most / norm + SLACK
            )  # fmt: skip


def weights_compared(
    role: Role, how: Coded, step: nn.Module, run: Callable[[], object]
) -> Comparing:
    """What the classes of a text make of weights in a step, that ``run`` takes."""
    module = role.module.__dict__
    names = {x.data_ptr(): name for name, x in role.tensors(step).items() if x.numel()}
    seen, classes = Comparing(module["dist"], how, names), classes_of(role)
    with gathering_by(role, {name: seen.watched(made) for name, made in classes.items()}):
        run()
    return seen
