"""What a rank adds to a checkpoint: its tensors, and what the list says of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from partc.data.loader import Loader
from partc.data.sampler import RowSampler
from partc.errors import RunError
from partc.plan.mesh import PP
from partc.plan.sharding import dtype_name
from partc.program.checkpoints.generators import generators
from partc.program.checkpoints.saved_checkpoint import ISLANDS, MODEL, STATES, SUMS, digest_of
from partc.program.optimizer.optimizers import check_of_stage
from partc.program.optimizer.same_optimizer import CLASS, plain_values
from partc.program.role import Shard
from partc.program.stage.runtime import Stage

Optimizer = torch.optim.Optimizer
Held = dict[str, tuple[Shard, Tensor]]


@dataclass(frozen=True)
class Snapshot:
    """A rank's part of a checkpoint.

    Attributes:
        step: its number.
        tensors: those of which the rank has the first copy, by key (`model/layers.0.w`).
        frozen: the keys of parameters that no step changes.
        steady: the keys of tensors that nothing but an optimizer changes.
        entries: what the list says of the tensors of this pipeline rank.
        groups: hyperparameters of the optimizer, with the names of this pipeline rank's parameters.
        listed: all else that the list says, the same on all ranks.
        facts: what ranks have to have alike.
        senders: the first rank of each pipeline rank, which tells `entries` and `groups`.
    """

    step: int
    tensors: Held
    frozen: frozenset[str]
    steady: frozenset[str]
    entries: dict[str, list[Any]]
    groups: list[dict[str, Any]]
    listed: dict[str, Any]
    facts: dict[str, Any]
    senders: list[int]

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(x.numel() * x.element_size() for _, x in self.tensors.values())


def snapshot_of(
    stage: Stage, optimizer: Optimizer | None, loader: Loader | RowSampler | None, step: int,
    states: dict[str, Any] | None = None,
) -> Snapshot:  # fmt: skip
    """What a rank has now; the tensors are the stage's own. All ranks call this together.

    ``states``: of schedulers and alike, as the list has them.
    """
    held = {**model_pieces(stage), **stage.from_owners(_states(stage, optimizer))}
    # after `stage.to(torch.bfloat16)` a piece has another dtype than was compiled
    held = {key: (replace(shard, dtype=x.dtype), x) for key, (shard, x) in held.items()}
    groups, mesh = _groups(stage, optimizer), stage.mesh
    data = None if loader is None else loader.state_dict()
    mine = {key: pair for key, pair in held.items() if stage.is_first_copy(pair[0])}
    first = {key: shard for key, (shard, _) in held.items() if stage.is_first_stage(shard)}
    drawn = generators(stage)
    mine, first = {**mine, **drawn}, {**first, **{key: shard for key, (shard, _) in drawn.items()}}
    return Snapshot(
        step, mine,
        frozenset(key for key in mine if _is_frozen(key, mine[key][1], stage)),
        frozenset(key for key in mine if _is_steady(key, mine[key][1], stage)),
        {key: _entry(shard, stage) for key, shard in first.items()}, groups,
        {**_listed(stage, step, data), **({STATES: states} if states else {})},
        {
            **_facts(stage, optimizer, groups, data), "step": step,
            "generators": sorted({key.split("/")[1] for key in drawn}),
            **{f"state of {name}": state for name, state in (states or {}).items()},
        },
        [mesh.first_rank(number) for number in range(mesh.pipeline_ranks)],
    )  # fmt: skip


def model_pieces(stage: Stage) -> Held:
    """This rank's pieces of parameters and buffers, by key."""
    return {f"model/{name}": held for name, held in stage.pieces().items()}


def trained(stage: Stage, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """The parameters that an optimizer has, by name."""
    if optimizer is None:
        return {}
    check_of_stage(optimizer, stage.parameters())
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in stage.named_parameters() if id(p) in theirs}


def check_savable(stage: Stage, optimizer: Optimizer | None) -> None:
    """RunError for an optimizer with other parameters than the stage's, or other states than
    tensors.
    """
    for param in trained(stage, optimizer).values():
        for field, value in optimizer.state.get(param, {}).items() if optimizer else ():
            if not isinstance(value, Tensor):
                _refuse_field(field, value)


def names_of_groups(stage: Stage, optimizer: Optimizer) -> list[list[str]]:
    """The names of each group's parameters that this rank has."""
    names = {param: name for name, param in trained(stage, optimizer).items()}
    return [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]


