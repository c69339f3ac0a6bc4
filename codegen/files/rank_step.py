"""The statements of a pipeline rank's class ``<Model>Step``: its stages, the schedule, the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from partc.codegen.calls.ranges import LOSS, finished, numbered
from partc.codegen.files.alike_stages import made
from partc.codegen.files.rank_links import RankLinks
from partc.codegen.files.roll_schedule import parted, turn_lines, whole_backwards
from partc.codegen.files.spelling import read
from partc.codegen.files.stage_flow import has_phase
from partc.codegen.files.stages import StageText
from partc.codegen.files.take_ends import check_one_way
from partc.codegen.repeats.layers import Layers
from partc.codegen.text import Line
from partc.graph import Graph, Phase, value
from partc.graph.moves import wire_of
from partc.graph.tied import Tied
from partc.plan.mesh import MICROBATCH_AXIS, PP
from partc.quoting import literal
from partc.schedules.actions import Action, Kind, Schedule

PHASES: dict[Kind, Phase] = {"F": "F", "B": "B", "I": "B", "W": "W"}
FEW = 2  # so many tied parameters stand one by one; more stand in a list


def actions_of(graphs: Sequence[Graph], schedule: Schedule, rank: int) -> list[Action]:
    """The actions of a rank in order, without those for which its stages have no calls.

    ``B`` is split into ``I`` and ``W`` in a schedule with ``W``, and joined again where the two
    follow each other.
    """
    order = list(schedule.orders[rank])
    if "W" in schedule.kinds:
        order = list(parted(order))
    return whole_backwards(a for a in order if has_phase(graphs[a.stage], PHASES[a.kind]))


@dataclass(frozen=True)
class RankStep:
    """Prints the statements of one pipeline rank's ``Step``.

    ``graphs`` are the graphs of all stages, ``stages`` the texts of this rank's own by number.
    Ranks that run one file share these texts.
    """

    graphs: Sequence[Graph]
    tied: Sequence[Tied]
    stages: Mapping[int, StageText]
    schedule: Schedule
    rank: int
    links: RankLinks

    @property
    def arguments(self) -> list[str]:
        """The names of a step's inputs."""
        return list(next(iter(self.stages.values())).arguments_by_node().values())

    @property
    def _device(self) -> str:
        return f"{self.arguments[0]}.device"

    def title(self) -> Iterator[Line]:
        """The docstring of the class: which pipeline rank, and which stages it runs."""
        word = "stages" if len(self.stages) > 1 else "stage"
        numbers = ", ".join(map(str, self.stages))
        yield Line(
            f"Pipeline rank {self.rank} of {self.schedule.ranks}: {word} {numbers} of "
            f"{self.schedule.stages}."
        )

    # __init__ --------------------------------------------------------------------------------
    def wiring(self) -> Iterator[Line]:
        """The statements of ``__init__``: stages, and what links them to other ranks."""
        if self.draws:
            draws = next(iter(self.stages.values())).helpers.use("Draws")
            yield Line(f"self.rng = {draws}()")
        if self.adds_up:
            yield Line("self.partials = Partials()")
        for number, stage in self.stages.items():
            layers = Layers.of(self.graphs[number])
            yield Line(f"self.{stage.attribute} = {made(stage, layers.first if layers else None)}")
        for one in self.shared_here():
            check_one_way(one.name, {s: self.stages[s].ends for s in self.mine(one)})
            first, *others = (self._path(one.name, s) for s in self.mine(one))
            yield from (Line(f"{other} = {first}", "one tied parameter") for other in others)
        stages = ", ".join(f"{s}: self.{stage.attribute}" for s, stage in self.stages.items())
        yield Line(f"self.stages = {{{stages}}}")
        yield from self.links.made()

    @property
    def adds_up(self) -> bool:
        """Whether gradients of microbatches are added up before ranks sum them."""
        return any(stage.ends.reduces for stage in self.stages.values())

    @property
    def draws(self) -> bool:
        """Whether a stage of the rank draws random numbers."""
        return any(stage.draws for stage in self.stages.values())

    @property
    def _compresses_each(self) -> bool:
        """Whether sums with fewer bytes are made in every microbatch, of which nothing is kept."""
        every = (n for graph in self.graphs for n in graph.calls() if wire_of(n))
        return any(value(n).phase != "E" for n in every)

    def others(self) -> list[str]:
        """The axes of ranks that see other sums with fewer bytes than this rank does, and have to
        agree with it on what is kept.
        """
        if self._compresses_each:
            return []
        among = {
            str(n.kwargs["axis"]) for graph in self.graphs for n in graph.calls() if wire_of(n)
        }
        own = [axis for axis, size in self.graphs[0].mesh.axes if size > 1]
        mine = [axis for axis in own if axis != MICROBATCH_AXIS and axis not in among]
        return [*([PP] if self.schedule.ranks > 1 else []), *mine] if among else []

    def shared_here(self) -> list[Tied]:
        """The tied parameters that several stages of this rank hold."""
        return [t for t in self.tied if len(self.mine(t)) > 1]

    def mine(self, one: Tied) -> list[int]:
        """The stages of this rank that hold a tied parameter."""
        return [stage for stage in one.stages if stage in self.stages]

    def _path(self, name: str, number: int) -> str:
        """The text that reads a stage's parameter: ``self.stage1.layers[0].w_weight``."""
        stage = self.stages[number]
        return read(stage.attributes[stage.graph.params[name]], f"self.{stage.attribute}")

    # step ------------------------------------------------------------------------------------
    def step(self) -> Iterator[Line]:
        """The statements of ``step``: begin, the loops of the schedule, the sums at the end."""
        if self.draws:
            yield Line(f"self.rng.begin({self._device})")
        if self.adds_up:
            yield Line("self.partials.clear()", "of a step that did not end")
        yield from self._lend()
        yield from self.links.meet(self._device)
        yield Line("for stage in self.stages.values():")
        yield Line(f"stage.begin({', '.join(self.arguments)})", indent=1)
        begin = f"begin({self.schedule.microbatches}, {self._device})"
        yield from self.links.each("Inbox", begin)
        for number, (_, paths) in enumerate(self._summed()):
            yield from _set_aside(paths, number)
        yield from turn_lines(actions_of(self.graphs, self.schedule, self.rank))
        yield from self.links.each("Outbox", "wait()")
        yield from self._finish() if self.links.trains else self._results()

    def _lend(self) -> Iterator[Line]:
        """The statements that give a stage the buffers which another stage of the rank holds."""
        for stage in self.stages.values():
            for name in sorted(stage.lent):
                owner = next(s for s in self.stages.values() if name in s.graph.buffers)
                mine, theirs = (
                    read(s.attributes[s.graph.buffers[name]], f"self.{s.attribute}")
                    for s in (stage, owner)
                )
                yield Line(f"{mine} = {theirs}")

    def _finish(self) -> Iterator[Line]:
        """The end of a training step: sums over ranks, tied gradients, the loss for every rank."""
        holder = next(i for i, g in enumerate(self.graphs) if g.loss is not None)
        extras = any(g.outputs.results for g in self.graphs)
        yield from [Line("results = {}")] * extras
        narrow = self.links.helpers.narrow and (self.adds_up or not self._compresses_each)
        if narrow:
            yield Line(f"reduced = {self.links.helpers.use('Reduced')}()")
        for number, stage in self.stages.items():
            if stage.finishes:
                more = ["results"] * bool(stage.graph.outputs.results)
                yield from _finished(stage, number, ["loss"] * (number == holder) + more)
        if narrow:
            others = ", ".join(f"self.{axis}" for axis in self.others())
            yield from finished(f"reduced.finish({others})", ranges=self.links.helpers.ranges)
        for number, (ranks, paths) in enumerate(self._summed()):
            self.links.helpers.use("sum_tied")
            yield from _sum_tied(paths, number, f"{ranks}, self.{PP}")
        source = self.schedule.rank_of[holder]
        if self.rank != source:
            made = self.graphs[holder].loss
            assert made is not None
            dtype = literal(value(made).dtype)
            yield Line(f"loss = torch.empty((), dtype={dtype}, device={self._device})")
        if self.schedule.ranks > 1:
            call = f"dist.broadcast(loss, group=self.{PP}, group_src={source})"
            ranged = LOSS if self.links.helpers.ranges else None
            yield Line(call, "every rank learns the loss", range=ranged)
        yield from self._broadcasts()
        yield Line("return loss, results" if extras else "return loss")

    def _results(self) -> Iterator[Line]:
        """The end of an inference: a broadcast gives every rank the results."""
        yield Line("results = {}")
        for number, stage in self.stages.items():
            if stage.finishes:
                yield from _finished(stage, number, ["results"] * bool(stage.graph.outputs.results))
        yield from self._broadcasts()
        yield Line("return results")

    def _broadcasts(self) -> Iterator[Line]:
        """The statements that give every rank the results which one has."""
        for number, graph in enumerate(self.graphs):
            source = self.schedule.rank_of[number]
            for name, node in graph.outputs.results.items():
                key = f"results[{literal(name)}]"
                if source != self.rank:
                    lies = value(node).sharding.without([MICROBATCH_AXIS], graph.mesh)
                    shape = literal(lies.local_shape(value(node).shape, graph.mesh))
                    dtype = literal(value(node).dtype)
                    empty = f"torch.empty({shape}, dtype={dtype}, device={self._device})"
                    yield Line(f"{key} = {empty}")
                elif self.schedule.ranks > 1:  # c10d wants contiguous memory
                    yield Line(f"{key} = {key}.contiguous()")
                if self.schedule.ranks > 1:
                    yield Line(f"dist.broadcast({key}, group=self.{PP}, group_src={source})")

    def _is_summed(self, one: Tied) -> bool:
        """Whether this rank and another one hold a tied parameter that has a gradient."""
        ranks = one.ranks(self.schedule)
        trained = any(one.name in graph.outputs.grads for graph in self.graphs)
        return trained and self.rank in ranks and len(ranks) > 1

    def _summed(self) -> list[tuple[list[int], list[str]]]:
        """The tied parameters whose gradients several pipeline ranks sum: the ranks, and the paths.

        Many of the same ranks are together, as those of a block that two stages call.
        """
        each = [
            ([*one.ranks(self.schedule)], [self._path(one.name, self.mine(one)[0])])
            for one in self.tied
            if self._is_summed(one)
        ]
        found: list[tuple[list[int], list[str]]] = []
        for ranks, group in groupby(each, key=lambda one: one[0]):
            paths = [path for _, (path,) in group]
            found += [(ranks, paths)] if len(paths) > FEW else [(ranks, [path]) for path in paths]
        return found


