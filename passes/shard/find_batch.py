"""Find which dim of each input is the batch: the one along which samples do not mix.

Cuts of inputs are followed through the forward to the loss, parameters whole. Along the batch
nothing has to move before the loss, and ranks share all the work; along another dim (time,
features) something is gathered or summed on the way, and what follows is computed by all alike.
The cuts of other inputs follow from what is computed with them: of a sequence-first model
``data i64[35,20@dp]`` moves nothing, and its flat targets ``i64[700]`` are cut as ``[0, 35]``. Dim
0 wins where it is as good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, prod

from partc.errors import PlanError
from partc.graph import Graph, value
from partc.passes.shard.batch_trials import Batch, Finder, cuts_of, forward_of, walked
from partc.passes.shard.rows_in_loss import notes_on_rows
from partc.plan import Cuts, Plan
from partc.plan.batch import BATCH, BY_PLACE, ROWS_MEET, data_axes, is_pinned, layout_of
from partc.plan.mesh import DP, Mesh
from partc.plan.plan_text import write_cuts
from partc.plan.sharding import Layout, R, cut

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
    finder = Finder(forward_of(graph), pins)
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
    finder = Finder(forward_of(graph), pins or {})
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
    finder = Finder(forward_of(graph), {})
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
    finder = Finder(forward_of(graph), batch)
    num = finder.ranks(batch)
    if num is None:
        return {}
    graph = finder.graph
    graph.mesh = Mesh(((DP, num),))
    walk = walked(graph, Plan(mesh=graph.mesh, inputs=cuts_of(batch)), inf)
    return {name: walk.made[node][0] for name, node in graph.outputs.results.items()}


def moved_results(graph: Graph, batch: Batch) -> frozenset[str]:
    """The results of a forward that are computed from samples that were moved, so that their
    shardings do not tell which rows are whose.
    """
    trial = Finder(forward_of(graph), batch).trial({})
    return frozenset() if trial is None else trial.moved


def places_read(graph: Graph, pins: Mapping[str, Layout]) -> PlacesRead | None:
    """What of a forward is read along another dim than 0, where samples mix along dim 0; None where
    none do, or where it reads all of each other dim.
    """
    finder = Finder(forward_of(graph), pins)
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
