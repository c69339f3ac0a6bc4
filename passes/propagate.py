"""Decide how every value lies on the mesh, given how parameters and inputs do.

Axis by axis, in order of execution, each node takes the strategy of its rule that costs least: the
network bytes its operands need, the network bytes its result will need to be finished, and the
work that stays replicated. Cuts spread from parameters and inputs; they do not appear by
themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from math import prod

from torch import fx

from partc.graph import (
    Graph,
    Outputs,
    is_weight,
    picked,
    results_of,
    tensor_args,
    update,
    value,
)
from partc.mesh import Mesh
from partc.passes.local_batch_norm import local_batch_norm
from partc.passes.open_ops import open_op, opens
from partc.passes.reshard import transition_cost
from partc.plan import Plan
from partc.rules import Strategy
from partc.rules.discover import strategies_for
from partc.sharding import Layout, R, Sharding, cut

# how a call is cut, per axis; a missing axis is replicated
Choices = dict[fx.Node, dict[str, Strategy]]

# What a transfer costs beside its bytes, in bytes: a collective's latency. What is replicated
# although it could be cut is charged a share of its bytes: local memory is about this much faster
# than the network.
_LATENCY_BYTES, _LOCAL_SHARE = 1024.0, 0.05
# Decisions of the plan that propagation must not undo to save a few bytes: parameters are used as
# the plan says, and what the inputs cut (the batch) stays cut.
_UNDO_PARAM, _UNDO_INPUT_CUT = 1e6, 1e3


def propagate(
    graph: Graph, plan: Plan, *, strict: bool = False, warnings: list[str] | None = None
) -> Choices:
    """Choose a strategy for every call; writes each node's sharding and returns the choices.

    An op without a rule, that experiments do not show how to cut either, is computed whole on every
    rank and told to ``warnings``; with ``strict`` it is a RuleError.

    Ops that no axis may cut as they stand, though their operand arrives cut (softmax over a cut
    vocabulary, batch statistics of a cut batch), are opened into several that may.
    """
    while True:
        choices: Choices = {}
        opened = False
        for axis in graph.mesh.names:
            walk = _AxisWalk(graph, plan, axis, choices, strict, warnings)
            opened |= walk.run()
        if not opened:
            _write(graph, plan, choices)
            return choices


@dataclass
class _AxisWalk:
    """``made`` has the layouts of each value that are at hand, the produced one first; ``decided``
    the strategies chosen so far, by circumstances.
    """

    graph: Graph
    plan: Plan
    axis: str
    choices: Choices
    strict: bool
    warnings: list[str] | None
    made: dict[fx.Node, list[Layout]] = field(default_factory=dict)
    decided: dict[Hashable, Strategy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num = self.graph.mesh.size(self.axis)
        self.input_axis = any(self.axis in cuts for cuts in self.plan.inputs.values())
        self.scatter = self.plan.scatter.get(self.axis)
        self.final = _final_layouts(self.graph, self.plan, self.axis)

    def run(self) -> bool:
        """Walk the graph once; True if an op was opened and the walk has to be repeated on all
        axes.
        """
        opened = False
        node = next(iter(self.graph.fx.nodes))
        while node.op != "output":
            if node.op == "placeholder":
                self.made[node] = [placed(node, self.plan).on(self.axis)]
            elif node.target is operator.getitem:
                call, index = picked(node)
                self.made[node] = [self._produced(call)[index]]
            elif node.op == "call_function":
                best = self._choose(node)
                if self._gathers(node, best) and opens(node):
                    node, opened = open_op(self.graph, node), True
                    continue
                self._take(node, best)
            node = node.next
        return opened

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

    def _choose(self, node: fx.Node) -> Strategy:
        """The cheapest admissible strategy; all-replicated if nothing else will do."""
        operands = tensor_args(node)
        whole = Strategy((R,) * len(operands), (R,) * len(results_of(node)))
        if all(self.made[o] == [R] for o in operands) and self.final.get(node, R) == R:
            return whole  # nothing is cut here, and cuts do not appear by themselves
        if self.plan.batch_norm == "local":
            local = local_batch_norm(node, self.made[operands[0]][0])
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
        known = strategies_for(node, self.num, seen, strict=self.strict, warnings=self.warnings)
        options = [whole, *known]
        priced = [
            (cost, i)
            for i, s in enumerate(options)
            if (cost := self._price(node, operands, s)) is not None
        ]
        return options[min(priced)[1]] if priced else whole

    def _circumstances(self, node: fx.Node, operands: list[fx.Node]) -> Hashable:
        """All that a decision depends on: equal calls of equal blocks are decided once."""
        literals = fx.map_arg((node.args, dict(node.kwargs)), lambda n: operands.index(n))
        known = tuple(
            (
                value(o).shape, value(o).dtype, tuple(self.made[o]), self._shared(o),
                is_weight(o), self._cut_before(o),
            )
            for o in operands
        )  # fmt: skip
        results = tuple(
            None if fake is None else (tuple(fake.shape), fake.dtype) for fake in results_of(node)
        )
        before = tuple(self.choices.get(node, {}).items())
        return node.target, repr(literals), known, results, before, self.final.get(node)

    def _price(self, node: fx.Node, operands: list[fx.Node], strategy: Strategy) -> float | None:
        if not self._fits(node, operands, strategy):
            return None
        cost = 0.0
        for operand, want in zip(operands, strategy.ins, strict=True):
            moved = self._move(operand, want, operands, strategy)
            if moved is None:
                return None
            cost += moved
        return cost + self._finishing(node, strategy) + self._local(node, operands, strategy)

    def _move(
        self, operand: fx.Node, want: Layout, operands: list[fx.Node], strategy: Strategy
    ) -> float | None:
        """Bytes to bring one operand into the layout that the strategy wants; None if it may
        not.
        """
        if want.kind in "UM" and self._shared(operand):
            return None  # several readers: finished once for all of them
        if want in self.made[operand]:
            return 0.0
        sources = self._sources(operand, want, operands, strategy)
        costs = [c for have in sources if (c := self._leave(operand, have, want)) is not None]
        return min(costs, default=None)

    def _shared(self, node: fx.Node) -> bool:
        return sum(user.op != "output" for user in node.users) > 1

    def _leave(self, operand: fx.Node, have: Layout, want: Layout) -> float | None:
        ratio = transition_cost(have, want, self.num)
        if ratio is None or ratio == 0.0:
            return ratio
        cost = ratio * self._bytes(operand) + _LATENCY_BYTES
        if have.kind == "cut":
            if is_weight(operand):
                cost *= _UNDO_PARAM
            elif self.input_axis:
                cost *= _UNDO_INPUT_CUT
        return cost

    def _sources(
        self, operand: fx.Node, want: Layout, operands: list[fx.Node], strategy: Strategy
    ) -> list[Layout]:
        """The layouts at hand from which the wanted one may be made.

        What is whole is cut only where something that is cut already asks for it. Sums go straight
        into a cut only where the plan scatters them, or the inputs are cut so.
        """
        made = self.made[operand]
        if want.kind in "UM":
            return []
        if want.kind != "cut":
            return made
        driven = self._driven(operand, operands, strategy)
        if made[0].kind in "UM" and self.scatter is None and not self.input_axis:
            return []
        if driven or self._scatters(operand, want):
            return made
        return [layout for layout in made if layout.kind == "cut"]

    def _driven(self, operand: fx.Node, operands: list[fx.Node], strategy: Strategy) -> bool:
        """Whether another operand is cut as the strategy wants it, or a sum is scattered so."""
        return any(
            (layout.kind == "cut" and layout in self.made[other])
            or (self.made[other][0].kind == "U" and self._scatters(other, layout))
            for other, layout in zip(operands, strategy.ins, strict=True)
            if other is not operand
        )

    def _scatters(self, node: fx.Node, layout: Layout) -> bool:
        """Whether the plan's sequence parallelism scatters this unfinished activation so."""
        return (
            self.scatter is not None and layout == cut(self.scatter) and len(value(node).shape) > 2
        )

    def _finishing(self, node: fx.Node, strategy: Strategy) -> float:
        """Bytes that the results will still cost: unfinished sums, and gradients not yet as
        stored.
        """
        cost = 0.0
        for fake, layout in zip(results_of(node), strategy.outs, strict=True):
            if fake is None:
                continue
            final = self.final.get(node)
            ratio = transition_cost(layout, final, self.num) if final is not None else None
            if ratio is None:
                ratio = 0.0 if layout.kind not in "UM" else 1.0 if self.scatter is not None else 2.0
            # among equals: a sum that only sums feed stays unfinished, any other is finished at
            # once
            tilt = 0.999 if all(i.kind == "U" for i in strategy.ins) else 1.001
            cost += ratio * tilt * self._bytes(node) if layout.kind in "UM" or final else 0.0
        return cost

    def _local(self, node: fx.Node, operands: list[fx.Node], strategy: Strategy) -> float:
        """The bytes read and written on each rank, as a share of network bytes."""
        cost = 0.0
        for other, layout in zip(operands, strategy.ins, strict=True):
            cost += self._bytes(other) / (self.num if layout.kind == "cut" else 1)
        for layout in strategy.outs:
            cost += self._bytes(node) / (self.num if layout.kind == "cut" else 1)
        return _LOCAL_SHARE * cost

    def _bytes(self, node: fx.Node) -> float:
        """Bytes of a value (the first result of several) on one rank of the axes decided before."""
        fake = next((f for f in results_of(node) if f is not None), None)
        if fake is None:
            return 0.0
        return fake.numel() * fake.element_size() / self._cut_before(node)

    def _cut_before(self, node: fx.Node) -> int:
        """Into how many pieces the axes decided before have cut a value."""
        return prod(
            self.graph.mesh.size(axis)
            for axis, strategy in self.choices.get(node, {}).items()
            if axis != self.axis and strategy.outs and strategy.outs[0].kind == "cut"
        )

    def _fits(self, node: fx.Node, operands: list[fx.Node], strategy: Strategy) -> bool:
        """Whether the cuts divide what the axes decided before have left of each operand and
        result.
        """
        mesh, before = self.graph.mesh, self.choices.get(node, {})
        for i, operand in enumerate(operands):
            if not _divides(
                value(operand).shape,
                [(a, s.ins[i]) for a, s in before.items()],
                self.axis,
                strategy.ins[i],
                mesh,
            ):
                return False
        return all(
            fake is None
            or _divides(
                tuple(fake.shape),
                [(a, s.outs[i]) for a, s in before.items()],
                self.axis,
                strategy.outs[i],
                mesh,
            )
            for i, fake in enumerate(results_of(node))
        )

    def _gathers(self, node: fx.Node, best: Strategy) -> bool:
        """Whether the best there is undoes a cut that an operand arrives with."""
        return any(
            self.made[o][0].kind == "cut" and want not in self.made[o]
            for o, want in zip(tensor_args(node), best.ins, strict=True)
        )


