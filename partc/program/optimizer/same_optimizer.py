"""Is an optimizer the one whose states a checkpoint has?"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partc.errors import LoadError

CLASS = "optimizer"  # of a saved group: the name of the optimizer's class
PLAIN = (bool, int, float, str, tuple)  # hyperparameters that are saved
SCHEDULED = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
# How an optimizer computes its step, not what: a training that began on GPUs goes on on CPUs.
HOW = {"capturable", "differentiable", "foreach", "fused"}
Optimizer = torch.optim.Optimizer


def check_same_optimizer(
    path: Path, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]
) -> None:
    """LoadError if the groups of a checkpoint are not those of this optimizer.

    Optimizers of two classes are taken for the same if they have the same hyperparameters (Adam and
    AdamW). A checkpoint that names no class is refused where either side has one of its own.
    """
    mine = type(optimizer).__name__
    if len(groups) != len(optimizer.param_groups):
        num = len(optimizer.param_groups)
        has = f"it has {len(groups)} groups of parameters, the {mine} has {num}"
        raise _other(path, has if groups else "it was saved without an optimizer")
    wanted = {name for name, value in optimizer.defaults.items() if isinstance(value, PLAIN)}
    saved = {name for group in groups for name in group} - {CLASS, "params"}
    known = {name for group in optimizer.param_groups for name in group}
    missing, left = sorted(wanted - saved), sorted(saved - known - SCHEDULED)
    theirs = {str(group[CLASS]) for group in groups if CLASS in group}
    differ = bool(missing or left) if theirs else bool(missing and left)
    if groups and (left if mine in theirs else differ):
        their = " and ".join(sorted(theirs)) or "another optimizer"
        names = ", ".join((left or missing)[:3])
        has = f"it has the states of {their}, not of {mine} ({names})"
        raise _other(path, has if mine not in theirs else f"this {mine} does not know {names}")
    for number, (group, values) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for name in values.keys() & group.keys() - {CLASS, "params"}:
            if not _fits(values[name], group[name]):
                said = f"{name} of group {number} is {values[name]!r}, here it is {group[name]!r}"
                raise _other(path, said)
        if why := impossible_values(optimizer, values):
            raise _other(path, f"group {number} has what {mine} refuses: {why}")


def check_state_names(
    path: Path, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, Sequence[int]],
) -> None:  # fmt: skip
    """LoadError where a parameter lacks a state that the hyperparameters of its group ask for.

    ``sizes``: the shapes of a checkpoint's tensors, by key (``optimizer/exp_avg/head.weight``).
    """
    fields: dict[str, set[str]] = defaultdict(set)
    for kind, field, name in (key.split("/", 2) for key in sizes if key.count("/") > 1):
        if kind == "optimizer":
            fields[name].add(field)
    for group in groups:
        dims = ((name, len(sizes.get(f"model/{name}", ()))) for name in group["params"])
        states = ((name, num, fields.get(name, ())) for name, num in dims)
        if why := lacking_states(optimizer, group, states):
            raise _other(path, why)


def check_same_groups(
    path: Path, names: Sequence[Sequence[str]], groups: Sequence[Mapping[str, Any]]
) -> None:
    """LoadError if a parameter is in another group than it was when the checkpoint was saved.

    ``names``: of this rank's parameters, by group.
    """
    for number, (mine, group) in enumerate(zip(names, groups, strict=True)):
        odd = next((name for name in mine if name not in {*group["params"]}), None)
        if odd is not None:
            raise _other(path, f"{odd} is in group {number} here, and was not when it was saved")


def plain_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group that JSON can say; a tensor ``f32[]`` as its number."""
    numbers = {
        name: value.item()
        for name, value in group.items()
        if isinstance(value, Tensor) and not value.shape
    }
    return {**{n: v for n, v in group.items() if isinstance(v, PLAIN)}, **numbers}


def take_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a group the hyperparameters of a checkpoint; one that is a tensor stays one."""
    for name, value in values.items():
        if name in (CLASS, "params") or (name in HOW and name in group):
            continue
        if isinstance(group.get(name), Tensor):
            group[name].fill_(value)
        else:
            group[name] = tuple(value) if isinstance(value, list) else value


def impossible_values(optimizer: Optimizer, values: Mapping[str, Any]) -> str:
    """Why an optimizer's class would not be made with these hyperparameters; "" if it would, or if
    it takes more than them.
    """
    try:
        type(optimizer)([torch.zeros(1, requires_grad=True)], **_arguments(optimizer, values))
    except ValueError as error:  # as torch says of a beta of 1, by which a step would divide
        return str(error)
    except Exception:  # an optimizer of the user's own may take anything
        return ""
    return ""


def lacking_states(
    optimizer: Optimizer,
    values: Mapping[str, Any],
    states: Iterable[tuple[str, int, Iterable[str]]],
) -> str:
    """Which state of a parameter an optimizer with these hyperparameters would read in vain, as
    Adam with ``amsgrad`` its ``max_exp_avg_sq``; "" if none.

    ``states``: parameters by name, with their number of dims and the names of their states.
    """
    made: dict[int, frozenset[str]] = {}
    for name, dims, found in states:
        has = {*found}
        if has and dims not in made:
            made[dims] = _made_states(optimizer, values, dims)
        if has and (lack := sorted(made[dims] - has)):
            return f"{name} has no {lack[0]}, which its hyperparameters ask for"
    return ""


def _made_states(optimizer: Optimizer, values: Mapping[str, Any], dims: int) -> frozenset[str]:
    """The names of the states that a first step makes of a tensor of so many dims; none where that
    cannot be tried.
    """
    param = torch.ones((1,) * dims, requires_grad=True)
    param.grad = torch.ones_like(param)
    try:
        twin = type(optimizer)([param], **_arguments(optimizer, values))
        with torch.random.fork_rng(devices=[]):
            type(optimizer).step(twin)
    except Exception:  # as one that needs a closure, or other tensors
        return frozenset()
    return frozenset(map(str, twin.state[param]))


def _arguments(optimizer: Optimizer, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a class is made with for these hyperparameters."""
    known = inspect.signature(type(optimizer).__init__).parameters
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name in known and name not in {*HOW, "params"}
    }


def _fits(value: Any, here: Any) -> bool:
    """Whether a saved hyperparameter can stand where `here` stands."""
    if here is None:
        return True
    if isinstance(here, (tuple, list)):
        pairs = isinstance(value, list) and len(value) == len(here)
        return pairs and all(map(_fits, value, here))
    if isinstance(here, (bool, str)):
        return type(value) is type(here)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _other(path: Path, what: str) -> LoadError:
    return LoadError(
        where=str(path),
        what="cannot be loaded into this optimizer",
        why=what,
        do="Load with the optimizer that was saved, in the same groups, or leave it out: "
        "load_checkpoint(folder, stage) reads the model alone.",
    )
