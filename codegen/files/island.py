"""The last class of a file whose ranks are islands: its step meets the others now and then.

    class LlamaStepIsland(LlamaStep):
        def step(self, x):
            self.meet()
            result = super().step(x)
            ...

The class that it derives from is a step as without islands.
"""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypedDict

from torch import fx

from partc.codegen.files.templates import TEMPLATES
from partc.codegen.text import Line, block
from partc.errors import PlanError
from partc.graph import Graph
from partc.plan.local_steps import ALL, PAIRS, RING, LocalSteps
from partc.plan.servers import Servers
from partc.plan.stale import Stale
from partc.plan.uneven import Uneven
from partc.plan.wires import WIRES
from partc.program.role import OUTER_TABLE
from partc.quoting import literal

WIDTH = 92  # of the class's docstring
PARTNERS = {  # of this island: the helper that finds them, and with what
    RING: ("beside", "self.island_rank, {num}"),
    PAIRS: ("paired_with", "self.island_rank, {num}, self.pairs, self.taken"),
}


class Head(TypedDict):
    """The name of a step's class, and the arguments and the result's type of its method."""

    name: str
    arguments: Sequence[str]
    result: str


@dataclass(frozen=True, kw_only=True)
class Islands(ABC):
    """How many islands there are, and what their last class does.

    ``frozen``: the parameters that are not trained. ``running``: the buffers that steps change,
    such as running statistics.
    """

    num: int
    how: LocalSteps | Stale | Uneven | Servers
    frozen: tuple[str, ...] = ()
    running: frozenset[str] = frozenset()

    apart: ClassVar[str] = ""  # from one to the next of which islands keep something

    @property
    @abstractmethod
    def calls(self) -> tuple[str, ...]:
        """The helper functions and classes that the class names."""

    @abstractmethod
    def text(
        self, graphs: Sequence[Graph],
        attributes: Mapping[fx.Node, str], head: Head, *, draws: bool, shards: str = "SHARDS",
    ) -> str:  # fmt: skip
        """The class, and the line that makes it the file's ``Step``.

        ``shards``: the expression that reads the table of a rank's parameters.
        """

    def tables(self, ranks: str = "") -> list[str]:
        """The table of what islands keep of trained parameters, as BUFFERS has buffers.

        ``ranks``: the name of the pipeline ranks, where there is a table for each; else "".
        """
        if not self.how.keeps:
            return []
        trained = " if name not in FROZEN" if self.frozen else ""
        row = 'f"{at}_{word}_island": (f"{name}_{word}@island", *rest)'
        over = f"for word in {literal(self.how.keeps)}"
        known = [f"FROZEN = {literal(self.frozen)}"] if self.frozen else []
        if ranks:
            rows = [f"    rank: {{{row}", f"           {over}"]
            rows += [f"           for at, (name, *rest) in SHARDS[rank].items(){trained}}}"]
            rows += [f"    for rank in {ranks}"]
        else:
            rows = [f"    {row}", f"    {over} for at, (name, *rest) in SHARDS.items(){trained}"]
        kept = f"what islands keep from one {self.apart} to the next"
        begun = f"{OUTER_TABLE} = {{  # the same for {kept}"
        return [*known, "\n".join([begun, *rows, "}"])]


