"""Refuse a plan with ``[compress]`` that nothing allows, or where that is not built.

In: a plan, and the mesh it is for. Out: the same plan, with a note where gradients arrive as
directions; or a PlanError that says what to write in its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from partc.errors import PlanError
from partc.graph import Graph
from partc.plan import Plan
from partc.plan.batch import DATA_AXES
from partc.plan.compress import COMPRESS, Compress
from partc.plan.field_kinds import plan_error
from partc.plan.mesh import ISLAND, PP, TP, Mesh
from partc.plan.servers import SERVERS
from partc.plan.stale import STALE
from partc.plan.uneven import UNEVEN
from partc.plan.wires import WIRES

DIRECTIONS = (
    "gradients that {} sends arrive as +1 and -1, a direction: their learning rate is another, and "
    "their norm says nothing"
)

IN_EACH = (
    "gradients are rounded to {} in each of {} microbatches, and nothing is kept of what that "
    "loses: a step's error is the sum of theirs"
)


def check_compress(plan: Plan, graph: Graph, mesh: Mesh) -> Plan | None:
    """PlanError for a plan that compresses without being allowed to, or where that is not built.

    Gives the plan a note where gradients are directions.
    """
    if COMPRESS not in plan.allow:
        raise refused(
            "the plan has [compress], and nothing allows it", "rounded sums change what a step "
            "computes, so that it is never done silently", f'Write allow = ["{COMPRESS}"].',
        )  # fmt: skip
    if graph.loss is None:
        return None  # a forward has no gradients; it shares its stage with a program that has
    axes = [axis for axis, size in mesh.axes if size > 1]
    data = data_axes_of(plan, mesh)
    over, scatters = compressed_axes(plan, mesh), False
    if not data and not axes:
        raise refused(
            f"the mesh {mesh} has one rank", "nothing is sent that could be compressed",
            "Leave it out, or compile for more ranks.",
        )  # fmt: skip
    if data and not over:
        _check_scatters(plan.compress, data)
        over, scatters = data, True
    if len(over) != 1 or {*axes} - {ISLAND, PP, TP, *data}:
        raise refused(
            f"the mesh is {mesh}", "sums are compressed over one data axis, beside which there may "
            "be tp, pp, and data axes over which parameters are sharded",
            'Use such a mesh, with preset = "hsdp" for two data axes, or leave it out.',
        )  # fmt: skip
    if plan.reduce == "microbatch" and plan.microbatches > 1:
        return _with_note(plan, _each_microbatch(plan, scatters))
    return _with_directions(plan)


def _each_microbatch(plan: Plan, scatters: bool) -> str:
    """A note where sums are compressed in every microbatch; PlanError where they cannot be."""
    assert plan.compress is not None
    wire = plan.compress.wire
    if not scatters:
        raise refused(
            "gradients are summed in every microbatch", "sums of which a rank keeps what it has "
            "not sent, or that all ranks have whole, are compressed once a step",
            'Write reduce = "step", with preset = "zero1" in place of zero2, fsdp and hsdp, which '
            "sum in every microbatch; or leave [compress] out.",
        )  # fmt: skip
    if WIRES[wire].drawn:
        raise refused(
            f"gradients are summed in every microbatch, and {wire} draws random numbers",
            "they follow from the step, and would be the same in each of its microbatches",
            'Take "int8"; or write reduce = "step", with preset = "zero1" in place of zero2 and '
            "fsdp, which sum in every microbatch.",
        )  # fmt: skip
    return IN_EACH.format(wire, plan.microbatches)


def _check_scatters(how: Compress | None, data: Sequence[str]) -> None:
    """PlanError where ranks keep pieces of sums, and the scheme is for whole ones."""
    sharded = f"parameters or their optimizer states are sharded over {' and '.join(data)}"
    between = (
        'shard inside of machines alone, and compress between them: preset = "hsdp" on a mesh such '
        'as "dp_replicate=2,dp_shard=8".'
    )
    assert how is not None
    if len(data) > 1:
        raise refused(
            f"{sharded}, and the mesh has both", "sums are compressed over one data axis",
            f"Take one data axis; or {between}",
        )  # fmt: skip
    if not WIRES[how.wire].scatter:
        known = ", ".join(repr(name) for name, wire in WIRES.items() if wire.scatter)
        raise refused(
            f"{sharded}, and {how.wire} is for sums that all ranks have whole",
            "there each rank keeps a piece of the sum", f"Take one of {known}; or {between}",
        )  # fmt: skip
    if how.keeps_rest:
        raise refused(
            f"{sharded}, and error_feedback is true", "a rank would keep whole residuals beside "
            "its piece, which none of zero1, zero2 and fsdp is for",
            f'Write error_feedback = false; or take preset = "ddp"; or {between}',
        )  # fmt: skip


def _with_directions(plan: Plan) -> Plan | None:
    """The plan with a note if gradients are directions; PlanError where islands would add them."""
    if plan.compress is None or not plan.compress.is_direction:
        return None
    wire = plan.compress.wire
    for table in (STALE, UNEVEN, SERVERS):
        if getattr(plan, table) is not None:
            raise refused(
                f"the plan has [{table}], and gradients in {wire} are directions", "islands would "
                "take their mean, which is no direction", f"Take another wire, or leave [{table}] "
                "out; islands with [local_steps] share parameters.",
            )  # fmt: skip
    return _with_note(plan, DIRECTIONS.format(wire))


def _with_note(plan: Plan, note: str) -> Plan:
    return plan.changed(notes=tuple(dict.fromkeys((*plan.notes, note))))


def compressed_axes(plan: Plan, mesh: Mesh) -> list[str]:
    """The data axes of several ranks over which nothing is sharded: of these one is compressed."""
    stored = {axis for cuts in plan.params.values() for axis in cuts} | {*plan.gather}
    return [axis for axis in data_axes_of(plan, mesh) if axis not in stored]


def summed_axis(plan: Plan, mesh: Mesh) -> str:
    """The axis over which sums are compressed: that one, or the one over which all is sharded."""
    [axis] = compressed_axes(plan, mesh) or data_axes_of(plan, mesh)
    return axis


def data_axes_of(plan: Plan, mesh: Mesh) -> list[str]:
    """The data axes of several ranks."""
    axes = [axis for axis, size in mesh.axes if size > 1]
    return [axis for axis in axes if axis in DATA_AXES and axis in plan.batch_axes]


def refused(what: str, why: str, do: str) -> PlanError:
    return plan_error(f"plan, {COMPRESS}", what, why, do)
