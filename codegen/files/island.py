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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jinja2
from torch import fx

from partc.codegen.helpers.needed import Helpers
from partc.graph import Graph, fake_of
from partc.plan.local_steps import LocalSteps
from partc.quoting import literal

WIDTH = 92  # of the class's docstring


@dataclass(frozen=True)
class Islands:
    """How many islands there are, and how they meet."""

    num: int
    how: LocalSteps

    def note(self, helpers: Helpers) -> None:
        """Note the functions that the class calls."""
        helpers.use("average")
        if self.how.fragments > 1:
            helpers.use("fragment")

    def text(
        self, environment: jinja2.Environment, graphs: Sequence[Graph],
        attributes: Mapping[fx.Node, str], *, name: str, arguments: Sequence[str], result: str,
        draws: bool,
    ) -> str:  # fmt: skip
        """The class, and the line that makes it the file's ``Step``."""
        begun = f"self.taken - {self.how.start_step}" if self.how.start_step else "self.taken"
        return environment.get_template("island.py.j2").render(
            how=self.how, num=self.num, said=self._said(), title=self._title(), name=name,
            arguments=arguments, result=result, draws=draws,
            steps="begun" if self.how.start_step else begun,
            apart=self.how.period // self.how.fragments,
            running=_listed(_running(graphs, attributes)),
        )  # fmt: skip

    def tables(self, graphs: Sequence[Graph], ranks: str = "") -> list[str]:
        """The statements that add what islands keep of trained parameters to the table BUFFERS.

        ``ranks``: the name of the pipeline ranks, where BUFFERS has a table for each; else "".
        """
        if not self.how.keeps:
            return []
        params = {name for graph in graphs for name in graph.params}
        frozen = sorted(params - {name for graph in graphs for name in graph.grads})
        trained = " if name not in FROZEN" if frozen else ""
        row = 'f"{at}_{word}_island": (f"{name}_{word}@island", *rest)'
        over = f"for word in {literal(self.how.keeps)} for at, (name, *rest) in"
        begun, table, pad = ("BUFFERS |= {", "SHARDS", "    ")
        if ranks:
            begun = f"for rank in {ranks}:\n    BUFFERS[rank] |= {{"
            table, pad = "SHARDS[rank]", "        "
        rows = [f"{pad}{row}", f"{pad}{over} {table}.items(){trained}", f"{pad[4:]}}}"]
        known = [f"FROZEN = {literal(tuple(frozen))}"] if frozen else []
        return [*known, "\n".join([f"{begun}  # what islands keep between meetings", *rows])]

    def _said(self) -> list[str]:
        """How the islands meet, in words."""
        how = self.how
        first = f"Before step {how.start_step} they share their gradients. Then every" if (
            how.start_step
        ) else "Every"  # fmt: skip
        each = f"{first} {how.period} steps the parameters of all islands become their mean"
        if how.fragments > 1:
            each += f", {how.fragments} parts of the model in turn"
        if how.keeps:
            each += (
                "; from where islands last met an outer optimizer takes a step towards it, SGD with "
                "Nesterov momentum"
            )
        return textwrap.wrap(f"{each}.", WIDTH)

    def _title(self) -> str:
        return "Do what is due with the other islands behind the last step, if it has not happened."


def _running(graphs: Iterable[Graph], attributes: Mapping[fx.Node, str]) -> Iterator[str]:
    """The last parts of the names of buffers that steps change, such as running statistics."""
    for graph in graphs:
        for name in graph.outputs.buffers:
            node = graph.buffers[name]
            if fake_of(node).is_floating_point():
                yield attributes[node].rpartition(".")[2]


def _listed(names: Iterable[str]) -> str:
    """Names as a tuple; "" for none."""
    found = sorted({*names})
    return literal(tuple(found)) if found else ""
