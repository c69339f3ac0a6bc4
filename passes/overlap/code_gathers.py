"""Let weights be gathered in fewer bytes, as the plan's ``[compress_weights]`` says.

In: a local graph with the all-gathers of weights. Out: the same, each with the plan's code. All
ranks compute with what was sent, forward and backward alike; what a rank stores stays exact, and
gets the gradient that was computed at what was sent (straight through the rounding).

    all_gather(w, dp, dim=0)  -->  all_gather(w, dp, dim=0, code="int8", block=256)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from partc.errors import PlanError
from partc.graph import Graph, fake_of, value
from partc.graph.moves import gathers_param, moves
from partc.plan import Plan
from partc.plan.batch import DATA_AXES
from partc.plan.coded import COMPRESS_WEIGHTS
from partc.plan.compress import COMPRESS
from partc.plan.field_kinds import plan_error
from partc.plan.mesh import ISLAND, Mesh

ROUNDED = (
    "forward and backward compute with weights that are rounded to {} when they are gathered; "
    "gradients are taken at these, and applied to the exact ones (straight-through)"
)


def check_compress_weights(plan: Plan, mesh: Mesh) -> Plan:
    """The plan with a note on what its gathers do; PlanError where nothing allows it, or it is not
    built.
    """
    how = plan.compress_weights
    assert how is not None
    if COMPRESS not in plan.allow:
        raise _refused(
            "the plan has this table, and nothing allows it", "rounded weights change what a step "
            "computes, so that it is never done silently", f'Write allow = ["{COMPRESS}"].',
        )  # fmt: skip
    if dict(mesh.axes).get(ISLAND, 1) > 1:
        raise _refused(
            f"the mesh {mesh} has islands", "what islands share is compared with exact weights",
            "Take a mesh without island, or leave it out.",
        )  # fmt: skip
    note = ROUNDED.format(how.wire)
    return plan.changed(notes=tuple(dict.fromkeys((*plan.notes, note))))


def code_gathers(
    graph: Graph, plan: Plan, mesh: Mesh, stages: Sequence[Graph] = ()
) -> Graph | None:
    """Give the gathers of weights the plan's code, in place."""
    how = plan.compress_weights
    assert how is not None
    for each in stages or [graph]:
        for node in each.calls():
            if gathers_param(node) and node.kwargs["axis"] in DATA_AXES:
                node.kwargs = {**node.kwargs, "code": how.wire, "block": how.block}
        for name, param in each.params.items():
            _check_param(name, param)
        each.fx.lint()
    return None if stages else graph


def _check_param(name: str, param: fx.Node) -> None:
    """PlanError for a weight that is cut over data axes, and not gathered once over one of them."""
    over = [axis for axis, _ in value(param).sharding.cuts() if axis in DATA_AXES]
    if over and not fake_of(param).is_floating_point():
        raise _refused(
            f"{name} has numbers of {value(param).dtype}", "floats are rounded, and nothing else",
            f'Store it whole: an entry "{name}" = {{}} in [params].',
        )  # fmt: skip
    if len(over) > 1 or (over and not all(_gathers_whole(user, param) for user in param.users)):
        raise _refused(
            f"{name} is cut over {' and '.join(over)}, and not gathered over one axis in one "
            "transfer", "all ranks are to compute with what was sent of each weight, once",
            'Take preset = "fsdp" on one data axis, or preset = "hsdp"; or leave the table out.',
        )  # fmt: skip


def _gathers_whole(user: fx.Node, param: fx.Node) -> bool:
    """Whether a call gathers a weight over the data axis that cuts it."""
    if not gathers_param(user):
        return False
    over = {axis for axis, _ in value(param).sharding.cuts() if axis in DATA_AXES}
    return any(m.operand is param and {m.kwargs["axis"]} == over for m in moves(user))


def _refused(what: str, why: str, do: str) -> PlanError:
    return plan_error(f"plan, {COMPRESS_WEIGHTS}", what, why, do)
