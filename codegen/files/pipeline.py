"""Prints the programs of a pipeline's ranks, from the graphs of all stages and a schedule.

Pipeline ranks whose programs differ only in numbers (of layers, stages, loop counts) run one file,
where these numbers are expressions of ``pp_rank``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from string import ascii_uppercase
from typing import Any

from partc.codegen.bodies.outline import outlined
from partc.codegen.calls.ranges import in_ranges, plain_ranges
from partc.codegen.files.alike_stages import take_in
from partc.codegen.files.by_rank import RANK, merged
from partc.codegen.files.island import Head, Islands
from partc.codegen.files.pipeline_tables import pipeline_tables
from partc.codegen.files.rank_links import RankLinks
from partc.codegen.files.rank_step import RankStep, actions_of
from partc.codegen.files.role_file import role_file
from partc.codegen.files.roll_schedule import turn_lines
from partc.codegen.files.shared_blocks import shared_blocks
from partc.codegen.files.spelling import dtype_name, result_type
from partc.codegen.files.stages import Prepared, StageText, stage_text
from partc.codegen.files.templates import TEMPLATES
from partc.codegen.helpers.needed import Helpers
from partc.codegen.repeats.equal import printing
from partc.codegen.repeats.layers import Layers, stage_key
from partc.codegen.text import Line, Printed, block
from partc.graph import Graph, value
from partc.graph.hooked import calls_hooks
from partc.graph.moves import wire_of
from partc.graph.tied import Tied
from partc.plan.mesh import MICROBATCH_AXIS, PP, Mesh
from partc.program.role import RANKS
from partc.quoting import docstring, literal
from partc.schedules.actions import Schedule
from partc.schedules.programs import Wiring

LETTERS = ascii_uppercase  # name the stages of a file whose stage numbers depend on the rank
Lines = Callable[[RankStep], Iterator[Line]]


def file_name(ranks: Sequence[int]) -> str:
    """The name of the file that some pipeline ranks run.

    >>> file_name([0]), file_name([1, 2, 3]), file_name([1, 3])
    ('pipeline0.py', 'pipeline1_to_3.py', 'pipeline1_3.py')
    """
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 1 and last - first == len(ranks) - 1:
        return f"pipeline{first}_to_{last}.py"
    return f"pipeline{'_'.join(map(str, ranks))}.py"


@dataclass(frozen=True)
class Pipeline:
    """All stages of a pipeline, and how ranks run them.

    ``wiring`` comes from the lowered schedule and says how many sends of each link may be under
    way. Up to ``bucket_mb`` megabytes of gradients share a bucket. ``backend`` carries tensors
    between ranks: ``gloo`` or ``nccl``. With ``messages`` ranks send each other what gloo would
    gather, or sum and scatter. With ``inductor`` the calls between two transfers become functions
    for torch.compile. With ``ranges`` blocks, transfers and actions stand in ranges of
    torch.profiler. With ``islands`` the step meets those of other islands.
    """

    graphs: Sequence[Graph]
    tied: Sequence[Tied]
    schedule: Schedule
    mesh: Mesh
    wiring: Wiring
    bucket_mb: float
    messages: bool = False
    backend: str = "gloo"
    inductor: bool = False
    ranges: bool = False
    islands: Islands | None = None

    def emit(self, ranks: Sequence[int], *, header: str) -> Printed:
        """The file that some pipeline ranks run; ``ranks`` is one of ``groups()``."""
        helpers = Helpers(
            messages=self.messages, backend=self.backend, ranges=self.ranges,
            hooks=any(map(calls_hooks, self.graphs)),
            narrow=any(wire_of(node) for graph in self.graphs for node in graph.calls()),
        )  # fmt: skip
        stages = self._stages(ranks, helpers)
        with ExitStack() as stack:
            for stage in stages:
                stack.enter_context(printing(stage.graph))
            steps = {
                rank: RankStep(
                    self.graphs, self.tied, dict(zip(numbers, stages, strict=True)), self.schedule,
                    rank, self._links(rank, helpers),
                )
                for rank, numbers in self._numbers(ranks).items()
            }  # fmt: skip
            return role_file(_File(self, steps, helpers).body(), header, helpers)

    def groups(self) -> list[tuple[int, ...]]:
        """The pipeline ranks in groups that run one file each, in order of their first rank."""
        found: dict[tuple[int, ...], Any] = {}
        for rank in range(self.schedule.ranks):
            key = self._rank_key(rank)
            alike = (group for group, other in found.items() if key is not None and other == key)
            group = next((g for g in alike if self._fits(g, rank)), ())
            found.pop(group, None)
            found[(*group, rank)] = key
        return sorted(found)

    def _numbers(self, ranks: Sequence[int]) -> dict[int, tuple[int, ...]]:
        return {rank: self.schedule.stages_of(rank) for rank in ranks}

    def _stages(self, ranks: Sequence[int], helpers: Helpers) -> list[StageText]:
        """The texts of the stages of one file, printed from the first rank's graphs."""
        mine, shared = self.schedule.stages_of(ranks[0]), len(ranks) > 1
        numbers = self._numbers(ranks)
        titles = merged({rank: [Line(f"Stage {n}") for n in numbers[rank]] for rank in ranks})
        firsts = merged({rank: [*self._firsts(numbers[rank])] for rank in ranks})
        assert titles is not None, f"the stages of ranks {ranks} are not linear in the rank"
        assert firsts is not None, f"the layers of ranks {ranks} are not linear in the rank"
        labels = [str(number) for number in mine]
        if shared:
            labels = [*LETTERS[: len(mine)]] if len(mine) > 1 else [""]
        counted = [self._layers[n] if shared or self._is_repeated(n, mine) else None for n in mine]
        prepared = [
            Prepared.of(self.graphs[number], layers, inductor=self.inductor)
            for number, layers in zip(mine, counted, strict=True)
        ]
        keys = [self._keys[number] for number in mine]
        again = [key is not None and key in keys[:i] for i, key in enumerate(keys)]
        every = outlined([(each.graph, each.items) for each in prepared], helpers, again)
        for each, items in zip(prepared, every, strict=True):
            each.items = items
        texts = zip(mine, prepared, labels, titles, firsts, counted, strict=True)
        return [
            stage_text(
                each, label, title.code, helpers, self.bucket_mb, lent=self._lent(mine, number),
                shared=self._shared, layers=layers, first=first.code, inductor=self.inductor,
            )
            for number, each, label, title, first, layers in texts
        ]  # fmt: skip

    def _firsts(self, stages: Sequence[int]) -> Iterator[Line]:
        """The number of each stage's first layer, as a line of text; empty if it has no layers."""
        for stage in stages:
            layers = self._layers[stage]
            yield Line("" if layers is None else str(layers.first))

    def _is_repeated(self, stage: int, stages: Sequence[int]) -> bool:
        """Whether another of ``stages`` differs from ``stage`` in the numbers of layers alone."""
        key = self._keys[stage]
        return key is not None and sum(self._keys[other] == key for other in stages) > 1

    def _lent(self, mine: Sequence[int], stage: int) -> frozenset[str]:
        """The buffers that a stage reads and an earlier stage of the same rank holds for both."""
        held = {name for s in mine if s < stage for name in self.graphs[s].buffers}
        return frozenset(held & self.graphs[stage].buffers.keys())

    @cached_property
    def _shared(self) -> frozenset[str]:
        """The buffers that several stages have."""
        counts = Counter(name for graph in self.graphs for name in graph.buffers)
        return frozenset(name for name, count in counts.items() if count > 1)

    def _links(self, rank: int, helpers: Helpers) -> RankLinks:
        return RankLinks(self.graphs, self.schedule, rank, self.wiring, helpers)

    # which ranks run one file ----------------------------------------------------------------
    @cached_property
    def _keys(self) -> list[Any]:
        """A key for each stage, equal for stages that differ in the numbers of layers alone.

        None for a stage that shares its text with no other: one with tied parameters, or one whose
        layers stand in several lists or in none.
        """
        tied = {stage for one in self.tied for stage in one.stages}
        return [
            None if each is None or stage in tied else stage_key(graph, each)
            for stage, (graph, each) in enumerate(zip(self.graphs, self._layers, strict=True))
        ]

    @cached_property
    def _layers(self) -> list[Layers | None]:
        return [Layers.of(graph) for graph in self.graphs]

    def _rank_key(self, rank: int) -> Any:
        """A key for what the stages of a rank compute; None if the rank needs a file of its own."""
        mine = self.schedule.stages_of(rank)
        lent = [sorted(self._lent(mine, stage)) for stage in mine]
        if any(self._keys[stage] is None for stage in mine) or len(mine) > len(LETTERS):
            return None
        return [self._keys[stage] for stage in mine], lent

    def _fits(self, group: Sequence[int], rank: int) -> bool:
        """Whether a rank can join a group: all numbers in its text are linear in the rank.

        The group's first and last rank stand for the group.
        """
        # Two ranks fix every line's slope; to print all of a group each time would take long.
        ends = dict.fromkeys((group[0], group[-1], rank))
        return merged({each: list(self._order(each)) for each in ends}) is not None

    def _order(self, rank: int) -> Iterator[Line]:
        """All lines in which the programs of ranks with equal stages may differ."""
        links = self._links(rank, Helpers())
        yield from (Line(f"Stage {number}") for number in self.schedule.stages_of(rank))
        yield from self._firsts(self.schedule.stages_of(rank))
        yield from links.made()
        yield from links.each("Inbox", "begin()")
        yield from turn_lines(actions_of(self.graphs, self.schedule, rank))
        yield from links.each("Outbox", "wait()")


