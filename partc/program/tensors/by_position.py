"""Tensors of a whole model beside those of a pipeline rank, which a script has paired by place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
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


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, HomeTensor) and value.dim() > 0


def _beside_others(op: Op, mine: HomeTensor, beside: Tensor, error: RuntimeError) -> RunError:
    return RunError(
        where=f"{op.func} of {mine.home.shard.name}",
        what=f"torch refuses it beside a plain tensor of shape {list(beside.shape)}: {error}",
        why="a pipeline rank has the parameters of its own stages alone, so by place (zip) they "
        "stand beside those of other stages of a whole model",
        do="Go by name: own = dict(model.named_parameters()); or average a copy of this model "
        "itself: copy.deepcopy(model), AveragedModel(model).",
    )
