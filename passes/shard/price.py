"""The price of a strategy for one call on one mesh axis, given the layouts of its operands.

Network bytes to reshard the operands, plus network bytes to finish partial sums of the results,
plus a share of the bytes that each rank reads and writes. A strategy that the plan forbids has no
price. No machine is needed: prices are in bytes, not seconds.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod

from torch import fx

from partc.graph import Graph, first_operand, is_weight, picked, results_of, value
from partc.graph.casts import is_cast, widens
from partc.passes.shard.reshard import transition_cost
from partc.passes.shard.results import own_rows
from partc.plan import Plan
from partc.plan.batch import sequence_dim
from partc.plan.mesh import MICROBATCH_AXIS, Mesh
from partc.plan.sharding import Layout, R, Sharding, cut
from partc.rules import Strategy

# how a call is cut, per axis; a missing axis is replicated
Choices = dict[fx.Node, dict[str, Strategy]]

# A collective's latency, as if it were so many bytes. And the price of a byte read or written in
# the rank's own memory, per byte on the network: about the ratio of their speeds. It charges what
# is replicated although it could be sharded.
_LATENCY_BYTES, _LOCAL_SHARE = 1024.0, 0.05
# Factors on the price of an all-gather, so that propagation does not undo the plan to save a few
# bytes: parameters are used as the plan says, and the batch that the inputs shard stays sharded.
_UNDO_PARAM, _UNDO_INPUT_CUT = 1e6, 1e3
# A value of all microbatches cannot exist in the middle of a step, as they run one after the other:
# ``check_microbatches`` refuses it.
_JOIN_MICROBATCHES = 1e9


@dataclass
class Prices:
    """Prices on one axis.

    ``made`` has the layouts in which each value exists, the produced one first; ``choices`` the
    strategies chosen so far, on earlier axes too.
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
        self.one_grad = for_one_grad(self.graph)

    def price(self, node: fx.Node, operands: list[fx.Node], strategy: Strategy) -> float | None:
        """The price of a strategy in bytes; None if the call cannot have it."""
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
        """The price of resharding one operand to the layout ``want``; None if that is ruled out."""
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
        """Whether several calls read a value."""
        return sum(user.op != "output" for user in node.users) > 1

    def _leave(self, operand: fx.Node, have: Layout, want: Layout) -> float | None:
        """The price of resharding an operand from ``have`` to ``want``; None if impossible."""
        ratio = transition_cost(have, want, self.num)
        if ratio == 0.0 and want.kind == "U" and have != want:
            return _LATENCY_BYTES  # it moves nothing, and is no way to go without need
        if ratio is None or ratio == 0.0:
            return ratio
        cost = ratio * self._bytes(operand) + _LATENCY_BYTES
        cost += self._gather_inner(operand, have, want)
        if self.axis == MICROBATCH_AXIS:
            return cost * _JOIN_MICROBATCHES
        if have.kind == "cut":
            if is_weight(operand):
                cost *= _UNDO_PARAM
            elif self.input_axis:
                cost *= _UNDO_INPUT_CUT
        return cost

    def _gather_inner(self, operand: fx.Node, *layouts: Layout) -> float:
        """The price of gathering an operand over earlier axes whose shards lie inside of those of
        this axis, before or behind a move: ``f32[8@dp,4@tp]`` becomes ``f32[8@tp+dp,4]`` by way of
        ``f32[8,4]``.
        """
        names, cuts = self.graph.mesh.names, {x for x in layouts if x.kind == "cut"}
        inner = [
            self.graph.mesh.size(axis)
            for axis, layout in self._laid(operand).items()
            if layout in cuts and names.index(axis) < names.index(self.axis)
        ]
        return sum(size * self._bytes(operand) + _LATENCY_BYTES for size in inner)

    def _sources(
        self, operand: fx.Node, want: Layout, operands: list[fx.Node], strategy: Strategy
    ) -> list[Layout]:
        """The existing layouts of an operand from which the wanted one may be made.

        A replicated value is sliced only if another operand is sharded so. A partial sum is
        reduce-scattered only if the plan scatters on this axis (sequence parallelism) or the inputs
        are sharded on it. A replicated value may be counted as a partial sum, whole on the first
        rank or microbatch: a weight penalty that every microbatch's loss would add.
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
        """Whether another operand already has the strategy's sharding, or is a partial sum that is
        scattered to it.
        """
        return any(
            (layout.kind == "cut" and layout in self.made[other])
            or (self.made[other][0].kind == "U" and self._scatters(other, layout))
            for other, layout in zip(operands, strategy.ins, strict=True)
            if other is not operand
        )

    def _scatters(self, node: fx.Node, layout: Layout) -> bool:
        """Whether the plan's sequence parallelism scatters an activation's partial sum like this.

        Only tensors of more than 2 dims are activations with a sequence.
        """
        if self.scatter is None or len(value(node).shape) <= 2:
            return False
        call, index = picked(node) if node.target is operator.getitem else (node, 0)
        before = self.choices.get(call, {}).items()
        outs = [s.outs[index] for axis, s in before if axis != self.axis and s.outs]
        taken = {out.dim for out in outs if out.kind == "cut"}
        return layout == cut(sequence_dim(self.scatter, taken))

    def _finishing(self, node: fx.Node, strategy: Strategy) -> float:
        """The price of finishing the results: partial sums, and gradients not yet in the layout in
        which their parameters are stored.
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
                ratio = 0.0  # accumulated by the microbatches, without a transfer
            # Breaks ties: a partial sum of partial sums stays unfinished, any other is finished at
            # once.
            tilt = 0.999 if all(i.kind == "U" for i in strategy.ins) else 1.001
            cost += _LATENCY_BYTES if self._passes_on(node, layout, strategy) else 0.0
            sized = self._narrowest(node) if layout.kind == "U" else node
            cost += ratio * tilt * self._bytes(sized) if layout.kind in "UM" or final else 0.0
        return cost

    def _passes_on(self, node: fx.Node, layout: Layout, strategy: Strategy) -> bool:
        """Whether a call passes on an activation's partial sum that could be scattered before.

        That saves no transfer, however small the sum is: an activation's gradient is computed of
        pieces in small models as in large ones.
        """
        sums = [i.kind == "U" for i in strategy.ins]
        activation = self.scatter is not None and len(value(node).shape) > 2
        return activation and layout.kind == "U" and any(sums) and not all(sums)

    def _narrowest(self, node: fx.Node) -> fx.Node:
        """The value whose bytes price an unfinished sum: of a gradient that is cast upwards, the
        one before the cast, so that ranks do not add in bf16 what is cast to f32 in order to be
        added.
        """
        if node in self.one_grad and is_cast(node) and widens(node):
            return first_operand(node)
        return node

    def local(self, node: fx.Node, operands: list[fx.Node], strategy: Strategy) -> float:
        """The price of the bytes that each rank reads and writes, in network bytes."""
        cost = 0.0
        for other, layout in zip(operands, strategy.ins, strict=True):
            cost += self._bytes(other) / (self.num if layout.kind == "cut" else 1)
        for layout in strategy.outs:
            cost += self._bytes(node) / (self.num if layout.kind == "cut" else 1)
        return _LOCAL_SHARE * cost

    def _bytes(self, node: fx.Node) -> float:
        """Bytes of a value, or of a call's first result, on one rank, as earlier axes shard it."""
        fake = next((f for f in results_of(node) if f is not None), None)
        if fake is None:
            return 0.0
        return fake.numel() * fake.element_size() / self.cut_before(node)

    def cut_before(self, node: fx.Node) -> int:
        """The number of shards into which earlier axes divide a value; ``mb`` does not count, as
        each rank computes all microbatches.
        """
        laid = self._laid(node).items()
        return prod(self.graph.mesh.size(axis) for axis, layout in laid if layout.kind == "cut")

    def _laid(self, node: fx.Node) -> dict[str, Layout]:
        """The layouts of a value on earlier axes but ``mb``."""
        call, index = picked(node) if node.target is operator.getitem else (node, 0)
        return {
            axis: strategy.outs[index]
            for axis, strategy in self.choices.get(call, {}).items()
            if axis not in (self.axis, MICROBATCH_AXIS) and strategy.outs
        }

    def fits(self, node: fx.Node, operands: list[fx.Node], strategy: Strategy) -> bool:
        """Whether the axis divides what earlier axes leave of each operand and result."""
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


