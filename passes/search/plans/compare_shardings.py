"""Compare the presets with searched shardings over ``tp``, and take those where they gain enough.

In: a search over presets and its best candidates. Out: the search and its best candidates, with
searched shardings among them if these gain more than MARGIN; and per size of ``tp`` a line of text
that says how far the preset is from the best sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from partc.graph import Graph
from partc.passes.runner import Table
from partc.passes.search.plans.candidate import Candidate, Recompute
from partc.passes.search.plans.candidates import sizes_of
from partc.passes.search.plans.read_scaling_model import scaling_models_of_entries
from partc.passes.search.plans.scaling_model import ScalingModel, searched_word
from partc.passes.search.plans.search_plans import Ranked, ScalingModels, Search
from partc.passes.search.shardings.tensor_shardings import TensorRanks, TensorShardings
from partc.plan import Plan

MOST_SIZES = 2  # sizes of tp that are searched: each takes as long as a preset's scaling model
# A preset is one word, searched shardings are many lines of a plan. And the estimates of two plans
# may be 1.5 % further apart than the predictions of their programs.
MARGIN = 0.02
KNOWN = 0.5  # the share of a model's FLOPs that a preset must shard to count as knowing the model
_MANY = 20  # candidates whose sizes of tp are searched where none of the best has a tp
_MODEL = "calls and transfers one after the other"


@dataclass(frozen=True)
class Compared:
    """The outcome of the comparison.

    ``ranked`` are the best candidates that fit. Candidates with searched shardings are in
    ``ranked`` and ``search`` only if one of them is the best by more than MARGIN. ``lines`` are by
    size of ``tp``, ``entries`` (of a plan) by the word of the candidate.
    """

    search: Search
    ranked: tuple[Ranked, ...]
    lines: Mapping[int, str] = field(default_factory=dict)
    entries: Mapping[str, Plan] = field(default_factory=dict)


@dataclass(frozen=True)
class Looked:
    """The best shardings for one candidate's size of ``tp``, beside its preset, in seconds.

    ``entries`` of a plan are present if the shardings may be more than MARGIN faster.
    """

    candidate: Candidate
    best_s: float
    bound_s: float
    exact: bool
    preset_s: float | None  # None: no preset, or one with strategies that the search does not have
    entries: Plan | None

    @classmethod
    def at(cls, one: Candidate, graph: Graph, search: Search, plan: Plan) -> Looked | None:
        """Search shardings for a candidate's sizes; None if the plan's pins allow none."""
        mesh, pieces = one.mesh(search.mesh.hardware), one.data_ranks * one.microbatches
        ranks = TensorRanks(mesh, pieces, max(1, search.space.dp_divides))
        shardings = TensorShardings(graph, ranks, plan)
        found = shardings.found
        if found.violations:
            return None
        preset_s = shardings.seconds(one.word) if one.word != searched_word(one.tp) else None
        near = preset_s is not None and preset_s <= (1 + MARGIN) * found.cost
        entries = None if near else shardings.entries()
        if entries and graph.folds and entries.names_blocks:
            entries = None  # entries for single blocks: dropped blocks would no longer be equal
        return cls(one, found.cost, found.bound, found.how == "exact", preset_s, entries)

    @property
    def tp(self) -> int:
        return self.candidate.tp

    @property
    def near(self) -> str:
        """A line that says how far the preset is from the best sharding; "" if not known."""
        if self.preset_s is None:
            return ""
        how = "exact" if self.exact else "bounded"
        gap = _percent(self.preset_s / self.bound_s - 1)
        best = f"within {gap} of the best sharding ({how} search, {_MODEL})"
        return f"{self.candidate.word} over tp={self.tp} is {best}"

    def kept(self, gain: float) -> str:
        """The line for a preset that is kept, with the estimated gain of the best sharding."""
        more = "faster" if gain >= 0 else "slower"
        said = f"the best sharding is estimated {_percent(abs(gain))} {more}"
        return f"{self.near}; {said}" if self.near else f"over tp={self.tp} {said}"

    def taken(self, faster: str) -> str:
        """The line that says that the searched shardings were taken."""
        gap = _percent(1 - self.bound_s / self.best_s)
        best = f"at most {gap} from the best ({_MODEL})"
        return f"shardings over tp={self.tp}: searched, {faster}; {best}"


def compare_shardings(
    graph: Graph, plan: Plan, search: Search, ranked: Sequence[Ranked], table: Table
) -> Compared:
    """Search shardings for up to MOST_SIZES sizes of ``tp``; ``plan`` has the user's pins."""
    looked = (Looked.at(one, graph, search, plan) for one in _worth_a_look(search, ranked))
    return _Comparison(graph, search, tuple(ranked), tuple(filter(None, looked)), table).outcome()