def _set_aside(paths: Sequence[str], number: int) -> Iterator[Line]:
    """Set aside tied parameters' ``.grad`` from before the step: it is summed already."""
    if len(paths) == 1:
        yield Line(f"before_{number} = {paths[0]}.grad")
        yield Line(f"{paths[0]}.grad = None")
        return
    yield Line(f"tied_{number} = [{', '.join(paths)}]")
    yield Line(f"before_{number} = [param.grad for param in tied_{number}]")
    yield Line(f"for param in tied_{number}:")
    yield Line("param.grad = None", indent=1)


def _sum_tied(paths: Sequence[str], number: int, among: str) -> Iterator[Line]:
    """The statements that sum tied parameters' gradients of several pipeline ranks."""
    if len(paths) == 1:
        yield Line(f"sum_tied({paths[0]}, before_{number}, {among})", "tied")
        return
    yield Line(f"for param, before in zip(tied_{number}, before_{number}, strict=True):")
    yield Line(f"sum_tied(param, before, {among})", "tied", indent=1)


def _finished(stage: StageText, number: int, gives: Sequence[str]) -> Iterator[Line]:
    """The statements that end a stage's step; ``gives``: "loss", "results", both or neither."""
    reduces = stage.ends.reduces and stage.helpers.narrow
    call = f"self.{stage.attribute}.finish({'reduced' if reduces else ''})"
    ranged = numbered("gradients of stage", number) if stage.helpers.ranges else None
    if gives == ["loss", "results"]:
        yield Line(f"loss, found = {call}", range=ranged)
        yield Line("results |= found")
    elif gives == ["results"]:
        yield Line(f"results |= {call}", range=ranged)
    else:
        yield Line(f"loss = {call}" if gives else call, range=ranged)
