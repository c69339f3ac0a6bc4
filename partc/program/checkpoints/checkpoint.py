"""Save and load checkpoints: safetensors files with digests, committed as a whole, no pickle.

``folder/step-00000010/`` holds one safetensors file per rank, with every shard of which the rank
has the first copy, and ``checkpoint.json``, which says how each tensor is sharded. The folder is
written under another name and renamed when all ranks are done. A checkpoint is never overwritten,
and loads under any other mesh or plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.data.loader import Loader
from partc.data.sampler import RowSampler
from partc.errors import LoadError, RunError
from partc.plan.local_steps import is_outer
from partc.plan.mesh import PP
from partc.plan.sharding import dtype_name
from partc.plan.wires import is_residual
from partc.program.checkpoints.checkpoint_call import check_arguments, stage_of
from partc.program.checkpoints.checkpoint_folder import (
    first_rank_commits,
    first_rank_makes,
    flush,
    number_of_step,
)
from partc.program.checkpoints.residuals import MET, check_same_sums
from partc.program.checkpoints.saved_checkpoint import (
    CUTS,
    ISLANDS,
    MANIFEST,
    SCHEMA,
    SUMS,
    Saved,
    cuts_text,
    digest_of,
    file_name,
    refuse,
    sha256_of,
)
from partc.program.checkpoints.saved_position import go_to_position, islands_go_on
from partc.program.folders import if_of_torch, if_program
from partc.program.optimizer.optimizers import check_of_stage
from partc.program.optimizer.same_optimizer import (
    CLASS,
    check_same_groups,
    check_same_optimizer,
    plain_values,
    take_values,
)
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.ranks.together import Together
from partc.program.role import Shard
from partc.program.stage.runtime import Stage
from partc.program.tensorfile import write_tensors
from partc.program.tensors.holders import exchange_texts
from partc.wrong_calls import as_path, known_arguments

STEP = re.compile(r"step-(\d{8,})\Z", re.ASCII)
Optimizer = torch.optim.Optimizer


@known_arguments
@of_other_ranks("save_checkpoint")
def save_checkpoint(
    folder: str | Path,
    stage: nn.Module,
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
        stage: what ``Program.module()`` gave, or ``parallelize`` behind its first step.
        optimizer: the optimizer over ``stage.parameters()``; None writes the model alone.
        step: the number of the step, which names the checkpoint; left out, it is the only one.
        loader: its position in the data is saved too.

    Returns:
        The new folder.

    Raises:
        RunError: a checkpoint of this step exists already; none is overwritten. Or the optimizer
            has parameters that are none of the stage's, ranks differ in the step or the optimizer,
            or a rank cannot write. It is raised on all ranks.
        UsageError: the step is no whole number from 0 on.
    """
    of = stage_of("save_checkpoint", stage)
    check_arguments("save_checkpoint", of, optimizer, loader)
    folder = as_path(folder, "save_checkpoint")
    of.writes.check()
    of.check_together("save_checkpoint")
    of.meet_owners()
    of.check_alike()
    ranks = Together("save_checkpoint", of.device, RunError)
    target = ranks.do(lambda: _target(folder, of, optimizer, step))
    ranks.check_alike(_facts(of, optimizer, loader) | {"step": step})
    partial = target.with_name(f".{target.name}.partial")
    held = {**_model(of), **of.from_owners(_optimizer(of, optimizer))}
    ranks.do(lambda: first_rank_makes(partial, target))
    file = partial / file_name(dist.get_rank())
    digest = ranks.do(lambda: _write(file, held, of))
    digests = exchange_texts(digest, dist.group.WORLD, of.device)
    contents = _contents(of, held, _groups(of, optimizer))
    contents["data"] = None if loader is None else loader.state_dict()
    text = _manifest(of, contents, digests, step)
    ranks.do(lambda: first_rank_commits(partial, target, text))
    return target


