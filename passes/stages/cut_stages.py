"""Cut a chain of units into pipeline stages so that the slowest stage is as fast as possible.

In: the cost of each unit of the model. Out: the first unit of every stage but the first. The result
is exact (dynamic programming over all cuts) and the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partc.errors import MemoryLimitError, PlanError

Ints = NDArray[np.int64]
_NEVER = np.iinfo(np.int64).max // 4  # stands for infinity; a quarter, so that sums do not overflow


@dataclass(frozen=True)
class Unit:
    """A part of the model that stays on one stage: a block, the embedding, the head.

    Times and ``activation_bytes`` are of one microbatch. ``parameter_bytes`` are parameters,
    gradients and optimizer states. ``boundary_bytes`` are the activations sent if a stage ends
    behind this unit; their gradients, which come back, are as large.
    """

    name: str
    forward_us: float
    backward_us: float
    parameter_bytes: int
    activation_bytes: int
    boundary_bytes: int


Exposed = Callable[[int], float]


def all_hidden(num_bytes: int) -> float:
    """The ``exposed_us`` of transfers that computing hides entirely: 0 microseconds."""
    return 0.0


def balance(
    units: Sequence[Unit],
    stages: int,
    *,
    in_flight: Sequence[int],
    memory_bytes: int | Sequence[int] | None = None,
    exposed_us: Exposed = all_hidden,
    there: Sequence[Sequence[Unit]] = (),
) -> list[int]:
    """The first unit of every stage but the first, so that the slowest stage is fastest.

    A stage's time is its computing plus ``exposed_us(bytes)`` of what it receives: the activation
    at its front and the gradient at its back. It holds the activations of ``in_flight[stage]``
    microbatches (1F1B: ``stages - stage``), which with its parameters must fit ``memory_bytes``,
    one number or one per stage. Where stages run on different devices, ``there`` has for each all
    units with their times on it. Of equally fast cuts it takes the one with the fewest bytes over
    all boundaries, then the one whose fastest stage is slowest. Times count in whole nanoseconds.

    PlanError if there are more stages than units, or if no cut fits the memory; then it says the
    least memory that works and who holds it.
    """
    _check(units, stages, in_flight)
    chain = Chain(there or [units] * stages, exposed_us)
    limits = per_stage(memory_bytes, stages)
    windows = [chain.first_that_fits(*at) for at in zip(in_flight, limits, strict=True)]
    if not chain.can_cut(_NEVER, windows):
        raise _too_little(chain, in_flight, limits)
    # Bisection finds the least time of the slowest stage; then the best cut with that time.
    slowest = least(lambda ns: chain.can_cut(ns, windows), 0, chain.total_ns)
    return _cheapest_cut(chain, slowest, windows)


class Chain:
    """Sums over the units before each possible cut; cut ``i`` stands before unit ``i``.

    Whole numbers, so that sums are exact and two equal stages compare equal.
    """

    def __init__(self, there: Sequence[Sequence[Unit]], exposed_us: Exposed) -> None:
        """``there`` has per stage all units with their costs on the stage's devices."""
        self.there, self.units = there, (units := there[0])
        crossing = [unit.boundary_bytes for unit in units[:-1]]
        exposed = _row([0, *(round(1000 * exposed_us(b)) for b in crossing), 0])
        self.crossing = _row([0, *crossing, 0])
        self.state = _sums([u.parameter_bytes for u in units])
        self.saved = _sums([u.activation_bytes for u in units])
        # The time of a stage from cut i to cut j is until[stage][j] - since[stage][i].
        ns = {id(each): _sums(list(map(_ns, each))) for each in there}
        self.since = [ns[id(each)] - exposed for each in there]
        self.until = [ns[id(each)] + exposed for each in there]
        self.total_ns = max(int(until[-1] + 2 * exposed.max()) for until in self.until)

    def loads(self, edges: Sequence[int], in_flight: Sequence[int]) -> tuple[Ints, Ints]:
        """The nanoseconds and the bytes of memory of every stage of a cut."""
        at = _row(edges)
        pairs = zip(self.since, self.until, pairwise(edges), strict=True)
        times = _row([int(until[end] - since[first]) for since, until, (first, end) in pairs])
        return times, np.diff(self.state[at]) + _row(in_flight) * np.diff(self.saved[at])

    def first_that_fits(self, in_flight: int, limit: int) -> Ints:
        """Per end of a stage the earliest beginning with which the stage fits ``limit`` bytes."""
        held = self.state + in_flight * self.saved
        return np.searchsorted(held, held - limit)

    def can_cut(self, slowest_ns: int, windows: Sequence[Ints]) -> bool:
        """Whether a cut exists in which every stage takes at most ``slowest_ns`` nanoseconds and
        begins no earlier than its window (``first_that_fits``) allows.
        """
        reached = np.zeros(len(self.units) + 1, dtype=bool)
        reached[0] = True
        for since, until, first in zip(self.since, self.until, windows, strict=True):
            latest = _window_max(np.where(reached, since, -_NEVER), first)
            reached = (latest > -_NEVER) & (latest >= until - slowest_ns)
        return bool(reached[-1])

    def short(self, stage: int, slowest_ns: int, windows: Sequence[Ints]) -> _Stages:
        """All (end, begin) pairs with which a stage takes at most ``slowest_ns``, sorted by end.

        Pairs that no stage's window allows are left out.
        """
        times = self.until[stage][:, None] - self.since[stage][None, :]
        allowed = np.tril(times <= slowest_ns, -1)
        allowed &= np.arange(len(times)) >= np.minimum.reduce(windows)[:, None]
        ends, begins = np.nonzero(allowed)
        return _Stages(ends, begins, times[ends, begins])


