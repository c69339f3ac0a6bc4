"""Choose the sharding of every value, given the shardings of parameters and inputs.

Mesh axis by mesh axis, in order of execution, each call takes the cheapest strategy of its sharding
rule: network bytes to reshard its operands, network bytes to finish its result's partial sum, and a
share of the bytes that each rank reads and writes. Shardings spread from parameters and inputs, or
from a value that the plan names; a replicated value is not sharded without such a cause. Calls that
one parameter's gradient alone needs come last, since they may read copies gathered for other calls.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import fx

from partc.errors import PlanError
from partc.graph import (
    Graph,
    is_weight,
    literals,
    op_word,
    picked,
    results_of,
    tensor_args,
    update,
    value,
)
from partc.graph.draws import draws_numbers
from partc.graph.given_back import is_given_back
from partc.graph.input_only import input_only
from partc.passes.shard.cut_given import cut_given
from partc.passes.shard.decompose_ops import decompose_op, decomposes
from partc.passes.shard.local_batch_norm import of_each_microbatch
from partc.passes.shard.open_numbers import adds_number, open_number
from partc.passes.shard.pieces_first import PiecesFirst
from partc.passes.shard.price import Choices, Prices
from partc.passes.shard.results import own_rows, rows_told
from partc.passes.shard.value_names import value_names
from partc.passes.shard.zeros import is_zero
from partc.plan import Plan
from partc.plan.batch import DATA_AXES
from partc.plan.mesh import MICROBATCH_AXIS
from partc.plan.plan_values import PlannedLayout, planned_on, write_value
from partc.plan.sharding import Layout, R, Sharding, U
from partc.rules import Strategy
from partc.rules.discover import strategies_for
from partc.rules.local_batch_norm import local_batch_norm
from partc.rules.rows import alike, rows_known
from partc.rules.table import name_of

aten = torch.ops.aten

Pins = dict[fx.Node, Mapping[str, PlannedLayout]]  # what the plan asks for: call -> axis -> layout


def propagate(
    graph: Graph, plan: Plan, *, strict: bool = False, warnings: list[str] | None = None
) -> Choices:
    """Choose a strategy for every call; write each node's sharding and return the choices.

    An op without a rule, for which discovery finds none either, is replicated on every rank, with a
    line in ``warnings``; with ``strict`` it is a RuleError. An op whose operand is sharded where no
    strategy allows it (softmax over a sharded vocabulary, batch statistics of a sharded batch) is
    decomposed into ops that allow it. PlanError if a call cannot be as the plan says.
    """
    while True:  # a decomposition adds calls that every axis has to decide: begin again
        choices: Choices = {}
        decomposed = False
        pins = pinned(graph, plan)
        for axis in _in_turn(graph.mesh.names):
            walk = AxisWalk(graph, plan, axis, choices, strict, warnings, pins)
            decomposed |= walk.run()
        if not decomposed:
            cut_given(graph, plan, choices)
            write_shardings(graph, plan, choices)
            return choices


def _in_turn(names: Sequence[str]) -> list[str]:
    """The axes in the order in which they are decided: data axes, microbatches, then the others.

    Tensor axes may shard samples or another dim; after the microbatches they see how few samples
    are left in one.
    """
    axes = [axis for axis in names if axis != MICROBATCH_AXIS]
    data = len(list(takewhile(DATA_AXES.__contains__, axes)))
    return [*axes[:data], *([MICROBATCH_AXIS] if MICROBATCH_AXIS in names else []), *axes[data:]]


def pinned(graph: Graph, plan: Plan) -> Pins:
    """Per call that the plan names in ``[values]`` its layouts by axis."""
    if not plan.values:
        return {}
    found = {node: plan.planned(name) for node, name in value_names(graph).items()}
    return {node: planned for node, planned in found.items() if planned is not None}


class OwnOrderFailsError(Exception):
    """On this axis a call needs whole rows that each rank has sorted by itself (``permuted``)."""


@dataclass
class AxisWalk:
    """One walk over the graph, which chooses every call's strategy on one mesh axis.

    ``made`` has the layouts in which each value exists so far, the produced one first. ``decided``
    has the strategies chosen so far, which equal calls take again. ``own_orders`` says whether a
    rank may sort its shard of the rows alone.
    """

    graph: Graph
    plan: Plan
    axis: str
    choices: Choices
    strict: bool
    warnings: list[str] | None
    pins: Pins = field(default_factory=dict)
    made: dict[fx.Node, list[Layout]] = field(default_factory=dict)
    decided: dict[Hashable, Strategy] = field(default_factory=dict)
    input_only: set[fx.Node] = field(default_factory=set)  # on the axis of microbatches
    own_orders: bool = True
    decomposed: bool = False

    def __post_init__(self) -> None:
        self.prices = Prices(self.graph, self.plan, self.axis, self.choices, self.made)
        self.input_only = input_only(self.graph) if self.axis == MICROBATCH_AXIS else set()

    def run(self) -> bool:
        """Choose all strategies; True if an op was decomposed, so that all axes must be walked
        again.
        """
        try:
            # Weight gradients alone come last: they may read copies that other calls have gathered.
            self._walk(self.prices.one_grad)
            self._walk(set())
        except OwnOrderFailsError:
            self._forget()
            return self.run()
        if not self.decomposed:
            PiecesFirst(
                self.graph, self.axis, self.choices, self.made, self.prices,
                {*self.pins, *self.input_only}, self._take,
            ).run()  # fmt: skip
        return self.decomposed

    def _forget(self) -> None:
        """Drop this axis's choices and allow only sorts of all rows together."""
        self.own_orders = False
        self.made.clear()
        self.decided.clear()
        for chosen in self.choices.values():
            chosen.pop(self.axis, None)

    def _walk(self, later: set[fx.Node]) -> None:
        """Decide the calls in order of execution, without those in ``later`` and decided ones."""
        node = next(iter(self.graph.fx.nodes))
        while node.op != "output":
            if node in later or node in self.made:
                pass
            elif node.op == "placeholder":
                self.made[node] = [placed(node, self.plan).on(self.axis)]
                self._at_hand_too(node)
            elif node.target is operator.getitem:
                call, index = picked(node)
                self.made[node] = [self._produced(call)[index]]
                self._at_hand_too(node)
            elif node.op == "call_function":
                best = self.choose(node)
                if decomposes(node) and self._pin(node) is None and self._gathers(node, best):
                    node, self.decomposed = decompose_op(self.graph, node), True
                    continue
                if adds_number(node) and self._needs_all_microbatches(node, best):
                    node, self.decomposed = open_number(node), True
                    continue
                self._take(node, best)
                self._at_hand_too(node)
            node = node.next

    def _at_hand_too(self, node: fx.Node) -> None:
        """Add to ``made`` the layouts that cost no transfer: the one that the plan moves the value
        to, on ``mb`` the whole batch of an input-only value, and zeros as a sum of zeros.
        """
        planned = self._pin(node)
        if planned is not None and planned.then is not None:
            self.made[node].append(planned.then)
        if node in self.input_only and R not in self.made[node]:
            self.made[node].append(R)
        if is_zero(node):
            self.made[node].append(U)  # zeros are the sum of zeros

    def _produced(self, node: fx.Node) -> tuple[Layout, ...]:
        """The layouts of a call's results."""
        chosen = self.choices.get(node, {}).get(self.axis)
        return chosen.outs if chosen else (R,) * len(results_of(node))

    def _take(self, node: fx.Node, best: Strategy) -> None:
        if any(layout != R for layout in (*best.ins, *best.outs)):
            self.choices.setdefault(node, {})[self.axis] = best
        self.made[node] = [best.outs[0] if best.outs else R]
        for operand, layout in zip(tensor_args(node), best.ins, strict=True):
            if layout not in self.made[operand]:
                self.made[operand].append(layout)

    def choose(self, node: fx.Node) -> Strategy:
        """The strategy of one call: pinned by the plan, local batch norm, else the cheapest."""
        operands = tensor_args(node)
        whole = whole_strategy(node)
        planned = self._pin(node)
        if planned is not None:
            return self.as_pinned(node, planned)
        if is_given_back(node):
            return self._as_results_lie(operands)
        if self.plan.random == "single-device" and draws_numbers(node):
            return whole  # also where it reads values: they are gathered
        if all(self.made[o] == [R] for o in operands) and self.prices.final.get(node, R) == R:
            return whole  # nothing is cut here, and cuts do not appear by themselves
        if self.plan.batch_norm == "local":
            kept = of_each_microbatch if self.axis == MICROBATCH_AXIS else local_batch_norm
            local = kept(node, self.made[operands[0]][0])
            if local is not None:
                return local
        key = self._circumstances(node, operands)
        if key not in self.decided:
            self.decided[key] = self._cheapest(node, operands, whole)
        return self.decided[key]

    def _as_results_lie(self, operands: Sequence[fx.Node]) -> Strategy:
        """What the script gives back lies as what it is given: whole, but for a rank's own rows."""
        own = self.axis in own_rows(self.graph, self.plan)
        lies = tuple(self._own_rows(o) if own else R for o in operands)
        return Strategy(lies, lies)

    def _own_rows(self, result: fx.Node) -> Layout:
        have, told = self.made[result][0], rows_told(result, self.graph)
        if told is not None:
            return told
        return have if have.kind == "cut" else R

    def _cheapest(self, node: fx.Node, operands: list[fx.Node], whole: Strategy) -> Strategy:
        """The strategy with the least price, of equal ones the first; ``whole`` if none has one."""
        seen = [
            (i, layout) for i, o in enumerate(operands) for layout in self.made[o] if layout != R
        ]
        known = strategies_for(
            node, self.prices.num, seen, strict=self.strict, warnings=self.warnings
        )
        options = [whole, *known]
        if not self.own_orders:
            options = [s for s in options if not any(out.permuted for out in s.outs)]
        if is_zero(node) and not any(layout.kind == "cut" for _, layout in seen):
            options = [s for s in options if s.outs == (R,)]  # any piece of zeros is at hand then
        if node in self.input_only:  # a mask or position is at hand whole: no need of a partial sum
            options = [s for s in options if not any(out.kind in "UM" for out in s.outs)]
        priced = [
            (cost, i)
            for i, s in enumerate(options)
            if (cost := self.prices.price(node, operands, s)) is not None
        ]
        if not priced and any(have.permuted for o in operands for have in self.made[o]):
            raise OwnOrderFailsError
        return options[min(priced)[1]] if priced else whole

    def as_pinned(self, node: fx.Node, planned: PlannedLayout) -> Strategy:
        """The cheapest strategy with the plan's layouts ``planned``; PlanError if there is none."""
        operands, own = tensor_args(node), len(tensor_args(node))
        at = [(i if planned.ins else own, layout) for i, layout in planned.layouts]
        known = strategies_for(node, self.prices.num, at, strict=self.strict)
        options = [s for s in (whole_strategy(node), *known) if planned.allows(s.ins, s.outs)]
        if not options:
            possible = [s.outs[0] for s in strategies_for(node, self.prices.num, []) if s.outs]
            raise _impossible(node, self.axis, planned, possible)
        costs = [self.prices.price(node, operands, s) for s in options]
        priced = [(cost, i) for i, cost in enumerate(costs) if cost is not None]
        return options[min(priced)[1] if priced else 0]

    def _pin(self, node: fx.Node) -> PlannedLayout | None:
        """The plan's layouts of a call on this axis; None on ``mb``, which plans do not pin."""
        return None if self.axis == MICROBATCH_AXIS else planned_on(self.pins.get(node), self.axis)

    def _circumstances(self, node: fx.Node, operands: list[fx.Node]) -> Hashable:
        """A key of all that a decision depends on, so that equal calls are decided only once."""
        known = tuple(
            (
                value(o).shape, value(o).dtype, tuple(self.made[o]), self.prices.shared(o),
                is_weight(o), self.prices.cut_before(o),
            )
            for o in operands
        )  # fmt: skip
        results = tuple(
            None if fake is None else (tuple(fake.shape), fake.dtype) for fake in results_of(node)
        )
        before = (*self.choices.get(node, {}).items(), node in self.input_only)
        orders = alike(rows_known(node))
        final = self.prices.final.get(node)
        return node.target, literals(node), known, results, before, orders, final

    def _gathers(self, node: fx.Node, best: Strategy) -> bool:
        """Whether even the best strategy has to reshard an operand that arrives sharded."""
        return any(
            self.made[o][0].kind == "cut" and want not in self.made[o]
            for o, want in zip(tensor_args(node), best.ins, strict=True)
        )

    def _needs_all_microbatches(self, node: fx.Node, best: Strategy) -> bool:
        """Whether even the best strategy has to finish a sum over microbatches."""
        operand = tensor_args(node)[0]
        return (
            self.axis == MICROBATCH_AXIS
            and self.made[operand][0] == U
            and best.ins[0] not in self.made[operand]
        )


