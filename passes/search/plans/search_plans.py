"""A search over ways to train: candidates in the order of what they cost, on any machine.

It keeps what a model's profiles say, so that the same question is answered again in a moment with
other links, devices or memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from partc.cost.memory_limit import usable
from partc.graph import Graph
from partc.machines.objective import NO_BATCH, Batch, Objective, per_million, price_text
from partc.machines.topology import Topology
from partc.passes.runner import Table
from partc.passes.search.plans.candidate import RECOMPUTE, Candidate, Recompute
from partc.passes.search.plans.candidates import Space, divisors
from partc.passes.search.plans.estimate import Estimate, Estimator
from partc.passes.search.plans.read_scaling_model import scaling_models
from partc.passes.search.plans.scaling_model import ScalingModel
from partc.passes.shard.apply_preset import DATA_AXES
from partc.plan.mesh import Mesh

ScalingModels = Mapping[
    tuple[str, Recompute], ScalingModel
]  # by tensor preset and what is recomputed
FITS_WELL = 0.9  # of the limit: estimates of memory are a few percent off


def scaling_models_of(
    graph: Graph, words: Sequence[str], ways: Sequence[Recompute], table: Table
) -> ScalingModels:
    """The laws of a joint graph's step under each tensor preset and way to recompute."""
    return {
        (word, again): found
        for word in words
        for again, found in zip(ways, scaling_models(graph, word, ways, table), strict=True)
    }


@dataclass(frozen=True)
class Ranked:
    """A candidate and what it is estimated to cost."""

    candidate: Candidate
    estimate: Estimate


@dataclass(frozen=True, eq=False)
class Taken:
    """The candidate that a program was compiled from: that of a search, or by hand."""

    search: Search
    candidate: Candidate
    searched: bool


def anything(one: Candidate) -> bool:
    """Accepts every candidate."""
    return True


@dataclass(frozen=True, eq=False)
class Search:
    """What is known of a model and what the user has pinned.

    ``mesh`` is open or has axes; ``memory_bytes`` is the limit of a rank, 0 for what a device has.
    For money and energy an open mesh may be used in part, and seconds of all devices count.
    """

    mesh: Mesh
    scaling_models: ScalingModels
    memory_bytes: int = 0
    microbatches: int | None = None
    schedule: str = ""
    recompute: tuple[Recompute, ...] = RECOMPUTE
    objective: Objective = "time"
    batch: Batch = NO_BATCH

    @property
    def devices(self) -> int:
        return self.mesh.num_ranks if self.mesh.axes else self.mesh.hardware.num_devices

    @property
    def limit(self) -> float:
        """Bytes that every rank may hold at least."""
        return self.memory_bytes or usable(self.mesh.hardware.memory_bytes)

    @cached_property
    def space(self) -> Space:
        """The candidates that agree with what is pinned."""
        uncut = self.scaling_models["", self.recompute[0]]
        return Space(
            mesh=self.mesh, microbatches=self.microbatches, schedule=self.schedule,
            devices=self.devices, recompute=self.recompute,
            dp_divides=uncut.dp_divides,
            tp_divides={w: found.tp_divides for (w, _), found in self.scaling_models.items() if w},
            units=len(uncut.chain), fewer=self.objective != "time",
        )  # fmt: skip

    @cached_property
    def candidates(self) -> list[tuple[float, int, Candidate]]:
        """All of them behind their bounds, the lowest first."""
        numbered = enumerate(self.space.candidates())
        return sorted((self._count(self._of(one).bound_s(one), one), i, one) for i, one in numbered)

    def _count(self, seconds: float, one: Candidate) -> float:
        """What the objective counts of a step's seconds."""
        return seconds if self.objective == "time" else seconds * one.num_ranks

    def cost(self, one: Ranked) -> float:
        """What is to be least: seconds of the step, or of all devices."""
        return self._count(one.estimate.step_s, one.candidate)

    def per_million(self, one: Ranked) -> float | None:
        """$ or kWh of a million tokens; None where time is what counts."""
        step_s, ranks = one.estimate.step_s, one.candidate.num_ranks
        return per_million(self.objective, step_s, ranks, self.mesh.hardware, self.batch)

    def price(self, one: Ranked) -> str:
        """The same in words, or ""."""
        return price_text(self.objective, self.per_million(one), self.batch)

    @cached_property
    def _estimators(self) -> dict[tuple[str, Recompute], Estimator]:
        return {
            key: Estimator(found, self.mesh.hardware) for key, found in self.scaling_models.items()
        }

    def _of(self, one: Candidate) -> Estimator:
        return self._estimators[one.word if one.tp > 1 else "", one.recompute]

    def estimate(self, one: Candidate) -> Ranked:
        """What a candidate costs."""
        return Ranked(one, self._of(one).estimate(one))

    def fits(self, one: Ranked, part: float = 1.0) -> bool:
        """Whether a rank's peak is within so much of what it may hold."""
        limit = self.limit
        if self.mesh.hardware.is_mixed:
            limit = min(self.memory_bytes or inf, usable(one.estimate.memory_bytes))
        return one.estimate.peak_bytes <= part * limit

    def is_wanted(self, one: Ranked) -> bool:
        """Whether it fits, and takes no turns for nothing: without a pipeline they save memory and
        nothing else, and what each costs beside its calls no estimate counts. They are for nothing
        where half as many, say, fit so well that the program will.
        """
        here = one.candidate
        if not self.fits(one) or here.pp > 1 or here.microbatches == 1 or self.microbatches:
            return self.fits(one)
        fewer = max(number for number in divisors(here.microbatches) if number < here.microbatches)
        return not self.fits(self.estimate(replace(here, microbatches=fewer)), FITS_WELL)

    def ascending(self, accept: Callable[[Candidate], bool] = anything) -> Iterator[Ranked]:
        """The accepted candidates, the least in cost first, whether they fit or not.

        As few are estimated as bounds allow.
        """
        ready: list[tuple[float, float, int, Ranked]] = []
        for bound, i, one in self.candidates:
            if not accept(one):
                continue
            while ready and ready[0][0] <= bound:
                yield heapq.heappop(ready)[3]
            each = self.estimate(one)
            key = self.cost(each), each.estimate.peak_bytes
            heapq.heappush(ready, (*key, i, each))
        while ready:
            yield heapq.heappop(ready)[3]

    def best(self, accept: Callable[[Candidate], bool] = anything) -> Ranked | None:
        """The accepted candidate of the least cost that fits, if one does."""
        return next(filter(self.fits, self.ascending(accept)), None)

    # the same on other machines ------------------------------------------------------------------
    def on(self, topology: Topology, *, more_bytes: int = 0) -> Search:
        """The same search on other machines, with more memory on each device.

        Where the mesh has axes, a data axis takes up a change in the number of devices; PlanError
        if there is none.
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
