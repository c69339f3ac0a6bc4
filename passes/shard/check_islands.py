"""Refuse plans whose islands, copies of the model that train apart, are not said, or not allowed.

    mesh island=2,dp=2    [local_steps] period = 16

Ranks along the mesh axis ``island`` compute nothing together. So no pass knows the axis: the graph
is that of one island, of its batch, and the printed program has a last class whose ``step`` meets
the other islands now and then (``codegen/files/island.py``).
"""

from __future__ import annotations

from partc.errors import PlanError
from partc.plan import Plan
from partc.plan.field_kinds import plan_error
from partc.plan.local_steps import LOCAL_STEPS
from partc.plan.mesh import ISLAND, Mesh


def has_islands(plan: Plan, mesh: Mesh) -> bool:
    """Whether a plan or a mesh speaks of islands."""
    return plan.local_steps is not None or ISLAND in mesh.names


def check_islands(plan: Plan, mesh: Mesh) -> None:
    """PlanError for islands that do not meet, or not by leave of the plan."""
    if plan.local_steps is None:
        raise _refused(
            f"the mesh {mesh} has islands, and the plan does not say how often they meet",
            "islands train copies of the model apart",
            f'Write allow = ["{LOCAL_STEPS}"], and below [{LOCAL_STEPS}] period = 16.',
        )  # fmt: skip
    if LOCAL_STEPS not in plan.allow:
        raise _refused(
            f"the plan has [{LOCAL_STEPS}], and nothing allows it", "islands take other steps than "
            "one device, so that they are never chosen silently",
            f'Write allow = ["{LOCAL_STEPS}"].',
        )  # fmt: skip
    if mesh.islands == 1:
        raise _refused(
            f"the mesh {mesh} has no islands", f"they are the ranks along the axis {ISLAND}, each "
            "of which, or each group of which, trains a copy of the model",
            f'Write a mesh such as "{ISLAND}=2,dp=2", or leave [{LOCAL_STEPS}] out.',
        )  # fmt: skip
    if mesh.names[0] != ISLAND:
        raise _refused(
            f"{ISLAND} is not the first axis of the mesh {mesh}", "ranks of one island stand side "
            "by side, and slow links lie between islands",
            f"Write {ISLAND}={mesh.islands} before the other axes.",
        )  # fmt: skip


def _refused(what: str, why: str, do: str) -> PlanError:
    return plan_error(f"plan, {LOCAL_STEPS}", what, why, do)
