"""The tensors that a rank holds, under the names of the user's model: loaded, joined and saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from partc.plan.mesh import PP, Mesh
from partc.program import Program
from partc.program.dtensors import DTensors
from partc.program.holders import Holders, from_first
from partc.program.role import Role, Shard
from partc.program.weights import check_names, check_shapes, match


class Unmatched(NamedTuple):
    """What ``load_state_dict`` returns, as in torch."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class RankTensors:
    """``held`` has every tensor of this rank by its first name in the user's model, ``shards`` how
    each is cut from the whole; ``all_shards`` also has those that only other ranks hold.
    """

    held: dict[str, Tensor]

    def __init__(
        self, program: Program, role: Role, mesh: DeviceMesh | None, device: torch.device
    ) -> None:
        self.mesh, self.coords = program.mesh, program.mesh.coords(dist.get_rank())
        self.groups = {n: mesh.get_group(n) for n in program.mesh.names} if mesh else {}
        self.holders = Holders.of(program)
        self._model, self._role = program.fingerprint, role
        self._dtensors = _dtensors(program.mesh, mesh, self.coords)
        self._aside = {
            name: torch.zeros(shard.shape, dtype=shard.dtype, device=device)
            for name, shard in self.holders.aside.items()
        }
        own = {shard.name: shard for shard in role.shards}
        self.shards = {**own, **self.holders.aside}

    @property
    def all_shards(self) -> Mapping[str, Shard]:
        return self.holders.shards

    @property
    def pipeline(self) -> Any:
        """The process group of the ranks with the other stages; None if there is none."""
        return self.groups.get(PP)

    @property
    def device(self) -> torch.device:
        return next(iter(self.held.values())).device

    # names -----------------------------------------------------------------------------------
    def read(self, step: nn.Module) -> None:
        """Look up all tensors in the rank's module, which may have other ones than before."""
        self.held = {**self._role.tensors(step), **self._aside}

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Change what stands beside the rank's module as ``.to()`` changed what stands in it."""
        self._aside = {name: fn(tensor) for name, tensor in self._aside.items()}

    def named(self) -> Iterator[tuple[str, Tensor, bool]]:
        """What is held under all its names, and whether a state dict has it."""
        saved = set(self.saved_names(self.shards))
        seconds = {n: f for n, f in self.holders.aliases.items() if f in self.held}
        for name, first in {**{n: n for n in self.shards}, **seconds}.items():
            yield name, self.held[first], name in saved

    def first_name(self, name: str) -> str:
        """The name under which a tied tensor is held."""
        return self.holders.aliases.get(name, name)

    def saved_names(self, held: Collection[str]) -> Iterator[str]:
        """The names of the model's own state dict for what is held, in the model's order."""
        return (n for n in self._model.saved_names() if self.first_name(n) in held)

    # in --------------------------------------------------------------------------------------
    def load(self, given: Mapping[str, Any], strict: bool, needed: Collection[str]) -> Unmatched:
        """Check all names that some rank holds, so that all ranks agree, and take this rank's."""
        matched = match(given, list(self.all_shards), self.holders.aliases, self._model)
        matched = replace(matched, missing=[n for n in matched.missing if n in needed])
        if strict:
            check_names(matched)
        check_shapes(given, matched, {s.name: s.shape for s in self.all_shards.values()})
        self.fill({name: given[key] for name, key in matched.found.items()})
        return Unmatched(matched.missing, matched.unexpected)

    @torch.no_grad()
    def fill(self, given: Mapping[str, Tensor]) -> None:
        """Copy this rank's pieces of whole tensors, or of DTensors, into place."""
        for name, value in given.items():
            shard = self.shards.get(name)
            if shard is None:
                if isinstance(value, DTensor):
                    value.full_tensor()  # for the ranks that hold it: they cannot gather it alone
            elif isinstance(value, DTensor):
                self.held[name].copy_(self._dtensors.piece(shard, value))
            else:
                self.held[name].copy_(shard.take(value, self.mesh, self.coords))

    # out -------------------------------------------------------------------------------------
    def whole(self, name: str) -> Tensor:
        """A tensor joined by the first pipeline rank that holds it, on all of them."""
        shard, first = self.all_shards[name], self.holders.first[name]
        joined = None
        if self.holders.is_first_stage(shard, self.coords):
            joined = shard.join(self.held[name].detach(), self.gather)
        if self.pipeline is None:
            assert joined is not None
            return joined
        return from_first(joined, shard, first, self.pipeline, self.device)

    def as_dtensor(self, name: str) -> Any:
        """What is held of a tensor, as a DTensor on the mesh without ``pp``."""
        shard = self.shards[self.first_name(name)]
        return self._dtensors.make(shard, self.held[shard.name].detach(), self.gather)

    def gather(self, piece: Tensor, axis: str) -> list[Tensor]:
        """What every rank along an axis holds."""
        piece = piece.contiguous()
        pieces = [torch.empty_like(piece) for _ in range(self.mesh.size(axis))]
        dist.all_gather(pieces, piece, group=self.groups[axis])
        return pieces


def _dtensors(mesh: Mesh, devices: DeviceMesh | None, coords: Mapping[str, int]) -> DTensors:
    """Tensors are cut over the axes without ``pp``."""
    cutting = mesh.without_pipeline()
    if devices is not None and cutting != mesh:
        devices = devices[cutting.names] if cutting.names else None
    return DTensors(cutting, devices, coords)
