"""Tensors of a script, of a whole model, beside those of a pipeline rank, of its stages alone.

Paired by place, they are of other layers. Paired by name, an average or a target network follows
this rank's stages, and keeps the first values of all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from partc.errors import RunError
from partc.program.tensors.homes import HomeTensor
from partc.program.tensors.op_facts import Op

_OF_ITS_OWN = (dist.DistError, torch.OutOfMemoryError)


@contextmanager
def fitting(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[HomeTensor]
) -> Iterator[None]:
    """RunError where torch refuses an op of a pipeline rank's tensor and a plain one, as of
    ``zip(ema.parameters(), model.parameters())``: the rank has the parameters of its stages alone.
    """
    try:
        yield
    except RuntimeError as error:
        beside = [x for x in pytree.tree_leaves([*args, *kwargs.values()]) if _is_plain(x)]
        if isinstance(error, _OF_ITS_OWN) or not beside:
            raise
        raise _beside_others(op, given[0], beside[0], error) from None


def check_kept(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[HomeTensor]
) -> None:
    """RunError where an op of a pipeline rank's parameter or buffer writes a plain tensor.

    Gradients may be written so: an optimizer of the script keeps momenta of its parameters alone.
    """
    if not op.writes or all(isinstance(x, DTensor) for x in op.written(args, kwargs)):
        return
    of_model = next((x for x in given if not x.of_gradient), None)
    if of_model is not None:
        raise kept_elsewhere(of_model, f"{op.func} of {of_model.home.shard.name}")


def kept_elsewhere(of: HomeTensor, where: str) -> RunError:
    """The refusal of a plain tensor that is to follow a parameter of a pipeline's rank."""
    return RunError(
        where=where,
        what=f"writes {of.home.shard.name} to a tensor that is not the model's",
        why="a pipeline rank has the parameters of its own stages alone, so what the script keeps "
        "of all others (an average, a target network) would stay as it was",
        do="Average a copy of this model itself: copy.deepcopy(model) behind the first step, or "
        "AveragedModel(model); or read model.full_state_dict(), which all ranks call.",
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, HomeTensor) and value.dim() > 0


def _beside_others(op: Op, mine: HomeTensor, beside: Tensor, error: RuntimeError) -> RunError:
    return RunError(
        where=f"{op.func} of {mine.home.shard.name}",
        what=f"torch refuses it beside a plain tensor of shape {list(beside.shape)}: {error}",
        why="a pipeline rank has the parameters of its own stages alone, so by place (zip) they "
        "stand beside those of other stages of a whole model",
        do="Average a copy of this model itself, whose parameters are those of the same stages: "
        "copy.deepcopy(model), AveragedModel(model).",
    )
