"""This rank's part of a state that is given whole, or as a DTensor of another layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partc.errors import LoadError
from partc.program.optimizer.optimizer_states import OptimizerStates
from partc.program.role import Shard

Shape = tuple[int, ...]
Optimizer = torch.optim.Optimizer
MOMENTS = {  # states of torch's optimizers that have one number for each of the parameter's
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "grad_avg", "acc_delta", "prev", "sum", "variance",
}  # fmt: skip


def own_state(
    states: OptimizerStates, optimizer: Optimizer, field: str, name: str, value: Any
) -> Any:
    """A whole state of the parameter ``name`` as this rank's optimizer has it.

    A state of LBFGS, which is of all parameters together, stays as it is.
    """
    if not isinstance(value, Tensor) or isinstance(optimizer, torch.optim.LBFGS):
        return value
    tensors, shard = states.tensors, states.tensors.shards[name]
    check_shape(optimizer, field, shard, value)
    wanted = states.wanted(name, Shard("", name, tuple(value.shape), value.dtype, ()))
    piece = wanted.take(value.to(tensors.device), tensors.mesh, tensors.coords)
    return states.from_piece(field, name, wanted, piece.detach().clone())


def check_shape(optimizer: Optimizer, field: str, shard: Shard, value: Any) -> None:
    """LoadError for a state of a parameter that is of no shape that such a state has."""
    if not isinstance(value, Tensor) or isinstance(optimizer, torch.optim.LBFGS):
        return
    if not _may_be(optimizer, field, tuple(value.shape), shard.shape):
        raise _other_shape(f"{shard.name}, {field}", tuple(value.shape), shard.shape)


def in_own_layout(states: OptimizerStates, param: Tensor, name: str, value: DTensor) -> Tensor:
    """A DTensor of the parameter's shape as this rank's optimizer has it; no copy of what fits."""
    shard, tensors = states.tensors.shards[name], states.tensors
    if states.form == "whole":
        return value.full_tensor()
    if states.form == "dtensors" and _lie_alike(param, value):
        return value
    piece = tensors.piece(shard, value)
    return piece if states.form == "pieces" else tensors.layouts().parameter(shard, piece)


def _lie_alike(param: Tensor, value: DTensor) -> bool:
    """Whether a state is sharded as its parameter."""
    if not isinstance(param, DTensor):
        return False
    alike = param.placements == value.placements and param.device_mesh == value.device_mesh
    return alike and getattr(param, "parted", False) == getattr(value, "parted", False)


def _may_be(optimizer: Optimizer, field: str, shape: Shape, param: Shape) -> bool:
    """Whether a state may be that of a parameter: a moment of torch's optimizers has its shape."""
    bases = (each for each in type(optimizer).__mro__ if each is not Optimizer)
    is_torchs = any(each.__module__.startswith("torch.optim.") for each in bases)
    return shape == param if is_torchs and field in MOMENTS else _fits(shape, param)


def _fits(shape: Shape, param: Shape) -> bool:
    """Whether it is of the parameter's shape, factored, square statistics, or of fewer dims."""
    if len(shape) < len(param):
        return True
    square = len(set(shape)) == 1 and shape[:1] != () and shape[0] in param
    alike = len(shape) == len(param)
    return square or (alike and all(s in (1, p) for s, p in zip(shape, param, strict=True)))


def _other_shape(where: str, given: Shape, wanted: Shape) -> LoadError:
    return LoadError(
        where=f"optimizer state of {where}",
        what=f"has the shape {list(given)}, the parameter {list(wanted)}",
        why="its elements belong to those of the parameter",
        do="Load the state of an optimizer over the same model, in the same order.",
    )
