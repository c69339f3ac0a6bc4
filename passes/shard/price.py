"""What a strategy for one call costs on one axis, given how its operands lie.

Network bytes to bring operands into place, network bytes to finish what results leave open, and a
share of the bytes that each rank reads and writes. What the plan forbids has no price.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import fx

from partc.graph import Graph, Outputs, is_weight, results_of, value
from partc.passes.shard.reshard import transition_cost
from partc.plan import Plan
from partc.plan.mesh import MICROBATCH_AXIS, Mesh
from partc.plan.sharding import Layout, R, Sharding, cut
from partc.rules import Strategy

# how a call is cut, per axis; a missing axis is replicated
Choices = dict[fx.Node, dict[str, Strategy]]

# What a transfer costs beside its bytes, in bytes: a collective's latency. What is replicated
# although it could be cut is charged a share of its bytes: local memory is about this much faster
# than the network.
_LATENCY_BYTES, _LOCAL_SHARE = 1024.0, 0.05
# Decisions of the plan that propagation must not undo to save a few bytes: parameters are used as
# the plan says, and what the inputs cut (the batch) stays cut.
_UNDO_PARAM, _UNDO_INPUT_CUT = 1e6, 1e3
_JOIN_MICROBATCHES = 1e9  # they run one after the other: what joins them will be refused


@dataclass
class Prices:
    """``made`` has the layouts of each value that are at hand, the produced one first; ``choices``
    what is decided, on the axes before this one too.
    """

    graph: Graph
    plan: Plan
    axis: str
    choices: Choices
    made: dict[fx.Node, list[Layout]]

    def __post_init__(self) -> None:
        self.num = self.graph.mesh.size(self.axis)
        self.input_axis = any(self.axis in cuts for cuts in self.plan.inputs.values())
        self.scatter = self.plan.scatter.get(self.axis)
        self.final = _final_layouts(self.graph, self.plan, self.axis)

    def price(self, node: fx.Node, operands: list[fx.Node], strategy: Strategy) -> float | None:
        if not self.fits(node, operands, strategy):
            return None
        cost = 0.0
        for operand, want in zip(operands, strategy.ins, strict=True):
            moved = self._move(operand, want, operands, strategy)
            if moved is None:
                return None
            cost += moved
        return cost + self._finishing(node, strategy) + self.local(node, operands, strategy)

    def _move(
        self, operand: fx.Node, want: Layout, operands: list[fx.Node], strategy: Strategy
    ) -> float | None:
        """Bytes to bring one operand into the layout that the strategy wants; None if it may
        not.
        """
        rows = value(operand).rows
        parts = self.axis == MICROBATCH_AXIS or (
            rows is not None and rows.counted
        )  # read as they are
        if want.kind in "UM" and self.shared(operand) and not parts:
            return None  # several readers: finished once for all of them
        if want in self.made[operand]:
            return 0.0
        sources = self._sources(operand, want, operands, strategy)
        costs = [c for have in sources if (c := self._leave(operand, have, want)) is not None]
        return min(costs, default=None)

    def shared(self, node: fx.Node) -> bool:
        return sum(user.op != "output" for user in node.users) > 1

    def _leave(self, operand: fx.Node, have: Layout, want: Layout) -> float | None:
        ratio = transition_cost(have, want, self.num)
        if ratio == 0.0 and want.kind == "U" and have != want:
            return _LATENCY_BYTES  # it moves nothing, and is no way to go without need
        if ratio is None or ratio == 0.0:
            return ratio
        cost = ratio * self._bytes(operand) + _LATENCY_BYTES
        if self.axis == MICROBATCH_AXIS:
            return cost * _JOIN_MICROBATCHES
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
        into a cut only where the plan scatters them, or the inputs are cut so. What microbatches
        have in common, as a penalty of weights, counts in the first where all of them add to it.
        """
        made = self.made[operand]
        if want.kind in "UM":
            counted = self.axis == MICROBATCH_AXIS or self.input_axis
            return [R] if counted and want.kind == "U" and R in made else []
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
            if self.axis == MICROBATCH_AXIS and final is not None and layout.kind == "U":
                ratio = 0.0  # turns add to it
            # among equals: a sum that only sums feed stays unfinished, any other is finished at
            # once
            tilt = 0.999 if all(i.kind == "U" for i in strategy.ins) else 1.001
            cost += ratio * tilt * self._bytes(node) if layout.kind in "UM" or final else 0.0
        return cost

    def local(self, node: fx.Node, operands: list[fx.Node], strategy: Strategy) -> float:
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
        return fake.numel() * fake.element_size() / self.cut_before(node)

    def cut_before(self, node: fx.Node) -> int:
        """Into how many ranks' pieces the axes decided before have cut a value; of microbatches
        each rank computes all.
        """
        return prod(
            self.graph.mesh.size(axis)
            for axis, strategy in self.choices.get(node, {}).items()
            if axis not in (self.axis, MICROBATCH_AXIS)
            and strategy.outs
            and strategy.outs[0].kind == "cut"
        )

    def fits(self, node: fx.Node, operands: list[fx.Node], strategy: Strategy) -> bool:
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
