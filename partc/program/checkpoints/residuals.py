"""What rounded sums of gradients have left over: where it begins, and what becomes of it elsewhere.

In a stage it stands in buffers of its own (``layers.0.w_residual@dp``), a row for each data rank.
All of these rows together are a part of the gradients that no rank has applied yet, so that only
their sum means something to a stage with another number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partc.errors import LoadError
from partc.plan import Plan
from partc.plan.local_steps import begins_as
from partc.plan.mesh import TP, Mesh
from partc.plan.wires import PIECE, RANK, WIRES, is_residual, whose
from partc.users_line import warn

MET = "met"  # behind how many steps islands have met last
KEEPS = "keeps"  # which buffers a scheme has
BUCKETS = ("bucket_mb", "bucket_copy_mb", "grad_parts")  # decide which gradients share a sum


def of_sums(plan: str, mesh: Mesh) -> dict[str, Any]:
    """What decides of which gradients the sums of a program are, by a plan given as text; empty
    without error feedback.

    Two programs of one model in which this is equal have the same buffers, in the same order.
    """
    found = Plan.parse(plan)
    if found.compress is None or not found.compress.keeps_rest:
        return {}
    how = found.compress
    known: dict[str, Any] = {name: getattr(found, name) for name in BUCKETS}
    known |= {"least_mb": how.least_mb, KEEPS: [*WIRES[how.wire].kept([(1,)], 1, 1)]}
    known |= {RANK: how.rank} if WIRES[how.wire].entry == RANK else {}
    known |= {"stages": [*found.stages]} if found.stages else {}
    known |= {"several microbatches": True} if found.microbatches > 1 else {}
    inside = {axis: mesh.size(axis) for axis in found.gather if axis in mesh.names}
    return {**known, TP: dict(mesh.axes).get(TP, 1), **inside}


@lru_cache(maxsize=8)  # a checkpoint asks for each of its tensors
def of_islands(plan: str) -> dict[str, Any]:
    """What decides whether what islands have kept means the same to another training, by a plan
    given as text; empty without islands.
    """
    found = Plan.parse(plan)
    if found.stale is not None:
        return {"stale": [*found.stale.keeps], "start_step": found.stale.start_step}
    how = found.local_steps
    if how is None:
        return {}
    known = {"outer": how.outer, "start_step": how.start_step, "fragments": how.fragments}
    return known | ({"overlap": how.overlap} if how.overlap else {})


def draws(plan: str) -> bool:
    """Whether what a step sends depends on how many were taken, by a plan given as text: sums draw
    random numbers, or begin behind so many steps; or islands meet.
    """
    found = Plan.parse(plan)
    how = found.compress
    if found.local_steps is not None or found.stale is not None:
        return True
    return how is not None and (WIRES[how.wire].drawn != "" or how.start_step > 0)


@torch.no_grad()
def begin(held: Mapping[str, Tensor], loaded: Collection[str] = ()) -> None:
    """Let nothing be left over, but in the buffers that were ``loaded``; let islands go on from the
    parameters as they are.
    """
    for name, tensor in held.items():
        if not is_residual(name) or name in loaded:
            continue
        if param := begins_as(name):
            tensor.copy_(held[param])
        else:
            tensor.zero_()


def fitted(name: str, whole: Tensor, shape: tuple[int, ...], num: int) -> Tensor:
    """What is left over, for another number of ranks: ``f32[4,8448] -> f32[2,8320]``.

    Every rank gets an equal part of the sum over ranks, or its piece of what sums have lost.
    Elements behind the gradients are zeros, of which there may be more or fewer. ``num``: of pieces
    of gradients, each summed apart, that stand side by side.
    """
    of_sums, parts = whose(name) == PIECE, whole.view(len(whole), num, -1)
    rows = parts.transpose(0, 1).flatten(1) if of_sums else parts.sum(0) / shape[0]
    size = prod(shape) // num if of_sums else shape[1] // num
    found = nn.functional.pad(rows, (0, size - rows.shape[1]))  # or cut off
    if of_sums:
        return found.view(num, shape[0], -1).transpose(0, 1).reshape(shape)
    return found.reshape(1, -1).expand(shape)


def _listed(sums: Mapping[str, Any]) -> str:
    return " and ".join(sums.get(KEEPS) or ["nothing"])


def check_same_sums(path: Path, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """LoadError if a checkpoint's residuals are of other sums than a stage's.

    A stage may begin with nothing left over, and so take a checkpoint that has none. One that keeps
    none drops what a checkpoint has, with a warning.
    """
    if saved and not mine:
        warn(
            f"{path}: what rounded sums had left over is dropped, as this program keeps none: the "
            "gradients of one step more or less, rounded"
        )  # fmt: skip
    either = {**mine, **saved} if saved and mine else {}
    differing = [name for name in either if saved.get(name) != mine.get(name)]
    if differing:
        name = differing[0]
        why = f"{name} was {saved.get(name)} in the plan, and is {mine.get(name)}"
        if name == KEEPS:
            why = f"its scheme keeps {_listed(saved)}, and that of this plan {_listed(mine)}"
        same = (
            "wire as it was, or one that keeps the same" if name == KEEPS else f"{name} as it was"
        )
        raise LoadError(
            where=str(path), what="what rounded sums have left over is of other sums", why=why,
            do=f"Compile with {same}, or take the weights alone: compile with what the "
            "checkpoint has, load it there, and load_full its full_state_dict().",
        )  # fmt: skip