def for_one_grad(graph: Graph) -> set[fx.Node]:
    """The calls whose results only one parameter's gradient depends on."""
    grads, found = set(graph.grads.values()), set[fx.Node]()
    for node in reversed(list(graph.calls())):
        reader = next(iter(node.users), None)
        ends = node in grads and reader is graph.fx.output_node()
        if len(node.users) == 1 and (ends or reader in found):
            found.add(node)
    return found


def _divides(
    shape: tuple[int, ...], before: list[tuple[str, Layout]], axis: str, layout: Layout, mesh: Mesh
) -> bool:
    if layout.kind != "cut":
        return True
    return Sharding.of({**dict(before), axis: layout}, mesh).local_shape(shape, mesh) is not None


def _final_layouts(graph: Graph, plan: Plan, axis: str) -> dict[fx.Node, Layout]:
    """The layouts of the step's results on ``axis``; gradients as their parameters are stored.

    Results of which ranks keep their own rows along this axis may lie as they come.
    """
    outputs = graph.outputs
    found = {g: plan.sharding(plan.stored(n)).on(axis) for n, g in outputs.grads.items()}
    others = [outputs.loss, *outputs.buffers.values()]
    if axis not in own_rows(graph, plan):
        others += outputs.results.values()
    return found | {result: R for result in others if result is not None}
