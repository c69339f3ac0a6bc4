"""Whether the programs of all ranks train every parameter that the model trains."""

from __future__ import annotations

from collections.abc import Iterable

from partc.errors import CheckError
from partc.graph import Graph
from partc.graph.folds import spread
from partc.program import Program
from partc.program.holders import roles_of
from partc.trace.fingerprint import table


def trained(graph: Graph) -> list[str]:
    """The parameters that get a gradient, those of blocks that a graph leaves out among them."""
    return list(spread(graph.grads, graph.folds))


def check_complete(names: Iterable[str], program: Program) -> None:
    """CheckError unless each of the parameters stands in a rank's program: no rank would train it.

    A block that is left out when a program is printed leaves a program that runs, and that no check
    of single calls can tell from the right one.
    """
    held = {shard.name for role in roles_of(program) for shard in role.params}
    missing = [name for name in names if name not in held]
    if missing:
        raise CheckError(
            where="the programs of all ranks",
            what=f"{len(missing)} trained parameters stand in none of them:{table(missing)}",
            why="a block that the model computes was left out when the programs were written",
            do="This is an error of partc: please report it with the model and the plan.",
        )
