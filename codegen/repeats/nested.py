"""Blocks inside of blocks: one class prints what the blocks of several classes have in common.

In: the runs of equal blocks of a step. Out: the runs, with the blocks inside of their first blocks
that have a class of their own (``Run.inner``), and with single blocks elsewhere that share it. An
encoder's and a decoder's blocks both have a ``T5LayerFF``, say. A class is made where its text and
the calls of its methods have fewer lines than the same calls in line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import fx

from partc.codegen.repeats.equal import Group
from partc.codegen.repeats.families import Families, Member
from partc.codegen.repeats.inner_numbers import with_numbers
from partc.codegen.repeats.runs import PHASES, Run, runs_within
from partc.codegen.repeats.trim import Block
from partc.graph import Graph


def nested(graph: Graph, runs: Sequence[Run], alone: Collection[tuple[str, ...]]) -> list[Run]:
    """The runs with the blocks inside of them, and single blocks that share a class with these.

    ``alone`` has runs, by their ``layers``, that share no class with others.
    """
    apart = {path for layers in alone if len(layers) == 1 for path in layers}
    while True:
        families = Families(graph, runs, alone, apart)
        families.find()
        if not any(member.run is None for each in families.all for member in each.members):
            return [*runs]
        wrong = families.in_one_piece()
        built = [] if wrong else Built(families).runs(runs)
        wrong |= {run.layers[0] for run in runs_within(built) if run.layers[0] in apart}
        wrong = {families.origin(path, runs) for path in wrong}
        if not wrong:
            return with_numbers(built)
        apart |= wrong


class Built:
    """Makes runs of the members of families, each with the runs inside of it."""

    def __init__(self, families: Families) -> None:
        self.families = families
        self.known: dict[Member, tuple[Run, ...]] = {}

    def runs(self, before: Sequence[Run]) -> list[Run]:
        """The runs that were there before, and behind them single blocks that are new."""
        known = {m.run: m for each in self.families.all for m in each.members if m.run is not None}
        free = [
            m for each in self.families.all for m in each.members if m.run is None and not m.home
        ]
        made = [self._known(known[run]) if run in known else run for run in before]
        return [*made, *(self._single(member) for member in free)]

    def _known(self, member: Member) -> Run:
        """A run that was there before, with the runs inside of its blocks."""
        assert member.run is not None
        groups = {p: tuple(g for b in member.blocks if (g := b[p]) is not None) for p in PHASES}
        inner = self._inside(member)
        for block in member.blocks[1:]:
            at = _at(member.blocks[0], block)
            layers = _layer(member.blocks[0]), _layer(block)
            inner = tuple(_with_alike(run, _image(run, at, *layers)) for run in inner)
        kin = member.family.kin or member.run.kin
        forward, backward, weights = groups.values()
        return replace(
            member.run, forward=forward, backward=backward, weights=weights, kin=kin, inner=inner
        )

    def _single(self, member: Member) -> Run:
        """A block inside of another one, or one that is new beside them."""
        forward, backward, weights = (
            tuple(group for group in [member.blocks[0][phase]] if group is not None)
            for phase in PHASES
        )
        return Run(
            (member.layer,), forward, backward, weights, kin=member.family.kin,
            inner=self._inside(member),
        )  # fmt: skip

    def _inside(self, member: Member) -> tuple[Run, ...]:
        """The runs inside of a member: those of the first of its family."""
        lead = member.family.members[0]
        if lead not in self.known:
            self.known[lead] = tuple(map(self._single, lead.children))
        if member is lead:
            return self.known[lead]
        at = _at(lead.blocks[0], member.blocks[0])
        return tuple(_image(run, at, lead.layer, member.layer) for run in self.known[lead])


def _layer(block: Block) -> str:
    return next(group.layer for group in block.values() if group is not None)


def _at(here: Block, there: Block) -> dict[fx.Node, fx.Node]:
    """The calls of one block, each with the call that does the same in another one."""
    found: dict[fx.Node, fx.Node] = {}
    for phase, group in here.items():
        other = there[phase]
        if group is not None and other is not None:
            found |= dict(zip(group.nodes, other.nodes, strict=True))
    return found


def _image(run: Run, at: Mapping[fx.Node, fx.Node], here: str, there: str) -> Run:
    """A run inside of the block ``here`` as it is inside of the block ``there``."""
    layer = there + run.layers[0].removeprefix(here)
    forward, backward, weights = (
        tuple(Group(layer, tuple(at[node] for node in group.nodes)) for group in run.of(phase))
        for phase in PHASES
    )
    inner = tuple(_image(each, at, here, there) for each in run.inner)
    return Run((layer,), forward, backward, weights, kin=run.kin, inner=inner)


def _with_alike(run: Run, other: Run) -> Run:
    """A run inside of a first block, which also knows the same block inside of another one."""
    block = {phase: next(iter(other.of(phase)), None) for phase in PHASES}
    inner = tuple(map(_with_alike, run.inner, other.inner))
    return replace(run, alike=(*run.alike, block), inner=inner)
