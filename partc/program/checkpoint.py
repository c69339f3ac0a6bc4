"""Save and load checkpoints: safetensors files with digests, committed as a whole, no pickle.

``folder/step-00000010/`` holds one safetensors file per rank, with every shard of which the rank
has the first copy, and ``checkpoint.json``, which says how each tensor is sharded. The folder is
written under another name and renamed when all ranks are done. A checkpoint is never overwritten,
and loads under any other mesh or plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from partc.data.loader import Loader
from partc.data.sampler import RowSampler
from partc.errors import LoadError, RunError
from partc.plan.mesh import PP, Mesh
from partc.plan.sharding import cut, dtype_name, join_pieces
from partc.program.holders import exchange_texts
from partc.program.optimizers import check_of_stage
from partc.program.role import Shard, dtype_of
from partc.program.runtime import Stage
from partc.program.same_optimizer import CLASS, PLAIN, check_same_optimizer
from partc.program.tensorfile import TensorFile, write_tensors

MANIFEST = "checkpoint.json"
SCHEMA = 1
STEP = re.compile(r"step-(\d{8,})\Z", re.ASCII)
Optimizer = torch.optim.Optimizer


def save_checkpoint(
    folder: str | Path,
    stage: Stage,
    optimizer: Optimizer | None = None,
    *,
    step: int = 0,
    loader: Loader | RowSampler | None = None,
) -> Path:
    """Write the tensors of a stage, and its optimizer's states, as one checkpoint of all ranks.

    The seed of the random numbers and the count of steps are part of it: a training that goes on
    from it draws what one that was not cut off would.

    All ranks call this together. Without pickle: a safetensors file per rank, and a list with a
    digest of each. It appears whole or not at all, and loads under any other mesh or plan.

    Args:
        folder: the folder of all checkpoints of a training; this one is ``step-00000100/`` in it.
        stage: what ``Program.module()`` gave.
        optimizer: the optimizer over ``stage.parameters()``; None writes the model alone.
        step: the number of the step, which names the checkpoint.
        loader: its position in the data is saved too.

    Returns:
        The new folder.

    Raises:
        RunError: a checkpoint of this step exists already; none is overwritten. Or the optimizer
            has parameters that are none of the stage's.
    """
    target = Path(folder) / f"step-{step:08d}"
    partial = target.with_name(f".{target.name}.partial")
    held = {**_model(stage), **_optimizer(stage, optimizer)}
    _first_rank_makes(partial, target, stage.device)
    mine = {k: piece for k, (shard, piece) in held.items() if stage.is_first_copy(shard)}
    file = partial / _file_name(dist.get_rank())
    write_tensors(file, mine)
    _flush(file)  # on disk before the rename that commits it
    digests = _gather_digests(bytes.fromhex(_sha256(file)), stage.device)
    contents = _contents(stage, held, _groups(stage, optimizer))
    if dist.get_rank() == 0:
        contents["data"] = None if loader is None else loader.state_dict()
        text = _manifest(stage, contents, digests, step)
        (partial / MANIFEST).write_text(text, encoding="utf-8")
        _flush(partial / MANIFEST)
        partial.rename(target)
        _flush(target.parent)
    dist.barrier()
    return target


def load_checkpoint(
    folder: str | Path,
    stage: Stage,
    optimizer: Optimizer | None = None,
    *,
    loader: Loader | RowSampler | None = None,
) -> int:
    """Read a checkpoint into a stage and its optimizer; all ranks call this together.

    Args:
        folder: the folder of all checkpoints, of which the newest is taken, or that of one.
        stage: what ``Program.module()`` gave, of any mesh and plan for the same model.
        optimizer: takes the states that were saved; None reads the model alone.
        loader: goes on behind the batch that the checkpoint's had taken last.

    Returns:
        The number of the step.

    Raises:
        LoadError: there is no checkpoint, a file is damaged, or it is of another model, other data
            or another optimizer.
    """
    saved = Saved.read(latest(folder))
    saved.verify(stage.device)
    _check_model(saved, stage)
    if optimizer is not None:
        check_same_optimizer(saved.path, optimizer, saved.groups)
    if loader is not None:
        loader.load_state_dict(saved.data or {})
    for key, (shard, piece) in _model(stage).items():
        with torch.no_grad():
            piece.copy_(saved.piece(key, shard, stage))
    if optimizer is not None:
        _load_optimizer(saved, stage, optimizer)
    if saved.random is not None:
        stage.seed(*saved.random)
    return saved.step


def latest(folder: str | Path) -> Path:
    """The directory of the newest committed checkpoint in a folder; LoadError if there is none."""
    path = Path(folder)
    if (path / MANIFEST).is_file():
        return path
    steps = [p for p in path.glob("step-*") if STEP.match(p.name) and (p / MANIFEST).is_file()]
    if not steps:
        _refuse(path, "there is no committed step in it", "Name the folder that was saved to.")
    return max(steps, key=lambda p: int(p.name.removeprefix("step-")))


@dataclass(frozen=True)
class Saved:
    """The manifest of a checkpoint; shards are read from the ranks' files when asked for."""

    path: Path
    step: int
    mesh: Mesh
    shards: Mapping[str, Shard]
    stages: Mapping[str, int]  # by tensor the pipeline rank whose files have it
    digests: tuple[str, ...]  # by rank
    groups: tuple[dict[str, Any], ...]
    files: dict[int, TensorFile]
    random: tuple[int, int] | None = None  # the seed of random numbers, and the steps since
    data: dict[str, Any] | None = None  # the state of a loader

    @classmethod
    def read(cls, path: Path) -> Saved:
        """Check and read ``checkpoint.json``."""
        try:
            fields = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            if fields["schema"] != SCHEMA:
                _refuse(path, f"it has schema {fields['schema']!r}", f"This partc reads {SCHEMA}.")
            mesh = Mesh(tuple((name, size) for name, size in fields["mesh"]))
            tensors = fields["tensors"]
            shards = {key: _shard(key, *entry[:3]) for key, entry in tensors.items()}
            stages = {key: int(entry[3]) for key, entry in tensors.items() if entry[3:]}
            digests, groups = tuple(fields["files"]), tuple(fields["optimizer"])
            if len(digests) != mesh.num_ranks:
                _refuse(path, "it does not name a file for each rank", "Restore it.")
            step, drawn = int(fields["step"]), fields.get("random")
            random = None if drawn is None else (int(drawn["seed"]), int(drawn["step"]))
            data = fields.get("data")
            return cls(path, step, mesh, shards, stages, digests, groups, {}, random, data)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _refuse(path, repr(error), "Restore the folder, or load an older step.")

    def verify(self, device: torch.device) -> None:
        """Check the digests of all files, some on each rank; all ranks raise if one is damaged."""
        num = len(self.digests)
        bad = torch.zeros(num, dtype=torch.int32, device=device)
        for rank in range(dist.get_rank(), num, dist.get_world_size()):
            file = self.path / _file_name(rank)
            whole = file.is_file() and not file.is_symlink()
            bad[rank] = not whole or _sha256(file) != self.digests[rank]
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad.any():
            file = self.path / _file_name(int(bad.argmax()))
            _refuse(file, "it is missing or damaged", "Restore it, or load an older step.")

    def piece(self, key: str, wanted: Shard, stage: Stage) -> Tensor:
        """This rank's shard of one tensor, whatever mesh the tensor was saved under."""
        shard = self.shards[key]
        if self.mesh == stage.mesh and shard.cuts == wanted.cuts:
            axes = [axis for axis, _, _ in shard.cuts]
            return self._read(key, {axis: stage.coords[axis] for axis in axes})
        return wanted.take(self._join(key, shard, 0, {}), stage.mesh, stage.coords)

    def _join(self, key: str, shard: Shard, num_cuts: int, at: dict[str, int]) -> Tensor:
        """Join a tensor's saved shards; ``at`` fixes coordinates of its first ``num_cuts`` axes."""
        if num_cuts == len(shard.cuts):
            return self._read(key, at)
        axis, dim, outer = shard.cuts[num_cuts]
        indices = range(self.mesh.size(axis))
        parts = [self._join(key, shard, num_cuts + 1, {**at, axis: i}) for i in indices]
        return join_pieces(parts, cut(dim, outer), outer)

    def _read(self, key: str, at: Mapping[str, int]) -> Tensor:
        """Read a shard from the file of the first rank that holds it."""
        start = {**dict.fromkeys(self.mesh.names, 0), PP: self.stages.get(key, 0)}
        rank = self.mesh.rank({**start, **at})
        if rank not in self.files:
            self.files[rank] = TensorFile(self.path / _file_name(rank))
        return self.files[rank][key]


