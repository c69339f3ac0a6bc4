"""A search over candidates: they come out in the order of their estimated cost.

A Search keeps the scaling models of a model, so that the search is repeated quickly for other
links, devices or memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from partc.cost.memory_limit import usable
from partc.errors import PlanError, ShardingError
from partc.graph import Graph
from partc.machines.objective import NO_BATCH, Batch, Objective, per_million, price_text
from partc.machines.topology import Topology
from partc.passes.runner import Table
from partc.passes.search.plans.candidate import RECOMPUTE, Candidate, Recompute
from partc.passes.search.plans.candidates import Space, divisors
from partc.passes.search.plans.estimate import Estimator
from partc.passes.search.plans.read_scaling_model import READING, Reading, scaling_models
from partc.passes.search.plans.scaling_model import ScalingModel
from partc.passes.search.plans.step_times import Estimate
from partc.plan import Cuts
from partc.plan.batch import DATA_AXES
from partc.plan.mesh import Mesh

ScalingModels = Mapping[
    tuple[str, Recompute], ScalingModel
]  # by tensor preset and what is recomputed
FITS_WELL = 0.9  # share of the memory limit; estimates of memory are a few percent off


def scaling_models_of(
    graph: Graph, words: Sequence[str], ways: Sequence[Recompute], table: Table,
    inputs: Mapping[str, Cuts] | None = None, reading: Reading = READING,
) -> ScalingModels:  # fmt: skip
    """The scaling models of a joint graph by tensor preset (word) and recomputation (way).

    ``inputs``: entries of a plan's ``[inputs]`` for any data axes. A preset by which the graph
    cannot be partitioned is left out, unless all are such.
    """
    found: dict[tuple[str, Recompute], ScalingModel] = {}
    for word in words:
        try:
            models = [*scaling_models(graph, word, ways, table, inputs=inputs, reading=reading)]
        except (PlanError, ShardingError):
            if not word or (word == words[-1] and not any(known for known, _ in found)):
                raise
            continue
        found |= {(word, again): each for again, each in zip(ways, models, strict=True)}
    return found


@dataclass(frozen=True)
class Ranked:
    """A candidate with its estimated time and memory."""

    candidate: Candidate
    estimate: Estimate


@dataclass(frozen=True, eq=False)
class Taken:
    """The candidate that a program was compiled from: found by a search, or a user's own plan."""

    search: Search
    candidate: Candidate
    searched: bool


def anything(one: Candidate) -> bool:
    """Accepts every candidate."""
    return True


