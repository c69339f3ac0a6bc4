"""Stage graphs and a schedule in, the source of one pipeline rank's program out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from partc.codegen.emit import MEANINGS, TEMPLATES, dtype_name, header_line, span
from partc.codegen.helpers import Helpers
from partc.codegen.rank_links import RankLinks
from partc.codegen.safety import check_source
from partc.codegen.stages import StageText, stage_text
from partc.codegen.tables import table
from partc.codegen.text import Line, block
from partc.codegen.turns import parted, turn_lines, whole_backwards
from partc.graph import Graph, Phase, value
from partc.mesh import PP, Mesh
from partc.passes.microbatches import MB
from partc.quoting import docstring, identifier, literal
from partc.schedules.actions import Action, Kind, Schedule
from partc.schedules.programs import Wiring
from partc.tied import Tied

PHASES: dict[Kind, Phase] = {"F": "F", "B": "B", "I": "B", "W": "W"}


def emit_rank(
    graphs: Sequence[Graph],
    tied: Sequence[Tied],
    schedule: Schedule,
    rank: int,
    mesh: Mesh,
    wiring: Wiring,
    *,
    header: str,
    join_mb: float,
) -> str:
    """The text of the file that pipeline rank ``rank`` runs; ``graphs`` are those of all stages.

    ``tied`` are the parameters that several of them hold. ``wiring`` is that of the lowered
    schedule: it says how many sends may be under way; up to ``join_mb`` megabytes of gradients
    share a transfer.
    """
    helpers = Helpers()
    mine = schedule.stages_of(rank)
    stages = [stage_text(graphs[s], s, helpers, join_mb, lent=_lent(graphs, mine, s)) for s in mine]
    links = RankLinks(graphs, schedule, rank, wiring, helpers)
    text = _Rank(graphs, tied, stages, schedule, rank, mesh, links, header, helpers).text()
    check_source(text)
    return text


def _lent(graphs: Sequence[Graph], mine: Sequence[int], stage: int) -> frozenset[str]:
    """The buffers of a stage that an earlier stage of the same rank holds for both."""
    held = {name for s in mine if s < stage for name in graphs[s].buffers}
    return frozenset(held & graphs[stage].buffers.keys())


@dataclass
class _Rank:
    graphs: Sequence[Graph]
    tied: Sequence[Tied]
    stages: list[StageText]
    schedule: Schedule
    rank: int
    mesh: Mesh
    links: RankLinks
    header: str
    helpers: Helpers

    def text(self) -> str:
        blocks = self._blocks()
        values = [stage.values() | {"number": stage.number} for stage in self.stages]
        first = self.graphs[0]
        wiring, body = block(self._wiring(), 2), block(self._step(), 2)
        seeded = [stage for stage, v in zip(self.stages, values, strict=True) if v["seeds"]]
        return TEMPLATES.get_template("pipeline.py.j2").render(
            header=[header_line(line) for line in self.header.strip().splitlines()],
            mesh=literal(dict(self.mesh.axes)),
            dtypes=literal(self._dtypes()) if "empty" in self.helpers.used else "",
            tables=self._tables("".join(v["declarations"] for v in values)),
            helpers=self.helpers.text(),
            blocks=blocks,
            stages=values,
            reduces=any("Reduced" in f["signature"] for b in blocks for f in b["functions"]),
            name=f"{identifier(first.model) or 'Model'}Step",
            rank=self.rank,
            ranks=self.schedule.ranks,
            num_stages=self.schedule.stages,
            axes=[(a, literal(a)) for a in first.mesh.names if a != MB],
            wiring=wiring,
            seeds=block(list(self._seeds(seeded)), 2),
            kinds={action.kind for action in self.actions},
            split="W" in self.schedule.kinds,
            schedule=f"Schedule {docstring(self.schedule.name)}, {self.schedule.microbatches} "
            "microbatches.",
            method="step" if self.links.trains else "forward",
            result="Tensor" if self.links.trains else "dict[str, Tensor]",
            arguments=self._arguments(),
            body=body,
        )

    @property
    def actions(self) -> list[Action]:
        """What this rank does, in order; stages without gradients have no backward."""
        here = {stage.number: stage for stage in self.stages}
        order = list(self.schedule.orders[self.rank])
        if "W" in self.schedule.kinds:
            order = list(parted(order))
        return whole_backwards(a for a in order if here[a.stage].has(PHASES[a.kind]))

    def _arguments(self) -> list[str]:
        return list(self.stages[0].arguments_by_node().values())

    def _dtypes(self) -> dict[str, Any]:
        nodes = [
            n for s in self.stages for n in (*s.graph.params.values(), *s.graph.buffers.values())
        ]
        return {dtype_name(n): value(n).dtype for n in nodes}

    # blocks and tables -----------------------------------------------------------------------
    def _blocks(self) -> list[dict[str, Any]]:
        """The classes of equal blocks; stages whose blocks have one text share the class."""
        known: dict[str, Any] = {}
        for stage in self.stages:
            for cls in stage.classes.values():
                if cls.name in known and known[cls.name][1] != _block(cls):
                    cls.name += str(stage.number)
                known.setdefault(cls.name, (cls, _block(cls)))
        return [made | {"layers": span(cls.run)} for cls, made in known.values()]

    def _tables(self, declared: str) -> list[str]:
        tables: dict[str, None] = {}
        entries: dict[str, list[Line]] = {name: [] for name in MEANINGS}
        again_here = {(t.name, s) for t in self._shared_here() for s in self._mine(t)[1:]}
        for stage in self.stages:
            blocks, stored = stage.stored_tables(
                {name for name, number in again_here if number == stage.number}
            )
            tables |= dict.fromkeys(blocks)
            for constant, rows in stored.items():
                own = f"STAGE{stage.number}_{constant}"
                if not rows and own not in declared:
                    continue
                tables[table(own, f"of stage {stage.number}", rows)] = None
                again = f'**{{f"stage{stage.number}.{{name}}": row for name, row in {own}.items()}}'
                entries[constant].append(Line(again))
        for second, name in sorted(self._aliases().items()):
            entries["ALIASES"].append(Line(f"{literal(second)}: {literal(name)}"))
        for name, node in self.graphs[0].inputs.items():
            entries["INPUTS"].append(
                Line(f"{literal(name)}: {literal((tuple(value(node).shape), dtype_name(node)))}")
            )
        return [*tables, *(table(name, MEANINGS[name], entries[name]) for name in MEANINGS)]

    def _aliases(self) -> dict[str, str]:
        return {a: b for stage in self.stages for a, b in stage.graph.aliases.items()}

    # wiring ----------------------------------------------------------------------------------
    def _wiring(self) -> Iterator[Line]:
        """The statements of ``__init__``: stages, and what links them to other ranks."""
        if self.schedule.ranks > 1:
            yield Line(f"self.{PP} = mesh.get_group({literal(PP)})")
        for stage in self.stages:
            yield Line(f"self.stage{stage.number} = {stage.name}(mesh)")
        for one in self._shared_here():
            first, *others = (f"self.stage{s}.{self._path(one.name, s)}" for s in self._mine(one))
            yield from (Line(f"{other} = {first}", "one tied parameter") for other in others)
        stages = ", ".join(f"{s.number}: self.stage{s.number}" for s in self.stages)
        yield Line(f"self.stages = {{{stages}}}")
        yield from self.links.made()

    def _numbers(self) -> list[int]:
        return [stage.number for stage in self.stages]

    def _shared_here(self) -> list[Tied]:
        """Tied parameters with several copies on this rank."""
        return [t for t in self.tied if len(self._mine(t)) > 1]

    def _mine(self, one: Tied) -> list[int]:
        """The stages of this rank that hold a tied parameter."""
        return [stage for stage in one.stages if stage in self._numbers()]

    def _path(self, name: str, number: int) -> str:
        stage = next(s for s in self.stages if s.number == number)
        return stage.attributes[stage.graph.params[name]]

    def _seeds(self, seeded: Sequence[StageText]) -> Iterator[Line]:
        for stage in seeded:
            yield Line(
                f"self.stage{stage.number}.seed(seed * {self.schedule.stages} + {stage.number})"
            )

    # step ------------------------------------------------------------------------------------
    def _step(self) -> Iterator[Line]:
        arguments = ", ".join(self._arguments())
        yield from self._lend()
        yield Line("for stage in self.stages.values():")
        yield Line(f"stage.begin({arguments})", indent=1)
        device = f"{self._arguments()[0]}.device"
        yield from self.links.each("Inbox", f"begin({self.schedule.microbatches}, {device})")
        for number, one in enumerate(self.tied):
            yield from self._set_aside(one, number)
        yield from turn_lines(self.actions)
        yield from self.links.each("Outbox", "wait()")
        yield from self._finish()

    def _lend(self) -> Iterator[Line]:
        """Buffers that one stage holds for others of the rank."""
        for stage in self.stages:
            for name in sorted(stage.lent):
                owner = next(s for s in self.stages if name in s.graph.buffers)
                mine, theirs = (s.attributes[s.graph.buffers[name]] for s in (stage, owner))
                yield Line(f"self.stage{stage.number}.{mine} = self.stage{owner.number}.{theirs}")

    def _finish(self) -> Iterator[Line]:
        """Sum what is summed once per step; every rank learns the loss."""
        if not self.links.trains:
            yield from self._results()
            return
        holder = next(i for i, g in enumerate(self.graphs) if g.loss is not None)
        for stage in self.stages:
            loss = "loss = " if stage.number == holder else ""
            if stage.finishes:
                yield Line(f"{loss}self.stage{stage.number}.finish()")
        for number, one in enumerate(self.tied):
            yield from self._sum_tied(one, number)
        source = self.schedule.rank_of[holder]
        if self.rank != source:
            made = self.graphs[holder].loss
            assert made is not None
            device, dtype = f"{self._arguments()[0]}.device", literal(value(made).dtype)
            yield Line(f"loss = torch.empty((), dtype={dtype}, device={device})")
        if self.schedule.ranks > 1:
            call = f"dist.broadcast(loss, group=self.{PP}, group_src={source})"
            yield Line(call, "every rank learns the loss")
        yield Line("return loss")

    def _results(self) -> Iterator[Line]:
        """Every rank learns the results of an inference."""
        yield Line("results = {}")
        for stage in self.stages:
            if stage.graph.outputs.results:
                yield Line(f"results |= self.stage{stage.number}.finish()")
        device = f"{self._arguments()[0]}.device"
        for number, graph in enumerate(self.graphs):
            source = self.schedule.rank_of[number]
            for name, node in graph.outputs.results.items():
                key = f"results[{literal(name)}]"
                if source != self.rank:
                    shape, dtype = literal(tuple(value(node).shape)), literal(value(node).dtype)
                    yield Line(f"{key} = torch.empty({shape}, dtype={dtype}, device={device})")
                elif self.schedule.ranks > 1:
                    yield Line(f"{key} = {key}.contiguous()")
                if self.schedule.ranks > 1:
                    yield Line(f"dist.broadcast({key}, group=self.{PP}, group_src={source})")
        yield Line("return results")

    def _is_apart(self, one: Tied) -> bool:
        """Whether this rank and another one hold a tied parameter."""
        ranks = one.ranks(self.schedule)
        return self.rank in ranks and len(ranks) > 1

    def _set_aside(self, one: Tied, number: int) -> Iterator[Line]:
        """What was in a tied parameter's gradient before must not be summed again."""
        if self._is_apart(one):
            here = next(s for s in one.stages if s in self._numbers())
            path = f"self.stage{here}.{self._path(one.name, here)}"
            yield Line(f"before_{number}, {path}.grad = {path}.grad, None")

    def _sum_tied(self, one: Tied, number: int) -> Iterator[Line]:
        ranks = list(one.ranks(self.schedule))
        mine = self._mine(one)
        if self._is_apart(one):
            tag = self.links.free_tag + number
            call = self.helpers.use("sum_tied")
            path = f"self.stage{mine[0]}.{self._path(one.name, mine[0])}"
            yield Line(f"{call}({path}, before_{number}, {ranks}, {tag}, self.{PP})", "tied")


def _block(cls: Any) -> dict[str, Any]:
    return {
        "name": cls.name,
        "declarations": block(cls.declarations(), 2),
        "functions": cls.functions(),
        "gathers": cls.gather_methods(),
    }
