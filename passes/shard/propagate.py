"""Decide how every value lies on the mesh, given how parameters and inputs do.

Axis by axis, in order of execution, each node takes the strategy of its rule that costs least: the
network bytes its operands need, the network bytes its result will need to be finished, and the
work that stays replicated. Cuts spread from parameters and inputs; they do not appear by
themselves, but the plan may say of any value how it lies. What one gradient of a parameter needs is
decided last: it may read what others have gathered.
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
    collectives,
    is_weight,
    literals,
    op_word,
    picked,
    results_of,
    tensor_args,
    update,
    value,
)
from partc.graph.input_only import input_only
from partc.passes.shard.apply_preset import DATA_AXES
from partc.passes.shard.cut_given import cut_given
from partc.passes.shard.decompose_ops import decompose_op, decomposes
from partc.passes.shard.local_batch_norm import of_each_microbatch
from partc.passes.shard.price import Choices, Prices
from partc.passes.shard.value_names import value_names
from partc.plan import Plan
from partc.plan.mesh import MICROBATCH_AXIS
from partc.plan.plan_values import Lies, lies_on, write_value
from partc.plan.sharding import Layout, R, Sharding, U
from partc.rules import Strategy
from partc.rules.discover import strategies_for
from partc.rules.local_batch_norm import local_batch_norm
from partc.rules.rows import alike, rows_known
from partc.rules.table import name_of

aten = torch.ops.aten

Pins = dict[fx.Node, Mapping[str, Lies]]  # a call -> axis -> how it lies


def propagate(
    graph: Graph, plan: Plan, *, strict: bool = False, warnings: list[str] | None = None
) -> Choices:
    """Choose a strategy for every call; writes each node's sharding and returns the choices.

    An op without a rule, that experiments do not show how to cut either, is computed whole on every
    rank and told to ``warnings``; with ``strict`` it is a RuleError.

    Ops that no axis may cut as they stand, though their operand arrives cut (softmax over a cut
    vocabulary, batch statistics of a cut batch), are decomposed into several that may.
    """
    while True:
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
    """The axes as they are decided: microbatches go before axes that may cut samples or something
    else, so that these leave enough samples.
    """
    axes = [axis for axis in names if axis != MICROBATCH_AXIS]
    data = len(list(takewhile(DATA_AXES.__contains__, axes)))
    return [*axes[:data], *([MICROBATCH_AXIS] if MICROBATCH_AXIS in names else []), *axes[data:]]


def pinned(graph: Graph, plan: Plan) -> Pins:
    """The calls of which the plan says how they lie."""
    if not plan.values:
        return {}
    found = {node: plan.lies(name) for node, name in value_names(graph).items()}
    return {node: lies for node, lies in found.items() if lies is not None}


class OwnOrderFailsError(Exception):
    """On this axis something has to see whole what ranks have in an order of their own."""


@dataclass
class AxisWalk:
    """``made`` has the layouts of each value that are at hand, the produced one first; ``decided``
    the strategies chosen so far, by circumstances; ``own_orders`` says whether ranks may sort
    their own rows by themselves.
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
        self.given = input_only(self.graph) if self.axis == MICROBATCH_AXIS else set()

    def run(self) -> bool:
        """Walk the graph once; True if an op was decomposed and the walk has to be repeated on all
        axes.
        """
        try:
            self._walk(_for_one_grad(self.graph))
            self._walk(set())
        except OwnOrderFailsError:
            self._forget()
            return self.run()
        return self.decomposed

    def _forget(self) -> None:
        """Begin anew, with sorts of the whole only."""
        self.own_orders = False
        self.made.clear()
        self.decided.clear()
        for chosen in self.choices.values():
            chosen.pop(self.axis, None)

    def _walk(self, later: set[fx.Node]) -> None:
        """Decide what is not yet decided, in order, and leave out what comes ``later``."""
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
                self._take(node, best)
                self._at_hand_too(node)
            node = node.next

    def _at_hand_too(self, node: fx.Node) -> None:
        """Layouts that cost nothing: what follows from the inputs is there for all microbatches,
        and what the plan says.
        """
        lies = self._pin(node)
        if lies is not None and lies.then is not None:
            self.made[node].append(lies.then)
        if node in self.given and R not in self.made[node]:
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
        """The cheapest admissible strategy; all-replicated if nothing else will do."""
        operands = tensor_args(node)
        whole = whole_strategy(node)
        lies = self._pin(node)
        if lies is not None:
            return self.as_pinned(node, lies)
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

    def _cheapest(self, node: fx.Node, operands: list[fx.Node], whole: Strategy) -> Strategy:
        seen = [
            (i, layout) for i, o in enumerate(operands) for layout in self.made[o] if layout != R
        ]
        known = strategies_for(
            node, self.prices.num, seen, strict=self.strict, warnings=self.warnings
        )
        options = [whole, *known]
        if not self.own_orders:
            options = [s for s in options if not any(out.permuted for out in s.outs)]
        if node in self.given:
            options = [s for s in options if not any(out.kind in "UM" for out in s.outs)]
        priced = [
            (cost, i)
            for i, s in enumerate(options)
            if (cost := self.prices.price(node, operands, s)) is not None
        ]
        if not priced and any(have.permuted for o in operands for have in self.made[o]):
            raise OwnOrderFailsError
        return options[min(priced)[1]] if priced else whole

    def as_pinned(self, node: fx.Node, lies: Lies) -> Strategy:
        """The cheapest strategy that does as the plan says; PlanError if there is none."""
        operands, own = tensor_args(node), len(tensor_args(node))
        at = [(i if lies.ins else own, layout) for i, layout in lies.layouts]
        known = strategies_for(node, self.prices.num, at, strict=self.strict)
        options = [s for s in (whole_strategy(node), *known) if lies.allows(s.ins, s.outs)]
        if not options:
            raise _impossible(node, self.axis, lies)
        costs = [self.prices.price(node, operands, s) for s in options]
        priced = [(cost, i) for i, cost in enumerate(costs) if cost is not None]
        return options[min(priced)[1] if priced else 0]

    def _pin(self, node: fx.Node) -> Lies | None:
        """What the plan says of a call on this axis; microbatches are none of its affair."""
        return None if self.axis == MICROBATCH_AXIS else lies_on(self.pins.get(node), self.axis)

    def _circumstances(self, node: fx.Node, operands: list[fx.Node]) -> Hashable:
        """All that a decision depends on: equal calls of equal blocks are decided once."""
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
        before = (*self.choices.get(node, {}).items(), node in self.given)
        orders = alike(rows_known(node))
        final = self.prices.final.get(node)
        return node.target, literals(node), known, results, before, orders, final

    def _gathers(self, node: fx.Node, best: Strategy) -> bool:
        """Whether the best there is undoes a cut that an operand arrives with."""
        return any(
            self.made[o][0].kind == "cut" and want not in self.made[o]
            for o, want in zip(tensor_args(node), best.ins, strict=True)
        )