# what is saved -------------------------------------------------------------------------------
def _model(stage: Stage) -> dict[str, tuple[Shard, Tensor]]:
    return {f"model/{name}": held for name, held in stage.pieces().items()}


def _optimizer(stage: Stage, optimizer: Optimizer | None) -> dict[str, tuple[Shard, Tensor]]:
    """The optimizer's tensors; one of its parameter's shape is sharded as the parameter is."""
    if optimizer is None:
        return {}
    found, states = {}, stage.states_of(optimizer)
    for name, param in _trained(stage, optimizer).items():
        for field, value in sorted(optimizer.state[param].items()):
            if not isinstance(value, Tensor):
                _refuse_field(field, value)
            found[f"optimizer/{field}/{name}"] = states.to_piece(name, value)
    return found


def _groups(stage: Stage, optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Hyperparameters that JSON can say, and the names of each group's parameters."""
    names = {param: name for name, param in _trained(stage, optimizer).items()}
    groups = []
    for group in optimizer.param_groups if optimizer is not None else []:
        plain = {k: v for k, v in group.items() if isinstance(v, PLAIN)}
        plain[CLASS] = type(optimizer).__name__
        groups.append({**plain, "params": [names[p] for p in group["params"] if p in names]})
    return groups


def _contents(
    stage: Stage, held: Mapping[str, tuple[Shard, Tensor]], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """The manifest's entries for tensors and optimizer groups, of all pipeline ranks together."""
    mine = {
        "tensors": {
            key: _entry(shard, stage)
            for key, (shard, _) in held.items()
            if stage.is_first_stage(shard)
        },
        "optimizer": groups,
    }
    if stage.pipeline is None:
        return mine
    texts = exchange_texts(json.dumps(mine), stage.pipeline, stage.device)
    told = [json.loads(text) for text in texts]
    joined = []
    for same in zip(*(each["optimizer"] for each in told), strict=True):
        names = dict.fromkeys(name for group in same for name in group["params"])
        joined.append({**same[0], "params": list(names)})
    tensors = {key: entry for each in told for key, entry in each["tensors"].items()}
    return {"tensors": tensors, "optimizer": joined}


def _entry(shard: Shard, stage: Stage) -> list[Any]:
    """Shape, dtype, cuts and, in a pipeline, the pipeline rank whose files hold the tensor."""
    entry = [list(shard.shape), dtype_name(shard.dtype), [list(c) for c in shard.cuts]]
    return entry if stage.pipeline is None else [*entry, stage.coords[PP]]


def _check_model(saved: Saved, stage: Stage) -> None:
    """LoadError if the checkpoint lacks a tensor of the model or has it in another shape.

    Tensors of other ranks are checked too, so that all ranks raise if one does.
    """
    wanted = {f"model/{name}": shard.shape for name, shard in stage.shards.items()}
    missing = sorted(set(wanted) - set(saved.shards))
    if missing:
        _refuse(saved.path, f"it lacks {', '.join(missing[:5])}", "Load one of this model.")
    for key, shape in wanted.items():
        if saved.shards[key].shape != shape:
            sizes = f"{key} is {list(saved.shards[key].shape)}, not {list(shape)}"
            _refuse(saved.path, sizes, "Load a checkpoint of this model.")


def _load_optimizer(saved: Saved, stage: Stage, optimizer: Optimizer) -> None:
    """Set the optimizer's state and hyperparameters from a checkpoint, by parameter name."""
    states = stage.states_of(optimizer)
    fields = sorted({key.split("/")[1] for key in saved.shards if key.startswith("optimizer/")})
    for name, param in _trained(stage, optimizer).items():
        for field in fields:
            key = f"optimizer/{field}/{name}"
            if key in saved.shards:
                wanted = states.wanted(name, saved.shards[key])
                piece = saved.piece(key, wanted, stage).clone()
                optimizer.state[param][field] = states.from_piece(field, name, wanted, piece)
    for group, plain in zip(optimizer.param_groups, saved.groups, strict=True):
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
        group.update({k: v for k, v in values.items() if k not in ("params", CLASS)})


def _trained(stage: Stage, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """The parameters that an optimizer has, by name."""
    if optimizer is None:
        return {}
    check_of_stage(optimizer, stage.parameters())
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in stage.named_parameters() if id(p) in theirs}


# files ---------------------------------------------------------------------------------------
def _manifest(stage: Stage, contents: Mapping[str, Any], digests: list[str], step: int) -> str:
    seed, taken = stage.seeded
    fields = {
        "schema": SCHEMA, "step": step, "mesh": [list(axis) for axis in stage.mesh.axes],
        "random": {"seed": seed, "step": taken},
        "tensors": dict(sorted(contents["tensors"].items())), "files": digests,
        "optimizer": contents["optimizer"], "data": contents["data"],
    }  # fmt: skip
    return json.dumps(fields, indent=1) + "\n"


def _shard(key: str, shape: Any, dtype: str, cuts: Any) -> Shard:
    sizes = tuple(int(size) for size in shape)
    return Shard(
        "", key, sizes, dtype_of(dtype), tuple((str(a), int(d), int(o)) for a, d, o in cuts)
    )


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _first_rank_makes(partial: Path, target: Path, device: torch.device) -> None:
    """Rank 0 makes the directory to write in; if the step is there already, all ranks refuse."""
    taken = torch.tensor(0, device=device)
    if dist.get_rank() == 0:
        taken.fill_(target.exists())
        if not target.exists():
            partial.mkdir(parents=True, exist_ok=True)
            for left in partial.iterdir():  # of a save that was cut off
                left.unlink()
    dist.broadcast(taken, src=0)
    if taken.item():
        raise RunError(
            where=str(target),
            what="this step was saved before",
            why="a checkpoint is never overwritten",
            do="Save under another step number, or move it away.",
        )


def _gather_digests(digest: bytes, device: torch.device) -> list[str]:
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [bytes(each.tolist()).hex() for each in found]


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Make a file or directory durable before what depends on it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refuse(path: Path, why: str, do: str) -> NoReturn:
    raise LoadError(where=str(path), what="cannot be loaded", why=why, do=do) from None


def _refuse_field(field: str, value: Any) -> NoReturn:
    raise RunError(
        where=f"optimizer state {field!r}",
        what=f"is a {type(value).__name__}, not a tensor",
        why="checkpoints hold tensors only, never pickled objects",
        do="Save this optimizer's state yourself.",
    )
