"""The choices of a call: its strategies on one or more mesh axes, and the seconds of each."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from torch import fx

from partc.graph import Graph, literals, picked, results_of, tensor_args, value
from partc.machines.devices import Device
from partc.passes.search.shardings.call_costs import CallCost
from partc.passes.search.shardings.decompositions import DECOMPOSED, Decomposition, decompositions
from partc.passes.search.shardings.shared_copies import SharedCopies
from partc.passes.search.shardings.transfers import Transfers
from partc.passes.search.solver.problem import Costs
from partc.passes.shard.price import Choices
from partc.plan.sharding import Layout, R
from partc.rules import Strategy
from partc.rules.discover import strategies_for

_MOST_OUTERS = 6  # layouts with an outer factor that are tried for one value
_ROUNDS = 4  # most walks over the graph to spread these layouts


@dataclass(frozen=True, eq=False)
class CallChoices:
    """The choices of one call.

    ``strategies[choice]`` has one strategy per axis that is being decided. ``ins[operand][choice]``
    and ``outs[result][choice]`` are the numbers of shardings on all axes.
    """

    strategies: tuple[tuple[Strategy, ...], ...]
    ins: tuple[tuple[int, ...], ...]
    outs: tuple[tuple[int, ...], ...]
    seconds: Costs
    labels: tuple[str, ...]

    def only(self, keep: Sequence[int]) -> CallChoices:
        """The choices with the indices ``keep`` alone."""
        return CallChoices(
            strategies=tuple(self.strategies[i] for i in keep),
            ins=tuple(tuple(side[i] for i in keep) for side in self.ins),
            outs=tuple(tuple(side[i] for i in keep) for side in self.outs),
            seconds=np.array([self.seconds[i] for i in keep]),
            labels=tuple(self.labels[i] for i in keep),
        )


@dataclass
class CallWays:
    """The choices of all calls of one graph; equal calls are looked at once.

    ``free`` are the values that are whole on every rank, so that slicing them costs nothing.
    """

    graph: Graph
    transfers: Transfers
    device: Device
    free: frozenset[fx.Node] = frozenset()
    kinds: dict[fx.Node, int] = field(default_factory=dict)  # equal calls have equal numbers
    known: dict[Hashable, int] = field(default_factory=dict)
    costs: dict[int, CallCost] = field(default_factory=dict)
    wishes: dict[int, dict[fx.Node, tuple[Layout, ...]]] = field(default_factory=dict)  # by size
    by_axis: dict[Hashable, list[Strategy]] = field(default_factory=dict)
    decomposed: dict[Hashable, list[Decomposition]] = field(default_factory=dict)
    made: dict[Hashable, CallChoices] = field(default_factory=dict)
    tables: dict[Hashable, Costs] = field(default_factory=dict)  # of problems built of these ways
    shared: dict[Hashable, SharedCopies] = field(default_factory=dict)
    part: float = 1.0  # the share of every call's time that counts
    share: float = 1.0  # the share of every call's work that other axes leave

    def __post_init__(self) -> None:
        for node in () if self.kinds else self.graph.calls():
            if node.target is not operator.getitem:
                kind = self.known.setdefault(_circumstances(node), len(self.known))
                self.kinds[node] = kind
                if kind not in self.costs:
                    self.costs[kind] = CallCost.of(node)

    def shrunk(self, share: float, part: float) -> CallWays:
        """The same with ``share`` of every call's work, and ``part`` of the time of that work."""
        costs = {kind: cost.shrunk(share) for kind, cost in self.costs.items()}
        return replace(self, costs=costs, decomposed={}, made={}, part=part, share=share)

    def of(self, node: fx.Node, axes: Sequence[str], fixed: Choices) -> CallChoices:
        """The choices of a call on ``axes``, given its strategies on the other axes."""
        others = {a: s for a, s in fixed.get(node, {}).items() if a not in axes}
        sizes = tuple(self.transfers.mesh.size(axis) for axis in axes)
        wished = tuple(self._wished(node, size) for size in sizes)
        key = self.kinds[node], tuple(axes), tuple(sorted(others.items(), key=_name)), wished
        if key not in self.made:
            options = [self._on_axis(node, a, w) for a, w in zip(axes, wished, strict=True)]
            self.made[key] = self._combined(node, axes, options, others)
        return self.made[key]

    def _combined(
        self,
        node: fx.Node,
        axes: Sequence[str],
        options: Sequence[Sequence[Strategy]],
        others: Mapping[str, Strategy],
    ) -> CallChoices:
        """The combinations of one strategy per axis that divide all operands and results."""
        shapes = [value(o).shape for o in tensor_args(node)]
        results = [None if r is None else tuple(r.shape) for r in results_of(node)]
        rows = []
        # All axes at once, not axis by axis: two axes may each divide a dim and not both together,
        # and the work that one leaves is what the other divides.
        for chosen in product(*options):
            every = {**others, **dict(zip(axes, chosen, strict=True))}
            ins = [self._number(every, i, "ins") for i in range(len(shapes))]
            outs = [self._number(every, i, "outs") for i in range(len(results))]
            pairs = [*zip(shapes, ins, strict=True), *zip(results, outs, strict=True)]
            if all(s is None or self.transfers.fits(s, n) for s, n in pairs):
                seconds = self._seconds(node, every, ins, outs)
                rows.append((chosen, ins, outs, seconds, _label(axes, chosen)))
        return CallChoices(
            strategies=tuple(row[0] for row in rows),
            ins=tuple(tuple(row[1][i] for row in rows) for i in range(len(shapes))),
            outs=tuple(tuple(row[2][i] for row in rows) for i in range(len(results))),
            seconds=np.array([row[3] for row in rows], np.float64),
            labels=tuple(row[4] for row in rows),
        )

    def stored(
        self,
        shape: tuple[int, ...],
        axes: Sequence[str],
        options: Sequence[Sequence[Layout]],
        others: Mapping[str, Layout],
    ) -> CallChoices:
        """The choices to store a parameter: combinations of ``options`` that divide its shape."""
        key = "stored", shape, tuple(axes), tuple(map(tuple, options)), tuple(others.items())
        if key not in self.made:
            combined = ({**others, **dict(zip(axes, c, strict=True))} for c in product(*options))
            fitting = [
                n for n in map(self.transfers.number, combined) if self.transfers.fits(shape, n)
            ]
            self.made[key] = fixed_ways(fitting, self.transfers)
        return self.made[key]

    def placed(self, layouts: Mapping[str, Layout]) -> CallChoices:
        """The one choice of a placeholder whose layouts are given."""
        key = "placed", tuple(layouts.items())
        if key not in self.made:
            self.made[key] = fixed_ways([self.transfers.number(layouts)], self.transfers)
        return self.made[key]

    def _number(self, every: Mapping[str, Strategy], position: int, side: str) -> int:
        return self.transfers.number({a: getattr(s, side)[position] for a, s in every.items()})

    def _seconds(
        self, node: fx.Node, every: Mapping[str, Strategy], ins: list[int], outs: list[int]
    ) -> float:
        """The call's seconds; of a decomposed call, those of the decomposition, at its slowest
        axis.
        """
        times = []
        for axis, strategy in every.items():
            if strategy.variant == DECOMPOSED:
                others = {a: s.outs[0] for a, s in every.items() if a != axis}
                inside = (d for d in self.decompositions(node, axis) if d.strategy == strategy)
                share = self.share * self.transfers.share(self.transfers.number(others))
                times.append(next(inside).seconds(share, self.transfers, self.device))
        own = self.costs[self.kinds[node]].seconds(ins, outs, self.transfers, self.device)
        return self.part * max(times, default=own)

    def _on_axis(
        self, node: fx.Node, axis: str, wished: tuple[tuple[int, Layout], ...]
    ) -> list[Strategy]:
        """The strategies on one axis: replicated, the sharding rules', and decompositions."""
        known = self.strategies(node, axis, wished)
        whole = Strategy((R,) * len(tensor_args(node)), (R,) * len(results_of(node)))
        return [whole, *known, *(d.strategy for d in self.decompositions(node, axis))]

    def decompositions(self, node: fx.Node, axis: str) -> list[Decomposition]:
        """The decompositions of a call on an axis."""
        key = self.kinds[node], axis
        if key not in self.decomposed:
            known = self.strategies(node, axis, ())
            self.decomposed[key] = decompositions(node, axis, known, self.transfers)
        return self.decomposed[key]

    def strategies(
        self, node: fx.Node, axis: str, wished: tuple[tuple[int, Layout], ...]
    ) -> list[Strategy]:
        """The sharding rules' strategies of a call on one axis, for the ``wished`` layouts too."""
        return self._by_size(node, self.transfers.mesh.size(axis), wished)

    def _by_size(
        self, node: fx.Node, num: int, wished: tuple[tuple[int, Layout], ...]
    ) -> list[Strategy]:
        key = self.kinds[node], num, wished
        if key not in self.by_axis:
            self.by_axis[key] = strategies_for(node, num, wished)
        return self.by_axis[key]

    # layouts with an outer factor: dim 1 of [2, 8] is, behind a view to [16], dim 0 with outer=2 --
    def outers(self, node: fx.Node, num: int) -> tuple[Layout, ...]:
        """The layouts with an outer factor that calls around a value can make or read."""
        if num not in self.wishes:
            self.wishes[num] = self._spread(num)
        return self.wishes[num].get(node, ())

    def _wished(self, node: fx.Node, num: int) -> tuple[tuple[int, Layout], ...]:
        if num not in self.wishes:
            self.wishes[num] = self._spread(num)
        return _positions(node, self.wishes[num])

    def _spread(self, num: int) -> dict[fx.Node, tuple[Layout, ...]]:
        """Spread layouts with an outer factor along the graph, forward and backward in turn, from
        the views that make them.
        """
        wishes: dict[fx.Node, tuple[Layout, ...]] = {}
        calls = list(self.kinds)
        for turn in range(_ROUNDS):
            before = sum(map(len, wishes.values()))
            for node in reversed(calls) if turn % 2 else calls:
                for strategy in self._by_size(node, num, _positions(node, wishes)):
                    self._wish(node, strategy, wishes)
            if turn and sum(map(len, wishes.values())) == before:
                break
        return wishes

    def _wish(
        self, node: fx.Node, strategy: Strategy, wishes: dict[fx.Node, tuple[Layout, ...]]
    ) -> None:
        pairs = [*zip(tensor_args(node), strategy.ins, strict=True)]
        pairs += [(r, strategy.outs[i]) for i, r in _result_nodes(node)]
        for at, layout in pairs:
            have = wishes.get(at, ())
            new = layout.outer > 1 and at not in self.free and layout not in have
            if new and len(have) < _MOST_OUTERS:
                wishes[at] = tuple(sorted((*have, layout)))