class _Stages(NamedTuple):
    """Possible stages as parallel arrays: end, begin and nanoseconds of each, sorted by end."""

    ends: Ints
    begins: Ints
    times: Ints


def least(works: Callable[[int], bool], low: int, high: int) -> int:
    """The least number from ``low`` to ``high`` that works, by bisection.

    If a number works, then all larger ones must work too.
    """
    while low < high:
        middle = (low + high) // 2
        if works(middle):
            high = middle
        else:
            low = middle + 1
    return low


def per_stage(memory_bytes: int | Sequence[int] | None, stages: int) -> list[int]:
    """The memory limit of each stage; without a limit, a number that no stage reaches."""
    if memory_bytes is None:
        return [_NEVER] * stages
    return [memory_bytes] * stages if isinstance(memory_bytes, int) else list(memory_bytes)


def _cheapest_cut(chain: Chain, slowest_ns: int, windows: Sequence[Ints]) -> list[int]:
    """The cut with the fewest boundary bytes, then the slowest fastest stage, among the cuts in
    which no stage takes more than ``slowest_ns``.

    Possible stages are sorted by their end, so that one ``reduceat`` finds the best for every end.
    """
    num = len(chain.crossing)
    best = _Best(np.full(num, _NEVER), np.full(num, -1))
    best.num_bytes[0], best.fastest[0] = 0, _NEVER
    history, short = [best], dict[int, _Stages]()
    for stage, first in enumerate(windows):
        devices = id(chain.there[stage])
        if devices not in short:
            short[devices] = chain.short(stage, slowest_ns, windows)
        best = best.one_more_stage(chain, first, short[devices])
        history.append(best)
    return _walk_back(chain, slowest_ns, windows, history)


@dataclass(frozen=True)
class _Best:
    """Per cut point the best division of the units before it into a given number of stages, as its
    boundary bytes and the nanoseconds of its fastest stage.
    """

    num_bytes: Ints  # _NEVER where there is no way
    fastest: Ints

    def one_more_stage(self, chain: Chain, first: Ints, stages: _Stages) -> _Best:
        """The best way to every cut with one stage more; ``stages`` are the possible last ones."""
        ends, begins, times = stages
        paid = (self.num_bytes + chain.crossing)[begins]  # a stage pays for its front
        paid[begins < first[ends]] = _NEVER
        num_bytes = _per_end(np.minimum, paid, ends, np.full(len(first), _NEVER))
        cheapest = np.flatnonzero((paid == num_bytes[ends]) & (paid < _NEVER))
        even = np.minimum(self.fastest[begins[cheapest]], times[cheapest])
        fastest = _per_end(np.maximum, even, ends[cheapest], np.full(len(first), -1))
        return _Best(num_bytes, fastest)


def _per_end(reduce: np.ufunc, values: Ints, ends: Ints, result: Ints) -> Ints:
    """Reduce the values of each end into ``result[end]``; ``ends`` must be sorted."""
    used, groups = np.unique(ends, return_index=True)
    if len(used):
        result[used] = reduce.reduceat(values, groups)
    return result


