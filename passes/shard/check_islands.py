"""Refuse plans whose islands, copies of the model that train apart, are not said, or not allowed.

    mesh island=2,dp=2    [local_steps] period = 16
    mesh island=2,dp=2    [stale] steps = 1
    mesh island=2,dp=2    [uneven] microbatches = [11, 5]
    mesh island=5         [servers] count = 1
    mesh dp=2             [servers] count = 1, max_steps_late = 2

Ranks along the mesh axis ``island`` compute nothing together. So no pass knows the axis: the graph
is that of one island, of its batch, and the printed program has a last class whose ``step`` meets
the other islands now and then (``codegen/files/island.py``), or shares gradients with them that are
applied later (``codegen/files/late_island.py``), or at once (``codegen/files/uneven_island.py``),
or sends them to servers (``codegen/files/served_island.py``).
"""

from __future__ import annotations

from partc.errors import PlanError
from partc.plan import Plan
from partc.plan.field_kinds import plan_error
from partc.plan.local_steps import LOCAL_STEPS
from partc.plan.mesh import ISLAND, Mesh
from partc.plan.servers import SERVERS, Servers
from partc.plan.stale import STALE
from partc.plan.uneven import UNEVEN


def has_islands(plan: Plan, mesh: Mesh) -> bool:
    """Whether a plan or a mesh speaks of islands."""
    return bool(_tables(plan)) or ISLAND in mesh.names


def _tables(plan: Plan) -> list[str]:
    """The tables of the plan that say what islands do."""
    return [
        name for name in (LOCAL_STEPS, STALE, UNEVEN, SERVERS) if getattr(plan, name) is not None
    ]


def check_islands(plan: Plan, mesh: Mesh) -> None:
    """PlanError for islands that do not meet, or not by leave of the plan."""
    tables = _tables(plan)
    if not tables:
        raise _refused(
            LOCAL_STEPS, f"the mesh {mesh} has islands, and the plan does not say how often they "
            "meet", "islands train copies of the model apart",
            f'Write allow = ["{LOCAL_STEPS}"], and below [{LOCAL_STEPS}] period = 16; or let them '
            f'share gradients: allow = ["{STALE}"], and below [{STALE}] steps = 1; or, exactly, '
            f"[{UNEVEN}] microbatches = [1, 1], or [{SERVERS}] count = 1.",
        )  # fmt: skip
    if len(tables) > 1:
        raise _refused(
            tables[1], f"the plan has [{tables[0]}] too", "islands share gradients in every step, "
            "at once or later, or parameters now and then", "Leave one of both tables out.",
        )  # fmt: skip
    [table] = tables
    if plan.servers is not None and mesh.islands == 1:
        _check_beside(plan.servers, plan, mesh)
        return
    if table not in (UNEVEN, SERVERS) and table not in plan.allow:
        raise _refused(
            table, f"the plan has [{table}], and nothing allows it", "islands take other steps "
            "than one device, so that they are never chosen silently",
            f'Write allow = ["{table}"].',
        )  # fmt: skip
    if mesh.islands == 1:
        raise _refused(
            table, f"the mesh {mesh} has no islands", "they are the ranks along the axis "
            f"{ISLAND}, each of which, or each group of which, computes a step by itself",
            f'Write a mesh such as "{ISLAND}=2,dp=2", or leave [{table}] out.',
        )  # fmt: skip
    if mesh.names[0] != ISLAND:
        raise _refused(
            table, f"{ISLAND} is not the first axis of the mesh {mesh}", "ranks of one island "
            "stand side by side, and slow links lie between islands",
            f"Write {ISLAND}={mesh.islands} before the other axes.",
        )  # fmt: skip
    if plan.uneven is not None and len(plan.uneven.of_each) != mesh.islands:
        raise _refused(
            UNEVEN, f"{len(plan.uneven.of_each)} islands are given microbatches, and the mesh "
            f"{mesh} has {mesh.islands}", "microbatches has a number for each island",
            f"Write {mesh.islands} numbers.",
        )  # fmt: skip
    if plan.servers is not None:
        _check_servers(plan.servers, mesh)


def _check_beside(how: Servers, plan: Plan, mesh: Mesh) -> None:
    """PlanError for a server beside programs that is not said, not allowed, or cannot be."""
    if not how.is_beside:
        raise _refused(
            SERVERS, f"the mesh {mesh} has no islands", "servers are some of the ranks along the "
            f"axis {ISLAND}, or processes beside the program",
            f'Write a mesh such as "{ISLAND}=5"; or max_steps_late = 0, for a server beside '
            "programs that join and leave.",
        )  # fmt: skip
    if how.max_steps_late and SERVERS not in plan.allow:
        raise _refused(
            SERVERS, f"max_steps_late = {how.max_steps_late}, and nothing allows it",
            "gradients of older parameters are another training, so that they are never chosen "
            "silently", f'Write allow = ["{SERVERS}"], or max_steps_late = 0.',
        )  # fmt: skip
    if how.count > 1 or how.compute:
        raise _refused(
            SERVERS, f"count = {how.count}, compute = {str(how.compute).lower()}, beside the "
            "program", "one process owns all parameters there",
            f'Write count = 1; or let islands of the mesh own them, "{ISLAND}=4", without '
            "max_steps_late.",
        )  # fmt: skip
    if mesh.pipeline_ranks > 1:
        raise _refused(
            SERVERS, f"the mesh {mesh} has pipeline stages", "the first rank of an island sends "
            "all gradients to the server, and has those of its own stages",
            f'Leave pp out; or let islands of the mesh own parameters, "{ISLAND}=2,pp=2", without '
            "max_steps_late.",
        )  # fmt: skip


def _check_servers(how: Servers, mesh: Mesh) -> None:
    """PlanError for more servers than there are islands, or for none that computes."""
    if how.is_beside or how.replicas:
        entry = "max_steps_late" if how.is_beside else "replicas"
        raise _refused(
            SERVERS, f"it has {entry}, and the mesh {mesh} has islands",
            "islands of a mesh take their steps together, and end together",
            f"Leave {entry} out; or write a mesh without {ISLAND}, and max_steps_late: then the "
            "server is a process beside programs that join and leave.",
        )  # fmt: skip
    most = mesh.islands if how.compute else mesh.islands - 1
    if how.count > most:
        raise _refused(
            SERVERS, f"count = {how.count}, and the mesh {mesh} has {mesh.islands} islands",
            "servers are islands, and some island has to compute",
            f"Write count = {most} or fewer, a mesh with more islands, or compute = true: then "
            "servers compute too.",
        )  # fmt: skip


def _refused(table: str, what: str, why: str, do: str) -> PlanError:
    return plan_error(f"plan, {table}", what, why, do)