def _for_one_grad(graph: Graph) -> set[fx.Node]:
    """The calls that one gradient of a parameter needs and nothing else."""
    grads, found = set(graph.grads.values()), set[fx.Node]()
    for node in reversed(list(graph.calls())):
        reader = next(iter(node.users), None)
        ends = node in grads and reader is graph.fx.output_node()
        if len(node.users) == 1 and (ends or reader in found):
            found.add(node)
    return found


def whole_strategy(node: fx.Node) -> Strategy:
    """Everything replicated."""
    return Strategy((R,) * len(tensor_args(node)), (R,) * len(results_of(node)))


def _impossible(node: fx.Node, axis: str, lies: Lies) -> PlanError:
    return PlanError(
        where=f"plan, {value(node).module}:{op_word(node.target)}",
        what=f"it cannot lie as {write_value({axis: lies})}",
        why=f"{name_of(node.target)} on {value(node).shape} has no such strategy on {axis}",
        do="Correct the entry in [values], or drop it.",
    )


def is_zero(node: fx.Node) -> bool:
    """Whether a call makes zeros, or keeps some of them."""
    while node.target in collectives.LOCAL:
        node = node.all_input_nodes[0]
    fills = {aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0}
    if node.target in (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default):
        return True
    return node.target in fills and bool(node.args[fills[node.target]] == 0)


def placed(node: fx.Node, plan: Plan) -> Sharding:
    """How a placeholder lies when computation begins."""
    known = value(node)
    if known.kind == "param":
        return plan.sharding(plan.used(known.name))
    if known.kind == "input":
        return plan.sharding(plan.stored(known.name, plan.inputs))
    return Sharding()


def write_shardings(graph: Graph, plan: Plan, choices: Choices) -> None:
    """Note on every value how it lies."""
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