def class_of(optimizer: Optimizer | None) -> str:
    return "no optimizer" if optimizer is None else type(optimizer).__name__


def joined(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The entries and optimizer groups of all pipeline ranks, as the list has them."""
    groups = []
    for same in zip(*(each["optimizer"] for each in told), strict=True):
        names = dict.fromkeys(name for group in same for name in group["params"])
        groups.append({**same[0], "params": list(names)})
    tensors = {key: entry for each in told for key, entry in each["tensors"].items()}
    return {"tensors": dict(sorted(tensors.items())), "optimizer": groups}


# inside --------------------------------------------------------------------------------------
def _states(stage: Stage, optimizer: Optimizer | None) -> Held:
    """The optimizer's tensors; one of its parameter's shape is sharded as the parameter is."""
    if optimizer is None:
        return {}
    found, states = {}, stage.states_of(optimizer)
    for name, param in trained(stage, optimizer).items():
        for field, value in sorted(optimizer.state[param].items()):
            found[f"optimizer/{field}/{name}"] = states.to_piece(name, value)
    return found


def _groups(stage: Stage, optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Hyperparameters that JSON can say, and the names of each group's parameters."""
    if optimizer is None:
        return []
    pairs = zip(optimizer.param_groups, names_of_groups(stage, optimizer), strict=True)
    mine = type(optimizer).__name__
    return [{**plain_values(group), CLASS: mine, "params": names} for group, names in pairs]


def _is_frozen(key: str, tensor: Tensor, stage: Stage) -> bool:
    kind, _, name = key.partition("/")
    return kind == "model" and isinstance(tensor, nn.Parameter) and not stage.trains(name)


def _is_steady(key: str, tensor: Tensor, stage: Stage) -> bool:
    """Buffers are written by steps; so are parameters where islands meet or own some."""
    if stage.islands or stage.owners or stage.is_served:
        return False
    return not key.startswith("model/") or isinstance(tensor, nn.Parameter)


def _entry(shard: Shard, stage: Stage) -> list[Any]:
    """Shape, dtype, cuts and, in a pipeline, the pipeline rank whose files hold the tensor."""
    entry = [list(shard.shape), dtype_name(shard.dtype), [list(c) for c in shard.cuts]]
    return entry if stage.pipeline is None else [*entry, stage.coords[PP]]


def _listed(stage: Stage, step: int, data: Any) -> dict[str, Any]:
    seed, taken = stage.seeded
    return {
        "step": step, "mesh": [list(axis) for axis in stage.mesh.axes], "plan": stage._program.plan,
        "random": {"seed": seed, "step": taken}, "data": data,
        **({SUMS: dict(stage.sums)} if stage.sums else {}),
        **({ISLANDS: stage.islands} if stage.islands else {}),
        MODEL: _model(stage),
    }  # fmt: skip


def _model(stage: Stage) -> dict[str, Any]:
    """The names of the model's own state dict, and which of them are second ones of tied tensors.

    Constants of a step and buffers that a state dict leaves out are saved too, and not among them.
    """
    firsts = stage.saved_names()
    tied = {name: first for name, first in firsts.items() if name != first}
    return {"names": list(firsts), "tied": tied}


def _facts(
    stage: Stage, optimizer: Optimizer | None, groups: list[dict[str, Any]], data: Any
) -> dict[str, Any]:
    """What ranks must have alike when they save, by name; the states of each pipeline rank."""
    states = {} if optimizer is None else {
        name: sorted(optimizer.state.get(param, {}))
        for name, param in trained(stage, optimizer).items()
        if name not in stage.owners  # of these an island that owns others has none
    }  # fmt: skip
    where = f"(pipeline rank {stage.coords.get(PP, 0)})"
    return {
        "optimizer": class_of(optimizer),
        "hyperparameters": [{k: v for k, v in g.items() if k != "params"} for g in groups],
        f"parameters of the optimizer {where}": digest_of(
            {"groups": [group["params"] for group in groups]}
        ),
        f"states of the optimizer {where}": digest_of(states),
        "seed and count of steps": list(stage.seeded),
        "place of the loader": data,
    }


def _refuse_field(field: str, value: Any) -> NoReturn:
    raise RunError(
        where=f"optimizer state {field!r}", what=f"is a {type(value).__name__}, not a tensor",
        why="checkpoints hold tensors only, never pickled objects",
        do="Save this optimizer's state yourself.",
    )  # fmt: skip
