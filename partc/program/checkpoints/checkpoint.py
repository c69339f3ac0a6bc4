"""Save and load checkpoints: safetensors files with digests, committed as a whole, no pickle.

``folder/step-00000010/`` holds one or two safetensors files per rank, with every shard of which the
rank has the first copy, and ``checkpoint.json``, which says how each tensor is sharded. The folder
is written under another name and renamed when all ranks are done. A checkpoint is never
overwritten, and loads under any other mesh or plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partc.data.loader import Loader
from partc.data.sampler import RowSampler
from partc.errors import LoadError, RunError
from partc.plan.local_steps import is_outer
from partc.plan.wires import is_residual
from partc.program.checkpoints.checkpoint_call import check_arguments, folder_of_run, stage_of
from partc.program.checkpoints.generators import load_generators, saved_generators
from partc.program.checkpoints.one_folder import of_one_folder
from partc.program.checkpoints.residuals import MET, check_same_sums
from partc.program.checkpoints.run_folder import committed, step_folder
from partc.program.checkpoints.saved_checkpoint import MANIFEST, Saved, refuse
from partc.program.checkpoints.saved_position import go_to_position, islands_go_on
from partc.program.checkpoints.script_states import check_states, load_states, states_of
from partc.program.checkpoints.snapshot import (
    check_savable,
    class_of,
    model_pieces,
    names_of_groups,
    snapshot_of,
    trained,
)
from partc.program.checkpoints.writing import Writer
from partc.program.folders import if_of_torch, if_program, if_weights
from partc.program.optimizer.same_optimizer import (
    check_same_groups,
    check_same_optimizer,
    check_state_names,
    take_values,
)
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.ranks.together import Together
from partc.program.role import Shard
from partc.program.stage.runtime import Stage
from partc.wrong_calls import as_path, known_arguments

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
    states: Mapping[str, Any] | None = None,
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
        states: of learning rate schedulers and alike, by names of yours: their ``state_dict()``.

    Returns:
        The new folder.

    Raises:
        RunError: a checkpoint of this step exists already; none is overwritten. Or the optimizer
            has parameters that are none of the stage's, ranks differ in the step or the optimizer,
            or a rank cannot write. It is raised on all ranks.
        UsageError: the step is no whole number from 0 on, or the folder is a file.
    """
    of = stage_of("save_checkpoint", stage)
    check_arguments("save_checkpoint", of, optimizer, loader)
    states = check_states("save_checkpoint", states)
    folder = as_path(folder, "save_checkpoint")
    of.writes.check()
    of.check_together("save_checkpoint")
    of.meet_owners()
    of.check_alike()
    ranks = Together("save_checkpoint", of.device, RunError)
    target, told = ranks.do(lambda: ready(folder, of, optimizer, step, states))
    Writer(folder).write(snapshot_of(of, optimizer, loader, step, told), target, ranks)
    return target


