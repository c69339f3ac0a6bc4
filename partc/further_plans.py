"""The plans of further programs of a model: of another batch, of another kind, of a variant.

In: a stage's first program. Out: its plan for another graph, by which parameters stay on the ranks
where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partc.plan import Cuts, Plan
from partc.plan.mesh import MICROBATCH_AXIS
from partc.program import Program
from partc.program.step.batch_fit import Rows
from partc.program.tensors.holders import Holders
from partc.program.wanted import Wanted
from partc.schedules.csv_form import CSV, read_csv, write_csv


def plan_of(first: Program, wanted: Wanted) -> Plan:
    """The first program's plan for another batch or kind: parameters stay where they are."""
    plan = kept(first)
    rows = Rows.of(plan, first.mesh, first.inputs)
    before = plan.microbatches
    num = rows.microbatches(wanted, before) if wanted.kind == "step" else 1
    inputs: Mapping[str, Cuts] = {"*": {}} if wanted.replicated else plan.inputs
    if num == 1:
        inputs = {name: _without_microbatches(cuts) for name, cuts in inputs.items()}
    plan = plan.changed(microbatches=num, inputs=inputs)
    if wanted.kind == "step" and num == before:
        return plan
    plan = plan.changed(sends=None, early_sums=None)  # of another order
    plan = plan.changed(recompute="cheap") if wanted.kind != "step" else plan
    if not plan.stages:
        return plan.changed(schedule="", order="", virtual_stages=0)
    kinds = "FBIW" if wanted.kind == "step" else "F"
    return plan.changed(schedule=f"part{CSV}", order=_part(first.schedule, kinds, num))


def varied(plan: Plan, first: Program) -> Plan:
    """Another plan for the first program's step, with the batch given to ranks as there."""
    as_there = kept(first)
    return plan.changed(inputs=as_there.inputs, batch=as_there.batch)


def kept(first: Program) -> Plan:
    """The first program's plan for another graph; what it does not read is whole on every rank."""
    plan, holders = Plan.parse(first.plan), Holders.of(first)
    params = {**plan.params, **{name: {} for name in holders.aside}}
    # With several stages on a rank the rank does not say which of them has a parameter.
    one_each = len(plan.stages) + 1 == first.mesh.pipeline_ranks
    homes = {n: at[0] for n, at in holders.places.items() if one_each and len(at) == 1}
    return plan.changed(params=params, notes=(), overlap_pieces=1, of_another=True, homes=homes)


def _part(order: str, kinds: str, num: int) -> str:
    """The actions of some kinds and of the first microbatches of a schedule, in its own order.

    Stages stay on their ranks, and what ran to its end with more actions does so with fewer.

    >>> _part("0F0,0F1,0B0,0B1\\n", "F", 1)
    '0F0\\n'
    """
    whole = read_csv(order)
    rows = (
        tuple(each for each in row if each.kind in kinds and each.microbatch < num)
        for row in whole.orders
    )
    return write_csv(replace(whole, orders=tuple(rows), microbatches=num))


def _without_microbatches(cuts: Cuts) -> Cuts:
    return {axis: layout for axis, layout in cuts.items() if axis != MICROBATCH_AXIS}
