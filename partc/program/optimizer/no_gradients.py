"""A GradScaler on ranks without gradients: islands that apply them late give none at first, and
where islands own parameters they are on owners alone.

Then there is nothing that might be infinite, and the optimizer's step does nothing. torch takes
such a step for a mistake of the script. All islands of one model take the verdict of all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from partc.program.tensors.rank_tensors import RankTensors
from partc.program.tensors.shown import Shown

_ASKED = "_islands_with_gradients"  # an attribute of parameters: whom a verdict is asked of
_DONE: list[str] = []


def expect_none(step: nn.Module, shown: Iterable[Shown], tensors: RankTensors) -> None:
    """Let a GradScaler take optimizers of a stage's parameters where none of them has a gradient,
    if a step may give none.
    """
    if not gives_late(tensors, step):
        return
    for each in shown:
        setattr(each.param, _ASKED, tensors.island if tensors.owners else None)
    if not _DONE:
        _DONE.append("GradScaler")
        _watch()


def gives_late(tensors: RankTensors, step: Any) -> bool:
    """Whether a step may end without gradients, or puts them where another rank owns a weight."""
    return (hasattr(step, "drain") and not hasattr(step, "meet")) or bool(tensors.owners)


def _watch() -> None:
    unscale = GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscaled(
        self: GradScaler, optimizer: Optimizer, inverse: Tensor, found: Tensor, *args: Any
    ) -> Any:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        if not every or not all(hasattr(p, _ASKED) for p in every):
            return unscale(self, optimizer, inverse, found, *args)
        verdicts = {found.device: found}
        if any(p.grad is not None for p in every):
            verdicts = unscale(self, optimizer, inverse, found, *args)
        islands = getattr(every[0], _ASKED)
        return verdicts if islands is None else _of_all(verdicts, islands)

    GradScaler._unscale_grads_ = unscaled  # type: ignore[method-assign, assignment]


def _of_all(verdicts: dict[torch.device, Tensor], islands: Any) -> dict[torch.device, Tensor]:
    """Whether a gradient of any island is infinite."""
    for found in verdicts.values():
        dist.all_reduce(found, dist.ReduceOp.MAX, group=islands)
    return verdicts
