"""``plan="auto"``: the fastest plan for a joint graph that fits the memory of the machines.

In: a joint graph, a mesh (open or with axes), and the user's pins. Out: a mesh with axes and a
partial plan for each of the best candidates. All candidates are estimated from one scaling model
per tensor preset and recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from partc.cost.prediction import Work
from partc.errors import PartcError, ShardingError
from partc.graph import Graph
from partc.graph.given_back import waits_for_script
from partc.machines.objective import Objective, check_price
from partc.passes.runner import Table
from partc.passes.search.plans.candidate import RECOMPUTE, Candidate, Recompute
from partc.passes.search.plans.candidates import WORDS, names_axes
from partc.passes.search.plans.infeasible import nothing_fits
from partc.passes.search.plans.read_scaling_model import RANKS, READING, Reading
from partc.passes.search.plans.search_plans import Ranked, ScalingModels, Search, scaling_models_of
from partc.passes.shard.apply_preset import store_cut
from partc.passes.shard.local_batch_norm import has_batch_norm
from partc.plan import Cuts, Plan, fits
from partc.plan.batch import DATA_AXES, without_axes
from partc.plan.mesh import PP, Mesh

if TYPE_CHECKING:
    from partc.passes.search.plans.compare_shardings import Compared

AUTO_PLAN = "auto"
DATA_RANKS = (2, 3, 5, 7, 11, 13)  # for one of which a batch is partitioned to read it
KEPT = 5  # candidates that a search returns, and a report names
# Estimates know the recomputations cheap and block; a plan with any other is estimated as cheap.
ONLY: tuple[Recompute, ...] = ("cheap",)
_RECOMPUTE: dict[object, tuple[Recompute, ...]] = {"cheap": RECOMPUTE, "block": ("block",)}
_SUPERLATIVES = {"time": "best", "dollars": "cheapest", "energy": "least energy"}


@dataclass(frozen=True)
class Choice:
    """The result of a search: the best candidates that fit, the best first.

    ``lines`` says, by size of ``tp``, how far the preset is from the best sharding. ``entries`` has
    the plan's entries of searched shardings, by the candidate's word.
    """

    ranked: tuple[Ranked, ...]
    search: Search
    lines: Mapping[int, str] = field(default_factory=dict)
    entries: Mapping[str, Plan] = field(default_factory=dict)

    def ways(self, graph: Graph, mesh: Mesh, plan: Plan) -> list[tuple[Mesh, Plan]]:
        """The mesh and plan of each candidate, the best first; entries of ``plan`` stay."""
        return [self.way(each.candidate, graph, mesh, plan) for each in self.ranked]

    def way(
        self, one: Candidate, graph: Graph, mesh: Mesh, plan: Plan, passed: Sequence[str] = ()
    ) -> tuple[Mesh, Plan]:
        """The mesh and plan of a candidate; ``passed``: notes on better ones that do not do."""
        knows = mesh.topology is not None and not mesh.topology.is_mixed
        limit = plan.memory_bytes or (round(self.search.limit) if knows else 0)
        at, entries = one.mesh(mesh.topology), self.entries.get(one.word)
        own = with_entries(plan, entries, graph, at, one.preset) if entries else plan
        if mesh.is_open:
            own = own.changed(inputs=without_axes(own.inputs))
        more: dict[str, Any] = {"schedule": one.schedule, "virtual_stages": one.chunks}
        line = self.lines.get(one.tp)
        notes = *plan.notes, *(passed or [self.note()]), *([line] if line else [])
        return at, own.changed(
            preset=one.preset, microbatches=one.microbatches, memory_bytes=limit, notes=notes,
            recompute=one.recompute if plan.recompute == "cheap" else plan.recompute,
            **(more if one.pp > 1 else {}),
        )  # fmt: skip

    def note(self) -> str:
        """One line for the plan's notes: how the plan was chosen, and the next best candidates."""
        search, best = self.search, self.ranked[0]
        others = (
            f"{each.candidate} +{search.cost(each) / search.cost(best) - 1:.0%}"
            for each in self.ranked[1:3]
        )
        price, then = search.price(best), "; ".join(others)
        found = f"auto: {_SUPERLATIVES[search.objective]} of {len(search.candidates)} candidates"
        return found + (f", {price}" if price else "") + (f"; next: {then}" if then else "")


def can_search(mesh: Mesh, plan: Plan) -> bool:
    """Whether a search makes sense: the mesh is open, or has axes that candidates know.

    Not if the plan names stages itself. On one device microbatches and recomputation are chosen, if
    the device's memory is known.
    """
    if plan.stages or plan.order or plan.virtual_stages:
        return False
    several = mesh.num_ranks > 1 or mesh.topology is not None or plan.memory_bytes > 0
    return mesh.is_open or (names_axes(mesh) and several)