def ready(
    folder: Path, stage: Stage, optimizer: Optimizer | None, step: int, states: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """The directory of a step that is to be saved, and what the list says of ``states``; the errors
    that this rank can see by itself.
    """
    check_savable(stage, optimizer)
    folder = folder_of_run("save_checkpoint", folder)  # here, as ranks may see different disks
    return step_folder(folder, step), states_of(states)


@known_arguments
@of_other_ranks("load_checkpoint")
def load_checkpoint(
    folder: str | Path,
    stage: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    loader: Loader | RowSampler | None = None,
    states: Mapping[str, Any] | None = None,
) -> int:
    """Read a checkpoint into a stage and its optimizer; all ranks call this together.

    Args:
        folder: the folder of all checkpoints, of which the newest is taken, or that of one.
        stage: what ``Program.module()`` gave, of any mesh and plan for the same model.
        optimizer: takes the states that were saved; None reads the model alone.
        loader: goes on behind the batch that the checkpoint's had taken last.
        states: schedulers and alike, which take the states that were saved under their names.

    Returns:
        The number of the step.

    Raises:
        LoadError: there is no checkpoint, a file is damaged, it is of another model, other data or
            another optimizer, or ranks find different steps. It is raised on all ranks, before
            anything is loaded.
    """
    of = stage_of("load_checkpoint", stage)
    check_arguments("load_checkpoint", of, optimizer, loader)
    states = check_states("load_checkpoint", states)
    return read_step(as_path(folder, "load_checkpoint"), of, optimizer, loader, states)


def read_step(
    folder: Path, of: Stage, optimizer: Optimizer | None, loader: Loader | RowSampler | None,
    states: Mapping[str, Any], *, resumes: bool = False, stays: bool = False,
) -> int:  # fmt: skip
    """As ``load_checkpoint``, of arguments that were checked.

    ``resumes``: this process takes the place of the one that has saved, so that its generators
    too go on. ``stays``: the place in the data does not go back, on purpose.
    """
    of.writes.forget()
    of.check_together("load_checkpoint")
    ranks = Together("load_checkpoint", of.device, LoadError)
    with of_one_folder(ranks, folder):
        saved = ranks.do(lambda: _accepted(folder, of, optimizer))
        ranks.check_alike({"step": saved.step, "content of a step": saved.digest})
    given = {
        "optimizer": class_of(optimizer), "loader": loader is not None, "states": sorted(states),
    }  # fmt: skip
    ranks.check_alike(given)
    drawn = saved_generators(saved, of) if resumes else {}
    ranks.do(lambda: saved.verify({**_wanted(saved, of, optimizer), **drawn}, of))
    ranks.do(lambda: load_states(saved, states))
    ranks.do(lambda: go_to_position(saved, loader, stays=stays))
    for key, (shard, piece) in model_pieces(of).items():
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
    if resumes:
        load_generators(saved, of)
    return saved.step


def latest(folder: str | Path) -> Path:
    """The directory of the newest committed checkpoint in a folder; LoadError if there is none."""
    path = Path(folder)
    if (path / MANIFEST).is_file():
        return path
    steps = committed(path)
    if not steps:
        why, do = "there is no committed step in it", "Name the folder that was saved to."
        if not path.exists():
            why, do = "there is no such folder", "Name the folder that was saved to."
            if str(path).startswith("~"):
                do = f"Write {path.expanduser()}: a shell reads ~, and Python does not."
        if path.is_file():
            why = "it is a file, and a checkpoint is the folder that save_checkpoint makes"
            do = "Name that folder; weights alone go through stage.load_full(torch.load(path))."
        do = if_program(path) or if_of_torch(path) or if_weights(path) or do
        if cut_off := [each.name for each in path.glob("step-*")]:
            why += f": {cut_off[0]} has no {MANIFEST}"
            do = "Copy the checkpoint with all of its files, or name another."
        refuse(path, why, do)
    return steps[-1]


def _accepted(folder: str | Path, stage: Stage, optimizer: Optimizer | None) -> Saved:
    """The newest step as this rank sees it; LoadError if it is none of this model or optimizer."""
    saved = Saved.read(latest(folder))
    _check_model(saved, stage)
    check_same_sums(saved.path, saved.sums, stage.sums)
    if optimizer is not None:
        check_same_optimizer(saved.path, optimizer, saved.groups)
        check_same_groups(saved.path, names_of_groups(stage, optimizer), saved.groups)
        sizes = {key: shard.shape for key, shard in saved.shards.items()}
        check_state_names(saved.path, optimizer, saved.groups, sizes)
    return saved


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
    for name, param in trained(stage, optimizer).items():
        optimizer.state.pop(param, None)  # moments of other steps, where the checkpoint has none
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
    wanted = {key: shard for key, (shard, _) in model_pieces(stage).items()}
    if optimizer is None:
        return wanted
    names, states = trained(stage, optimizer), stage.states_of(optimizer)
    for key, shard in saved.shards.items():
        kind, _, rest = key.partition("/")
        name = rest.partition("/")[2]
        if kind == "optimizer" and name in names:
            wanted[key] = states.wanted(name, shard)
    return wanted
