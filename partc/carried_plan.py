"""A saved program's plan for a mesh of other sizes: what it decided stays where it can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from partc.errors import PlanError
from partc.plan import Cuts, Plan, fits, fold_names
from partc.plan.mesh import Mesh
from partc.plan.other_world import Shapes, undivided
from partc.schedules.named import is_of_partc

T = TypeVar("T")
# What choices have found for the machines and sizes of the old mesh: they choose anew.
CHOSEN_ANEW: dict[str, Any] = {
    "bucket_copy_mb": None, "grad_parts": None, "hierarchical": None, "messages": None,
    "flops_per_byte": None, "prefetch": 0, "overlap_pieces": 0, "sends": None, "early_sums": None,
    "notes": (), "apart": frozenset[str](),
}  # fmt: skip


@dataclass(frozen=True)
class Carried:
    """A plan for another mesh, and what of the old one is left to the preset there."""

    plan: Plan
    dropped: tuple[str, ...] = ()


def bare(plan: Plan) -> Plan:
    """A plan without the entries that a preset writes, to see what it writes by itself."""
    none: dict[str, Cuts] = {}
    return plan.changed(params=none, inputs=none, gather={}, scatter={}, values={}, **CHOSEN_ANEW)


def carried(plan: Plan, usual: Plan | None, old: Mesh, mesh: Mesh, shapes: Shapes) -> Carried:
    """The plan of a program on the mesh ``old`` for another one with the same axes.

    ``usual``: what the preset alone says on the old mesh; what differs from it is somebody's own,
    and stays. None: nothing is the preset's. ``shapes``: of the model's parameters, by name.

    PlanError for an own entry that the new mesh does not divide, where no preset decides instead.
    """
    if usual is not None:
        usual = usual.changed(params=fold_names(usual.params))
    by = usual or bare(plan)  # what the preset writes by itself
    params, dropped = _params(plan, usual, mesh, shapes)
    own = _own(plan.values, by.values)
    same = {axis for axis in old.names if old.size(axis) == mesh.size(axis)}
    values = {name: entry for name, entry in own.items() if entry.keys() <= same}
    gone = [name for name in own if name not in values]
    made = plan.changed(
        mesh=None, params=params, values=values, inputs=_own(plan.inputs, by.inputs),
        gather=_own(plan.gather, by.gather), scatter=_own(plan.scatter, by.scatter), **CHOSEN_ANEW,
    )  # fmt: skip
    if old.pipeline_ranks != mesh.pipeline_ranks:
        made = _with_other_stages(made, mesh)
    return Carried(made, (*dropped, *gone))


def _own(mine: Mapping[str, T], usual: Mapping[str, T]) -> dict[str, T]:
    """The entries of a table that are not the preset's."""
    return {name: x for name, x in mine.items() if usual.get(name) != x}


def _params(
    plan: Plan, usual: Plan | None, mesh: Mesh, shapes: Shapes
) -> tuple[dict[str, Cuts], list[str]]:
    """Own entries of parameters that the mesh divides, and the names of those that it does not."""
    found: dict[str, Cuts] = {}
    dropped = []
    for name, shape in shapes.items():
        cuts = plan.stored(name)
        is_named = any(fits(pattern, name) for pattern in plan.params)
        if not is_named or (usual is not None and dict(usual.stored(name)) == dict(cuts)):
            continue
        if not (why := undivided(cuts, shape, mesh)):
            found[name] = cuts
        elif plan.preset:
            dropped.append(name)
        else:
            raise PlanError(
                where=f"the plan's [params], {name}", what=f"it cannot be sharded so over {mesh}",
                why=why, do="Take sizes of axes that divide it, or give the plan a preset.",
            )  # fmt: skip
    return dict(fold_names(found)), dropped


def _with_other_stages(plan: Plan, mesh: Mesh) -> Plan:
    """The plan for another number of pipeline ranks: stages are cut anew."""
    plan = plan.changed(stages=(), order="")
    if mesh.pipeline_ranks == 1:
        return plan.changed(schedule="", virtual_stages=0)
    return plan if is_of_partc(plan.schedule) else plan.changed(schedule="")