def choose_plan(
    graph: Graph, mesh: Mesh, plan: Plan, table: Table, microbatches: int | None = None,
    objective: Objective = "time",
) -> Choice:  # fmt: skip
    """The best candidates for one training step; PlanError if none fits the memory.

    ``microbatches``, or a plan with more than one, pins the number of microbatches. A model with
    batch norms, which in microbatches compute something else, has one unless several are pinned;
    so has a script that computes the loss, whose mesh gets no pipeline. PlanError if ``objective``
    is money and the machines have no price.
    """
    check_price(objective, mesh.hardware)
    pinned = microbatches or (plan.microbatches if plan.microbatches > 1 else None)
    pinned = pinned or (1 if has_batch_norm(graph) else None)
    ways = _RECOMPUTE.get(plan.recompute, ONLY)
    words = ["", *WORDS] if mesh.is_open or "tp" in mesh.names else [""]
    inputs = without_axes(plan.inputs)
    models, reading = _read(graph, words, ways, table, inputs, mesh)
    search = Search(
        mesh=mesh, scaling_models=models, memory_bytes=plan.memory_bytes, microbatches=pinned,
        schedule=plan.schedule, recompute=ways, objective=objective, batch=Work.of(graph).batch,
        reading=reading, in_turns=not waits_for_script(graph),
    )  # fmt: skip
    presets = choose(search)
    ranked = presets.ranked if presets else ()
    found = _compared(graph, plan, search, ranked, table) if len(words) > 1 else presets
    if found is None or not found.ranked:
        raise nothing_fits(
            replace(search, scaling_models=_all_profiles(graph, search, table, inputs))
        )
    return Choice(found.ranked[:KEPT], found.search, found.lines, found.entries)


def _compared(
    graph: Graph, plan: Plan, search: Search, ranked: Sequence[Ranked], table: Table
) -> Compared:
    """The candidates, with searched shardings where these are better."""
    # here, as most compiles search nothing, and the solver has many modules
    from partc.passes.search.plans.compare_shardings import compare_shardings

    return compare_shardings(graph, plan, search, ranked, table)


def _read(
    graph: Graph, words: Sequence[str], ways: Sequence[Recompute], table: Table,
    inputs: Mapping[str, Cuts], mesh: Mesh,
) -> tuple[ScalingModels, Reading]:  # fmt: skip
    """The scaling models, and how they were read.

    Where the mesh has no data axis, for as many data ranks as divide the batch; where it has more
    stages than the model has blocks, in finer units.
    """
    shares = mesh.is_open or any(name in DATA_AXES for name in mesh.names)
    for number in (RANKS,) if shares else DATA_RANKS:
        reading = Reading(number)
        with suppress(ShardingError):
            models = scaling_models_of(graph, words, ways, table, inputs, reading)
            break
    else:  # the error of the usual way
        reading = READING
        models = scaling_models_of(graph, words, ways, table, inputs)
    stages = 1 if mesh.is_open else dict(mesh.axes).get(PP, 1)
    if len(models["", ways[0]].chain) < stages:
        reading = replace(reading, fine=True)
        models = scaling_models_of(graph, words, ways, table, inputs, reading)
    return models, reading


def choose(search: Search) -> Choice | None:
    """The best candidates of a search; None if none fits the memory."""
    found = tuple(islice(filter(search.is_wanted, search.ascending()), KEPT))
    return Choice(found, search) if found else None


def with_entries(plan: Plan, entries: Plan, graph: Graph, mesh: Mesh, preset: str) -> Plan:
    """The user's plan, with searched ``entries`` over ``tp`` where it has none.

    Parameters are stored sharded over the data axes as the preset has it.
    """
    own = store_cut({name: entries.stored(name) for name in graph.params}, graph, mesh, preset)
    pinned = {name: plan.stored(name) for name in own if any(fits(p, name) for p in plan.params)}
    full = plan.changed(
        params={**own, **pinned},
        values={**plan.values, **{n: v for n, v in entries.values.items() if n not in plan.values}},
        gather={**entries.gather, **plan.gather},
        scatter={**entries.scatter, **plan.scatter},
    )
    written = Plan.parse(str(full.changed(preset=preset)))  # names of blocks as patterns
    return full.changed(params=written.params, values=written.values)


def _all_profiles(
    graph: Graph, search: Search, table: Table, inputs: Mapping[str, Cuts]
) -> ScalingModels:
    """Scaling models for all recomputations and all tensor presets that the model can have.

    Also those that the user's pins rule out: an error then says which pin to give up.
    """
    known, found = search.scaling_models, dict(search.scaling_models)
    for word in ("", *WORDS):
        missing = [again for again in RECOMPUTE if (word, again) not in known]
        with suppress(PartcError):
            if missing:
                found.update(
                    scaling_models_of(graph, [word], missing, table, inputs, search.reading)
                )
    return found
