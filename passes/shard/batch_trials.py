"""Cuts of a step's inputs, tried out: what follows from them, and what moves then."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, prod

import torch
from torch import fx

from partc.errors import ShardingError
from partc.graph import Graph, Outputs, Value, picked, results_of, tensor_args, value
from partc.graph.graph_edits import copied, drop_dead
from partc.graph.input_only import input_only
from partc.passes.shard.cut_given import cut_given, wanted_by_readers
from partc.passes.shard.propagate import AxisWalk
from partc.passes.shard.reshard import transition_cost
from partc.plan import Cuts, Plan
from partc.plan.mesh import DP, Mesh
from partc.plan.sharding import Layout, R, cut
from partc.rules import Strategy
from partc.rules.local_batch_norm import takes_statistics

aten = torch.ops.aten

_REORDERING = {
    aten.flip.default, aten.roll.default, aten.index.Tensor, aten.index_select.default,
    aten.gather.default,
}  # fmt: skip

_BY_PLACE = {
    aten.flip.default, aten.roll.default, aten.slice.Tensor, aten.select.int, aten.split.Tensor,
    aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int,
}  # fmt: skip

Batch = dict[str, Layout]  # how each input is cut; R: no dim of it is the batch


def cuts_of(batch: Batch) -> dict[str, Cuts]:
    return {name: {DP: layout} for name, layout in batch.items() if layout != R}


@dataclass(frozen=True)
class Trial:
    """Cuts of some inputs, and what follows: how all are read, and what it costs in elements.

    ``by_place``: the lines that take samples by their place among all, ``taken`` as a share of
    these. ``mixed``: the lines of all others at which something moves, ``meet``: those of them at
    which more than a number does that is computed from parameters. ``moved``: the results that are
    computed from samples that were moved.
    """

    seeds: Mapping[str, Layout]
    batch: Batch
    cost: float
    by_place: tuple[str, ...] = ()
    taken: float = 0.0
    mixed: tuple[str, ...] = ()
    meet: tuple[str, ...] = ()
    moved: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Finder:
    """Tries cuts of inputs on a forward."""

    graph: Graph
    pins: Mapping[str, Layout]

    @property
    def free(self) -> list[str]:
        """The inputs that have a dim to cut and are not pinned."""
        shapes = self.shapes
        return [
            n for n, shape in shapes.items() if max(shape, default=1) > 1 and n not in self.pins
        ]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: value(node).shape for name, node in self.graph.inputs.items()}

    def best(self, limit: float) -> tuple[Trial | None, list[tuple[str, int, int]]]:
        """The cheapest cut of the first input of which one costs at most ``limit``; its ties."""
        for name in self.free:
            trials = [self.trial({name: cut(dim)}, limit) for dim in range(len(self.shapes[name]))]
            known = [each for each in trials if each is not None]
            if known:
                best = min(known, key=lambda each: each.cost)
                dims = [each.seeds[name].dim for each in known if each.cost == best.cost]
                ties = [(name, dims[0], other) for other in dims[1:] if dims[0] != 0]
                return best, ties
        return None, []

    def together(self, limit: float) -> Trial | None:
        """The cheapest cut of all inputs along the same dim, if it costs at most ``limit``.

        Where a model reads one input by another (a decoder its encoder's memory), no cut of one of
        them alone is cheap.
        """
        shapes = {name: len(self.shapes[name]) for name in self.free}
        found = []
        for dim in range(1, max(shapes.values(), default=0)):
            seeds = {name: cut(dim) for name, dims in shapes.items() if dims > dim}
            found += [each] if (each := self.trial(seeds, limit)) is not None else []
        return min(found, key=lambda each: each.cost, default=None)

    def with_others(self, best: Trial) -> Trial:
        """The trial with cuts of the inputs that follow from no other, where these cost nothing."""
        for name in self.free:
            if best.batch[name] != R:
                continue
            for dim in range(len(self.shapes[name])):
                more = self.trial({**best.seeds, name: cut(dim)}, best.cost)
                if more is not None and more.seeds[name] != R:
                    best = more
                    break
        return best

    def with_fewer(self, best: Trial) -> Trial:
        """The trial without the cuts of inputs that cost something: weights of classes, edges."""
        for name in self.free:
            fewer = self.trial({n: lay for n, lay in best.seeds.items() if n != name}, best.cost)
            if fewer is not None and fewer.cost < best.cost:
                best = fewer
        return best

    def trial(self, seeds: Mapping[str, Layout], limit: float = inf) -> Trial | None:
        """What follows from cuts; None if no number of ranks divides them, or it costs more."""
        seeds = {**seeds, **self.pins}
        num = self.ranks(seeds)
        if num is None:
            return None
        seeds = {n: lay if _divides(self.shapes[n], lay, num) else R for n, lay in seeds.items()}
        graph = copied(self.graph)
        graph.mesh = Mesh(((DP, num),))
        plan = Plan(mesh=graph.mesh, inputs=cuts_of(seeds))
        try:
            walk = walked(graph, plan, limit)
        except _TooMuch:
            return None
        cut_given(graph, plan, walk.choices)
        inputs = graph.inputs.items()
        batch = {n: seeds.get(n, R) for n, _ in inputs}
        for name, node in inputs:
            if name not in self.pins and batch[name] == R:
                batch[name] = wanted_by_readers(node, walk.choices, DP)
        normed = {value(n).module for n in self.graph.calls() if takes_statistics(n)}
        meet = tuple(each.source for each in walk.meet_at if each.module not in normed)
        lines = tuple(walk.by_place), walk.taken, tuple(walk.mixed_at), meet
        moved = frozenset(n for n, x in graph.outputs.results.items() if walk.has_moved(x))
        return Trial(seeds, batch, walk.cost, *lines, moved)

    def ranks(self, seeds: Mapping[str, Layout]) -> int | None:
        """The least number of ranks that divides the first cut."""
        for name, layout in seeds.items():
            size = _size(self.shapes[name], name, layout) if layout != R else 1
            if size > 1:
                return next(n for n in range(2, size + 1) if size % n == 0)
        return None


def _size(shape: tuple[int, ...], name: str, layout: Layout) -> int:
    """How many equal pieces of an input's dim there can be; ShardingError without that dim."""
    if layout.dim is None or layout.dim >= len(shape):
        raise ShardingError(
            where=f"input {name}",
            what=f"it has no dim {layout.dim}",
            why=f"its shape is {list(shape)}",
            do=f"Give [inputs] a dim below {len(shape)}, or leave the entry out.",
        )
    return shape[layout.dim] // layout.outer


def _divides(shape: tuple[int, ...], layout: Layout, num: int) -> bool:
    return layout == R or (
        layout.dim < len(shape) and shape[layout.dim] % (num * layout.outer) == 0
    )


def walked(graph: Graph, plan: Plan, limit: float) -> _Walk:
    """A walk over a graph; again while ops are decomposed."""
    while True:
        walk = _Walk(graph, plan, DP, {}, False, [], limit=limit)
        if not walk.run():
            return walk


class _TooMuch(Exception):
    """A walk costs more than its limit."""


def _reorders(node: fx.Node) -> bool:
    """Whether a call gives the same samples in another order; a sum over them is no such call."""
    return node.target in _REORDERING


def _takes_places(node: fx.Node) -> bool:
    """Whether a call takes some of the elements along a dim by where they stand."""
    return node.target in _BY_PLACE


def _share(node: fx.Node, operand: fx.Node, have: Layout) -> float:
    """Which share of the elements along a cut dim a call takes by their place."""
    size = value(operand).shape[have.dim] if have.kind == "cut" else 1
    if node.target is aten.select.int:
        return 1 / size
    if node.target is aten.slice.Tensor and have.kind == "cut":
        return value(node).shape[have.dim] / size
    return 1.0


@dataclass
class _Walk(AxisWalk):
    """A walk that counts the elements that move, and those that every rank computes for itself.

    Neither scalars count nor what follows from inputs alone (masks, labels) or from parameters; nor
    what moves since samples are mixed before the model reads them (``x.flip(0)``, as mixup does).
    """

    limit: float = inf
    cost: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alone = input_only(self.graph, draws=True)
        self.by_place: list[str] = []
        self.mixed_at: list[str] = []
        self.meet_at: list[Value] = []  # of what is computed from parameters, and no scalar
        self.taken = 0.0
        self.moved: set[fx.Node] = set()  # what is computed from samples that were moved
        self.mixed: set[fx.Node] = set()  # what inputs alone give by moving some of them
        self.samples = set(self.graph.inputs.values())  # and what is computed with parameters
        for node in self.graph.calls():
            if self.samples.intersection(node.all_input_nodes):
                self.samples.add(node)
        self.samples -= input_only(self.graph)

    def _take(self, node: fx.Node, best: Strategy) -> None:
        for operand, want in zip(tensor_args(node), best.ins, strict=True):
            have = self.made[operand]
            if self.has_moved(operand) or (have[0].kind == "cut" and want != have[0]):
                self.moved.add(node)
            moves = have[0] != R and want not in have
            if moves and _takes_places(node):
                self.by_place.append(value(node).source)
                self.taken += _share(node, operand, have[0])
            if node in self.alone and ((moves and _reorders(node)) or operand in self.mixed):
                self.mixed.add(node)
            elif moves and operand not in self.mixed:
                if not _takes_places(node):
                    self.mixed_at.append(value(node).source)
                    if operand in self.samples and prod(value(operand).shape) > 1:
                        self.meet_at.append(value(node))
                self._pay(transition_cost(have[0], want, 2) or 1.0, value(operand).shape)
        if node in self.samples:
            for fake, layout in zip(results_of(node), best.outs, strict=True):
                if fake is not None and layout == R:
                    self._pay(1.0, tuple(fake.shape))
        super()._take(node, best)

    def has_moved(self, node: fx.Node) -> bool:
        """Whether a value is computed from samples that were moved."""
        made_by = picked(node)[0] if node.target is operator.getitem else node
        return made_by in self.moved

    def _pay(self, share: float, shape: Iterable[int]) -> None:
        size = prod(shape)
        self.cost += share * size if size > 1 else 0.0
        if self.cost > self.limit:
            raise _TooMuch


def forward_of(graph: Graph) -> Graph:
    """The forward of a step alone, as a graph of its own."""
    forward = copied(graph)
    whole = forward.outputs
    forward.set_outputs(Outputs(loss=whole.loss, results=whole.results))
    drop_dead(forward)
    return forward
