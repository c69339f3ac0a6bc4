"""Find which dim of each input is the batch: the one along which samples do not mix.

Cuts of inputs are followed through the forward to the loss, parameters whole. Along the batch
nothing has to move before the loss, and ranks share all the work; along another dim (time,
features) something is gathered or summed on the way, and what follows is computed by all alike.
The cuts of other inputs follow from what is computed with them: of a sequence-first model
``data i64[35,20@dp]`` moves nothing, and its flat targets ``i64[700]`` are cut as ``[0, 35]``. Dim
0 wins where it is as good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, prod

import torch
from torch import fx

from partc.errors import PlanError, ShardingError
from partc.graph import Graph, Outputs, Value, results_of, tensor_args, value
from partc.graph.graph_edits import copied, drop_dead
from partc.graph.input_only import input_only
from partc.passes.shard.cut_given import cut_given, wanted_by_readers
from partc.passes.shard.propagate import AxisWalk
from partc.passes.shard.reshard import transition_cost
from partc.passes.shard.rows_in_loss import notes_on_rows
from partc.plan import Cuts, Plan
from partc.plan.batch import BATCH, BY_PLACE, ROWS_MEET, data_axes, is_pinned, layout_of
from partc.plan.mesh import DP, Mesh
from partc.plan.plan_text import write_cuts
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
CLEARLY = 4.0  # another dim has to cost so many times less than dim 0


def find_batch(graph: Graph, plan: Plan, mesh: Mesh) -> Plan:
    """The plan, with entries ``{ batch = dim }`` in ``[inputs]`` where dim 0 is not the batch.

    What the plan pins stays. PlanError if ranks take pieces of their own, and two dims are as good.
    """
    plan = _found(graph, plan, mesh)
    told = [*_notes_on_places(graph, plan, mesh), *notes_on_rows(graph, plan, mesh)]
    return plan.changed(notes=(*plan.notes, *told))


def _found(graph: Graph, plan: Plan, mesh: Mesh) -> Plan:
    inputs = [name for name, node in graph.inputs.items() if value(node).shape]
    if all(is_pinned(name, plan) for name in inputs) or not _deals(plan, mesh):
        return plan
    pins = {n: layout_of(plan.stored(n, plan.inputs)) for n in inputs if is_pinned(n, plan)}
    found = batch_of(graph, pins)
    if found is None:
        return plan
    found.check(plan)
    new = entries({n: layout for n, layout in found.batch.items() if n not in pins})
    return plan.changed(inputs={**plan.inputs, **new}, notes=(*plan.notes, *notes_on(new)))


def _notes_on_places(graph: Graph, plan: Plan, mesh: Mesh) -> list[str]:
    """Notes on the lines that take samples by their place, and on the first one in which samples
    meet, where ranks have samples of their own.

    Under DDP a rank's batch may have two views of each sample, one half behind the other. The batch
    of a program has all ranks' rows, one rank's behind the other's, and other halves.
    """
    ranks = prod(mesh.size(axis) for axis in data_axes(mesh))
    if plan.batch != "local" or ranks < 2:
        return []
    pins = {n: layout_of(plan.stored(n, plan.inputs)) for n in graph.inputs if is_pinned(n, plan)}
    finder = _Finder(_forward_of(graph), pins)
    trial = finder.trial(dict.fromkeys(finder.free, cut(0)))
    if trial is None:
        return []
    meet = [
        f"{ROWS_MEET}{line}: it is computed of the rows of all ranks, under DDP of one rank's"
        for line in trial.meet[:1]
    ]
    return [*(f"{BY_PLACE}{each}" for each in dict.fromkeys(trial.by_place)), *meet]


def entries(batch: Batch) -> dict[str, Cuts]:
    """The entries of ``[inputs]`` for what was found."""
    return {name: {} if layout == R else {BATCH: layout} for name, layout in batch.items()}


def notes_on(new: Mapping[str, Cuts]) -> list[str]:
    """A note on each entry that was found, where it is not dim 0."""
    notes = []
    for name, cuts in new.items():
        if not cuts:
            notes.append(f"{name}: no dim of it is the batch, so that every rank takes it whole")
        elif layout_of(cuts) != cut(0):
            notes.append(f"{name}: the batch is {write_cuts(cuts)}: along it no samples mix")
    return notes


def _deals(plan: Plan, mesh: Mesh) -> bool:
    """Whether a batch is dealt out to ranks or microbatches, or may be.

    A search may do so on any machines, of which a pass sees the axes alone.
    """
    return mesh.is_open or mesh.num_ranks > 1 or plan.microbatches > 1 or plan.preset == "auto"


@dataclass(frozen=True)
class Found:
    """The batch where it is not dim 0 of every input; ``ties`` are dims that are as good."""

    batch: Batch
    ties: tuple[tuple[str, int, int], ...] = ()  # input, its dim, the other dim

    def check(self, plan: Plan) -> None:
        """PlanError if ranks take pieces of their own, and it is not clear which."""
        if plan.batch == "local" and self.ties:
            name, one, other = self.ties[0]
            raise PlanError(
                where=f"input {name}",
                what=f"dim {one} and dim {other} may both be the batch",
                why="samples mix along neither, and each makes another batch of ranks' pieces",
                do=f'Say which one it is: [inputs] "{name}" = {{ batch = {one} }} in the plan.',
            )


def batch_of(graph: Graph, pins: Mapping[str, Layout] | None = None) -> Found | None:
    """The batch of a joint graph; None where dim 0 of every input that the pins leave open is it.

    ``pins``: the cuts of some inputs, R for whole ones.
    """
    finder = _Finder(_forward_of(graph), pins or {})
    usual = finder.trial(dict.fromkeys(finder.free, cut(0)))
    if usual is None or usual.cost == 0:
        return None
    best, ties = finder.best(usual.cost / CLEARLY)
    best = best or finder.together(usual.cost / CLEARLY)
    if best is not None:
        return Found(finder.with_others(best).batch, tuple(ties))
    fewer = finder.with_fewer(usual)
    return None if fewer is usual else Found(fewer.batch)


def batch_of_forward(graph: Graph, guess: Mapping[str, Layout]) -> Batch:
    """The batch of a forward beside a step, by the step's own: ``guess`` has some of its inputs.

    Where nothing moves along the guess, or clearly less than along dim 0, it is the batch.
    """
    finder = _Finder(_forward_of(graph), {})
    usual = finder.trial(dict.fromkeys(finder.free, cut(0)))
    told = finder.trial(guess) if guess else None
    if told is not None and (usual is None or told.cost <= usual.cost / CLEARLY):
        return finder.with_others(told).batch
    found = batch_of(graph) if usual is not None and usual.cost else None
    if found is not None:
        return found.batch
    return usual.batch if usual else dict.fromkeys(finder.shapes, cut(0))


def results_along(graph: Graph, batch: Batch) -> Batch:
    """How a forward's results follow from cuts of all inputs; none where they divide by no number.

    R: a result is computed from all samples.
    """
    finder = _Finder(_forward_of(graph), batch)
    num = finder.ranks(batch)
    if num is None:
        return {}
    graph = finder.graph
    graph.mesh = Mesh(((DP, num),))
    walk = _walked(graph, Plan(mesh=graph.mesh, inputs=_cuts_of(batch)), inf)
    return {name: walk.made[node][0] for name, node in graph.outputs.results.items()}


def places_read(graph: Graph, pins: Mapping[str, Layout]) -> PlacesRead | None:
    """What of a forward is read along another dim than 0, where samples mix along dim 0; None where
    none do, or where it reads all of each other dim.
    """
    finder = _Finder(_forward_of(graph), pins)
    usual = finder.trial(dict.fromkeys(finder.free, cut(0)))
    if usual is None or not usual.mixed:
        return None
    for dim in range(1, max(map(len, finder.shapes.values()))):
        names = [name for name in finder.free if len(finder.shapes[name]) > dim]
        for seeds in (*([name] for name in names), names):
            trial = finder.trial(dict.fromkeys(seeds, cut(dim)))
            if trial is not None and not trial.mixed and 0 < trial.taken < 1:
                return PlacesRead(seeds[0], dim, usual.mixed[0], trial.by_place[0])
    return None


@dataclass(frozen=True)
class PlacesRead:
    """An input along whose dim nothing mixes, and of which the line ``read_at`` takes some places
    alone; ``mixed_at``: the line where its samples mix along dim 0.
    """

    name: str
    dim: int
    mixed_at: str
    read_at: str


def _cuts_of(batch: Batch) -> dict[str, Cuts]:
    return {name: {DP: layout} for name, layout in batch.items() if layout != R}


@dataclass(frozen=True)
class _Trial:
    """Cuts of some inputs, and what follows: how all are read, and what it costs in elements.

    ``by_place``: the lines that take samples by their place among all, ``taken`` as a share of
    these. ``mixed``: the lines of all others at which something moves, ``meet``: those of them at
    which more than a number does that is computed from parameters.
    """

    seeds: Mapping[str, Layout]
    batch: Batch
    cost: float
    by_place: tuple[str, ...] = ()
    taken: float = 0.0
    mixed: tuple[str, ...] = ()
    meet: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Finder:
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

    def best(self, limit: float) -> tuple[_Trial | None, list[tuple[str, int, int]]]:
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

    def together(self, limit: float) -> _Trial | None:
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

    def with_others(self, best: _Trial) -> _Trial:
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

    def with_fewer(self, best: _Trial) -> _Trial:
        """The trial without the cuts of inputs that cost something: weights of classes, edges."""
        for name in self.free:
            fewer = self.trial({n: lay for n, lay in best.seeds.items() if n != name}, best.cost)
            if fewer is not None and fewer.cost < best.cost:
                best = fewer
        return best

    def trial(self, seeds: Mapping[str, Layout], limit: float = inf) -> _Trial | None:
        """What follows from cuts; None if no number of ranks divides them, or it costs more."""
        seeds = {**seeds, **self.pins}
        num = self.ranks(seeds)
        if num is None:
            return None
        seeds = {n: lay if _divides(self.shapes[n], lay, num) else R for n, lay in seeds.items()}
        graph = copied(self.graph)
        graph.mesh = Mesh(((DP, num),))
        plan = Plan(mesh=graph.mesh, inputs=_cuts_of(seeds))
        try:
            walk = _walked(graph, plan, limit)
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
        return _Trial(seeds, batch, walk.cost, *lines)

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


def _walked(graph: Graph, plan: Plan, limit: float) -> _Walk:
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
        self.mixed: set[fx.Node] = set()  # what inputs alone give by moving some of them
        self.samples = set(self.graph.inputs.values())  # and what is computed with parameters
        for node in self.graph.calls():
            if self.samples.intersection(node.all_input_nodes):
                self.samples.add(node)
        self.samples -= input_only(self.graph)

    def _take(self, node: fx.Node, best: Strategy) -> None:
        for operand, want in zip(tensor_args(node), best.ins, strict=True):
            have = self.made[operand]
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

    def _pay(self, share: float, shape: Iterable[int]) -> None:
        size = prod(shape)
        self.cost += share * size if size > 1 else 0.0
        if self.cost > self.limit:
            raise _TooMuch


def _forward_of(graph: Graph) -> Graph:
    """The forward of a step alone, as a graph of its own."""
    forward = copied(graph)
    whole = forward.outputs
    forward.set_outputs(Outputs(loss=whole.loss, results=whole.results))
    drop_dead(forward)
    return forward
