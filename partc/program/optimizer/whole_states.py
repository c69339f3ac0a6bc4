"""An optimizer's states as those of the single-device model: whole tensors, torch's plain form.

``{"state": {0: {"exp_avg": f32[24,12], ...}}, "param_groups": [{"lr": ..., "params": [0, 1]}]}``:
a parameter's number is its place in the optimizer's groups, as torch counts. In a pipeline, where a
rank has the parameters of its own stages, it is the place that the model's order gives it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from partc.errors import LoadError, RunError
from partc.plan.sharding import dtype_name
from partc.program.optimizer.optimizer_states import OptimizerStates
from partc.program.optimizer.optimizers import check_is_optimizer, check_of_stage
from partc.program.optimizer.own_states import check_shape, own_state
from partc.program.optimizer.same_optimizer import (
    SCHEDULED,
    impossible_values,
    lacking_states,
)
from partc.program.optimizer.served_states import exchanged
from partc.program.optimizer.state_form import check_state
from partc.program.ranks.other_ranks import of_other_ranks
from partc.program.role import Shard, dtype_of
from partc.program.tensors.holders import exchange_texts, from_first
from partc.program.tensors.rank_tensors import RankTensors
from partc.wrong_calls import known_arguments

Optimizer = torch.optim.Optimizer
StateDict = dict[str, Any]
NAMES = "param_names"  # which torch keeps in groups of named parameters


class WholeStates(nn.Module):
    """What a Stage does with whole states of optimizers."""

    states_of: Callable[[Optimizer], OptimizerStates]

    @known_arguments
    @of_other_ranks("full_optim_state_dict")
    def full_optim_state_dict(self, optimizer: Optimizer) -> StateDict:
        """The state dict of an optimizer over the single-device model, with whole tensors.

        On the CPU, on every rank; all ranks call this together. ``torch.save`` it on one rank: it
        loads into an optimizer over the model that was compiled, and by
        ``load_full_optim_state_dict`` under any mesh. RunError for states that are no tensors or
        plain values.
        """
        check_is_optimizer(optimizer)
        params = dict(self.named_parameters())
        return whole_states(self.states_of(optimizer), optimizer, params)

    @known_arguments
    @of_other_ranks("load_full_optim_state_dict")
    def load_full_optim_state_dict(self, optimizer: Optimizer, state_dict: StateDict) -> None:
        """Take this rank's pieces of the states of an optimizer over the single-device model.

        Args:
            optimizer: one over ``stage.parameters()``, in the groups of the one that was saved.
            state_dict: what ``full_optim_state_dict`` gave, or the ``state_dict()`` of an
                optimizer over the model.

        Raises:
            LoadError: it has other groups, other numbers of parameters or other shapes.
        """
        check_is_optimizer(optimizer)
        check_state(state_dict, "load_full_optim_state_dict")
        params = dict(self.named_parameters())
        load_whole_states(self.states_of(optimizer), optimizer, params, state_dict)


def whole_states(
    states: OptimizerStates, optimizer: Optimizer, params: Mapping[str, Tensor]
) -> StateDict:
    """The whole state dict on every rank, on the CPU; ``params`` are the stage's by name.

    All ranks call this together.
    """
    check_of_stage(optimizer, params.values())
    groups = groups_of(states, optimizer, params)
    numbers = {name: i for i, name in enumerate(n for group in groups for n in group)}
    found: dict[int, dict[str, Any]] = {}
    for name, field, value in _values(states, optimizer, params, list(numbers)):
        found.setdefault(numbers[name], {})[field] = value
    saved = []
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        plain = {k: v for k, v in group.items() if k not in ("params", NAMES)}
        named = {NAMES: names} if NAMES in group else {}
        saved.append({**plain, **named, "params": [numbers[name] for name in names]})
    return {"state": dict(sorted(found.items())), "param_groups": saved}


def load_whole_states(
    states: OptimizerStates, optimizer: Optimizer, params: Mapping[str, Tensor], given: StateDict
) -> None:
    """Set an optimizer's states and hyperparameters from whole ones; all ranks call together."""
    check_of_stage(optimizer, params.values())
    groups = groups_of(states, optimizer, params)
    _check_groups(groups, given["param_groups"])
    _check_hyperparameters(optimizer, given["param_groups"])
    check_shapes(states, optimizer, groups, given)
    _check_states(states, optimizer, groups, given)
    for names, group, saved in zip(
        groups, optimizer.param_groups, given["param_groups"], strict=True
    ):
        for name, number in zip(names, saved["params"], strict=True):
            fields = given["state"].get(number, {})
            if name in params:
                optimizer.state[params[name]] = {
                    field: own_state(states, optimizer, field, name, value)
                    for field, value in fields.items()
                }
        group.update({k: v for k, v in saved.items() if k not in ("params", NAMES)})


