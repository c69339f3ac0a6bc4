"""Go through the candidates of a search until one compiles, and past those that cannot.

Estimates know times and memory, not what a model allows: a loss over the whole batch, for example,
cannot be computed in microbatches. That shows when a candidate is partitioned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from partc.errors import MemoryLimitError, PartcError, PlanError, ShardingError
from partc.passes.search.plans.candidate import Candidate
from partc.passes.search.plans.choose_plan import Choice
from partc.passes.search.plans.search_plans import Ranked, Search
from partc.passes.shard.microbatches import WholeBatchError

PASSED_OVER = (PlanError, ShardingError)  # what another candidate may not meet
MOST = 12  # candidates that are tried, as each takes seconds
SAME = 4  # equal errors in a row, after which no other candidate is thought to fare better
NAMED = 3  # errors that a note names one by one


@dataclass
class Attempts:
    """The candidates of a choice that are worth a try, the best first.

    Whoever tries one tells how it ``failed``. Candidates that differ from it only in what cannot
    matter are then left out. Once one has needed the whole batch, there are only those of a single
    microbatch, pipelines among them. Where all were too large, the last one needs least.
    """

    choice: Choice
    search: Search = field(init=False)
    failures: list[tuple[Candidate, PartcError]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.search = self.choice.search

    def __iter__(self) -> Iterator[Ranked]:
        yield from self._by_cost()
        # Whoever is still here has seen all of them fail.
        if all(isinstance(error, MemoryLimitError) for _, error in self.failures):
            every = filter(self.search.fits, self.search.ascending())
            least = min(every, key=lambda each: each.estimate.peak_bytes, default=None)
            if least is not None and not self._is_like_a_failure(least.candidate):
                yield least

    def _by_cost(self) -> Iterator[Ranked]:
        for one in chain(self.choice.ranked, self._ascending()):
            if self._one_piece():
                break
            if not self._is_like_a_failure(one.candidate):
                yield one
            if self._gives_up():
                return
        if self._one_piece():
            self.search = replace(self.search, microbatches=1)
            for one in self._ascending():
                if not self._is_like_a_failure(one.candidate):
                    yield one
                if self._gives_up():
                    return

    def failed(self, one: Ranked, error: PartcError) -> None:
        """Note that a candidate does not compile."""
        self.failures.append((one.candidate, error))

    def notes(self) -> list[str]:
        """Sentences for a plan on the better candidates that it was taken in place of."""
        refused = [(c, e) for c, e in self.failures if not isinstance(e, MemoryLimitError)]
        told = [f"auto: passed over {c}: {e.where}: {e.what}" for c, e in refused[:NAMED]]
        more = len(refused) - NAMED
        return [*told, f"auto: passed over {more} more"] if more > 0 else told

    def error(self) -> PartcError:
        """The error that says what every candidate has met."""
        met: dict[str, list[Candidate]] = {}
        for candidate, error in self.failures:
            met.setdefault(f"{error.where}: {error.what}", []).append(candidate)
        latest = self.failures[-1][1]
        if len(met) == 1 or all(isinstance(each, MemoryLimitError) for _, each in self.failures):
            return latest
        return PlanError(
            where=f"plan 'auto' on {self.search.mesh}",
            what=f"none of the {len(self.failures)} best candidates can be compiled",
            why="; ".join(f"{told[0]}{_others(told)}: {text}" for text, told in met.items()),
            do=self.failures[0][1].do,
        )

    def _ascending(self) -> Iterator[Ranked]:
        return filter(self.search.is_wanted, self.search.ascending())

    def _one_piece(self) -> bool:
        """Whether from here on only candidates of one microbatch can do."""
        needed = any(isinstance(error, WholeBatchError) for _, error in self.failures)
        return needed and self.search.microbatches is None

    def _is_like_a_failure(self, one: Candidate) -> bool:
        """Whether a candidate was tried, or one that differs in what is recomputed alone.

        Not where only memory was short, of which other candidates may need less.
        """
        for tried, error in self.failures:
            if one == tried:
                return True
            short = isinstance(error, MemoryLimitError)
            if not short and replace(one, recompute=tried.recompute) == tried:
                return True
            if isinstance(error, WholeBatchError) and one.microbatches > 1:
                return True
        return False

    def _gives_up(self) -> bool:
        short = sum(isinstance(error, MemoryLimitError) for _, error in self.failures)
        texts = [str(error) for _, error in self.failures[-SAME:]]
        same = len(texts) == SAME and len(set(texts)) == 1
        return same or len(self.failures) >= MOST or short >= len(self.choice.ranked)


def _others(told: list[Candidate]) -> str:
    return f" and {len(told) - 1} more" if len(told) > 1 else ""
