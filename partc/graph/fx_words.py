"""What passes of people who know torch.fx ask a graph for: what it is called here."""

from __future__ import annotations

from torch import fx

from partc.errors import UsageError
from partc.wrong_calls import did_you_mean

_CALLED = {  # a name of torch.fx.Graph or GraphModule: what to do with a graph of partc
    "nodes": "graph.calls() are the calls in their order, graph.placeholders(kind) the parameters, "
    "buffers or inputs; graph.fx.nodes are all nodes.",
    "lint": "Leave it out: partc checks the graph that a pass leaves. torch's own check is "
    "graph.fx.lint().",
    "recompile": "Leave it out: no code is made of a graph before all passes have run.",
    "graph": "It is the graph itself; the torch.fx.Graph inside is graph.fx.",
    "print_tabular": "Call print(graph).",
    "print_readable": "Call print(graph).",
    "eliminate_dead_code": "Call drop_dead(graph), of partc.graph.graph_edits.",
    "erase_node": "Call replace_by(old, new) or drop_dead(graph), of partc.graph.graph_edits.",
} | dict.fromkeys(
    ("call_function", "create_node", "node_copy", "inserting_before", "inserting_after"),
    "Call call_before(node, op, ...), of partc.graph.graph_edits, and set_like(new, old), of "
    "partc.graph.",
)


class NoNameError(UsageError, AttributeError):
    """A graph was asked for what it has not; ``hasattr`` says no."""


def no_name(name: str, known: list[str]) -> AttributeError:
    """The error of a graph that has no such attribute, by torch.fx's name or by a near one."""
    if name.startswith("_"):
        return AttributeError(f"'Graph' object has no attribute {name!r}")
    known_here = did_you_mean(name, known)
    of_fx = f"It has torch's: graph.fx.{name}." if hasattr(fx.Graph, name) else ""
    return NoNameError(
        where=f"graph.{name}", what="a graph of partc has no such attribute",
        why="it is no torch.fx.Graph, and has one as graph.fx",
        do=_CALLED.get(name) or known_here or of_fx or "See help(partc.graph.Graph).",
    )  # fmt: skip