def _check_hyperparameters(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """LoadError if the states are another optimizer's: each side has what the other lacks."""
    mine = type(optimizer).__name__
    known = {name for group in optimizer.param_groups for name in group} | SCHEDULED
    theirs = {name for group in saved for name in group} - {"params", NAMES}
    left, missing = sorted(theirs - known), sorted(optimizer.defaults.keys() - theirs)
    if saved and left and missing:
        raise LoadError(
            where="load_full_optim_state_dict", what=f"the states are of another than {mine}",
            why=f"it knows no {', '.join(left[:3])}, and they have no {', '.join(missing[:3])}",
            do="Build the optimizer whose states were saved.",
        )  # fmt: skip
    for group in saved:
        if why := impossible_values(optimizer, group):
            raise LoadError(
                where="load_full_optim_state_dict", what=f"{mine} refuses what the states have",
                why=why, do="Correct the hyperparameters of param_groups, or leave them out.",
            )  # fmt: skip


# names ---------------------------------------------------------------------------------------
def groups_of(
    states: OptimizerStates, optimizer: Optimizer, params: Mapping[str, Tensor]
) -> list[list[str]]:
    """The names of the parameters in each group of the optimizer over the whole model."""
    names = {id(param): name for name, param in params.items()}
    mine = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    group, tensors = states.tensors.pipeline, states.tensors
    if group is None:
        return mine
    told = [json.loads(text) for text in exchange_texts(json.dumps(mine), group, tensors.device)]
    if len({len(each) for each in told}) > 1:
        raise RunError(
            where=type(optimizer).__name__,
            what=f"pipeline ranks have {', '.join(str(len(each)) for each in told)} groups",
            why="a group of the model's optimizer has parameters of all of them",
            do="Make every group on every rank, also where it is empty.",
        )
    order = {name: i for i, name in enumerate(tensors.model_names())}
    return [
        sorted({name for each in same for name in each}, key=order.__getitem__)
        for same in zip(*told, strict=True)
    ]


def _check_groups(groups: list[list[str]], saved: list[dict[str, Any]]) -> None:
    if sizes_of(saved) != [len(names) for names in groups]:
        raise other_sizes(sizes_of(saved), [len(names) for names in groups])
    for names, each in zip(groups, saved, strict=True):
        named = each.get(NAMES, names)
        for theirs_is, mine_is in zip(named, names, strict=True):
            if theirs_is == mine_is:
                continue
            raise LoadError(
                where="optimizer state",
                what=f"its groups name {theirs_is} where the optimizer has {mine_is}",
                why="a parameter's state is found by its place in the groups",
                do="Build the optimizer with its parameters in the same order.",
            )


def check_shapes(
    states: OptimizerStates, optimizer: Optimizer, groups: list[list[str]], given: StateDict
) -> None:
    """LoadError for a state of a wrong shape, on all ranks: also those without the parameter."""
    names = [name for group in groups for name in group]
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    for name, number in zip(names, numbers, strict=True):
        for field, value in given["state"].get(number, {}).items():
            check_shape(optimizer, field, states.tensors.all_shards[name], value)


def _check_states(
    states: OptimizerStates, optimizer: Optimizer, groups: list[list[str]], given: StateDict
) -> None:
    """LoadError where a parameter lacks a state that the hyperparameters of its group ask for."""
    for names, group in zip(groups, given["param_groups"], strict=True):
        shapes = [states.tensors.all_shards[name].shape for name in names]
        fields = [given["state"].get(number, {}) for number in group["params"]]
        each = zip(names, map(len, shapes), fields, strict=True)
        if why := lacking_states(optimizer, group, each):
            raise LoadError(
                where="load_full_optim_state_dict",
                what=f"{type(optimizer).__name__} could not step with these states", why=why,
                do="Correct the hyperparameters of param_groups, or pass the states that they had.",
            )  # fmt: skip


def sizes_of(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many parameters each group has."""
    return [len(group["params"]) for group in groups]


def other_sizes(given: list[int], wanted: list[int]) -> LoadError:
    """The refusal of a state dict with other groups than the optimizer."""
    return LoadError(
        where="optimizer state",
        what=f"it has groups of {given} parameters, the optimizer of {wanted}",
        why="a parameter's state is found by its place in the groups",
        do="Build the optimizer with the groups of the one that was saved.",
    )


# values --------------------------------------------------------------------------------------
def _values(
    states: OptimizerStates, optimizer: Optimizer, params: Mapping[str, Tensor], names: list[str]
) -> Iterator[tuple[str, str, Any]]:
    """Name, field and whole value of every state of every parameter of the model."""
    tensors = states.tensors
    mine = {name: optimizer.state.get(params[name], {}) for name in names if name in params}
    for name, fields in _all_fields(states, mine).items():
        for field, (told, first) in fields.items():
            value, shard = mine.get(name, {}).get(field), _shard(name, told)
            if shard is None:
                yield name, field, told
                continue
            joined = None
            if isinstance(value, Tensor) and tensors.coords.get("pp", first) == first:
                cut, piece = states.to_piece(name, value)
                joined = tensors.join(cut, piece.to(tensors.device))
            if name in tensors.owners:
                joined = tensors.from_island(tensors.owners[name], _or_empty(joined, shard, states))
            elif joined is not None:
                joined = tensors.mean_of_islands(joined)
            if tensors.pipeline is not None:
                joined = from_first(joined, shard, first, tensors.pipeline, tensors.device)
            assert joined is not None
            yield name, field, joined.detach().to("cpu", copy=True)


def _all_fields(
    states: OptimizerStates, mine: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, tuple[Any, int]]]:
    """What the states of all parameters are, by field, and the first pipeline rank that has them.

    A tensor is told as ``[shape, dtype]``, a plain value as it is.
    """
    tensors = states.tensors
    told = {
        name: {field: _told(field, name, value, states) for field, value in fields.items()}
        for name, fields in mine.items()
    }
    if tensors.owners:
        told = _of_owners(told, tensors)
    group = tensors.pipeline
    texts = [json.dumps(told)] if group is None else exchange_texts(
        json.dumps(told), group, tensors.device
    )  # fmt: skip
    found: dict[str, dict[str, tuple[Any, int]]] = {}
    for rank, text in enumerate(texts):
        for name, fields in json.loads(text).items():
            for field, each in fields.items():
                found.setdefault(name, {}).setdefault(field, (each, rank))
    return found


def _of_owners(
    told: Mapping[str, Mapping[str, Any]], tensors: RankTensors
) -> dict[str, dict[str, Any]]:
    """The same as the islands have it that own the parameters."""
    each = exchanged(told, tensors)
    return {n: each[tensors.owners.get(n, tensors.here)].get(n, {}) for n in told}


def _or_empty(joined: Tensor | None, shard: Shard, states: OptimizerStates) -> Tensor:
    """A tensor to receive into, on islands that have none of their own."""
    if joined is not None:
        return joined
    return torch.empty(shard.shape, dtype=shard.dtype, device=states.tensors.device)


def _told(field: str, name: str, value: Any, states: OptimizerStates) -> Any:
    if isinstance(value, Tensor):
        shape = states.whole_shape(name, value)
        return [list(shape), dtype_name(value.dtype)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    _refuse_field(field, value)


def _shard(name: str, told: Any) -> Shard | None:
    if not isinstance(told, list):
        return None
    shape, dtype = told
    return Shard("", name, tuple(shape), dtype_of(dtype), ())


def _refuse_field(field: str, value: Any) -> NoReturn:
    raise RunError(
        where=f"optimizer state {field!r}",
        what=f"is a {type(value).__name__}, neither a tensor nor a plain value",
        why="nothing says which part of it belongs to this rank",
        do="Save this optimizer's state yourself.",
    )