def whole_strategy(node: fx.Node) -> Strategy:
    """The strategy with every operand and result replicated."""
    return Strategy((R,) * len(tensor_args(node)), (R,) * len(results_of(node)))


def _impossible(
    node: fx.Node, axis: str, planned: PlannedLayout, possible: Sequence[Layout]
) -> PlanError:
    each = dict.fromkeys(write_value({axis: PlannedLayout(out)}) for out in (R, *possible))
    return PlanError(
        where=f"plan, {value(node).module}:{op_word(node.target)}",
        what=f"it cannot lie as {write_value({axis: planned})}",
        why=f"{name_of(node.target)} that gives {list(value(node).shape)} can be computed in no "
        f"such pieces; its result can lie as {', '.join(each)}",
        do="Correct the entry in [values], or drop it.",
    )


def placed(node: fx.Node, plan: Plan) -> Sharding:
    """The sharding of a placeholder as calls read it: a parameter after its FSDP all-gather."""
    known = value(node)
    if known.kind == "param":
        return plan.sharding(plan.used(known.name))
    if known.kind == "input":
        return plan.sharding(plan.stored(known.name, plan.inputs))
    return Sharding()


def write_shardings(graph: Graph, plan: Plan, choices: Choices) -> None:
    """Write the chosen sharding on every node."""
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            update(node, sharding=placed(node, plan))
        elif node.target is operator.getitem:
            call, index = picked(node)
            outs = {axis: s.outs[index] for axis, s in choices.get(call, {}).items()}
            update(node, sharding=Sharding.of(outs, graph.mesh))
        elif node.op == "call_function":
            outs = {axis: s.outs[0] for axis, s in choices.get(node, {}).items() if s.outs}
            update(node, sharding=Sharding.of(outs, graph.mesh))