def _walk_back(
    chain: Chain, slowest_ns: int, windows: Sequence[Ints], history: Sequence[_Best]
) -> list[int]:
    """The first units of the later stages of the best cut, found from the last stage back.

    Of equally good beginnings the earliest is taken.
    """
    end, points = len(chain.units), []
    for stage in reversed(range(len(windows))):
        before, here = history[stage], history[stage + 1]
        low = int(windows[stage][end])
        times = chain.until[stage][end] - chain.since[stage][low:end]
        paid = (before.num_bytes + chain.crossing)[low:end]
        even = np.minimum(before.fastest[low:end], times)
        best = (paid == here.num_bytes[end]) & (even == here.fastest[end]) & (times <= slowest_ns)
        end = low + int(np.argmax(best))
        points.append(end)
    return points[-2::-1]  # the last one is the beginning of the first stage


def _window_max(values: Ints, first: Ints) -> Ints:
    """For each ``j`` the maximum of ``values[first[j]:j]``; ``-_NEVER`` for an empty window.

    Two overlapping runs whose length is a power of two cover any window (a sparse table).
    """
    here = np.arange(len(values))
    sizes = here - first
    largest, runs, length = np.full(len(values), -_NEVER), values, 1
    while length <= len(values):
        fits = (sizes >= length) & (sizes < 2 * length)
        at = here[fits]
        largest[fits] = np.maximum(runs[first[fits]], runs[at - length])
        runs = np.append(np.maximum(runs[:-length], runs[length:]), runs[-length:])
        length *= 2
    return largest


def _ns(unit: Unit) -> int:
    return round(1000 * (unit.forward_us + unit.backward_us))


def _row(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _sums(values: Sequence[int]) -> Ints:
    return np.concatenate([_row([0]), np.cumsum(_row(values))])


def _check(units: Sequence[Unit], stages: int, in_flight: Sequence[int]) -> None:
    assert len(in_flight) == stages > 0
    if stages > len(units):
        few = "1 unit" if len(units) == 1 else f"{len(units)} units"
        most = "1 stage" if len(units) == 1 else f"{len(units)} stages"
        raise PlanError(
            where=f"pipeline of {stages} stages",
            what=f"the model has only {few} to cut between",
            why="every stage needs at least one, and a unit, which is a block or a module beside "
            "the blocks, is not cut",
            do=f"Use at most {most} (fewer pp ranks, or fewer virtual stages per rank).",
        )


def _too_little(chain: Chain, in_flight: Sequence[int], limits: Sequence[int]) -> PlanError:
    """The error for limits that no cut fits: the least limit that works, and the units that take
    most memory on the tightest stage.
    """

    def windows(extra: int) -> list[Ints]:
        pairs = zip(in_flight, limits, strict=True)
        return [chain.first_that_fits(flying, limit + extra) for flying, limit in pairs]

    everything = int(chain.state[-1] + max(in_flight) * chain.saved[-1])
    extra = least(lambda more: chain.can_cut(_NEVER, windows(more)), 0, everything)
    slowest = least(lambda ns: chain.can_cut(ns, windows(extra)), 0, chain.total_ns)
    points = _cheapest_cut(chain, slowest, windows(extra))
    edges = [0, *points, len(chain.units)]
    _, held = chain.loads(edges, in_flight)
    tightest = int(np.argmax(held - _row(limits)))
    units = chain.units[edges[tightest] : edges[tightest + 1]]
    return too_little_memory(
        f"pipeline of {len(limits)} stages",
        limits[tightest],
        limits[tightest] + extra,
        f"stage {tightest} then holds, with {in_flight[tightest]} microbatches in flight, "
        + top_holders([(unit, in_flight[tightest]) for unit in units]),
    )


def too_little_memory(where: str, limit: int, needed: int, why: str) -> MemoryLimitError:
    """The error for a memory ``limit`` in bytes; ``needed`` is the least limit that works."""
    return MemoryLimitError(
        where=where,
        what=f"no cut fits {limit:,} bytes of memory; the least that works is {needed:,} bytes",
        why=why,
        do="Cut the model finer (more pp or tp ranks, or shard optimizer state), make microbatches "
        "smaller, recompute activations, or take a schedule with fewer microbatches in flight.",
    )


def top_holders(holders: Sequence[tuple[Unit, int]]) -> str:
    """The three units with most memory as text; ``holders`` pairs a unit with the number of
    microbatches in flight.
    """
    rows = [(u.parameter_bytes + n * u.activation_bytes, u.name) for u, n in holders]
    rows.sort(key=lambda row: -row[0])
    return ", ".join(f"{name} {num_bytes:,}" for num_bytes, name in rows[:3])
