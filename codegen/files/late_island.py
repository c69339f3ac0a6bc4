"""The last class of a file whose islands share gradients that are applied some steps late.

    class LlamaStepIsland(LlamaStep):
        def step(self, x):
            result = super().step(x)
            ...

While a step computes, the gradients of the steps before it become their mean over all islands. A
gradient stands in a buffer until it is applied, so that checkpoints have what is under way.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from partc.codegen.files.island import WIDTH, Head, Islands
from partc.codegen.files.templates import TEMPLATES
from partc.graph import Graph
from partc.plan.stale import Stale


@dataclass(frozen=True, kw_only=True)
class LateIslands(Islands):
    """Islands that share the gradients of every step, and apply them some steps late."""

    how: Stale

    apart = "step"

    @property
    def calls(self) -> tuple[str, ...]:
        return ("start_sums", "average_over") if self.how.start_step else ("start_sums",)

    def text(
        self, graphs: Sequence[Graph],
        attributes: Mapping[fx.Node, str], head: Head, *, draws: bool, shards: str = "SHARDS",
    ) -> str:  # fmt: skip
        num = self.how.steps
        return TEMPLATES.get_template("late_island.py.j2").render(
            how=self.how, num=self.num, said=self._said(), **head, draws=draws,
            ago="the step before" if num == 1 else f"{num} steps before",
        )  # fmt: skip

    def _said(self) -> list[str]:
        """What becomes of gradients, in words."""
        how = self.how
        behind = "the next step computes" if how.steps == 1 else f"{how.steps} steps compute"
        late = f"{how.steps} step{'s' * (how.steps > 1)} late"
        text = f"Their gradients become their mean while {behind}, and are given {late}"
        if how.start_step:
            text = f"Behind {how.start_step} steps whose gradients are shared at once, t{text[1:]}"
        if how.compensation:
            text += (
                f". To such a mean g belongs {how.compensation} * g * g * (how far parameters have "
                "moved since)"
            )
        return textwrap.wrap(f"{text}.", WIDTH)
