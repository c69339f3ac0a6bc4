"""What the checks of a local graph's calls share: the nodes that carry results, and the error."""

from __future__ import annotations

from torch import fx

from partc.errors import CheckError
from partc.graph import is_tensor, results_of, tensor_args, typed, value
from partc.graph.moves import results
from partc.rules.table import name_of


def result_nodes(node: fx.Node) -> list[fx.Node | None]:
    """The nodes that carry a call's results: itself, or one getitem each, None where unread."""
    return [node] if is_tensor(node) else results(node, len(results_of(node)))


def wrong(node: fx.Node, why: str, do: str) -> CheckError:
    """The error that a call raises: where it stands, its types, why they are wrong."""
    operands = ", ".join(typed(n) for n in tensor_args(node))
    made = ", ".join("-" if n is None else typed(n) for n in result_nodes(node))
    known = value(node)
    where = ", ".join(x for x in (known.module, known.source.partition(": ")[0], node.name) if x)
    return CheckError(
        where=where, what=f"{name_of(node.target)}({operands}) -> {made}", why=why, do=do
    )
