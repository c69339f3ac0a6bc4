"""What a partial plan leaves of the choices: its entries are filters on them."""

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
from partc.plan.plan_values import Lies, lies_on, write_value
from partc.plan.sharding import Layout, Sharding, cut
from partc.rules import Strategy


@dataclass
class Pins:
    """A plan's entries for one step. A table that the plan does not name leaves all open."""

    plan: Plan
    values: StepValues
    lies: Transfers
    ways: dict[Hashable, CallChoices] = field(default_factory=dict)
    barred: dict[Hashable, Transfers] = field(default_factory=dict)

    def allowed(self, node: fx.Node, ways: CallChoices, axes: tuple[str, ...]) -> CallChoices:
        """The ways of a call that do as the plan says; PlanError if there are none."""
        entry = self.plan.lies(self.values.names[node]) if self.plan.values else None
        wanted = {a: lies for a in axes if (lies := lies_on(entry, a)) is not None}
        if not wanted:
            return ways
        key = id(ways), tuple(wanted.items())
        if key not in self.ways:
            self.ways[key] = _only(node, ways, wanted, axes)
        return self.ways[key]

    def stored(self, name: str) -> Cuts | None:
        """How a parameter is stored, None if that is open."""
        pinned = any(fits(pattern, name) for pattern in self.plan.params)
        return self.plan.stored(name) if pinned else None

    def input(self, name: str) -> Mapping[str, Layout]:
        """How an input is cut; others than inputs lie whole."""
        return self.plan.stored(name, self.plan.inputs)

    def gathers(self, node: fx.Node) -> bool:
        """Whether the plan says that a parameter is gathered before use."""
        return value(node).kind == "param" and bool(self.plan.gather)

    def transfers(self, node: fx.Node) -> Transfers:
        """The ways from one layout of a value to another that the plan allows."""
        known = value(node)
        if known.kind == "param":
            used = self.plan.lies(known.name) if self.plan.values else None
            if used is not None:
                return self._without(("used", known.name), _other_than(used))
            if self.plan.gather:
                return self._without("gather", _kept_cut(tuple(self.plan.gather)))
        elif self.plan.scatter and len(known.shape) > 2:
            return self._without(("scatter", known.shape), self._unscattered(known.shape))
        return self.lies

    def _without(self, key: Hashable, bar: Bar) -> Transfers:
        if key not in self.barred:
            self.barred[key] = self.lies.without(bar)
        return self.barred[key]

    def _unscattered(self, shape: tuple[int, ...]) -> Bar:
        """Sums that do not end in the cut that the plan scatters them to, where that divides."""
        mesh = self.lies.mesh
        wanted = {
            axis: cut(dim)
            for axis, dim in self.plan.scatter.items()
            if dim < len(shape) and shape[dim] % mesh.size(axis) == 0
        }

        def bar(have: Sharding, want: Sharding) -> bool:
            return any(
                have.on(axis).kind == "U" and want.on(axis) not in (have.on(axis), layout)
                for axis, layout in wanted.items()
            )

        return bar


def _kept_cut(axes: tuple[str, ...]) -> Bar:
    """A parameter that is read as it is stored, though it is gathered before use."""

    def bar(have: Sharding, want: Sharding) -> bool:
        return any(have.on(a).kind == "cut" and want.on(a).kind == "cut" for a in axes)

    return bar


def _other_than(used: Mapping[str, Lies]) -> Bar:
    """A parameter that is read in another layout than the plan says."""

    def bar(have: Sharding, want: Sharding) -> bool:
        if not used:
            return bool(want.layouts)
        return any(want.on(a) != lies.out for a, lies in used.items())

    return bar


def _only(
    node: fx.Node, ways: CallChoices, wanted: Mapping[str, Lies], axes: tuple[str, ...]
) -> CallChoices:
    """The choices in which every axis lies as wanted."""

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