@dataclass(frozen=True)
class _File:
    """Prints the file of the pipeline ranks in ``steps``."""

    pipeline: Pipeline
    steps: Mapping[int, RankStep]
    helpers: Helpers

    @property
    def first(self) -> RankStep:
        return next(iter(self.steps.values()))

    @property
    def stages(self) -> list[StageText]:
        return list(self.first.stages.values())

    def body(self) -> str:
        """The text from the tables on."""
        blocks = shared_blocks(self.stages)
        values = [stage.values() for stage in self._classes()]
        schedule, graph = self.pipeline.schedule, self.pipeline.graphs[0]
        wiring = [*self._groups(), *self._lines(RankStep.wiring)]
        body = self._with_rank(self._lines(RankStep.step))
        (title,) = self._lines(RankStep.title)
        actions = actions_of(self.pipeline.graphs, schedule, self.first.rank)
        trains = self.first.links.trains
        name = self.stages[0].class_name
        result = result_type(trains, any(g.outputs.results for g in self.pipeline.graphs))
        head = Head(name=name, arguments=self.first.arguments, result=result)
        last, own = f"Step = {name}", list[str]()
        if (islands := self.pipeline.islands) and trains:
            for each in islands.calls:
                self.helpers.use(each)
            graphs = [stage.graph for stage in self.stages]
            own = islands.tables(RANKS if len(self.steps) > 1 else "")
            attributes = {node: at for s in self.stages for node, at in s.attributes.items()}
            shards = f"SHARDS[{RANK}]" if len(self.steps) > 1 else "SHARDS"
            last = islands.text(graphs, attributes, head, draws=self.first.draws, shards=shards)
        tables = pipeline_tables(self.steps, "".join(v["declarations"] for v in values))
        return TEMPLATES.get_template("pipeline.py.j2").render(
            mesh=literal(dict(self.pipeline.mesh.axes)),
            dtypes=literal(self._dtypes()) if "empty" in self.helpers.used else "",
            tables=[*tables, *own],
            helpers=self.helpers.own_text(),
            blocks=blocks,
            stages=values,
            linked=schedule.stages > 1,
            title=title.code,
            axes=[a for a in graph.mesh.names if a != MICROBATCH_AXIS],
            wiring=block(wiring, 2),
            draws=self.first.draws,
            own=self.helpers,
            turns=self.first.draws and MICROBATCH_AXIS in graph.mesh.names,
            kinds={action.kind for action in actions},
            split="W" in schedule.kinds,
            schedule=f"Schedule {docstring(schedule.name)}, {schedule.microbatches} microbatches.",
            method="step" if trains else "forward",
            body=block(body, 2),
            last=last,
            **head,
        )

    def _classes(self) -> list[StageText]:
        """The stages for which a class is printed; stages with the same text share one class."""
        found: list[StageText] = []
        for stage in self.stages:
            if not any(take_in(other, stage) for other in found):
                found.append(stage)
        return found

    def _lines(self, lines: Lines) -> list[Line]:
        """The statements that ``lines`` gives for each rank, as one text for all ranks."""
        text = merged({rank: in_ranges(lines(step)) for rank, step in self.steps.items()})
        assert text is not None, f"ranks {[*self.steps]} do not share a text"
        return plain_ranges(text)

    def _groups(self) -> Iterator[Line]:
        """The statements that keep the process group of ``pp``, and the rank where it is read."""
        if len(self.steps) > 1:
            yield Line(f"{RANK} = mesh.get_local_rank({literal(PP)})")
            yield Line(f"self.{PP}, self.{RANK} = mesh.get_group({literal(PP)}), {RANK}")
        elif self.pipeline.schedule.ranks > 1:
            yield Line(f"self.{PP} = mesh.get_group({literal(PP)})")
        for axis in self.first.others():
            if axis != PP:
                yield Line(f"self.{axis} = mesh.get_group({literal(axis)})")

    def _with_rank(self, lines: list[Line]) -> list[Line]:
        """The statements, with ``pp_rank = self.pp_rank`` before them where they read it."""
        reads = len(self.steps) > 1 and any(RANK in line.code for line in lines)
        return [Line(f"{RANK} = self.{RANK}"), *lines] if reads else lines

    def _dtypes(self) -> dict[str, Any]:
        nodes = [
            n for s in self.stages for n in (*s.graph.params.values(), *s.graph.buffers.values())
        ]
        return {dtype_name(n): value(n).dtype for n in nodes}