def _divides(
    shape: tuple[int, ...], before: list[tuple[str, Layout]], axis: str, layout: Layout, mesh: Mesh
) -> bool:
    if layout.kind != "cut":
        return True
    return Sharding.of({**dict(before), axis: layout}, mesh).local_shape(shape, mesh) is not None


def _final_layouts(graph: Graph, plan: Plan, axis: str) -> dict[fx.Node, Layout]:
    """How the step's results must lie in the end: gradients as their parameters are stored."""
    return {node: final.on(axis) for node, final in wanted_results(graph.outputs, plan)}


def wanted_results(outputs: Outputs, plan: Plan) -> Iterator[tuple[fx.Node, Sharding]]:
    """Each result of the step and the sharding it has to end in."""
    for name, node in outputs.grads.items():
        yield node, plan.sharding(plan.stored(name))
    for result in (outputs.loss, *outputs.buffers.values(), *outputs.results.values()):
        if result is not None:
            yield result, Sharding()


def placed(node: fx.Node, plan: Plan) -> Sharding:
    """How a placeholder lies when computation begins."""
    known = value(node)
    if known.kind == "param":
        return plan.sharding(plan.used(known.name))
    if known.kind == "input":
        return plan.sharding(plan.stored(known.name, plan.inputs))
    return Sharding()


def _write(graph: Graph, plan: Plan, choices: Choices) -> None:
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
