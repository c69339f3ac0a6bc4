"""Read the list of a checkpoint, ``checkpoint.json``, and prove it by the files of the ranks.

The list is untrusted input: it has a digest of its own, every entry is checked, and each rank's
file says by itself how its tensors are sharded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from partc.errors import LoadError, PartcError
from partc.plan.batch import Dealt
from partc.plan.mesh import ISLAND, PP, Mesh
from partc.plan.sharding import take_piece
from partc.plan.wires import is_residual
from partc.program.checkpoints import list_entries as entries
from partc.program.checkpoints.files import FileEntry, file_name, has_size, sha256_of
from partc.program.checkpoints.plain_states import check_entry
from partc.program.checkpoints.residuals import MET, fitted
from partc.program.folders import CHECKPOINT
from partc.program.role import Shard
from partc.program.stage.runtime import Stage
from partc.program.tensorfile import TensorFile

MANIFEST = CHECKPOINT
SCHEMA = 3
# entries that not every checkpoint has
SUMS, ISLANDS, STATES, MODEL = "sums", "islands", "states", "model"
CUTS = "partc.cuts"  # a rank's file says here how its tensors are sharded
_DAMAGE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError,
    RecursionError, PartcError,
)  # fmt: skip
_ENTRIES = {
    "schema", "step", "mesh", "plan", "random", "tensors", "files", "optimizer", "data", "sha256",
}  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """The checked list of a checkpoint; shards are read from the ranks' files when asked for."""

    path: Path
    step: int
    mesh: Mesh
    shards: Mapping[str, Shard]
    stages: Mapping[str, int]  # by tensor the pipeline rank whose files have it
    files: Mapping[str, FileEntry]  # by name
    groups: tuple[dict[str, Any], ...]
    opened: dict[str, TensorFile]
    digest: str  # of all the rest
    random: tuple[int, int]  # the seed of random numbers, and the steps since
    data: dict[str, Any] | None = None  # the state of a loader
    sums: dict[str, Any] = field(default_factory=dict)  # whose residuals it has (`residuals.py`)
    islands: dict[str, Any] = field(default_factory=dict)  # how they met (`residuals.py`)
    states: dict[str, Any] = field(default_factory=dict)  # of schedulers (`script_states.py`)
    # the names of the model's own state dict, in its order; a tied one has the first name
    model: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Saved:
        """Check and read ``checkpoint.json``; LoadError for any damage."""
        try:
            return cls._checked(path, entries.fields_of(path / MANIFEST))
        except LoadError as error:
            if error.where == str(path):
                raise
            refuse(path, str(error), "Restore the folder, or load an older step.")
        except _DAMAGE as error:
            refuse(path, repr(error), "Restore the folder, or load an older step.")

    @classmethod
    def _checked(cls, path: Path, fields: Any) -> Saved:
        if fields["schema"] != SCHEMA:
            refuse(path, f"it has schema {fields['schema']!r}", f"This partc reads {SCHEMA}.")
        if fields.keys() - {SUMS, ISLANDS, STATES, MODEL} != _ENTRIES:
            raise ValueError(f"its entries differ in {sorted(fields.keys() ^ _ENTRIES)}")
        rest = {name: entry for name, entry in fields.items() if name != "sha256"}
        if digest_of(rest) != fields["sha256"]:
            do = "Restore the folder, or load an older step."
            refuse(path, f"{MANIFEST} was changed or damaged: its digest differs", do)
        mesh = Mesh(tuple((name, entries.whole(size)) for name, size in fields["mesh"]))
        tensors = fields["tensors"]
        files = {name: entries.file(name, mesh, *entry) for name, entry in fields["files"].items()}
        if not {*map(file_name, range(mesh.num_ranks))} <= files.keys():
            refuse(path, "it does not name a file for each rank", "Restore it.")
        entries.text(fields["plan"])
        shards = {key: entries.shard(mesh, key, *entry[:3]) for key, entry in tensors.items()}
        stages = {key: entries.stage(mesh, *entry[3:]) for key, entry in tensors.items()}
        return cls(
            path, entries.whole(fields["step"]), mesh, shards, stages, files,
            tuple(map(entries.group, fields["optimizer"])), {}, fields["sha256"],
            _position(fields["random"]), fields["data"],
            dict(fields.get(SUMS, {})), entries.met(fields.get(ISLANDS, {})),
            check_entry(fields.get(STATES, {})), entries.model(fields.get(MODEL, {}), shards),
        )  # fmt: skip

    # the files of ranks --------------------------------------------------------------------------
    def verify(self, wanted: Mapping[str, Shard], stage: Stage) -> None:
        """Check the files that this rank reads, and its share of all others; LoadError if one is
        damaged, or holds other tensors than the list says.

        ``wanted``: how this rank's tensors are cut, by key.
        """
        share = range(dist.get_rank(), self.mesh.num_ranks, dist.get_world_size())
        reads = (rank for key, shard in wanted.items() for rank in self._ranks(key, shard, stage))
        for rank in sorted({*share, *reads}):
            self.check(rank)

    def check(self, rank: int) -> None:
        """LoadError if a file of a rank is damaged, or holds other tensors than the list says."""
        for name in self._names(rank):
            file = self.path / name
            whole = has_size(file, self.files[name])
            if not whole or sha256_of(file) != self.files[name].sha256:
                refuse(file, "it is missing or damaged", "Restore it, or load an older step.")
        self.prove(rank)

    def prove(self, rank: int) -> None:
        """LoadError unless a rank's files have what they have to, in these shapes, dtypes and cuts;
        the files' digests are another matter.
        """
        coords = self.mesh.coords(rank)
        mine = {key: s for key, s in self.shards.items() if self._is_of(key, s, coords)}
        left = {**mine}
        for name in self._names(rank):
            path, file = self.path / name, self._open(name)
            here = {key: left.pop(key) for key in file if key in left}
            if odd := sorted(file.keys() - here.keys()):
                refuse(path, f"it and {MANIFEST} differ in {odd[0]}", "Restore the folder.")
            self._prove_tensors(path, file, here)
        if left:
            path = self.path / file_name(rank)
            refuse(path, f"it and {MANIFEST} differ in {min(left)}", "Restore the folder.")

    def _prove_tensors(self, path: Path, file: TensorFile, here: Mapping[str, Shard]) -> None:
        for key, shard in here.items():
            if file.typed(key) != (shard.local_shape(self.mesh), shard.dtype):
                refuse(
                    path, f"{key} has another shape or dtype than {MANIFEST} says", "Restore it."
                )
        if file.notes.get(CUTS) != cuts_text(here):
            refuse(path, f"its tensors are not sharded as {MANIFEST} says", "Restore the folder.")

    def _names(self, rank: int) -> list[str]:
        """The names of a rank's files."""
        every = [file_name(rank), file_name(rank, frozen=True)]
        return [name for name in every if name in self.files]

    def _open(self, name: str) -> TensorFile:
        if name not in self.opened:
            self.opened[name] = TensorFile(self.path / name)
        return self.opened[name]

    def _is_of(self, key: str, shard: Shard, coords: Mapping[str, int]) -> bool:
        """Whether the rank at ``coords`` has its island's first copy of its shard of a tensor."""
        others = {axis: index for axis, index in coords.items() if axis not in (PP, ISLAND)}
        return shard.is_first_copy(others) and coords.get(PP, 0) == self.stages[key]

    def _ranks(self, key: str, wanted: Shard, stage: Stage) -> Iterator[int]:
        """The ranks from whose files this rank reads a tensor."""
        shard = self.shards.get(key)
        if shard is None:
            return  # residuals of an exact program's checkpoint
        axes = [axis for axis, _, _ in shard.cuts]
        if self._is_as_saved(shard, wanted, stage):
            yield self._rank(key, self._here(shard, stage))
            return
        axes += [ISLAND] if self.mesh.islands > 1 else []
        for indices in product(*(range(self.mesh.size(axis)) for axis in axes)):
            yield self._rank(key, dict(zip(axes, indices, strict=True)))

    def _here(self, shard: Shard, stage: Stage) -> dict[str, int]:
        """Where a rank of the same mesh has its shard: on its own island."""
        axes = [axis for axis, _, _ in shard.cuts]
        return {a: i for a, i in stage.coords.items() if a in axes or a == ISLAND}

    def _rank(self, key: str, at: Mapping[str, int]) -> int:
        """The first rank that holds a shard."""
        return self.mesh.rank({**dict.fromkeys(self.mesh.names, 0), PP: self.stages[key], **at})

    # tensors -------------------------------------------------------------------------------------
    def piece(self, key: str, wanted: Shard, stage: Stage) -> Tensor:
        """This rank's shard of one tensor, whatever mesh the tensor was saved under.

        Residuals that were not saved are zeros; of another number of ranks they are dealt out anew.
        """
        shard = self.shards.get(key)
        if shard is None:
            return torch.zeros(wanted.local_shape(stage.mesh), dtype=wanted.dtype)
        if self._is_as_saved(shard, wanted, stage):
            return self._read(key, self._here(shard, stage))
        whole = self.whole(key)
        if is_residual(wanted.name) and shard.shape != wanted.shape:
            beside = prod(stage.mesh.size(axis) for axis, dim, _ in wanted.cuts if dim == 1)
            whole = fitted(wanted.name, whole, wanted.shape, beside)
        return wanted.take(whole, stage.mesh, stage.coords)

    def whole(self, key: str) -> Tensor:
        """The whole tensor; where islands have saved copies of their own, the mean of these.

        Beside it in memory is one rank's piece, and one island's copy if there are several.
        """
        shard = self.shards[key]
        if self.mesh.islands == 1:
            return self._join(key, shard, {})
        total = self._join(key, shard, {ISLAND: 0})
        if not total.is_floating_point() and not total.is_complex():
            return total
        for i in range(1, self.mesh.islands):
            total += self._join(key, shard, {ISLAND: i})
        return total.div_(self.mesh.islands)

    def _is_as_saved(self, shard: Shard, wanted: Shard, stage: Stage) -> bool:
        alike = self.mesh == stage.mesh and shard.cuts == wanted.cuts
        return alike and self.has_same_islands(stage)

    def has_same_islands(self, stage: Stage) -> bool:
        """Whether what islands have kept means the same to a stage: else it takes the mean of their
        parameters, from which its islands begin.
        """
        mine = stage.islands
        either = (self.islands.keys() | mine.keys()) - {MET}
        return all(self.islands.get(name) == mine.get(name) for name in either)

    def _join(self, key: str, shard: Shard, at: Mapping[str, int]) -> Tensor:
        """Join a tensor's saved shards, of the ranks at ``at`` on axes that do not cut it."""
        if not shard.cuts:
            return self._read(key, at)
        whole = torch.empty(shard.shape, dtype=shard.dtype)
        self._fill(whole, key, shard.cuts, at)
        return whole

    def _fill(self, into: Tensor, key: str, cuts: Dealt, at: Mapping[str, int]) -> None:
        """Copy saved shards into a tensor, or a piece of one that these cuts still divide."""
        if not cuts:
            into.copy_(self._read(key, at))
            return
        axis, dim, outer = cuts[0]
        num = self.mesh.size(axis)
        for i in range(num):
            piece = take_piece(into, dim, outer, num, i)
            self._fill(piece, key, cuts[1:], {**at, axis: i})
            if outer > 1:  # the piece is a copy of rows that lie apart
                parts = into.unflatten(dim, (outer, num, -1)).select(dim + 1, i)
                parts.copy_(piece.unflatten(dim, (outer, -1)))

    def _read(self, key: str, at: Mapping[str, int]) -> Tensor:
        """Read a shard from a file of the first rank that holds it."""
        files = map(self._open, self._names(self._rank(key, at)))
        return next(file for file in files if key in file)[key]


def cuts_text(shards: Mapping[str, Shard]) -> str:
    """How tensors are sharded, as text: `{"model/w": [["dp", 0, 1]]}`."""
    return json.dumps({key: shard.cuts for key, shard in sorted(shards.items())})


def _position(random: Any) -> tuple[int, int]:
    return entries.integer(random["seed"]), entries.whole(random["step"])


def digest_of(fields: Mapping[str, Any]) -> str:
    """The sha256 of entries as JSON."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def refuse(path: Path, why: str, do: str) -> NoReturn:
    raise LoadError(where=str(path), what="cannot be loaded", why=why, do=do) from None
