"""Check that the programs of all ranks together train every parameter that the model trains."""

from __future__ import annotations

from collections.abc import Iterable

from partc.errors import CheckError
from partc.graph import Graph, fake_of
from partc.graph.folds import spread
from partc.program import Program
from partc.program.tensors.holders import roles_of
from partc.trace.fingerprint import table


def trained(graph: Graph) -> list[str]:
    """The parameters with a gradient, including those of equal blocks that the graph leaves out."""
    return list(spread(graph.grads, graph.folds))


def running(graph: Graph) -> list[str]:
    """The buffers that a step changes, such as running statistics, but for whole numbers."""
    found = graph.outputs.buffers.items()
    changed = {n: x for n, x in found if fake_of(x).is_floating_point() or fake_of(x).is_complex()}
    return list(spread(changed, graph.folds))


def check_complete(names: Iterable[str], program: Program) -> None:
    """CheckError if one of these parameters stands in no rank's program.

    If printing forgot a block, the program would still run, and checks of single calls would pass.
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
