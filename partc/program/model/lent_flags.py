"""Which parameters of a lent model are frozen: a stage does not train what a script has frozen."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partc.graph import NO_GRADIENT
from partc.program.tensors.shown import Shown
from partc.program.tensors.stand_in import StandIn
from partc.trace.fingerprint import named_tensors
from partc.users_line import warn


def take_flags(
    model: nn.Module | None, shown: Mapping[str, Shown], names: list[str], device: Any, plan: str,
    unread: Container[str], away: Mapping[str, StandIn],
) -> None:  # fmt: skip
    """Freeze what the model of rank 0 has frozen since it was compiled; all ranks call this
    together, with the same names. What was frozen then and is not now has no gradient in the
    program: told. ``unread``: what no step reads, of which neither matters. ``away``: what stands
    for parameters of other pipeline ranks, and says of them what the model says.
    """
    own = named_tensors(model) if model is not None else {}
    flags = [own[name].requires_grad if name in own else -1 for name in names]
    sent = torch.tensor(flags, dtype=torch.int8, device=device)
    if names:
        dist.broadcast(sent, src=0)
    lent = {n: bool(flag) for n, flag in zip(names, sent.tolist(), strict=True) if flag >= 0}
    mine = {name: flag for name, flag in lent.items() if name in shown}
    frozen = [n for n, flag in mine.items() if not flag and shown[n].param.requires_grad]
    for name in frozen:
        shown[name].param.requires_grad_(False)
    for name in away.keys() & lent.keys():
        away[name].requires_grad_(lent[name])
    if frozen := [name for name in frozen if name not in unread]:
        _tell(frozen, "are frozen in the model and were not when it was compiled; the stage "
              "freezes them")  # fmt: skip
    free = [n for n, flag in mine.items() if flag and not shown[n].trained]
    trains = any(each.trained for each in shown.values())  # a forward has no gradients at all
    if free and trains and NO_GRADIENT not in plan:
        _tell(free, "were frozen when the model was compiled, and are not now; the program has no "
              "gradient for them: compile again to train them")  # fmt: skip


def _tell(names: list[str], what: str) -> None:
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    warn(f"partc: {listed} {what}")
