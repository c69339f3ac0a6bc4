"""Refuse plans that leave a script no place to compute the loss in."""

from __future__ import annotations

from partc.errors import PlanError
from partc.passes.shard.check_islands import has_islands
from partc.plan import Plan
from partc.plan.mesh import PP, Mesh


def check_given_out(plan: Plan, mesh: Mesh) -> None:
    """PlanError for parts of a batch that take turns, where the script computes the loss of all."""
    if mesh.pipeline_ranks > 1 or plan.stages:
        raise _refused(f"mesh {mesh}", f"it has an axis {PP}, and there is no loss=")
    if plan.microbatches > 1:
        raise _refused("microbatches", f"they are {plan.microbatches}, and there is no loss=")
    if has_islands(plan, mesh):
        raise _refused(f"mesh {mesh}", "copies of the model train apart, and there is no loss=")


def _refused(where: str, what: str) -> PlanError:
    return PlanError(
        where=where, what=what,
        why="a script that computes the loss itself is given the results of the whole batch, and "
        "this plan begins backwards before all forwards have run, or repeats steps",
        do="Give the loss to partc: loss=loss_of, of def loss_of(model, x, y): return "
        "criterion(model(x), y).",
    )  # fmt: skip
