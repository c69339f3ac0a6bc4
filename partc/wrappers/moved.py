"""Optimizers that a script made over a model's parameters follow them into its stage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Mapping
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from partc.errors import RunError
from partc.program.stage.runtime import Stage


def optimizers_over(params: Collection[int]) -> list[Optimizer]:
    """The optimizers of this process that have one of these parameters, which are ids.

    torch keeps no list of optimizers, so that all objects are looked through, which takes some
    tenths of a second once.
    """
    every = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    return [each for each in every if any(id(p) in params for p in _params(each))]


def move(optimizer: Optimizer, stage: Stage, names: Mapping[int, str]) -> None:
    """Take a stage's parameters in the place of the model's, with their states.

    ``names``: those of the model's parameters, by their ids. Other parameters stay. A rank of a
    pipeline keeps those of its own stages.
    """
    if not {id(p) for p in _params(optimizer)} & {*names}:
        return  # one that shares its groups with another optimizer, which was moved
    state, shown = optimizer.state_dict(), dict(stage.named_parameters())
    if state["state"] and any(id(p) not in names for p in _params(optimizer)):
        raise _of_several(type(optimizer).__name__)
    for group in optimizer.param_groups:
        kept = [shown.get(names[id(p)]) if id(p) in names else p for p in group["params"]]
        group["params"][:] = [p for p in kept if p is not None]  # in place: LBFGS keeps the list
    optimizer.state.clear()
    with contextlib.suppress(RunError):  # not elementwise: it steps on DTensors
        stage.step_on_pieces(optimizer)
    if state["state"]:
        stage.load_full_optim_state_dict(optimizer, state | {"state": _whole(state["state"])})


def _whole(states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """States as of one process: those that a script has saved of a stage are this rank's pieces."""
    return {
        i: {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in state.items()}
        for i, state in states.items()
    }


def _params(optimizer: Optimizer) -> list[object]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _of_several(name: str) -> RunError:
    return RunError(
        where=f"the optimizer {name}",
        what="it has states already, and parameters that are not the model's",
        why="states move into the model's stage by the names of its parameters",
        do="Build one optimizer for each model, over model.parameters().",
    )
