"""The best shardings over ``tp`` for one size: what no preset's words can say.

The data axes are one axis here, ``dp``, of all pieces of the batch: data ranks times microbatches.
It lies as ``ddp`` has it, and its transfers, which come once per step and beside computing, are not
counted. ``tp`` is then decided exactly for one piece, with what cuts the batch left to ``dp``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from torch import fx

from partc.graph import Graph, tensor_args
from partc.passes.search.shardings.call_choices import CallChoices, CallWays
from partc.passes.search.shardings.decided import Decided, Life
from partc.passes.search.shardings.decode import copy_graph, entries_on
from partc.passes.search.shardings.pins import Pins
from partc.passes.search.shardings.sharding_problem import ShardingProblem
from partc.passes.search.shardings.step_values import StepValues
from partc.passes.search.shardings.transfers import Transfers
from partc.passes.search.solver.solve import How, Solution, solve
from partc.passes.shard.apply_preset import complete
from partc.passes.shard.fuse_loss import fuse_loss
from partc.passes.shard.price import Choices
from partc.passes.shard.propagate import propagate, whole_strategy
from partc.passes.shard.split_bias import split_bias
from partc.plan import Plan
from partc.plan.mesh import DP, TP, Mesh
from partc.plan.plan_values import Lies
from partc.plan.sharding import R, Sharding
from partc.rules import Strategy

T = TypeVar("T")

# Cells of all tables, at most: counted, so that plans do not depend on the machine that makes them.
# Beyond it a part of the variables is fixed and solved for in turns.
MAX_CELLS = 3e7
# No other lifetime of gathered weights is faster; what it holds is estimated later.
_LIFE: Life = "step"


@dataclass(frozen=True)
class TensorRanks:
    """What the search for shardings over ``tp`` depends on: ``tp`` of ``mesh``, whose machines tell
    how long transfers take, and into how many ``pieces`` data ranks and microbatches cut the batch
    of so many ``samples``.
    """

    mesh: Mesh
    pieces: int
    samples: int

    @property
    def num(self) -> int:
        return self.mesh.size(TP)

    @property
    def layout(self) -> Mesh:
        """The axes that values are laid out on."""
        return Mesh(((DP, self.pieces), (TP, self.num)))


class TensorShardings:
    """The shardings over ``tp`` of a joint graph, which stays as it is; ``pins`` are a plan's
    entries to keep. Times are of the calls and transfers of one piece, one after the other.
    """

    def __init__(self, graph: Graph, ranks: TensorRanks, pins: Plan) -> None:
        self.graph, _ = copy_graph(graph)
        self.graph.mesh = ranks.layout
        split_bias(self.graph)
        fuse_loss(self.graph)
        self.ranks, self.pins = ranks, _on_tensor_ranks(pins)
        lies = Transfers(ranks.layout, ranks.mesh, counted=(TP,))
        device = ranks.mesh.hardware.device
        self.values = StepValues(self.graph, self.pins)
        self.ways = CallWays(self.graph, lies, device, self.values.free)
        self.filters = _Apart(self.pins, self.values, lies, samples=ranks.samples)
        self.data = Decided(self._by_data_ranks(), {})

    @cached_property
    def found(self) -> Solution:
        """The fastest."""
        return solve(self._best.problem, max_cells=MAX_CELLS, asked_cells=0)

    @property
    def how(self) -> How:
        return self.found.how

    def seconds(self, word: str) -> float | None:
        """What a tensor preset's shardings take; None where it lays out a call in a way that the
        search does not know.
        """
        wanted = self.pins.changed(preset=f"ddp+{word}")
        plan = complete(wanted, self.graph, self.ranks.layout, rows=False)
        made, stated = self._propagated(plan), plan.changed(scatter={}, values={})
        filters = _Taken(stated, self.values, self.ways.lies, made=made)
        problem = self._problem(filters)
        return None if filters.unknown else solve(problem.problem, max_cells=MAX_CELLS).cost

    def entries(self) -> Plan:
        """The fastest as entries of a plan that speak of ``tp`` alone."""
        decided = self._best.decode(self.found.assignment)
        plan = entries_on(TP, decided, self.values, self._whole(), _LIFE)
        return self.pins.changed(
            params=plan.params, values=plan.values, gather=_only_tp(plan.gather),
            scatter=_only_tp(plan.scatter),
        )  # fmt: skip

    @cached_property
    def _best(self) -> ShardingProblem:
        return self._problem(self.filters)

    def _problem(self, filters: Pins) -> ShardingProblem:
        return ShardingProblem(self.values, self.ways, filters, (TP,), self.data, _LIFE)

    def _whole(self) -> Plan:
        """The plan in which only data ranks cut anything."""
        plan = self.pins.changed(preset="ddp", params={"*": {}}, values={}, gather={}, scatter={})
        return complete(plan, self.graph, self.ranks.layout, rows=False)

    def _by_data_ranks(self) -> Choices:
        """How every call is cut over data ranks."""
        found: Choices = {}
        for node, made in self._propagated(self._whole(), opened=True).items():
            if DP in made:
                found[node] = {DP: made[DP]}
        return found

    def _propagated(self, plan: Plan, opened: bool = False) -> Choices:
        """What propagation makes of a plan, by the calls of this graph; of those that it has
        ``opened`` by which strategy, or nothing.
        """
        twin, twins = copy_graph(self.graph)
        made = propagate(twin, plan, warnings=[])
        left = set(twin.fx.nodes)
        found: Choices = {}
        for node in self.values.names:
            if twins[node] in left:
                found[node] = made.get(twins[node], {})
            elif opened:
                found[node] = self._opened(node, found)
        return found

    def _opened(self, node: fx.Node, before: Choices) -> dict[str, Strategy]:
        """The strategy of a call that data ranks open, by how its first operand arrives."""
        first = before.get(tensor_args(node)[0], {}).get(DP)
        arrives = first.outs[0] if first else R
        ways = [opening.strategy for opening in self.ways.openings(node, DP)]
        chosen = next((strategy for strategy in ways if strategy.ins[0] == arrives), None)
        return {DP: chosen} if chosen else {}


def _moves_pieces(have: Sharding, want: Sharding) -> bool:
    """Whether a piece would be gathered or sent."""
    return have.on(TP).kind == "cut" and want.on(TP) != have.on(TP)


def _on_tensor_ranks(pins: Plan) -> Plan:
    """What a user's entries say of ``tp``; a parameter that they name lies as they say."""
    inputs = {name: _only_tp(cuts) for name, cuts in pins.inputs.items() if TP in cuts}
    values = {name: _only_tp(lies) for name, lies in pins.values.items() if TP in lies or not lies}
    return Plan(
        params={name: _only_tp(cuts) for name, cuts in pins.params.items()},
        inputs=inputs,
        values={name: lies or {TP: Lies()} for name, lies in values.items()},
        gather=_only_tp(pins.gather),
        scatter=_only_tp(pins.scatter),
        batch_norm=pins.batch_norm,
    )


