"""Stage graphs and a schedule in, the source of one pipeline rank's program out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from partc.codegen.emit import MEANINGS, TEMPLATES, dtype_name, header_line, span
from partc.codegen.helpers import Helpers
from partc.codegen.safety import check_source
from partc.codegen.stages import StageText, stage_text
from partc.codegen.tables import table
from partc.codegen.text import Line, block
from partc.codegen.turns import parted, turn_lines, whole_backwards
from partc.graph import Graph, Phase, held, value
from partc.mesh import PP, Mesh
from partc.passes.microbatches import MB
from partc.quoting import identifier, literal
from partc.schedules.actions import Action, Kind, Schedule
from partc.schedules.programs import BACKWARD, FORWARD, Wiring
from partc.tied import Tied

LINKS = {
    "x_in": "by stage: where a forward's `x` comes from and goes to",
    "d_in": "and a backward's `d`, the gradient of `x`",
}
PHASES: dict[Kind, Phase] = {"F": "F", "B": "B", "I": "B", "W": "W"}
TAGS = 64  # tensors that may pass from one stage to the next


def emit_rank(
    graphs: Sequence[Graph],
    tied: Sequence[Tied],
    schedule: Schedule,
    rank: int,
    mesh: Mesh,
    wiring: Wiring,
    *,
    header: str,
) -> str:
    """The text of the file that pipeline rank ``rank`` runs; ``graphs`` are those of all stages.

    ``tied`` are the parameters that several of them hold. ``wiring`` is that of the lowered
    schedule: it says how many sends may be under way.
    """
    helpers = Helpers()
    mine = schedule.stages_of(rank)
    stages = [stage_text(graphs[s], s, helpers, _lent(graphs, mine, s)) for s in mine]
    text = _Rank(graphs, tied, stages, schedule, rank, mesh, wiring, header, helpers).text()
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
    wiring: Wiring
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
            schedule=f"Schedule {self.schedule.name}, {self.schedule.microbatches} microbatches.",
            method="step" if self._trains() else "forward",
            result="Tensor" if self._trains() else "dict[str, Tensor]",
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
        yield from self._groups()
        for name, table_of in self._links():
            if name in LINKS:
                yield Line(f"# {LINKS[name]}")
            entries = ", ".join(f"{number}: {made}" for number, made in table_of.items())
            yield Line(f"self.{name} = {{{entries}}}")

    def _numbers(self) -> list[int]:
        return [stage.number for stage in self.stages]

    def _links(self) -> Iterator[tuple[str, Mapping[int, str]]]:
        """Per kind of link and stage the text that makes its end on this rank."""
        last = self.schedule.stages - 1
        kinds: list[tuple[str, Phase, int]] = [("x", "F", 1), ("d", "B", -1)]
        for name, phase, ahead in kinds:
            if phase == "B" and not self._trains():
                continue
            inward = {s: self._end(s - ahead, s, phase, True, last) for s in self._numbers()}
            outward = {s: self._end(s, s + ahead, phase, False, last) for s in self._numbers()}
            yield f"{name}_in", inward
            yield (
                f"{name}_out",
                {
                    s: f"self.{name}_in[{s + ahead}]" if text.startswith("Shelf") else text
                    for s, text in outward.items()
                },
            )

    def _trains(self) -> bool:
        return bool(self.schedule.kinds & {"B", "I"})

    def _end(self, source: int, target: int, phase: Phase, inward: bool, last: int) -> str:
        """One end of the link from stage ``source`` to stage ``target``."""
        between = 0 <= source <= last and 0 <= target <= last
        if not between or not self._received(target, phase):
            return f"{self.helpers.use('Nothing')}()"
        rank_of = self.schedule.rank_of
        if rank_of[source] == rank_of[target]:
            return f"{self.helpers.use('Shelf')}()"
        tag = _tag(source, phase)
        if inward:
            likes = [_like(n) for n in self._received(target, phase)]
            box = self.helpers.use("Inbox")
            return f"{box}(links[{tag}], {tag}, [{', '.join(likes)}])"
        channel = self.wiring.channels[2 * source + (BACKWARD if phase == "B" else FORWARD)]
        bound = self.wiring.bounds[channel]
        return f"{self.helpers.use('Outbox')}(links[{tag}], {tag}, bound={bound})"

    def _groups(self) -> Iterator[Line]:
        """The communicators of all links that begin or end on this rank."""
        rank_of, found = self.schedule.rank_of, {}
        for source in range(self.schedule.stages - 1):
            ways: list[tuple[Phase, tuple[int, int]]] = [
                ("F", (source, source + 1)),
                ("B", (source + 1, source)),
            ]
            for phase, ends in ways:
                ranks = tuple(rank_of[stage] for stage in ends)
                used = self._received(ends[1], phase) and (phase == "F" or self._trains())
                if used and self.rank in ranks and len({*ranks}) > 1:
                    found[_tag(ends[0], phase)] = ranks
        if found:
            entries = ", ".join(f"{tag}: {ranks}" for tag, ranks in sorted(found.items()))
            call = f"{self.helpers.use('link_groups')}(self.{PP}, {{{entries}}})"
            yield Line(f"links = {call}", "by tag: from rank, to rank")

    def _received(self, stage: int, phase: Phase) -> list[fx.Node]:
        nodes = self.graphs[stage].placeholders("received").values()
        return [n for n in nodes if value(n).phase == phase]

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
        yield from self._each("Inbox", f"begin({self.schedule.microbatches}, {device})")
        for number, one in enumerate(self.tied):
            yield from self._set_aside(one, number)
        yield from turn_lines(self.actions)
        yield from self._each("Outbox", "wait()")
        yield from self._finish()

    def _lend(self) -> Iterator[Line]:
        """Buffers that one stage holds for others of the rank."""
        for stage in self.stages:
            for name in sorted(stage.lent):
                owner = next(s for s in self.stages if name in s.graph.buffers)
                mine, theirs = (s.attributes[s.graph.buffers[name]] for s in (stage, owner))
                yield Line(f"self.stage{stage.number}.{mine} = self.stage{owner.number}.{theirs}")

    def _each(self, kind: str, call: str) -> Iterator[Line]:
        """A call of every link of a kind, each of which leads to another rank."""
        links = [
            f"self.{name}[{stage}]"
            for name, ends in self._links()
            for stage, text in ends.items()
            if text.startswith(kind)
        ]
        if len(links) == 1:
            yield Line(f"{links[0]}.{call}")
        elif links:
            yield Line(f"for link in ({', '.join(links)}):")
            yield Line(f"link.{call}", indent=1)

    def _finish(self) -> Iterator[Line]:
        """Sum what is summed once per step; every rank learns the loss."""
        if not self._trains():
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
            tag = TAGS * 2 * self.schedule.stages + number
            call = self.helpers.use("sum_tied")
            path = f"self.stage{mine[0]}.{self._path(one.name, mine[0])}"
            yield Line(f"{call}({path}, before_{number}, {ranks}, {tag}, self.{PP})", "tied")


def _tag(source: int, phase: str) -> int:
    """What tells the transfers that stage ``source`` makes from others."""
    return TAGS * (2 * source + (phase == "B"))


def _block(cls: Any) -> dict[str, Any]:
    return {
        "name": cls.name,
        "declarations": block(cls.declarations(), 2),
        "functions": cls.functions(),
        "gathers": cls.gather_methods(),
    }


def _like(node: fx.Node) -> str:
    """The shape and dtype of a tensor that is received."""
    fake = held(node)
    return f"({literal(tuple(fake.shape))}, {literal(fake.dtype)})"
