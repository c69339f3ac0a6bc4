"""The choices that a partial plan leaves open: its entries are filters on all choices."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from partc.errors import PlanError
from partc.graph import value
from partc.passes.search.shardings.call_choices import CallChoices
from partc.passes.search.shardings.step_values import StepValues
from partc.passes.search.shardings.transfers import Bar, Transfers
from partc.plan import Cuts, Plan, fits
from partc.plan.batch import sequence_dim
from partc.plan.plan_values import PlannedLayout, planned_on, write_value
from partc.plan.sharding import Layout, Sharding, cut
from partc.rules import Strategy


@dataclass
class Pins:
    """The entries of a partial plan for one step; a table without entries leaves all open."""

    plan: Plan
    values: StepValues
    unbarred: Transfers
    ways: dict[Hashable, CallChoices] = field(default_factory=dict)
    barred: dict[Hashable, Transfers] = field(default_factory=dict)

    def allowed(self, node: fx.Node, ways: CallChoices, axes: tuple[str, ...]) -> CallChoices:
        """The choices of a call that agree with the plan; PlanError if there are none."""
        entry = self.plan.planned(self.values.names[node]) if self.plan.values else None
        wanted = {a: planned for a in axes if (planned := planned_on(entry, a)) is not None}
        if not wanted:
            return ways
        key = id(ways), tuple(wanted.items())
        if key not in self.ways:
            self.ways[key] = _only(node, ways, wanted, axes)
        return self.ways[key]

    def stored(self, name: str) -> Cuts | None:
        """The pinned stored layouts of a parameter by axis; None if the plan does not name it."""
        pinned = any(fits(pattern, name) for pattern in self.plan.params)
        return self.plan.stored(name) if pinned else None

    def input(self, name: str) -> Mapping[str, Layout]:
        """The layouts of an input by axis; none, for whole, for any other placeholder."""
        return self.plan.stored(name, self.plan.inputs)

    def gathers(self, node: fx.Node) -> bool:
        """Whether a value is a parameter that the plan all-gathers before use."""
        return value(node).kind == "param" and bool(self.plan.gather)

    def transfers(self, node: fx.Node) -> Transfers:
        """The transfers of a value between shardings that the plan allows; others cost inf."""
        known = value(node)
        if known.kind == "param":
            used = self.plan.planned(known.name) if self.plan.values else None
            if used is not None:
                return self._without(("used", known.name), _other_than(used))
            if self.plan.gather:
                return self._without("gather", _kept_cut(tuple(self.plan.gather)))
        elif self.plan.scatter and len(known.shape) > 2:
            return self._without(("scatter", known.shape), self._unscattered(known.shape))
        return self.unbarred

    def _without(self, key: Hashable, bar: Bar) -> Transfers:
        if key not in self.barred:
            self.barred[key] = self.unbarred.without(bar)
        return self.barred[key]

    def _unscattered(self, shape: tuple[int, ...]) -> Bar:
        """Bars transfers of a partial sum to another layout than ``plan.scatter`` asks for, on dims
        that the axis divides.
        """
        mesh = self.unbarred.mesh

        def bars(have: Sharding, want: Sharding, axis: str, said: int) -> bool:
            dim = sequence_dim(said, {layout.dim for a, layout in have.cuts() if a != axis})
            if have.on(axis).kind != "U" or dim >= len(shape) or shape[dim] % mesh.size(axis):
                return False
            return want.on(axis) not in (have.on(axis), cut(dim))

        def bar(have: Sharding, want: Sharding) -> bool:
            return any(bars(have, want, axis, dim) for axis, dim in self.plan.scatter.items())

        return bar


def _kept_cut(axes: tuple[str, ...]) -> Bar:
    """Bars reading a parameter's shard on ``axes`` that the plan all-gathers before use."""

    def bar(have: Sharding, want: Sharding) -> bool:
        return any(have.on(a).kind == "cut" and want.on(a).kind == "cut" for a in axes)

    return bar


def _other_than(used: Mapping[str, PlannedLayout]) -> Bar:
    """Bars reading a parameter in another layout than the plan says."""

    def bar(have: Sharding, want: Sharding) -> bool:
        if not used:
            return bool(want.layouts)
        return any(want.on(a) != planned.out for a, planned in used.items())

    return bar


def _only(
    node: fx.Node, ways: CallChoices, wanted: Mapping[str, PlannedLayout], axes: tuple[str, ...]
) -> CallChoices:
    """The choices whose layouts agree with ``wanted`` on every axis; PlanError if none does."""

    def as_wanted(chosen: Sequence[Strategy]) -> bool:
        by_axis = zip(axes, chosen, strict=True)
        return all(wanted[a].allows(s.ins, s.outs) for a, s in by_axis if a in wanted)

    keep = [i for i, chosen in enumerate(ways.strategies) if as_wanted(chosen)]
    if not keep:
        raise PlanError(
            where=f"plan, {value(node).module}",
            what=f"{node.name} cannot lie as {write_value(wanted)}",
            why=f"{value(node).shape} has no such strategy",
            do="Correct the entry in [values], or drop it.",
        )
    return ways.only(keep)
