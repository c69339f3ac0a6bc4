"""``optimizer.load_state_dict(state)`` of one process's state, over a stage's parameters.

torch has no hook for loads of all optimizers, and would keep the whole states on every rank. So a
process with a stage has one, behind the hooks of the script: each state becomes what this rank's
optimizer has of it, before torch takes it. In a pipeline a rank's optimizer has the parameters of
its own stages, and takes theirs of the state dict.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partc.errors import RunError
from partc.program.optimizer.optimizer_states import OptimizerStates
from partc.program.optimizer.own_states import check_shape, in_own_layout, own_state
from partc.program.optimizer.state_form import check_state
from partc.program.optimizer.whole_states import (
    NAMES,
    check_shapes,
    groups_of,
    other_sizes,
    sizes_of,
)
from partc.program.tensors.elsewhere import drop_stand_ins, stand_in_of
from partc.program.tensors.own_writes import OWN_WRITES

Optimizer = torch.optim.Optimizer
StateDict = dict[str, Any]
_STAGES: WeakSet[Any] = WeakSet()
_served: list[Any] = []  # torch's own method, once it is replaced


class Place(NamedTuple):
    """Whose a parameter of an optimizer is: its name, and what its states are."""

    name: str
    states: OptimizerStates


def serve_loads(stage: Any) -> None:
    """From now on optimizers over a stage's parameters shard the states that they load."""
    _STAGES.add(stage)
    if not _served:
        _served.append(Optimizer.load_state_dict)
        Optimizer.load_state_dict = _sharding(Optimizer.load_state_dict)  # type: ignore[method-assign]


def _sharding(plain: Any) -> Any:
    @functools.wraps(plain)
    def load_state_dict(self: Optimizer, state_dict: StateDict) -> None:
        own = self.register_load_state_dict_pre_hook(_own_part)  # the last: it sees what they made
        try:
            plain(self, state_dict)
        finally:
            own.remove()

    return load_state_dict


def _own_part(optimizer: Optimizer, given: StateDict) -> StateDict:
    """What this rank's optimizer loads of a state dict; one over no stage loads what is given."""
    pipeline = _pipeline_of(optimizer)
    if pipeline is not None:
        drop_stand_ins(optimizer)
    places, params = _places(optimizer), _params(optimizer)
    if not places and pipeline is None:
        return given
    OWN_WRITES.load()
    check_state(given, f"{type(optimizer).__name__}.load_state_dict")
    if all(id(p) in places for p in params):
        given = _of_rank(optimizer, given, pipeline)
    keys = [key for group in given["param_groups"] for key in group["params"]]
    pairs = dict(zip(keys, params, strict=False))  # of other sizes torch refuses
    state = {
        key: _own_fields(optimizer, pairs[key], places[id(pairs[key])], fields)
        if key in pairs and id(pairs[key]) in places else fields
        for key, fields in given["state"].items()
    }  # fmt: skip
    return {**given, "state": state}


def _own_fields(
    optimizer: Optimizer, param: Tensor, place: Place, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """The states of one parameter as this rank's optimizer has them."""
    name, states = place
    own = {}
    for field, value in fields.items():
        check_shape(optimizer, field, states.tensors.shards[name], value)
        if not isinstance(value, DTensor):
            own[field] = own_state(states, optimizer, field, name, value)
        elif value.shape == param.shape:
            own[field] = in_own_layout(states, param, name, value)
        else:
            own[field] = value
    return own


# whose it is ---------------------------------------------------------------------------------
def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _places(optimizer: Optimizer) -> dict[int, Place]:
    """The places of an optimizer's parameters that are a stage's, by id."""
    mine, found = {id(param) for param in _params(optimizer)}, dict[int, Place]()
    for stage in _STAGES:
        states = stage.states_of(optimizer)
        named = ((id(param), name) for name, param in stage.named_parameters())
        found |= {i: Place(name, states) for i, name in named if i in mine}
    return found


def _pipeline_of(optimizer: Optimizer) -> Any:
    """The stage of a pipeline over which an optimizer is; None if there is none.

    A rank that trains no parameter of it knows it by stand-ins, or by having one such stage.
    """
    mine, mark = {id(param) for param in _params(optimizer)}, stand_in_of(optimizer)
    for stage in _pipelines():
        if any(id(p) in mine for p in stage.parameters()):
            return stage
        if mark is not None and mark.groups is stage.groups:
            return stage
    return None if mine or not _pipelines() else _only_pipeline(optimizer)


def _only_pipeline(optimizer: Optimizer) -> Any:
    """The one stage of a pipeline that there is; RunError if there are several."""
    gc.collect()  # those that nobody has any more, which lie in cycles
    stages = _pipelines()
    if len(stages) < 2:
        return stages[0] if stages else None
    raise RunError(
        where=f"{type(optimizer).__name__}.load_state_dict",
        what=f"it has no parameter on this rank, which has {len(stages)} stages of pipelines",
        why="nothing says with the optimizer of which other ranks it loads",
        do="Call stage.load_full_optim_state_dict(optimizer, state) on all ranks.",
    )


def _pipelines() -> list[Any]:
    return [stage for stage in _STAGES if stage.pipeline is not None]


# of a pipeline -------------------------------------------------------------------------------
def _of_rank(optimizer: Optimizer, given: StateDict, pipeline: Any) -> StateDict:
    """The part of a state dict that is this rank's; of its own state dict all of it.

    All ranks of a pipeline call this together. LoadError for a state dict with other groups.
    """
    sizes, own = sizes_of(given["param_groups"]), sizes_of(optimizer.param_groups)
    if pipeline is None and sizes != own:
        raise other_sizes(sizes, own)
    if pipeline is None:
        return given
    states, params = pipeline.states_of(optimizer), dict(pipeline.named_parameters())
    names = groups_of(states, optimizer, params)
    if sizes == [len(group) for group in names]:
        check_shapes(states, optimizer, names, given)
        return _selected(optimizer, given, names, params)
    if sizes != own:
        raise other_sizes(sizes, [len(group) for group in names])
    return given


def _selected(
    optimizer: Optimizer, given: StateDict, names: list[list[str]], params: Mapping[str, Tensor]
) -> StateDict:
    """The groups and states of this rank's parameters, of a state dict of all."""
    own_names, groups = {id(param): name for name, param in params.items()}, []
    for group, saved, every in zip(
        optimizer.param_groups, given["param_groups"], names, strict=True
    ):
        at = [every.index(own_names[id(param)]) for param in group["params"]]
        lists = {k: [saved[k][i] for i in at] for k in ("params", NAMES) if k in saved}
        groups.append({**saved, **lists})
    mine = {key for group in groups for key in group["params"]}
    states = {key: fields for key, fields in given["state"].items() if key in mine}
    return {**given, "state": states, "param_groups": groups}