@dataclass(frozen=True, kw_only=True)
class MeetingIslands(Islands):
    """Islands that train copies of the model apart, and make one of them now and then.

    ``fragments``: of each part of the model that meets by itself, how the names of its parameters
    begin. Buffers that steps change become their mean with the parameters.
    """

    how: LocalSteps
    fragments: tuple[tuple[str, ...], ...] = ()

    apart = "meeting"

    @property
    def calls(self) -> tuple[str, ...]:
        wire = self.how.wire
        more: tuple[str, ...] = ("in_blocks", "average_rounded", WIRES[wire].helper) if wire else ()
        if self.how.overlap:
            more = ("start_sums",)
        if self.how.partners != ALL:
            more = ("average_with", PARTNERS[self.how.partners][0])
        return ("average_over", *more)

    @property
    def _partners(self) -> str:
        """The call that finds the islands which this one meets; "" where it meets all."""
        if self.how.partners == ALL:
            return ""
        helper, arguments = PARTNERS[self.how.partners]
        return f"{helper}({arguments.format(num=self.num)})"

    @classmethod
    def of(
        cls, how: LocalSteps, num: int, params: Mapping[str, int], frozen: tuple[str, ...],
        running: frozenset[str],
    ) -> MeetingIslands:  # fmt: skip
        """``params``: how many elements each parameter of the model has, in the model's order."""
        fragments = tuple(_fragments(params, how.fragments))
        return cls(num=num, how=how, fragments=fragments, frozen=frozen, running=running)

    def text(
        self, graphs: Sequence[Graph],
        attributes: Mapping[fx.Node, str], head: Head, *, draws: bool, shards: str = "SHARDS",
    ) -> str:  # fmt: skip
        start, how = self.how.start_step, self.how
        buffers = {name: node for graph in graphs for name, node in graph.buffers.items()}
        kept = [attributes[node] for name, node in buffers.items() if name in self.running]
        return TEMPLATES.get_template("island.py.j2").render(
            how=how, num=self.num, said=self._said(), **head, draws=draws, shards=shards,
            steps="begun" if start else "self.taken",
            rounded=WIRES[how.wire].helper if how.wire else "", partners=self._partners,
            apart=how.period // how.fragments, running=_last_parts(kept),
        )  # fmt: skip

    def tables(self, ranks: str = "") -> list[str]:
        """Also the table of fragments."""
        parts = [f"    {literal(part)}," for part in self.fragments]
        begun = "FRAGMENTS = (  # of the model, which meet in turn: how the names of each begin"
        tables = ["\n".join([begun, *parts, ")"])] if self.how.fragments > 1 else []
        return [*tables, *super().tables(ranks)]

    def _said(self) -> list[str]:
        """How the islands meet, in words."""
        how = self.how
        first = f"Before step {how.start_step} they share their gradients. Then every" if (
            how.start_step
        ) else "Every"  # fmt: skip
        each = f"{first} {how.period} steps the parameters of all islands become their mean"
        if how.partners != ALL:
            whom = "those beside it" if how.partners == RING else "another one, drawn anew"
            each = f"{first} {how.period} steps an island's parameters become a mean with {whom}"
        if how.fragments > 1:
            each += f", {how.fragments} parts of the model in turn"
        if how.keeps:
            each += (
                "; from where islands last met an outer optimizer takes a step towards it: SGD "
                "with Nesterov momentum"
            )
        if how.wire:
            each += f", on the way in {how.wire}"
        if how.overlap:
            each += f". Islands go on for {how.overlap} steps while the sum of their ways is made"
            each += f", of which parameters keep the share {how.mix}" if how.mix else ""
        return textwrap.wrap(f"{each}.", WIDTH)


def check_names(how: LocalSteps | Stale | Uneven | Servers, names: Collection[str]) -> None:
    """PlanError if a tensor of the model has a name that islands need for what they keep."""
    for word in how.keeps:
        taken = next((name for name in names if f"{name}_{word}_island" in names), None)
        if taken is not None:
            raise PlanError(
                where=f"{taken}_{word}_island", what="the model has a tensor of this name",
                why=f"islands keep a buffer of this name beside {taken}",
                do="Rename it.",
            )  # fmt: skip


def check_real(how: LocalSteps | Stale | Uneven | Servers, dtypes: Mapping[str, str]) -> None:
    """PlanError for complex parameters where the plan rounds, or squares, real numbers alone."""
    entry = "compensation" if isinstance(how, Stale) else "wire"
    of_complex = next((name for name, dtype in dtypes.items() if "complex" in dtype), None)
    if getattr(how, entry, None) and of_complex is not None:
        raise PlanError(
            where=of_complex, what=f"it is {dtypes[of_complex]}, and the plan has a {entry}",
            why="that is defined for real numbers", do=f"Leave {entry} out.",
        )  # fmt: skip


def _fragments(params: Mapping[str, int], num: int) -> Iterator[tuple[str, ...]]:
    """Consecutive parts of a model with about equally many elements each, as beginnings of names.

    The blocks of a list are not divided: ``layers.3.`` stands for all parameters of one.
    """
    whole, before = max(1, sum(params.values())), 0
    parts: list[dict[str, None]] = [{} for _ in range(num)]
    at: dict[str, int] = {}
    for name, size in params.items():
        unit = _unit(name)
        at.setdefault(unit, min(num - 1, before * num // whole))
        parts[at[unit]][unit] = None
        before += size
    filled = sum(map(bool, parts))
    if filled < num:
        raise PlanError(
            where="[local_steps]", what=f"fragments = {num}, and the model has {filled} parts",
            why="the blocks of a list are not divided, and each part has about equally many "
            "elements", do=f"Write fragments = {filled} or fewer.",
        )  # fmt: skip
    return (tuple(part) for part in parts)


def _unit(name: str) -> str:
    """How the names of a list's block begin, ``layers.3.``; of others the whole name and a dot."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return ".".join(parts if number is None else parts[: number + 1]) + "."


def _last_parts(attributes: Iterable[str]) -> str:
    """The statement that names buffers by the last parts of their paths, by which equal blocks call
    the same one; "" for none.
    """
    found = sorted({path.rpartition(".")[2] for path in attributes})
    return block([Line(f"names = {literal(tuple(found))}")], 2) if found else ""