def fixed_ways(numbers: Sequence[int], transfers: Transfers) -> CallChoices:
    """The choices between shardings of a placeholder, which cost nothing by themselves."""
    labels = tuple(map(transfers.label, numbers))
    return CallChoices((), (), (tuple(numbers),), np.zeros(len(numbers)), labels)


def _circumstances(node: fx.Node) -> Hashable:
    """A key of all that the choices of a call depend on: equal calls have equal keys."""
    operands = tuple((value(o).shape, value(o).dtype) for o in tensor_args(node))
    results = tuple(None if r is None else (tuple(r.shape), r.dtype) for r in results_of(node))
    return node.target, literals(node), operands, results


def _positions(
    node: fx.Node, wishes: Mapping[fx.Node, tuple[Layout, ...]]
) -> tuple[tuple[int, Layout], ...]:
    """The wished layouts of a call's operands and results as (position, layout) pairs."""
    operands = tensor_args(node)
    at = [*enumerate(operands), *((len(operands) + i, r) for i, r in _result_nodes(node))]
    return tuple((i, layout) for i, n in at for layout in wishes.get(n, ()))


def _result_nodes(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """(number, node) of each result: the call itself, or the getitem nodes of its results."""
    picks = [u for u in node.users if u.target is operator.getitem]
    return [(picked(u)[1], u) for u in picks] or [(0, node)]


def _name(pair: tuple[str, Strategy]) -> str:
    return pair[0]


def _label(axes: Sequence[str], chosen: Sequence[Strategy]) -> str:
    return "; ".join(f"{axis} {strategy}" for axis, strategy in zip(axes, chosen, strict=True))
