"""What links the stages of one pipeline rank to those before and behind, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from partc.codegen.files.stage_flow import received
from partc.codegen.helpers.needed import Helpers
from partc.codegen.text import Line
from partc.graph import Graph, Phase, fake_of
from partc.plan.mesh import PP
from partc.quoting import literal
from partc.schedules.actions import Schedule
from partc.schedules.programs import BACKWARD, FORWARD, Wiring

LINKS = {
    "x_in": "by stage: where a forward's `x` comes from and goes to",
    "d_in": "and a backward's `d`, the gradient of `x`",
}
TAGS = 64  # of a link, one for each tensor that may pass: `link_groups` counts by as many


@dataclass(frozen=True)
class RankLinks:
    """The ends of all links that lie on ``rank``; ``graphs`` are those of all stages."""

    graphs: Sequence[Graph]
    schedule: Schedule
    rank: int
    wiring: Wiring
    helpers: Helpers

    @property
    def trains(self) -> bool:
        """Whether gradients are sent back."""
        return bool(self.schedule.kinds & {"B", "I"})

    @property
    def stages(self) -> tuple[int, ...]:
        return self.schedule.stages_of(self.rank)

    @property
    def free_tag(self) -> int:
        """The first tag that no link has."""
        return TAGS * 2 * self.schedule.stages

    def made(self) -> Iterator[Line]:
        """The statements of ``__init__`` that make them; one stage alone has none."""
        if self.schedule.stages == 1:
            return
        yield from self._groups()
        for name, table_of in self._links():
            if name in LINKS:
                yield Line(f"# {LINKS[name]}")
            entries = ", ".join(f"{number}: {made}" for number, made in table_of.items())
            yield Line(f"self.{name} = {{{entries}}}")

    def _links(self) -> Iterator[tuple[str, Mapping[int, str]]]:
        """Per kind of link and stage the text that makes its end on this rank."""
        last = self.schedule.stages - 1
        kinds: list[tuple[str, Phase, int]] = [("x", "F", 1), ("d", "B", -1)]
        for name, phase, ahead in kinds:
            if phase == "B" and not self.trains:
                continue
            inward = {s: self._end(s - ahead, s, phase, True, last) for s in self.stages}
            outward = {s: self._end(s, s + ahead, phase, False, last) for s in self.stages}
            yield f"{name}_in", inward
            yield (
                f"{name}_out",
                {
                    s: f"self.{name}_in[{s + ahead}]" if text.startswith("Shelf") else text
                    for s, text in outward.items()
                },
            )

    def _end(self, source: int, target: int, phase: Phase, inward: bool, last: int) -> str:
        """One end of the link from stage ``source`` to stage ``target``."""
        between = 0 <= source <= last and 0 <= target <= last
        if not between or not received(self.graphs[target], phase):
            return f"{self.helpers.use('Nothing')}()"
        rank_of = self.schedule.rank_of
        if rank_of[source] == rank_of[target]:
            return f"{self.helpers.use('Shelf')}()"
        link = f"links[{_link(target, phase)}]"
        if inward:
            likes = [_like(n) for n in received(self.graphs[target], phase)]
            return f"{self.helpers.use('Inbox')}({link}, [{', '.join(likes)}])"
        channel = self.wiring.channels[2 * source + (BACKWARD if phase == "B" else FORWARD)]
        return f"{self.helpers.use('Outbox')}({link}, bound={self.wiring.bounds[channel]})"

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
                used = received(self.graphs[ends[1]], phase) and (phase == "F" or self.trains)
                if used and self.rank in ranks and len({*ranks}) > 1:
                    found[_link(ends[1], phase)] = ranks
        if found:
            entries = ", ".join(f"({link}): {ranks}" for link, ranks in found.items())
            call = f"{self.helpers.use('link_groups')}(self.{PP}, {{{entries}}})"
            yield Line(f"links = {call}", "to which stage: from rank, to rank")

    def each(self, kind: str, call: str) -> Iterator[Line]:
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


def _link(target: int, phase: Phase) -> str:
    """What programs call the link to a stage: ``"x", 2``."""
    return f"{literal('d' if phase == 'B' else 'x')}, {target}"


def _like(node: fx.Node) -> str:
    """The shape and dtype of a tensor that is received."""
    fake = fake_of(node)
    return f"({literal(tuple(fake.shape))}, {literal(fake.dtype)})"
