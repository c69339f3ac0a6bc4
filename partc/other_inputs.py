"""How the inputs of another batch are cut, by the cuts of a stage's first program.

In: the first program's plan, and the step of a batch of other shapes. Out: the plan with cuts for
these. Along which dim a batch is dealt out stays. What has blocks in it is found anew, as it was
found for the first program: targets ``i64[48]`` of 6 steps are cut as ``[0, 6]``, and ``i64[32]``
of 4 steps as ``[0, 4]``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from partc.errors import PlanError
from partc.passes.shard.find_batch import batch_of
from partc.plan import Cuts, Plan, fits
from partc.plan.batch import MODEL_AXES, layout_of
from partc.plan.mesh import MICROBATCH_AXIS
from partc.plan.plan_text import write_cuts
from partc.plan.sharding import Layout, R, cut
from partc.program import Program
from partc.program.step.other_shape import Shapes, other_blocks, rows_now
from partc.traced import Traced


def plan_for(
    step: Traced, plan: Plan, first: Program, now: Shapes, pinned: Collection[str]
) -> Plan:
    """The plan with cuts for inputs of these shapes, by name.

    ``pinned``: the entries of ``[inputs]`` that the script gave; they stay as they are. PlanError
    where ranks are given pieces, and it is not found how a piece is cut.
    """
    known = [name for name in now if name in first.inputs]
    tables = {name: plan.stored(name, plan.inputs) for name in known}
    before = {name: first.inputs[name][0] for name in known}
    other = _Other(plan, tables, before, {name: now[name] for name in known})
    new = other.found(step, [n for n in other.blocks() if not any(fits(p, n) for p in pinned)])
    return plan.changed(inputs={**plan.inputs, **{name: other.entry(name, new) for name in known}})


@dataclass(frozen=True)
class _Other:
    """The inputs that two batches have; ``tables``: their entries in the first program's plan."""

    plan: Plan
    tables: Mapping[str, Cuts]
    before: Shapes
    now: Shapes

    @property
    def layouts(self) -> dict[str, Layout]:
        """How samples are dealt out, to ranks or else in time."""
        return {
            name: samples if (samples := layout_of(table)) != R else table.get(MICROBATCH_AXIS, R)
            for name, table in self.tables.items()
        }

    def blocks(self) -> list[str]:
        return other_blocks(self.layouts, self.before, self.now)

    def found(self, step: Traced, names: Collection[str]) -> dict[str, Layout]:
        """The cuts of these inputs, where all others are cut as they were."""
        if not names:
            return {}
        had = self.layouts
        pins = {name: layout for name, layout in had.items() if name not in names}
        graph = step.graph(fold=not self.plan.names_blocks)
        found = batch_of(graph, pins)
        read = {name for name in names if graph.inputs[name].users}
        new = {name: found.batch[name] if found is not None else cut(0) for name in read}
        unread = {name: replace(had[name], outer=1) for name in names if name not in read}
        return unread | {name: self._dealt(name, had[name], new[name]) for name in read}

    def _dealt(self, name: str, had: Layout, new: Layout) -> Layout:
        """The new cut, which may deal out other pieces only where ranks have the whole batch."""
        if self.plan.batch == "global" or (new != R and new.dim == had.dim):
            return new
        if had.outer == 1:
            return had
        raise PlanError(
            where=f"input {name} {list(self.now[name])}",
            what="it is not found which part of it each rank is given",
            why=f"the first batch, {list(self.before[name])}, was cut in {had.outer} blocks "
            f"({write_cuts({'batch': had})}), and the model does not show those of this shape",
            do="Give it with the batch as a dim of its own, and flatten it in the loss; or compile "
            'with batch="global".',
        )

    def entry(self, name: str, new: Mapping[str, Layout]) -> Cuts:
        """The entry of an input: dims of one element are not cut."""
        table, shape, had = self.tables[name], self.now[name], self.layouts[name]
        cuts = {
            axis: new.get(name, had) if layout == had and _is_data(axis) else layout
            for axis, layout in table.items()
        }
        if had == R and self.plan.batch == "local":
            cuts |= self._grown(name)
        whole = [a for a, x in cuts.items() if x == R or (x.dim < len(shape) and shape[x.dim] == 1)]
        return {axis: layout for axis, layout in cuts.items() if axis not in whole}

    def _grown(self, name: str) -> Cuts:
        """The cuts of what was one row for all, and has a row for each of a rank's samples."""
        cut_now = {n: x for n, x in self.layouts.items() if x != R and x.dim < len(self.now[n])}
        rows = [(x.dim, self.now[n][x.dim]) for n, x in cut_now.items()]
        dim = rows_now(self.now[name], self.before[name], rows)
        axes = [a for a in self.tables[next(iter(cut_now))] if _is_data(a)] if cut_now else []
        return {} if dim is None else dict.fromkeys(axes, cut(dim))


def _is_data(axis: str) -> bool:
    """Whether samples are dealt out along an axis, to ranks or in time."""
    return axis not in MODEL_AXES or axis == MICROBATCH_AXIS