@dataclass(frozen=True, eq=False)
class Search:
    """A search: the scaling models of a model, the machines, and the user's pins.

    ``mesh`` is open (machines without axes) or has axes. ``memory_bytes`` limits a rank; 0 is the
    device's memory. With ``objective`` money or energy, a candidate may leave devices of an open
    mesh unused, and its cost is its step time times its number of devices.
    """

    mesh: Mesh
    scaling_models: ScalingModels
    memory_bytes: int = 0
    microbatches: int | None = None
    schedule: str = ""
    recompute: tuple[Recompute, ...] = RECOMPUTE
    objective: Objective = "time"
    batch: Batch = NO_BATCH
    reading: Reading = READING  # how the scaling models were read
    in_turns: bool = True  # whether parts of the batch may take turns

    @property
    def devices(self) -> int:
        """The number of devices: all ranks of a mesh with axes, else all of the machines."""
        return self.mesh.num_ranks if self.mesh.axes else self.mesh.hardware.num_devices

    @property
    def limit(self) -> float:
        """The memory limit of a rank in bytes; on mixed devices the smallest."""
        return self.memory_bytes or usable(self.mesh.hardware.memory_bytes)

    @cached_property
    def space(self) -> Space:
        """The space of candidates that agree with the pins."""
        uncut = self.scaling_models["", self.recompute[0]]
        return Space(
            mesh=self.mesh, microbatches=self.microbatches, schedule=self.schedule,
            devices=self.devices, recompute=self.recompute,
            dp_divides=uncut.dp_divides,
            tp_divides={w: found.tp_divides for (w, _), found in self.scaling_models.items() if w},
            units=len(uncut.chain), fewer=self.objective != "time", in_turns=self.in_turns,
        )  # fmt: skip

    @cached_property
    def candidates(self) -> list[tuple[float, int, Candidate]]:
        """All candidates as (lower bound on the cost, number, candidate), lowest bound first."""
        numbered = enumerate(self.space.candidates())
        return sorted((self._count(self._of(one).bound_s(one), one), i, one) for i, one in numbered)

    def _count(self, seconds: float, one: Candidate) -> float:
        """The cost of a step of this many seconds: seconds, or seconds of all devices."""
        return seconds if self.objective == "time" else seconds * one.num_ranks

    def cost(self, one: Ranked) -> float:
        """The cost to minimise: seconds of the step, or seconds of all devices together."""
        return self._count(one.estimate.step_s, one.candidate)

    def per_million(self, one: Ranked) -> float | None:
        """$ or kWh of a million tokens; None if the objective is time."""
        step_s, ranks = one.estimate.step_s, one.candidate.num_ranks
        return per_million(self.objective, step_s, ranks, self.mesh.hardware, self.batch)

    def price(self, one: Ranked) -> str:
        """``per_million`` in words, "" if the objective is time."""
        return price_text(self.objective, self.per_million(one), self.batch)

    @cached_property
    def _estimators(self) -> dict[tuple[str, Recompute], Estimator]:
        return {
            key: Estimator(found, self.mesh.hardware) for key, found in self.scaling_models.items()
        }

    def _of(self, one: Candidate) -> Estimator:
        return self._estimators[one.word if one.tp > 1 else "", one.recompute]

    def estimate(self, one: Candidate) -> Ranked:
        """A candidate with its estimate."""
        return Ranked(one, self._of(one).estimate(one))

    def fits(self, one: Ranked, part: float = 1.0) -> bool:
        """Whether the fullest rank's peak is at most ``part`` of its memory limit."""
        limit = self.limit
        if self.mesh.hardware.is_mixed:
            limit = min(self.memory_bytes or inf, usable(one.estimate.memory_bytes))
        return one.estimate.peak_bytes <= part * limit

    def is_wanted(self, one: Ranked) -> bool:
        """Whether a candidate fits the memory and has no needless microbatches.

        Without a pipeline microbatches save only memory, and the estimate leaves out their
        overhead. They are needless if the next smaller number fits well (FITS_WELL) too.
        """
        here = one.candidate
        if not self.fits(one) or here.pp > 1 or here.microbatches == 1 or self.microbatches:
            return self.fits(one)
        fewer = max(number for number in divisors(here.microbatches) if number < here.microbatches)
        return not self.fits(self.estimate(replace(here, microbatches=fewer)), FITS_WELL)

    def ascending(self, accept: Callable[[Candidate], bool] = anything) -> Iterator[Ranked]:
        """The accepted candidates, cheapest first, whether they fit or not.

        A candidate is estimated only when its lower bound is reached (best-first search).
        """
        ready: list[tuple[float, float, int, Ranked]] = []
        for bound, i, one in self.candidates:
            if not accept(one):
                continue
            # No further candidate costs less than ``bound``: cheaper ones are final.
            while ready and ready[0][0] <= bound:
                yield heapq.heappop(ready)[3]
            each = self.estimate(one)
            key = self.cost(each), each.estimate.peak_bytes
            heapq.heappush(ready, (*key, i, each))
        while ready:
            yield heapq.heappop(ready)[3]

    def best(self, accept: Callable[[Candidate], bool] = anything) -> Ranked | None:
        """The cheapest accepted candidate that fits; None if none does."""
        return next(filter(self.fits, self.ascending(accept)), None)

    # the same on other machines ------------------------------------------------------------------
    def on(self, topology: Topology, *, more_bytes: int = 0) -> Search:
        """The same search on other machines, with ``more_bytes`` more memory on each device.

        If the mesh has axes, its first data axis grows or shrinks with the number of devices;
        PlanError if there is no data axis.
        """
        mesh = Mesh(self._axes(topology.num_devices), topology)
        limit = round(self.limit) + more_bytes if more_bytes else self.memory_bytes
        return replace(self, mesh=mesh, memory_bytes=limit)

    def _axes(self, devices: int) -> tuple[tuple[str, int], ...]:
        if not self.mesh.axes or devices == self.mesh.num_ranks:
            return self.mesh.axes
        grows = next((name for name in self.mesh.names if name in DATA_AXES), "")
        return tuple(
            (name, size * devices // self.mesh.num_ranks if name == grows else size)
            for name, size in self.mesh.axes
        )