@known_arguments
@of_other_ranks("load_checkpoint")
def load_checkpoint(
    folder: str | Path,
    stage: nn.Module,
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
        LoadError: there is no checkpoint, a file is damaged, it is of another model, other data or
            another optimizer, or ranks find different steps. It is raised on all ranks, before
            anything is loaded.
    """
    of = stage_of("load_checkpoint", stage)
    check_arguments("load_checkpoint", of, optimizer, loader)
    folder = as_path(folder, "load_checkpoint")
    of.writes.forget()
    of.check_together("load_checkpoint")
    ranks = Together("load_checkpoint", of.device, LoadError)
    saved = ranks.do(lambda: _accepted(folder, of, optimizer))
    given = {"optimizer": _class(optimizer), "loader": loader is not None}
    ranks.check_alike({"step": saved.step, "content of a step": saved.digest, **given})
    ranks.do(lambda: saved.verify(_wanted(saved, of, optimizer), of))
    ranks.do(lambda: go_to_position(saved, loader))
    for key, (shard, piece) in _model(of).items():
        with torch.no_grad():
            piece.copy_(saved.piece(key, shard, of))
    if optimizer is not None:
        _load_optimizer(saved, of, optimizer)
    loaded = [key.removeprefix("model/") for key in saved.shards]
    alike = islands_go_on(saved, of)
    of.go_on(
        saved.random, loaded if alike else [n for n in loaded if not is_outer(n)],
        saved.islands.get(MET, saved.random[1]) if alike else saved.random[1],
    )  # fmt: skip
    return saved.step


def latest(folder: str | Path) -> Path:
    """The directory of the newest committed checkpoint in a folder; LoadError if there is none."""
    path = Path(folder)
    if (path / MANIFEST).is_file():
        return path
    steps = [p for p in path.glob("step-*") if STEP.match(p.name) and (p / MANIFEST).is_file()]
    if not steps:
        why, do = "there is no committed step in it", "Name the folder that was saved to."
        if not path.exists():
            why, do = "there is no such folder", "Name the folder that was saved to."
            if str(path).startswith("~"):
                do = f"Write {path.expanduser()}: a shell reads ~, and Python does not."
        if path.is_file():
            why = "it is a file, and a checkpoint is the folder that save_checkpoint makes"
            do = "Name that folder; weights alone go through stage.load_full(torch.load(path))."
        do = if_program(path) or if_of_torch(path) or do
        if cut_off := [each.name for each in path.glob("step-*")]:
            why += f": {cut_off[0]} has no {MANIFEST}"
            do = "Copy the checkpoint with all of its files, or name another."
        refuse(path, why, do)
    return max(steps, key=lambda p: int(p.name.removeprefix("step-")))


def _accepted(folder: str | Path, stage: Stage, optimizer: Optimizer | None) -> Saved:
    """The newest step as this rank sees it; LoadError if it is none of this model or optimizer."""
    saved = Saved.read(latest(folder))
    _check_model(saved, stage)
    check_same_sums(saved.path, saved.sums, stage.sums)
    if optimizer is not None:
        check_same_optimizer(saved.path, optimizer, saved.groups)
        check_same_groups(saved.path, _names(stage, optimizer), saved.groups)
    return saved


def _facts(
    stage: Stage, optimizer: Optimizer | None, loader: Loader | RowSampler | None
) -> dict[str, Any]:
    """What ranks must have alike when they save, by name; the states of each pipeline rank."""
    states = {} if optimizer is None else {
        name: sorted(optimizer.state.get(param, {}))
        for name, param in _trained(stage, optimizer).items()
        if name not in stage.owners  # of these an island that owns others has none
    }  # fmt: skip
    groups = _groups(stage, optimizer)
    return {
        "optimizer": _class(optimizer),
        "hyperparameters": [{k: v for k, v in g.items() if k != "params"} for g in groups],
        f"parameters of the optimizer (pipeline rank {stage.coords.get(PP, 0)})": digest_of(
            {"groups": [group["params"] for group in groups]}
        ),
        f"states of the optimizer (pipeline rank {stage.coords.get(PP, 0)})": digest_of(states),
        "seed and count of steps": list(stage.seeded),
        "place of the loader": None if loader is None else loader.state_dict(),
    }


def _class(optimizer: Optimizer | None) -> str:
    return "no optimizer" if optimizer is None else type(optimizer).__name__


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
    if optimizer is None:
        return []
    pairs = zip(optimizer.param_groups, _names(stage, optimizer), strict=True)
    mine = type(optimizer).__name__
    return [{**plain_values(group), CLASS: mine, "params": names} for group, names in pairs]


def _names(stage: Stage, optimizer: Optimizer) -> list[list[str]]:
    """The names of each group's parameters that this rank has."""
    names = {param: name for name, param in _trained(stage, optimizer).items()}
    return [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]


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
    wanted = {f"model/{n}": s.shape for n, s in stage.shards.items() if not is_residual(n)}
    missing = sorted(set(wanted) - set(saved.shards))
    if missing:
        refuse(saved.path, f"it lacks {', '.join(missing[:5])}", "Load one of this model.")
    for key, shape in wanted.items():
        if saved.shards[key].shape != shape:
            sizes = f"{key} is {list(saved.shards[key].shape)}, not {list(shape)}"
            refuse(saved.path, sizes, "Load a checkpoint of this model.")


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
        take_values(group, plain)


def _wanted(saved: Saved, stage: Stage, optimizer: Optimizer | None) -> dict[str, Shard]:
    """How the tensors that this rank reads are cut for it, by key."""
    wanted = {key: shard for key, (shard, _) in _model(stage).items()}
    if optimizer is None:
        return wanted
    names, states = _trained(stage, optimizer), stage.states_of(optimizer)
    for key, shard in saved.shards.items():
        kind, _, rest = key.partition("/")
        name = rest.partition("/")[2]
        if kind == "optimizer" and name in names:
            wanted[key] = states.wanted(name, shard)
    return wanted


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
        **({SUMS: dict(stage.sums)} if stage.sums else {}),
        **({ISLANDS: stage.islands} if stage.islands else {}),
    }  # fmt: skip
    return json.dumps({**fields, "sha256": digest_of(fields)}, indent=1) + "\n"


def _target(folder: Path, stage: Stage, optimizer: Optimizer | None, step: int) -> Path:
    """The folder of a step; the errors that this rank can see by itself."""
    number = number_of_step(folder, step)
    _trained(stage, optimizer)
    return folder / f"step-{number:08d}"


def _write(file: Path, held: Mapping[str, tuple[Shard, Tensor]], stage: Stage) -> str:
    """Write the shards of which this rank has the first copy; the file's sha256."""
    mine = {key: pair for key, pair in held.items() if stage.is_first_copy(pair[0])}
    notes = {CUTS: cuts_text({key: shard for key, (shard, _) in mine.items()})}
    write_tensors(file, {key: piece for key, (_, piece) in mine.items()}, notes)
    flush(file)  # on disk before the rename that commits it
    return sha256_of(file)


def _refuse_field(field: str, value: Any) -> NoReturn:
    raise RunError(
        where=f"optimizer state {field!r}", what=f"is a {type(value).__name__}, not a tensor",
        why="checkpoints hold tensors only, never pickled objects",
        do="Save this optimizer's state yourself.",
    )  # fmt: skip
