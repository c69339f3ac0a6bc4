"""Which stages have a buffer that the step updates, and which of its new values are made once.

Every stage that reads a buffer has it, and computes its new value: else the next step would read an
old one there.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set

from torch import fx

from partc.errors import PlanError
from partc.graph import Graph, Origin, stage_of, value
from partc.graph.ancestors import ancestors
from partc.passes.shard.local_batch_norm import COUNT
from partc.plan.mesh import MICROBATCH_AXIS
from partc.plan.sharding import R

Holders = Mapping[str, Set[int]]  # by the name of a buffer: the numbers of stages


def made_once(local: Graph) -> set[fx.Node]:
    """The calls of new buffer values that run once per step: no microbatch changes them.

    Examples are counters, spectral norms, averages of weights and of a whole input. The counter of
    a batch norm with local statistics is no such buffer: each microbatch counts.
    """
    local_statistics = (n for n in local.calls() if value(n).origin is Origin.LOCAL_STATISTICS)
    one_by_one = {value(node).module for node in local_statistics}
    found: set[fx.Node] = set()
    for name, new in local.outputs.buffers.items():
        made_of = ancestors(new)
        counts = name.rpartition(".")[2] == COUNT and value(new).module in one_by_one
        if _is_of_the_step(local, made_of) and not counts:
            found |= {node for node in made_of if node.op == "call_function"}
    picks = (user for node in found for user in node.users if user.target is operator.getitem)
    return found | {*picks}


def _is_of_the_step(local: Graph, made_of: Sequence[fx.Node]) -> bool:
    """Whether a value with these ancestors is known before the first microbatch."""
    if MICROBATCH_AXIS in local.mesh.names:
        return all(value(node).sharding.on(MICROBATCH_AXIS) == R for node in made_of)
    kinds = {value(node).kind for node in made_of}
    return not {"input", "param"} <= kinds  # what is made of both is an activation


def params_of(node: fx.Node) -> list[fx.Node]:
    """The parameters that a value depends on."""
    return [o for o in ancestors(node) if o.op == "placeholder" and value(o).kind == "param"]


def holders(local: Graph, everywhere: Set[fx.Node]) -> Holders:
    """For each buffer that the step updates the stages that have it.

    ``everywhere`` has the values that each stage which reads them computes for itself. PlanError if
    a stage reads a buffer whose new value only another stage can compute.
    """
    readers = _readers(local, everywhere)
    news, olds = local.outputs.buffers, local.buffers
    found = {name: {*readers[olds[name]]} for name in news}
    makers = {name: _makers(new, readers, everywhere) for name, new in news.items()}
    for name, new in news.items():
        if not found[name] or new not in everywhere:
            found[name].add(min(makers[name] or {max(stage_of(new), 0)}))
    _add_operands(local, found, everywhere)
    for name, new in news.items():
        others = found[name] - (makers[name] or found[name])
        if others:
            raise _read_elsewhere(name, new, min(others), min(makers[name]))
    return found


def _readers(local: Graph, everywhere: Set[fx.Node]) -> dict[fx.Node, set[int]]:
    """The stages that read each value, themselves or by what they compute in ``everywhere``."""
    found: dict[fx.Node, set[int]] = {}
    for node in reversed(list(local.fx.nodes)):
        found[node] = set()
        for user in node.users:
            if user.op == "call_function":
                found[node] |= found[user] if user in everywhere else {stage_of(user)}
    return found


def _makers(
    new: fx.Node, readers: Mapping[fx.Node, set[int]], everywhere: Set[fx.Node]
) -> set[int]:
    """The stages that can compute a new value; empty if all can."""
    if new not in everywhere:
        return {stage_of(new)}
    held_by = [readers[param] for param in params_of(new) if readers[param]]
    return set[int].intersection(*held_by) if held_by else set()


def _add_operands(local: Graph, found: Mapping[str, set[int]], everywhere: Set[fx.Node]) -> None:
    """Give each stage the buffers from which it computes new values of others, in place."""
    names = {node: name for name, node in local.buffers.items() if name in found}
    operands = {
        name: {names[node] for node in ancestors(new) if node in names}
        for name, new in local.outputs.buffers.items()
        if new in everywhere
    }
    waiting = [*operands]
    while waiting:
        name = waiting.pop()
        for other in operands.get(name, ()):
            if not found[name] <= found[other]:
                found[other] |= found[name]
                waiting.append(other)


def _read_elsewhere(name: str, new: fx.Node, reader: int, maker: int) -> PlanError:
    known = value(new)
    return PlanError(
        where=" ".join(filter(None, [name, f"({known.source})" if known.source else ""])),
        what=f"stage {reader} reads the buffer, and stage {maker} computes its new value",
        why="the other stage would read the old value in the next step",
        do="Begin the stages elsewhere, so that one has both.",
    )
