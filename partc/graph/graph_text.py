"""A Graph as text, one line per value under the module that made it, and a Graph from such text.

    graph MLP  mesh dp=2
    param w : f32[16,8]
    input x : f32[4@dp,8]
    forward (loss)
      linear = linear(x, w)              : f32[4@dp,16]
      sum = sum(linear)                  : f32[]{U:dp}
    outputs
      loss = sum

A stage's graph has ``start``, ``weights`` and ``end`` beside ``forward`` and ``backward`` (its
phases ``S``, ``W`` and ``E``), values ``received`` and values ``sent``. A tuple's types are those
of the values that are picked from it. Source lines and links from backward to forward are not part
of the text.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import Tensor, fx

from partc.graph import (
    Graph,
    Phase,
    Value,
    collectives,
    fake_of,
    is_tensor,
    picked,
    typed,
    value,
)
from partc.graph.call_text import argument_text, call_text
from partc.plan.sharding import REPLICATED

WIDTH = 44  # columns before a value's type
SECTIONS: dict[Phase, str] = {
    "F": "forward", "B": "backward", "S": "start", "E": "end", "W": "weights",
}  # fmt: skip


def graph_text(graph: Graph) -> str:
    """The text that ``parse_graph`` reads."""
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    mesh = f"  mesh {graph.mesh}" if graph.mesh.axes else ""
    yield f"{'local ' if _is_local(graph) else ''}graph {graph.model}{mesh}"
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            yield _placeholder_line(graph, node)
    section = None
    for node in graph.calls():
        if _section(value(node)) != section:
            section = _section(value(node))
            yield section
        yield _call_line(node)
    yield "outputs"
    yield from _output_lines(graph)


def _placeholder_line(graph: Graph, node: fx.Node) -> str:
    known = value(node)
    also = [second for second, first in sorted(graph.aliases.items()) if first == known.name]
    names = " = ".join([known.name, *also])
    fixed = f" = {graph.constants[known.name].tolist()}" if known.name in graph.constants else ""
    return f"{known.kind} {names} : {typed(node)}{fixed}"


def _section(known: Value) -> str:
    return f"{SECTIONS[known.phase]} {known.module or '(loss)'}"


def _call_line(node: fx.Node) -> str:
    known = value(node)
    note = f"  # {known.remark}" if known.remark else ""
    return f"  {node.name + ' = ' + call_text(node):<{WIDTH}} : {_types(node)}{note}"


def _types(node: fx.Node) -> str:
    fake = fake_of(node)
    if isinstance(fake, Tensor):
        return typed(node)
    if not isinstance(fake, list | tuple):
        return type(fake).__name__  # the number of a rank on an axis, a size
    read = {picked(pick)[1]: typed(pick) for pick in _picks(node)}
    return f"({', '.join(read.get(i, _own_type(f)) for i, f in enumerate(fake))})"


def _picks(node: fx.Node) -> Iterator[fx.Node]:
    """The values that are picked from a tuple, those of a bucket behind the wait for it too."""
    for user in node.users:
        if user.target is collectives.wait:
            yield from _picks(user)
        elif user.target is operator.getitem:
            yield user


def _own_type(fake: Tensor | None) -> str:
    """The type of a result that no value was made of, in the graph's own shape."""
    return "None" if fake is None else REPLICATED.typed(fake.shape, fake.dtype)


def _output_lines(graph: Graph) -> Iterator[str]:
    outputs = graph.outputs
    if outputs.loss is not None:
        yield f"  loss = {argument_text(outputs.loss)}"
    for kind, nodes in (
        ("grad", outputs.grads),
        ("buffer", outputs.buffers),
        ("result", outputs.results),
        ("sent", outputs.sent),
    ):
        for name, node in nodes.items():
            yield f"  {kind} {name} = {argument_text(node)}"


def _is_local(graph: Graph) -> bool:
    """Whether the graph's own shapes are one rank's pieces."""
    tensors = [n for n in graph.fx.nodes if is_tensor(n)]
    return any(tuple(fake_of(n).shape) != value(n).shape for n in tensors)
