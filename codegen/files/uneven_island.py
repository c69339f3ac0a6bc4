"""The last class of a file whose islands compute as many microbatches as their speed allows.

    class LlamaStepIsland(LlamaStep):
        def step(self, x):
            for x in x.chunk(MICROBATCHES[self.island_rank]):
                losses.append(super().step(x))
            ...

The class that it derives from is the step of one microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from partc.codegen.files.island import Head, Islands
from partc.codegen.files.templates import TEMPLATES
from partc.errors import PlanError
from partc.graph import Graph
from partc.plan.uneven import UNEVEN, Uneven
from partc.quoting import literal


@dataclass(frozen=True, kw_only=True)
class UnevenIslands(Islands):
    """Islands that share the gradients of every step, each of as many microbatches as it has."""

    how: Uneven

    @property
    def calls(self) -> tuple[str, ...]:
        return ("average_over",)

    def text(
        self, graphs: Sequence[Graph],
        attributes: Mapping[fx.Node, str], head: Head, *, draws: bool, shards: str = "SHARDS",
    ) -> str:  # fmt: skip
        self._check(head)
        dims = [self.how.dim_of(name) for name in graphs[0].inputs]
        pairs = [
            (argument, f"{argument}.chunk(self.microbatches{f', {dim}' if dim else ''})")
            for argument, dim in zip(head["arguments"], dims, strict=True)
            if dim is not None
        ]
        return TEMPLATES.get_template("uneven_island.py.j2").render(
            how=self.how, num=self.num, **head, draws=draws, pairs=pairs
        )

    def tables(self, ranks: str = "") -> list[str]:
        """The table of microbatches."""
        numbers = literal(tuple(self.how.of_each))
        return [f"MICROBATCHES = {numbers}  # of each island in a step"]

    def _check(self, head: Head) -> None:
        """PlanError for what the microbatches of all islands do not have together."""
        if head["result"] != "Tensor":
            raise _refused(
                "the loss returns values beside it", "each island has those of its microbatches",
                "Return the loss alone; a forward program, stage.eval(), has the others.",
            )  # fmt: skip
        if self.running:
            raise _refused(
                f"a step changes {min(self.running)}", "each island would have it from other rows, "
                "and in another number of steps", f"Freeze it (model.eval()), or leave [{UNEVEN}] "
                "and the islands out: microbatches = N.",
            )  # fmt: skip


def _refused(what: str, why: str, do: str) -> PlanError:
    return PlanError(where=f"plan, {UNEVEN}", what=what, why=why, do=do)
