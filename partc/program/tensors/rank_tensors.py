"""Load, join and save the tensors that a rank holds, under their names in the user's model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from partc.plan import Plan
from partc.plan.mesh import ISLAND, PP, Mesh
from partc.program import Program
from partc.program.checkpoints import residuals
from partc.program.ranks.agreement import Sources
from partc.program.ranks.tensor_hash import sampled
from partc.program.role import Role, Shard
from partc.program.tensors.chunks import chunks_of
from partc.program.tensors.dtensors import DTensors, expressible
from partc.program.tensors.dtensors import whole_of as uncut
from partc.program.tensors.holders import Holders, from_first
from partc.program.tensors.homes import Home, HomeTensor, whole_of
from partc.program.tensors.shown import Layouts
from partc.program.tensors.stage_tensors import StageTensor
from partc.program.weights import check_any, check_names, check_shapes, match

FIRST_CALLS = 3  # of each op on a tensor, before which ranks are asked whether all call for it


class Unmatched(NamedTuple):
    """What ``load_state_dict`` returns, as in torch."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class RankTensors:
    """The parameters and buffers of one rank, by name in the user's model.

    ``held``: this rank's shards by the tensor's first name. ``shards``: how each is cut from the
    whole tensor. ``all_shards``: the same, with the tensors that only other ranks hold.
    """

    held: dict[str, Tensor]

    def __init__(
        self, program: Program, role: Role, mesh: DeviceMesh | None, device: torch.device
    ) -> None:
        self.mesh, self.coords = program.mesh, program.mesh.coords(dist.get_rank())
        every = {n: mesh.get_group(n) for n in program.mesh.names} if mesh else {}
        self.island = every.pop(ISLAND, None)  # the ranks that hold the same pieces of other copies
        self.owners: dict[str, int] = {}  # by parameter its island, where islands own some
        self.groups = every
        self._ask: WeakMethod[Callable[[str, int], None]] | None = None
        self.holders = Holders.of(program)
        self._model, self._role = program.fingerprint, role
        self._gradients: dict[object, tuple[Any, Home]] = {}  # the layout of each
        self._aside = {
            name: self._as_kept(name, torch.zeros(shard.shape, dtype=shard.dtype, device=device))
            for name, shard in self.holders.aside.items()
        }
        self._sources: dict[str, tuple[int, int]] = {}  # what was loaded, and the version it made
        self._elsewhere: dict[str, int] = {}  # what the last load gave for other ranks' tensors
        self._num_loads = 0
        how = Plan.parse(program.plan).compress
        self.has_directions = how is not None and how.is_direction  # in place of sums
        self._empty = torch.empty(0, device=device)  # which `.to()` moves
        own = {shard.name: shard for shard in role.shards}
        self.shards = {**own, **self.holders.aside}
        params = [shard for name, shard in self.shards.items() if self._is_param(name)]
        self._num_elements = sum(math.prod(shard.shape) for shard in params)
        self._dtensors = _dtensors(program.mesh, mesh, self.coords, self.shards.values())

    def _is_param(self, name: str) -> bool:
        """Whether a tensor is a parameter of the model, and no buffer or constant of the step."""
        own = self._model.tensors.get(name)
        return own is not None and own.kind == "param"

    @property
    def all_shards(self) -> Mapping[str, Shard]:
        return self.holders.shards

    @property
    def pipeline(self) -> Any:
        """The process group of the ranks with the other stages; None if there is none."""
        return self.groups.get(PP)

    @property
    def device(self) -> torch.device:
        """Of this rank's tensors; of what the rank was built on, if its stages have none."""
        return next((tensor.device for tensor in self.held.values()), self._empty.device)

    def zero(self) -> Tensor:
        """0 in the type of a norm of the whole model: the same on ranks that hold no tensor."""
        kinds = {shard.dtype for shard in self.all_shards.values()}
        kinds |= {tensor.dtype for tensor in self.held.values()}
        wide = torch.float64 in kinds
        return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=self.device)

    # names -----------------------------------------------------------------------------------
    def read(self, step: nn.Module) -> None:
        """Look up all tensors in the rank's module again; ``.to()`` may have replaced them."""
        self.held = {**self._role.tensors(step), **self._aside}
        self.owners = self._role.owners(step)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a function (of ``.to()``) to the tensors that are kept beside the rank's module."""
        for name, tensor in self._aside.items():
            self._aside[name] = self._as_kept(name, fn(tensor.detach()))
        self._empty = fn(self._empty)

    def _as_kept(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor that no step reads, as the model has it: a parameter, which gets no gradient."""
        if not self._is_param(name) or not tensor.is_floating_point():
            return tensor
        return nn.Parameter(tensor)

    def casts(self) -> dict[str, torch.dtype]:
        """The tensors whose dtype is not the compiled one, and which they have."""
        pairs = ((name, self.held[name].dtype, shard) for name, shard in self.shards.items())
        return {name: dtype for name, dtype, shard in pairs if dtype != shard.dtype}

    def named(self) -> Iterator[tuple[str, str, bool]]:
        """Each name of a held tensor, its first name, and whether a state dict has the name."""
        saved = set(self.saved_names(self.shards))
        seconds = {n: f for n, f in self.holders.aliases.items() if f in self.held}
        every = {**{n: n for n in self.shards}, **seconds}
        in_order = [name for name in self._model.tensors if name in every]  # the model's
        for name in dict.fromkeys([*in_order, *every]):
            yield name, every[name], name in saved

    def first_name(self, name: str) -> str:
        """The name under which a tensor is held; a tied one has other names too."""
        return self.holders.aliases.get(name, name)

    def model_names(self) -> list[str]:
        """The names of all of the model's tensors, in the model's order."""
        return list(self._model.tensors)

    def saved_names(self, held: Collection[str]) -> Iterator[str]:
        """The names in the model's own state dict of held tensors, in the model's order."""
        return (n for n in self._model.saved_names() if self.first_name(n) in held)

    # in --------------------------------------------------------------------------------------
    def load(self, given: Mapping[str, Any], strict: bool, needed: Collection[str]) -> Unmatched:
        """Copy this rank's shards from whole tensors or DTensors; LoadError for wrong ones.

        The names and shapes of all ranks' tensors are checked, so that all ranks raise or none.
        """
        matched = match(given, list(self.all_shards), self.holders.aliases, self._model)
        matched = replace(matched, missing=[n for n in matched.missing if n in needed])
        if strict:
            check_names(matched)
        check_any(matched)
        every = self.all_shards.values()
        shapes, dtypes = {s.name: s.shape for s in every}, {s.name: s.dtype for s in every}
        check_shapes(given, matched, shapes, dtypes)
        numbers = {}
        for name, key in matched.found.items():  # one by one: a file may be larger than memory
            self.fill({name: (value := given[key])})
            if not isinstance(value, DTensor):
                numbers[name] = sampled(value, self.all_shards[name].dtype)
        residuals.begin(self.held, matched.found)
        self._note_sources(numbers)
        left_out = [] if strict else self._left_out(given, matched.found)
        return Unmatched([*matched.missing, *left_out], matched.unexpected)

    def _left_out(self, given: Mapping[str, Any], found: Collection[str]) -> list[str]:
        """The names of tied tensors that have their values under another name. Files of safetensors
        have a tensor once, and its loader expects the other names among those that are missing.
        """
        return [name for name in self.saved_names(found) if name not in given]

    def _note_sources(self, numbers: dict[str, int]) -> None:
        """Remember what was given, also for tensors of other pipeline ranks, which have to be of
        the same model.
        """
        here = [name for name in numbers if name in self.held]
        self._sources |= {name: (numbers.pop(name), self.held[name]._version) for name in here}
        self._elsewhere, self._num_loads = numbers, self._num_loads + 1

    def sources(self) -> Sources:
        """What each tensor was loaded from and not changed since."""
        known = self._sources.items()
        here = {n: number for n, (number, v) in known if self.held[n]._version == v}
        return Sources({**self._elsewhere, **here}, self._num_loads)

    @torch.no_grad()
    def fill(self, given: Mapping[str, Tensor]) -> None:
        """Copy this rank's shards of whole tensors or of DTensors into the held tensors."""
        for name, value in given.items():
            shard = self.shards.get(name)
            if shard is not None:
                self.held[name].copy_(self.piece(shard, value))
            elif isinstance(value, DTensor):
                value.full_tensor()  # a collective: ranks that hold the tensor need this one

    # out -------------------------------------------------------------------------------------
    def whole(self, name: str) -> Tensor:
        """The whole tensor, on every rank: joined on its first pipeline rank, then broadcast."""
        shard, first = self.all_shards[name], self.holders.first[name]
        joined = None
        if self.holders.is_first_stage(shard, self.coords):
            joined = shard.join(self.held[name].detach(), self.gather)
            joined = self.of_islands(name, joined)
        if self.pipeline is None:
            assert joined is not None
            return joined
        return from_first(joined, shard, first, self.pipeline, self.device)

    def of_islands(self, name: str, tensor: Tensor) -> Tensor:
        """What all islands together have of a tensor of this name: where an island owns it, its
        copy, else the mean of all.
        """
        if name not in self.owners:
            return self.mean_of_islands(tensor)
        return self.from_island(self.owners[name], tensor)

    @property
    def here(self) -> int:
        """The number of this rank's island."""
        return self.coords.get(ISLAND, 0)

    def from_island(self, owner: int, tensor: Tensor) -> Tensor:
        """An island's copy of a tensor, whose shape and dtype all islands have."""
        found = tensor.clone(memory_format=torch.contiguous_format)
        if found.numel():
            sent = found.view(-1).view(torch.uint8)
            dist.broadcast(sent, group=self.island, group_src=owner)
        return found

    def mean_of_islands(self, tensor: Tensor) -> Tensor:
        """The mean of all islands' copies of a tensor; of whole numbers the first island's."""
        if self.island is None:
            return tensor
        total = tensor.clone(memory_format=torch.contiguous_format)
        if tensor.is_floating_point() or tensor.is_complex():
            dist.all_reduce(total, group=self.island)
            return total / self.mesh.islands
        return self.from_island(0, tensor)

    def as_dtensor(self, name: str) -> Any:
        """This rank's shard of a tensor as a DTensor on the mesh without ``pp``; where there are
        islands of the mean of their copies.
        """
        shard = self.shards[self.first_name(name)]
        return self.portable(shard, self.of_islands(shard.name, self.held[shard.name].detach()))

    def shares_memory(self, name: str) -> bool:
        """Whether ``as_dtensor`` of a tensor is over this rank's own memory, and no copy."""
        return self.mesh.islands == 1 and expressible(self.shards[self.first_name(name)])

    def layouts(self) -> Layouts:
        """How users see this rank's pieces: as DTensors, where there is a mesh."""
        return Layouts(self._as_param, self._as_gradient, self.piece)

    def piece(self, shard: Shard, value: Tensor) -> Tensor:
        """This rank's piece of a whole tensor, or of a DTensor with any mesh and placements."""
        if isinstance(value, HomeTensor) and (value.parted or value.copied_view is not None):
            same = value.home.shard.cuts == shard.cuts and value.shape == shard.shape
            if value.parted and same:
                return value.to_local()
            value = whole_of(value)
        if isinstance(value, DTensor):
            return self._dtensors.piece(shard, value)
        return shard.take(value, self.mesh, self.coords)

    def join(self, shard: Shard, piece: Tensor) -> Tensor:
        """The whole tensor of the pieces of the ranks with this rank's stages."""
        return shard.join(piece, self.gather)

    def portable(self, shard: Shard, piece: Tensor) -> Tensor:
        """A DTensor that loads under any mesh; whole where placements cannot say the cuts."""
        made = self._dtensors.make(shard, piece, self.gather)
        if not isinstance(made, DTensor):
            return made
        whole = shard if expressible(shard) else uncut(shard)
        return StageTensor.of(made.to_local(), made._spec, self._home(whole))

    def _as_param(self, shard: Shard, piece: Tensor) -> Tensor:
        if self._dtensors.device_mesh is None:
            return piece
        spec = self._dtensors.over(shard, piece)._spec
        return StageTensor.of(piece, spec, self._home(shard), parted=not expressible(shard))

    def _as_gradient(self, shard: Shard, piece: Tensor) -> Tensor:
        if self._dtensors.device_mesh is None:
            return piece
        key = shard.name, piece.dtype
        if key not in self._gradients:
            spec = self._dtensors.over(shard, piece)._spec
            self._gradients[key] = spec, self._home(shard)
        spec, home = self._gradients[key]
        return StageTensor.of(piece, spec, home, parted=not expressible(shard), of_gradient=True)

    def _home(self, shard: Shard) -> Home:
        return Home(
            shard,
            chunks_of(shard, self.mesh, self.coords),
            self.groups,
            lambda piece: shard.join(piece, self.gather),
            lambda whole: shard.take(whole, self.mesh, self.coords),
            self.pipeline is not None,
            self._num_elements,
            self.has_directions,
            self._meet,
        )

    def met_by(self, ask: Callable[[str, int], None]) -> None:
        """Let ranks be asked whether all of them call for an op on tensors of all; ``ask`` is a
        method, which is not held.
        """
        self._ask = WeakMethod(ask)

    def _meet(self, call: str) -> None:
        alone = self.pipeline is not None or self.island is not None  # others have other tensors
        if not alone and self._ask is not None and (ask := self._ask()) is not None:
            ask(call, FIRST_CALLS)

    def gather(self, piece: Tensor, axis: str) -> list[Tensor]:
        """The shards of all ranks along an axis, by an all-gather."""
        piece = piece.contiguous()
        pieces = [torch.empty_like(piece) for _ in range(self.mesh.size(axis))]
        dist.all_gather(pieces, piece, group=self.groups[axis])
        return pieces


def _dtensors(
    mesh: Mesh, devices: DeviceMesh | None, coords: Mapping[str, int], shards: Iterable[Shard]
) -> DTensors:
    """A DTensors over the mesh without ``pp``, as no tensor is sharded over pipeline stages.

    Where there is no other axis it is over ``pp``, with every tensor whole on its own rank.
    """
    cutting = mesh.cutting_axes()
    if not cutting.names:
        cutting = mesh
    if devices is not None and cutting != mesh:
        devices = devices[cutting.names]
    return DTensors(cutting, devices, coords, shards)