@dataclass(frozen=True)
class _Comparison:
    """The best candidates with presets, beside those with the searched shardings in ``looked``."""

    graph: Graph
    presets: Search
    ranked: tuple[Ranked, ...]
    looked: tuple[Looked, ...]
    table: Table

    def outcome(self) -> Compared:
        """The presets alone, unless searched shardings gain more than MARGIN."""
        gain = self._gain()
        lines = {each.tp: self._line(each, gain) for each in self.looked}
        lines = {tp: line for tp, line in lines.items() if line}
        if not self._takes(gain):
            return Compared(self.presets, self.ranked, lines)
        every = sorted([*self._best, *self.ranked], key=self.presets.cost)
        search = replace(
            self.presets, scaling_models={**self.presets.scaling_models, **self._profiles}
        )
        return Compared(search, tuple(every), lines, self._entries)

    @cached_property
    def _entries(self) -> dict[str, Plan]:
        return {searched_word(each.tp): each.entries for each in self.looked if each.entries}

    @cached_property
    def _profiles(self) -> ScalingModels:
        """The scaling models of the searched shardings, by word and recomputation."""
        found: dict[tuple[str, Recompute], ScalingModel] = {}
        ways = self.presets.recompute
        for each in self.looked:
            if each.entries:
                word = searched_word(each.tp)
                laws = scaling_models_of_entries(
                    self.graph, word, each.tp, each.entries, ways, self.table,
                    self.presets.reading,
                )  # fmt: skip
                found |= {(word, again): law for again, law in zip(ways, laws, strict=True)}
        return found

    @cached_property
    def _best(self) -> list[Ranked]:
        """The best fitting candidates with searched shardings, as many as those with presets."""
        if not self._entries:
            return []
        uncut = {key: law for key, law in self.presets.scaling_models.items() if not key[0]}
        own = replace(self.presets, scaling_models={**uncut, **self._profiles})
        ascending = own.ascending(lambda one: one.word in self._entries)
        return list(islice(filter(own.is_wanted, ascending), max(1, len(self.ranked))))

    def _gain(self) -> float | None:
        """The cost of the best preset over that of the best searched shardings, less 1.

        None if nothing fits on one of the two sides.
        """
        if not (self._best and self.ranked):
            return None
        cost = self.presets.cost
        return cost(self.ranked[0]) / cost(self._best[0]) - 1

    def _takes(self, gain: float | None) -> bool:
        return bool(self._best) and (gain is None or gain > MARGIN)

    def _line(self, each: Looked, gain: float | None) -> str:
        if not each.entries:
            return each.near
        if not self._takes(gain):
            return each.near if gain is None else each.kept(gain)
        if gain is None:
            return each.taken("as no preset fits")
        preset = self.ranked[0].candidate
        own = self._best[0].candidate
        name = preset.word if preset.mesh(None) == own.mesh(None) else str(preset)
        return each.taken(_faster(gain, name))


def _worth_a_look(search: Search, ranked: Sequence[Ranked]) -> Iterator[Candidate]:
    """The candidates to search shardings for, one per size of ``tp``, at most MOST_SIZES.

    They are among the best. If none of the best has a ``tp``, then others are taken where the mesh
    has the axis ``tp`` or no preset knows the model.
    """
    near = [each.candidate for each in ranked if each.candidate.tp > 1]
    given = sizes_of(search.mesh)[-1] if search.mesh.axes else 1
    if not near and (given > 1 or not _know(search)):
        within = search.mesh.hardware.unit_sizes[0]
        each = search.ascending(lambda one: 1 < one.tp <= max(given, within))
        near = [one.candidate for one in islice(each, _MANY)]
    if not near and given > 1:
        word = searched_word(given)
        near = list(islice(replace(search.space, tp_divides={word: given}).candidates(), 1))
    sizes = dict.fromkeys(one.tp for one in near)
    yield from (next(one for one in near if one.tp == tp) for tp in list(sizes)[:MOST_SIZES])


def _know(search: Search) -> bool:
    """Whether a tensor preset shards at least the share KNOWN of the model's FLOPs."""
    return any(
        float(law.calls.flops[law.calls.cut[:, 1]].sum()) >= KNOWN * float(law.calls.flops.sum())
        for (word, _), law in search.scaling_models.items()
        if word
    )


def _faster(gain: float, than: str) -> str:
    if gain < 1:
        return f"{_percent(gain)} faster than {than}"
    return f"{1 + gain:.1f} times as fast as {than}"


def _percent(part: float) -> str:
    return f"{100 * max(0.0, part):.1f} %"
