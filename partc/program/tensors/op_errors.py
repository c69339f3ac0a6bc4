"""What is said where an op of torch would not give the model's value on a stage's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partc.errors import RunError
from partc.program.model.other_wrappers import asks_zero, of_zero
from partc.program.tensors.homes import HomeTensor


def of_one_rank(func: Any, given: Sequence[HomeTensor]) -> RunError:
    names = list(dict.fromkeys(x.home.shard.name for x in given))
    return RunError(
        where=f"{func} of the gradients of {', '.join(names[:2])}{' ...' * (len(names) > 2)}",
        what="joins gradients of this pipeline rank alone",
        why="the other ranks hold the gradients of the model's other stages",
        do="Clip with stage.clip_grad_norm_, which is over the whole model, and take an optimizer "
        "that treats each parameter by itself.",
    )


def number_of_one_rank(value: HomeTensor) -> RunError:
    return RunError(
        where=f"a number of the gradient of {value.home.shard.name}",
        what="is known to this pipeline rank alone",
        why="the other ranks hold the gradients of the model's other stages, and would decide "
        "by other numbers",
        do="Clip with stage.clip_grad_norm_, which returns the norm of the whole model; let an "
        "optimizer that reads numbers go by stage.step_on_whole; or say that you mean this "
        "parameter alone: .full_tensor().item().",
    )


def collective(func: Any) -> RunError:
    if asks_zero():
        return of_zero()
    return RunError(
        where=str(func),
        what="a collective was asked for on a parameter of a stage, or on its gradient",
        why="the stage sums gradients by itself, and a parameter stands for all ranks' pieces",
        do="Leave DistributedDataParallel and dist.all_reduce out; parameter.full_tensor() is the "
        "whole.",
    )
