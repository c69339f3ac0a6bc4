"""Shared by the checks of a local graph's calls: a call's result nodes, and the error it raises."""

from __future__ import annotations

from torch import fx

from partc.errors import CheckError
from partc.graph import is_tensor, results_of, tensor_args, typed, value
from partc.graph.moves import results
from partc.rules.table import name_of


def result_nodes(node: fx.Node) -> list[fx.Node | None]:
    """The nodes of a call's results: the call, or a getitem each; None for an unread result."""
    return [node] if is_tensor(node) else results(node, len(results_of(node)))


def wrong(node: fx.Node, why: str, do: str) -> CheckError:
    """A CheckError for a call, with the call's place and the types of its operands and results."""
    operands = ", ".join(typed(n) for n in tensor_args(node))
    made = ", ".join("-" if n is None else typed(n) for n in result_nodes(node))
    known = value(node)
    where = ", ".join(x for x in (known.module, known.source.partition(": ")[0], node.name) if x)
    return CheckError(
        where=where, what=f"{name_of(node.target)}({operands}) -> {made}", why=why, do=do
    )
