"""The last class of a file some of whose islands own parameters: the others send them gradients.

    class LlamaStepIsland(LlamaStep):
        def step(self, x):
            self.pull(WORKERS)
            if self.island_rank in WORKERS:
                result = super().step(x)
            ...

The class that it derives from is a step as without islands.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from partc.codegen.files.island import WIDTH, Head, Islands
from partc.codegen.files.templates import TEMPLATES
from partc.errors import PlanError
from partc.graph import Graph
from partc.plan.servers import SERVERS, Servers


@dataclass(frozen=True, kw_only=True)
class ServedIslands(Islands):
    """Islands that compute, and islands that own parameters and their optimizer.

    ``serving``, ``workers``: the numbers of the islands that own, and of those that compute.
    """

    how: Servers
    serving: tuple[int, ...]
    workers: tuple[int, ...]

    @property
    def calls(self) -> tuple[str, ...]:
        return ("served_by", "give_params", "take_gradients")

    def text(
        self, graphs: Sequence[Graph],
        attributes: Mapping[fx.Node, str], head: Head, *, draws: bool, shards: str = "SHARDS",
    ) -> str:  # fmt: skip
        self._check(head)
        here = {name for graph in graphs for name in graph.params} - {*self.frozen}
        check_servers(self.how, len(here))  # of a stage, too
        return TEMPLATES.get_template("served_island.py.j2").render(
            num=self.num, said=self._said(), workers=len(self.workers), **head, draws=draws,
            apart=not self.how.compute,
        )  # fmt: skip

    def tables(self, ranks: str = "") -> list[str]:
        """Which islands compute, and which own parameters."""
        every = ", ".join(_range(each) for each in (self.workers, self.serving))
        return [f"WORKERS, SERVERS = {every}  # islands"]

    def _said(self) -> list[str]:
        """What servers do, in words."""
        own = "own" if self.how.count > 1 else "owns"
        compute = "compute" if len(self.workers) > 1 else "computes"
        text = (
            f"Of these {_named(self.workers)} {compute}, each on a batch of its own, and "
            f"{_named(self.serving)} {own} the parameters. The gradients of a parameter become "
            "their mean over all that compute on its owner alone, whose optimizer steps. Before "
            "the next step the owner sends the parameter to those that compute."
        )
        return textwrap.wrap(text, WIDTH)

    def _check(self, head: Head) -> None:
        """PlanError for what an island that computes nothing does not have."""
        if head["result"] != "Tensor":
            raise _refused(
                "the loss returns values beside it", "each island has those of its own batch, and "
                "a server has none", "Return the loss alone; a forward program, stage.eval(), has "
                "the others.",
            )  # fmt: skip
        check_running(self.running)


def check_running(running: Collection[str]) -> None:
    """PlanError for buffers that steps change."""
    if running:
        raise _refused(
            f"a step changes {min(running)}", "each island would have it from other rows, and "
            "servers own parameters alone", "Freeze it (model.eval()), or train without "
            f"[{SERVERS}].",
        )  # fmt: skip


def check_servers(how: Servers, trained: int) -> None:
    """PlanError for more servers than parameters of a program that trains some."""
    if how.count > trained > 0:
        raise _refused(
            f"count = {how.count}, and the model, or one of its stages, has {trained} trained "
            "parameters", "a server owns whole parameters of each stage",
            f"Write count = {trained} or fewer.",
        )  # fmt: skip


def _range(islands: Sequence[int]) -> str:
    """Consecutive islands as Python: ``range(4, 6)``."""
    first, last = islands[0], islands[-1]
    return f"range({first}, {last + 1})" if first else f"range({last + 1})"


def _named(islands: Sequence[int]) -> str:
    """Consecutive islands in words: ``4``, ``4 and 5``, ``4 to 7``."""
    between = " and " if len(islands) == 2 else " to "
    return between.join(map(str, dict.fromkeys((islands[0], islands[-1]))))


def _refused(what: str, why: str, do: str) -> PlanError:
    return PlanError(where=f"plan, {SERVERS}", what=what, why=why, do=do)
