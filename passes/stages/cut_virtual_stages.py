"""Cut a chain of units into several virtual stages per pipeline rank, so that the slowest rank is
fast (interleaved schedules).

In: the cost of each unit, and the rank of each stage. Out: the first unit of every later stage, as
in ``cut_stages``, whose result is the starting point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from partc.errors import PlanError
from partc.passes.stages.cut_stages import (
    Chain,
    Exposed,
    Ints,
    Unit,
    all_hidden,
    balance,
    least,
    per_stage,
    too_little_memory,
    top_holders,
)


def balance_ranks(
    units: Sequence[Unit],
    rank_of: Sequence[int],
    *,
    in_flight: Sequence[int],
    memory_bytes: int | Sequence[int] | None = None,
    exposed_us: Exposed = all_hidden,
    there: Sequence[Sequence[Unit]] = (),
    tries: int = 20_000,
) -> list[int]:
    """The first unit of every stage but the first; ``rank_of[stage]`` is the rank of a stage.

    With one stage per rank the result is that of ``balance``, which is exact. With more, descent
    starts from the cut with the fastest slowest *stage* and moves units between stages as long as
    the slowest *rank* becomes faster (then the next slowest, then the slowest stage, then the bytes
    over all boundaries). The result is a local optimum; each start looks at ``tries`` cuts at most.
    ``memory_bytes`` limits all stages of a rank together, one number or one per rank. ``there`` has
    the units as each rank's devices run them. PlanError if no cut that was looked at fits.
    """
    stages, ranks = len(rank_of), max(rank_of) + 1
    limits = [memory_bytes] * ranks if isinstance(memory_bytes, int) else memory_bytes
    there = [there[rank] if there else units for rank in rank_of]
    if stages == ranks:
        each = limits and [limits[rank] for rank in rank_of]
        return balance(
            units, stages, in_flight=in_flight, memory_bytes=each, exposed_us=exposed_us,
            there=there,
        )  # fmt: skip
    free = balance(units, stages, in_flight=in_flight, exposed_us=exposed_us, there=there)
    search = _Search(Chain(there, exposed_us), rank_of, in_flight, tries)
    found = search.descend([0, *free, len(units)], limits)
    if limits is not None:
        leanest = search.descend(search.least_memory_per_stage(), [0] * ranks)  # but memory nothing
        if search.rate(leanest.edges, limits).score[0]:
            raise search.too_little(limits, leanest)
        lean = search.descend(leanest.edges, limits)
        found = min(found, lean, key=lambda cut: cut.score)
    return found.edges[1:-1]


class _Cut(NamedTuple):
    """A cut with its score; ``edges`` are 0, the cut points and the number of units."""

    score: tuple[int, ...]  # bytes too many, ranks from slow to fast, slowest stage, boundary bytes
    edges: list[int]
    worst_ranks: list[int]  # all of them, the worst first


class _Search:
    """Descent over the cuts of one chain."""

    def __init__(
        self, chain: Chain, rank_of: Sequence[int], in_flight: Sequence[int], tries: int
    ) -> None:
        self.chain, self.in_flight, self.tries = chain, in_flight, tries
        self.rank_of = np.array(rank_of)

    def descend(self, edges: list[int], limits: Sequence[int] | None) -> _Cut:
        """Go to the first better neighbour until there is none, or ``tries`` are used up."""
        best, left = self.rate(edges, limits), self.tries
        improved = True
        while improved:
            improved = False
            for neighbour in self.neighbours(best):
                if not left:
                    return best
                left -= 1
                rated = self.rate(neighbour, limits)
                if rated.score < best.score:
                    best, improved = rated, True
                    break
        return best

    def rate(self, edges: list[int], limits: Sequence[int] | None) -> _Cut:
        """Score a cut; a cut that needs too much memory is worse than any that fits."""
        times, held = self.chain.loads(edges, self.in_flight)
        per_rank = self.per_rank(times)
        crossing = int(self.chain.crossing[edges].sum())
        too_many = self.per_rank(held) - (np.array(limits) if limits else np.inf)
        over = max(0, int(too_many.max())) if limits else 0
        worst = np.argsort(-(too_many if over else per_rank), kind="stable").tolist()
        slow_to_fast = np.sort(per_rank)[::-1].tolist()
        return _Cut((over, *slow_to_fast, int(times.max()), crossing), edges, worst)

    def per_rank(self, per_stage: Ints) -> Ints:
        totals = np.zeros(int(self.rank_of.max()) + 1, dtype=np.int64)
        np.add.at(totals, self.rank_of, per_stage)
        return totals

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def neighbours(self, cut: _Cut) -> Iterator[list[int]]:
        """Cuts in which a stage gives one or two units to another stage; worst ranks give first.

        Each stage between them passes as many units on, so that all cut points between them move
        together.
        """
        edges = cut.edges
        for giver in (stage for rank in cut.worst_ranks for stage in self.stages_of(rank)):
            for moved in (1, 2):
                for first in range(giver, 0, -1):
                    yield from _shifted(edges, first, giver + 1, moved)
                for end in range(giver + 2, len(edges)):
                    yield from _shifted(edges, giver + 1, end, -moved)

    def least_memory_per_stage(self) -> list[int]:
        """The cut whose stage with most memory needs least: a start where memory is short."""
        stages = len(self.in_flight)

        def windows(limit: int) -> list[Ints]:
            limits = per_stage(limit, stages)
            pairs = zip(self.in_flight, limits, strict=True)
            return [self.chain.first_that_fits(flying, at) for flying, at in pairs]

        everything = int(self.chain.state[-1] + max(self.in_flight) * self.chain.saved[-1])
        anything = 1 << 61
        limit = least(lambda at: self.chain.can_cut(anything, windows(at)), 0, everything)
        return [
            0,
            *balance(self.chain.units, stages, in_flight=self.in_flight, memory_bytes=limit),
            len(self.chain.units),
        ]

    def too_little(self, limits: Sequence[int], cut: _Cut) -> PlanError:
        """The error for limits that no cut fits; ``cut`` needs the least memory that was found."""
        rated = self.rate(cut.edges, limits)
        edges, rank = rated.edges, rated.worst_ranks[0]
        holders = [
            (unit, self.in_flight[stage])
            for stage in self.stages_of(rank)
            for unit in self.chain.units[edges[stage] : edges[stage + 1]]
        ]
        return too_little_memory(
            f"pipeline of {len(self.in_flight)} stages on {int(self.rank_of.max()) + 1} ranks",
            limits[rank],
            limits[rank] + rated.score[0],
            f"rank {rank} then holds {top_holders(holders)}",
        )


def _shifted(edges: list[int], first: int, end: int, by: int) -> Iterator[list[int]]:
    """The edges with ``edges[first:end]`` moved by ``by`` units, unless a stage would be empty."""
    moved = [*edges[:first], *(edge + by for edge in edges[first:end]), *edges[end:]]
    if moved[first - 1] < moved[first] and moved[end - 1] < moved[end]:
        yield moved
