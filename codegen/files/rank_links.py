"""The links of one pipeline rank's stages to the stages before and behind them, as text.

A link carries activations (``x``) to the next stage, or their gradients (``d``) to the stage
before. Its ends are an ``Outbox`` and an ``Inbox`` (``helpers/links.py``), one ``Shelf`` if both
stages are on one rank, or ``Nothing`` at the pipeline's ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from partc.codegen.files.stage_flow import received
from partc.codegen.helpers.needed import Helpers
from partc.codegen.text import Line
from partc.graph import Graph, Phase, fake_of
from partc.quoting import literal
from partc.schedules.actions import Schedule
from partc.schedules.programs import BACKWARD, FORWARD, Wiring

LINKS = {
    "x_in": "by stage: where a forward's `x` comes from and goes to",
    "d_in": "and a backward's `d`, the gradient of `x`",
}


@dataclass(frozen=True)
class RankLinks:
    """Prints the ends of links that lie on ``rank``; ``graphs`` are the graphs of all stages."""

    graphs: Sequence[Graph]
    schedule: Schedule
    rank: int
    wiring: Wiring
    helpers: Helpers

    @property
    def trains(self) -> bool:
        """Whether the schedule has backwards, so that gradients are sent."""
        return bool(self.schedule.kinds & {"B", "I"})

    @property
    def stages(self) -> tuple[int, ...]:
        return self.schedule.stages_of(self.rank)

    def made(self) -> Iterator[Line]:
        """The statements of ``__init__`` that make the links; none for a single stage."""
        if self.schedule.stages == 1:
            return
        yield from self._groups()
        for name, table_of in self._links():
            if name in LINKS:
                yield Line(f"# {LINKS[name]}")
            entries = ", ".join(f"{number}: {made}" for number, made in table_of.items())
            yield Line(f"self.{name} = {{{entries}}}")

    def _ways(self) -> Iterator[tuple[str, Phase, int]]:
        """What links carry, the phase that receives it, and how many stages ahead it goes."""
        yield "x", "F", 1
        if self.trains:
            yield "d", "B", -1

    def _links(self) -> Iterator[tuple[str, Mapping[int, str]]]:
        """For ``x_in``, ``x_out``, ``d_in``, ``d_out`` the text that makes each stage's end."""
        last = self.schedule.stages - 1
        for name, phase, ahead in self._ways():
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
        """The text that makes one end of the link from stage ``source`` to stage ``target``.

        ``inward`` is the end at the target. The ``bound`` of an Outbox is how many sends may be
        under way.
        """
        between = 0 <= source <= last and 0 <= target <= last
        if not between or not received(self.graphs[target], phase):
            return f"{self.helpers.use('Nothing')}()"
        rank_of = self.schedule.rank_of
        if rank_of[source] == rank_of[target]:
            return f"{self.helpers.use('Shelf')}()"
        link = f"self.links[{_link(target, phase)}]"
        if inward:
            likes = [_like(n) for n in received(self.graphs[target], phase)]
            return f"{self.helpers.use('Inbox')}({link}, [{', '.join(likes)}])"
        channel = self.wiring.channels[2 * source + (BACKWARD if phase == "B" else FORWARD)]
        return f"{self.helpers.use('Outbox')}({link}, bound={self.wiring.bounds[channel]})"

    @cached_property
    def _receivers(self) -> dict[str, list[int]]:
        """For ``x`` and ``d`` the stages that receive them from another rank."""
        rank_of, last = self.schedule.rank_of, self.schedule.stages - 1
        found = {
            what: [
                stage
                for stage in range(last + 1)
                if 0 <= stage - ahead <= last
                and rank_of[stage - ahead] != rank_of[stage]
                and received(self.graphs[stage], phase)
            ]
            for what, phase, ahead in self._ways()
        }
        return {what: stages for what, stages in found.items() if stages}

    def _groups(self) -> Iterator[Line]:
        """The statement that makes the links of all ranks; every rank's program has the same."""
        if self._receivers:
            to = ", ".join(f"{literal(w)}: {_numbers(s)}" for w, s in self._receivers.items())
            ranks = _numbers(self.schedule.rank_of)
            call = f"{self.helpers.use('Links')}(mesh, {ranks}, {{{to}}})"
            yield Line("# the rank of every stage, and the stages that receive from another rank")
            yield Line(f"self.links = {call}")

    def meet(self, device: str) -> Iterator[Line]:
        """The statement of ``step`` that connects the ends of this pipeline's links."""
        if self._receivers:
            yield Line(f"self.links.meet({device})")

    def each(self, kind: str, call: str) -> Iterator[Line]:
        """The statements that call a method of every ``Inbox``, or every ``Outbox``."""
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


def _numbers(numbers: Sequence[int]) -> str:
    """Numbers as text, as a range where they follow each other.

    >>> _numbers([1, 2, 3]), _numbers([0, 1, 1, 0])
    ('range(1, 4)', '[0, 1, 1, 0]')
    """
    first, end = numbers[0], numbers[-1] + 1
    if [*numbers] != [*range(first, end)]:
        return str([*numbers])
    return f"range({first}, {end})" if first else f"range({end})"


def _link(target: int, phase: Phase) -> str:
    """The key of the link to a stage in a program: ``"x", 2``."""
    return f"{literal('d' if phase == 'B' else 'x')}, {target}"


def _like(node: fx.Node) -> str:
    """The shape and dtype of a received tensor, as text: ``((8, 64), torch.float32)``."""
    fake = fake_of(node)
    return f"({literal(tuple(fake.shape))}, {literal(fake.dtype)})"
