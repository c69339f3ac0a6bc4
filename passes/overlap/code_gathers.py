"""Let weights be gathered in fewer bytes, as the plan's ``[compress_weights]`` says.

In: a local graph with the all-gathers of weights. Out: the same, each with the plan's code. All
ranks compute with what was sent, forward and backward alike; what a rank stores stays exact, and
gets the gradient that was computed at what was sent (straight through the rounding).

    all_gather(w, dp, dim=0)  -->  all_gather(w, dp, dim=0, code="int8", block=256)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from partc.errors import PlanError
from partc.graph import Graph, collectives, fake_of, value
from partc.graph.moves import gathers_param
from partc.plan import Plan
from partc.plan.batch import DATA_AXES
from partc.plan.coded import COMPRESS_WEIGHTS, pattern_of
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
) -> Mapping[str, Plan]:
    """Give the gathers of weights the plan's code, in place; and the plan, which names weights that
    are stored in shards, and used so.
    """
    how = plan.compress_weights
    assert how is not None
    exact: dict[str, None] = {}
    for each in stages or [graph]:
        for node in each.calls():
            if gathers_param(node) and node.kwargs["axis"] in DATA_AXES:
                node.kwargs = {**node.kwargs, "code": how.wire, "block": how.block}
        for name, param in each.params.items():
            if not _is_sent(name, param):
                exact[pattern_of(name)] = None
        each.fx.lint()
    known = replace(how, exact=tuple(sorted({*how.exact, *exact})))
    return {"plan": plan.changed(compress_weights=known)}


def _is_sent(name: str, param: fx.Node) -> bool:
    """Whether a weight is gathered over data axes, or whole on all their ranks; PlanError for one
    that is gathered in several transfers, or also used as it is stored.
    """
    over = [axis for axis, _ in value(param).sharding.cuts() if axis in DATA_AXES]
    gathers = [u for u in param.users if gathers_param(u) and u.kwargs["axis"] in over]
    if not over or not param.users:
        return True
    if not any(map(_is_moved, param.users)) and len(over) == 1:
        return False
    if not fake_of(param).is_floating_point():
        raise _refused(
            f"{name} has numbers of {value(param).dtype}", "floats are rounded, and nothing else",
            f'Store it whole: an entry "{name}" = {{}} in [params].',
        )  # fmt: skip
    if len(over) > 1 or len(gathers) < len(param.users):
        raise _refused(
            f"{name} is cut over {' and '.join(over)}, and some of its readers do not gather it "
            "first over that axis, in one transfer",
            "all that computes with a weight is to see what was sent of it, once",
            'Take preset = "fsdp" on one data axis, or preset = "hsdp"; with tensor parallelism '
            'write dp before tp, as in "dp=2,tp=2"; or leave the table out.',
        )  # fmt: skip
    return True


def _is_moved(reader: fx.Node) -> bool:
    """Whether a weight goes into a transfer, as it is stored or as a view or a cast of that."""
    if reader.target in collectives.COLLECTIVES:
        return True
    alone = reader.op == "call_function" and len(reader.all_input_nodes) == 1
    return alone and any(map(_is_moved, reader.users))


def _refused(what: str, why: str, do: str) -> PlanError:
    return plan_error(f"plan, {COMPRESS_WEIGHTS}", what, why, do)