def _only_tp(table: Mapping[str, T]) -> dict[str, T]:
    return {TP: table[TP]} if TP in table else {}


@dataclass
class _Apart(Pins):
    """Leaves samples to data ranks and microbatches, however many these are, and gradients as they
    are made: microbatches add to them before anything but a sum is done.
    """

    samples: int = 1
    apart: dict[int, CallChoices] = field(default_factory=dict)

    def allowed(self, node: fx.Node, ways: CallChoices, axes: tuple[str, ...]) -> CallChoices:
        pinned = super().allowed(node, ways, axes)
        if id(pinned) not in self.apart:
            sides = (*pinned.ins, *pinned.outs)
            choices = enumerate(zip(*sides, strict=True))
            keep = [i for i, numbers in choices if not any(map(self._cuts_samples, numbers))]
            self.apart[id(pinned)] = pinned.only(keep) if keep else pinned
        return self.apart[id(pinned)]

    def transfers(self, node: fx.Node) -> Transfers:
        if node in self.gradients:
            return self._without("gradient", _moves_pieces)
        return super().transfers(node)

    @cached_property
    def gradients(self) -> frozenset[fx.Node]:
        return frozenset(self.values.graph.grads.values())

    def _cuts_samples(self, number: int) -> bool:
        """Whether tensor ranks cut the dim that data ranks cut, and not inside of each sample."""
        sharding = self.lies.shardings[number]
        data, tensor = sharding.on(DP), sharding.on(TP)
        if not (data.kind == tensor.kind == "cut" and data.dim == tensor.dim):
            return False
        inside = tensor.outer > data.outer and tensor.outer // data.outer % self.samples == 0
        return not inside and tensor.outer >= data.outer


@dataclass
class _Taken(Pins):
    """Leaves each call the one way that a propagation took, and all where it opened the call;
    ``unknown`` are those that the search has no such way for.
    """

    made: Choices = field(default_factory=dict)
    taken: dict[Hashable, CallChoices] = field(default_factory=dict)
    unknown: list[fx.Node] = field(default_factory=list)

    def allowed(self, node: fx.Node, ways: CallChoices, axes: tuple[str, ...]) -> CallChoices:
        if node not in self.made:
            return ways
        strategy = (self.made[node].get(TP, whole_strategy(node)),)
        if strategy not in ways.strategies:
            self.unknown.append(node)
            return ways
        number = ways.strategies.index(strategy)
        return self.taken.setdefault((id(ways), number), ways.only([number]))
