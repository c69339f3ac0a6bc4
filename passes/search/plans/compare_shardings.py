"""The best shardings over ``tp`` as candidates beside the presets' words, and how far these are
from them.

In: a search over presets and the best that it found. Out: the same with what was searched, where
that is worth its entries in a plan, and a line for every size of ``tp`` that was looked at.
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

MOST_SIZES = 2  # of tp that are looked at: each takes about as long as a preset's profile
# A preset says in a word what entries say in many lines, and the estimates of two plans of a model
# may be 1.5 % further apart than what their programs are predicted to take.
MARGIN = 0.02
KNOWN = 0.5  # the part of a model's FLOPs that words have to cut to know it
_MANY = 20  # candidates whose sizes of tp are looked at where none is among the best
_MODEL = "calls and transfers one after the other"


@dataclass(frozen=True)
class Compared:
    """``ranked`` are the best that fit; those with searched shardings are among them, and in
    ``search``, if one of these is the best. ``lines`` by size of ``tp``, ``entries`` by word.
    """

    search: Search
    ranked: tuple[Ranked, ...]
    lines: Mapping[int, str] = field(default_factory=dict)
    entries: Mapping[str, Plan] = field(default_factory=dict)


@dataclass(frozen=True)
class Looked:
    """The best shardings for the tensor ranks of one candidate; ``entries`` where they may be
    faster than its preset by more than the margin.
    """

    candidate: Candidate
    best_s: float
    bound_s: float
    exact: bool
    preset_s: float | None  # None: the preset does what the search has no model of, or cuts nothing
    entries: Plan | None

    @classmethod
    def at(cls, one: Candidate, graph: Graph, search: Search, plan: Plan) -> Looked | None:
        """Search at a candidate's sizes; None if the plan's pins leave nothing."""
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
            entries = None  # blocks that a fold takes for equal would not be
        return cls(one, found.cost, found.bound, found.how == "exact", preset_s, entries)

    @property
    def tp(self) -> int:
        return self.candidate.tp

    @property
    def near(self) -> str:
        """How far the preset is from the best, as a line; "" if that is not known."""
        if self.preset_s is None:
            return ""
        how = "exact" if self.exact else "bounded"
        gap = _percent(self.preset_s / self.bound_s - 1)
        best = f"within {gap} of the best sharding ({how} search, {_MODEL})"
        return f"{self.candidate.word} over tp={self.tp} is {best}"

    def kept(self, gain: float) -> str:
        """The same where an estimate says what is gained by the best."""
        more = "faster" if gain >= 0 else "slower"
        said = f"the best sharding is estimated {_percent(abs(gain))} {more}"
        return f"{self.near}; {said}" if self.near else f"over tp={self.tp} {said}"

    def taken(self, faster: str) -> str:
        """That the best was taken."""
        gap = _percent(1 - self.bound_s / self.best_s)
        best = f"at most {gap} from the best ({_MODEL})"
        return f"shardings over tp={self.tp}: searched, {faster}; {best}"


def compare_shardings(
    graph: Graph, plan: Plan, search: Search, ranked: Sequence[Ranked], table: Table
) -> Compared:
    """Look at the sizes of ``tp`` that are worth it; ``plan`` has the user's pins."""
    looked = (Looked.at(one, graph, search, plan) for one in _worth_a_look(search, ranked))
    return _Comparison(graph, search, tuple(ranked), tuple(filter(None, looked)), table).outcome()


@dataclass(frozen=True)
class _Comparison:
    graph: Graph
    presets: Search
    ranked: tuple[Ranked, ...]
    looked: tuple[Looked, ...]
    table: Table

    def outcome(self) -> Compared:
        """The presets alone, unless what was searched is worth its entries."""
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
        """Of what was searched."""
        found: dict[tuple[str, Recompute], ScalingModel] = {}
        ways = self.presets.recompute
        for each in self.looked:
            if each.entries:
                word = searched_word(each.tp)
                laws = scaling_models_of_entries(
                    self.graph, word, each.tp, each.entries, ways, self.table
                )
                found |= {(word, again): law for again, law in zip(ways, laws, strict=True)}
        return found

    @cached_property
    def _best(self) -> list[Ranked]:
        """The best that fit with searched shardings, as many as with presets."""
        if not self._entries:
            return []
        uncut = {key: law for key, law in self.presets.scaling_models.items() if not key[0]}
        own = replace(self.presets, scaling_models={**uncut, **self._profiles})
        ascending = own.ascending(lambda one: one.word in self._entries)
        return list(islice(filter(own.is_wanted, ascending), max(1, len(self.ranked))))

    def _gain(self) -> float | None:
        """By what part the best of what was searched is faster than the best preset; None if there
        is no such pair.
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
    """The best candidate of each of the first sizes of ``tp``: of those that are among the best; if
    there is none, and words do not know the model or the mesh has the axis, of all.
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
    """Whether a preset's words cut most of the model's arithmetic."""
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
