"""The fastest shardings over ``tp`` for one size of ``tp``, beyond the presets' column and row.

All data axes and the microbatches are one axis here, ``dp``, which shards the batch as ``ddp``
does. Its transfers are not counted: they come once per step and overlap with computing. ``tp`` is
then searched for one shard of the batch; dims that shard the batch are left to ``dp``.
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
from partc.plan.batch import without_axes
from partc.plan.mesh import DP, TP, Mesh
from partc.plan.plan_values import PlannedLayout
from partc.plan.sharding import R, Sharding
from partc.rules import Strategy

T = TypeVar("T")

# Most cells of all tables: a count, not a time, so that a plan does not depend on the machine that
# searches it. With more cells the solver fixes some of the variables in turn.
MAX_CELLS = 3e7
# The fastest lifetime of gathered weights; the memory that they take is estimated later.
_LIFE: Life = "step"


@dataclass(frozen=True)
class TensorRanks:
    """The sizes that a search over ``tp`` depends on.

    ``mesh`` has ``tp`` and the machines. Data ranks times microbatches shard the batch of
    ``samples`` samples into ``pieces`` pieces.
    """

    mesh: Mesh
    pieces: int
    samples: int

    @property
    def num(self) -> int:
        """The size of ``tp``."""
        return self.mesh.size(TP)

    @property
    def layout(self) -> Mesh:
        """The mesh of the search: ``dp`` of all pieces, and ``tp``."""
        return Mesh(((DP, self.pieces), (TP, self.num)))


class TensorShardings:
    """The search over ``tp`` for a joint graph, which is not changed.

    ``pins`` is a partial plan whose entries are kept. Seconds are those of all calls and transfers
    of one piece of the batch, one after the other.
    """

    def __init__(self, graph: Graph, ranks: TensorRanks, pins: Plan) -> None:
        self.graph, _ = copy_graph(graph)
        self.graph.mesh = ranks.layout
        split_bias(self.graph)
        fuse_loss(self.graph)
        self.ranks, self.pins = ranks, _on_tensor_ranks(pins)
        transfers = Transfers(ranks.layout, ranks.mesh, counted=(TP,))
        device = ranks.mesh.hardware.device
        self.values = StepValues(self.graph, self.pins)
        self.ways = CallWays(self.graph, transfers, device, self.values.free)
        self.filters = _Apart(self.pins, self.values, transfers, samples=ranks.samples)
        self.data = Decided(self._by_data_ranks(), {})

    @cached_property
    def found(self) -> Solution:
        """The solver's answer: the fastest shardings."""
        return solve(self._best.problem, max_cells=MAX_CELLS, asked_cells=0)

    @property
    def how(self) -> How:
        """The method by which the shardings were found, such as ``exact``."""
        return self.found.how

    def seconds(self, word: str) -> float | None:
        """The seconds of a tensor preset's shardings; None if the preset gives a call a strategy
        that the search does not have.
        """
        wanted = self.pins.changed(preset=f"ddp+{word}")
        plan = complete(wanted, self.graph, self.ranks.layout, rows=False)
        made, stated = self._propagated(plan), plan.changed(scatter={}, values={})
        filters = _Taken(stated, self.values, self.ways.transfers, made=made)
        problem = self._problem(filters)
        return None if filters.unknown else solve(problem.problem, max_cells=MAX_CELLS).cost

    def entries(self) -> Plan:
        """The fastest shardings as a plan's entries, which name the axis ``tp`` alone."""
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
        """The plan in which ``dp`` alone shards values."""
        plan = self.pins.changed(preset="ddp", params={"*": {}}, values={}, gather={}, scatter={})
        return complete(plan, self.graph, self.ranks.layout, rows=False)

    def _by_data_ranks(self) -> Choices:
        """The strategy of every call on ``dp``."""
        found: Choices = {}
        for node, made in self._propagated(self._whole(), decomposed=True).items():
            if DP in made:
                found[node] = {DP: made[DP]}
        return found

    def _propagated(self, plan: Plan, decomposed: bool = False) -> Choices:
        """The strategies that propagation chooses for a plan, by the calls of this graph.

        A call that propagation decomposes has no entry, or with ``decomposed`` the strategy of its
        decomposition.
        """
        twin, twins = copy_graph(self.graph)
        made = propagate(twin, plan, warnings=[])
        left = set(twin.fx.nodes)
        found: Choices = {}
        for node in self.values.names:
            if twins[node] in left:
                found[node] = made.get(twins[node], {})
            elif decomposed:
                found[node] = self._decomposed(node, found)
        return found

    def _decomposed(self, node: fx.Node, before: Choices) -> dict[str, Strategy]:
        """The strategy on ``dp`` of a decomposed call, by the layout of its first operand."""
        first = before.get(tensor_args(node)[0], {}).get(DP)
        arrives = first.outs[0] if first else R
        ways = [each.strategy for each in self.ways.decompositions(node, DP)]
        chosen = next((strategy for strategy in ways if strategy.ins[0] == arrives), None)
        return {DP: chosen} if chosen else {}


def _moves_pieces(have: Sharding, want: Sharding) -> bool:
    """Whether a transfer would gather or move a shard over ``tp``."""
    return have.on(TP).kind == "cut" and want.on(TP) != have.on(TP)


def _on_tensor_ranks(pins: Plan) -> Plan:
    """The user's entries reduced to ``tp``; a parameter that they name keeps its layout."""
    values = {
        name: _only_tp(planned)
        for name, planned in pins.values.items()
        if TP in planned or not planned
    }
    return Plan(
        params={name: _only_tp(cuts) for name, cuts in pins.params.items()},
        inputs=without_axes(pins.inputs),
        values={name: planned or {TP: PlannedLayout()} for name, planned in values.items()},
        gather=_only_tp(pins.gather),
        scatter=_only_tp(pins.scatter),
        batch_norm=pins.batch_norm,
        random=pins.random,
    )


def _only_tp(table: Mapping[str, T]) -> dict[str, T]:
    return {TP: table[TP]} if TP in table else {}


@dataclass
class _Apart(Pins):
    """Pins that keep ``tp`` off the batch and off gradients' shards.

    The batch is left to data ranks and microbatches, of any number. A gradient stays in the layout
    in which it is made, as microbatches add to it before ranks exchange it.
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
        """Whether ``tp`` shards the dim that ``dp`` shards, and does so across samples."""
        sharding = self.unbarred.shardings[number]
        data, tensor = sharding.on(DP), sharding.on(TP)
        if not (data.kind == tensor.kind == "cut" and data.dim == tensor.dim):
            return False
        inside = tensor.outer > data.outer and tensor.outer // data.outer % self.samples == 0
        return not inside and tensor.outer >= data.outer


@dataclass
class _Taken(Pins):
    """Pins that leave each call only the strategy that a propagation chose.

    A decomposed call keeps all its choices. ``unknown`` are the calls without that choice.
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
