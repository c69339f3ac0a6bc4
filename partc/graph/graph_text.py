"""A Graph as text, one line per value under the module that made it, and a Graph from such text.

    graph MLP  mesh dp=2
    param w : f32[16,8]
    input x : f32[4@dp,8]
    forward (loss)
      linear = linear(x, w)              : f32[4@dp,16]
      sum = sum(linear)                  : f32[]{U:dp}
    outputs
      loss = sum

Source lines and links from backward to forward are not part of the text.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from partc.graph import Graph, Value, fake_of, is_tensor, typed, value
from partc.plan.sharding import DTYPE_NAMES

WIDTH = 44  # columns before a value's type


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
    return f"{'forward' if known.phase == 'F' else 'backward'} {known.module or '(loss)'}"


def _call_line(node: fx.Node) -> str:
    known = value(node)
    note = f"  # {known.remark}" if known.remark else ""
    return f"  {node.name + ' = ' + _call(node):<{WIDTH}} : {_types(node)}{note}"


def _call(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{_argument(node.args[0])}[{node.args[1]}]"
    given = [_argument(a) for a in node.args]
    given += [f"{name}={_argument(a)}" for name, a in node.kwargs.items()]
    return f"{op_text(node.target)}({', '.join(given)})"


def op_text(target: Any) -> str:
    """``linear``, ``add.Tensor``: an op's name, with its overload unless that is the default."""
    if isinstance(target, torch._ops.OpOverload):
        return target._opname + ("" if _is_only_choice(target) else f".{target._overloadname}")
    return str(target.__name__)


def _is_only_choice(target: torch._ops.OpOverload) -> bool:
    return target._overloadname == "default"


def _types(node: fx.Node) -> str:
    fake = fake_of(node)
    if isinstance(fake, Tensor):
        return typed(node)
    if not isinstance(fake, list | tuple):
        return type(fake).__name__  # the number of a rank on an axis, a size
    shapes = [
        value(node).sharding.typed(f.shape, f.dtype) if f is not None else "None" for f in fake
    ]
    return f"({', '.join(shapes)})"


def _argument(item: Any) -> str:
    """An argument as the parser reads it: values by name, dtypes by their short names."""
    if isinstance(item, fx.Node):
        name = value(item).name if item.op == "placeholder" else item.name
        return f"%{name}" if name[0].isdigit() else name
    if isinstance(item, list | tuple):
        return f"[{', '.join(_argument(i) for i in item)}]"
    if isinstance(item, torch.dtype):
        return DTYPE_NAMES[item]
    return repr(item)


def _output_lines(graph: Graph) -> Iterator[str]:
    outputs = graph.outputs
    if outputs.loss is not None:
        yield f"  loss = {_argument(outputs.loss)}"
    for kind, nodes in (
        ("grad", outputs.grads),
        ("buffer", outputs.buffers),
        ("result", outputs.results),
    ):
        for name, node in nodes.items():
            yield f"  {kind} {name} = {_argument(node)}"


def _is_local(graph: Graph) -> bool:
    """Whether the graph's own shapes are one rank's pieces."""
    tensors = [n for n in graph.fx.nodes if is_tensor(n)]
    return any(tuple(fake_of(n).shape) != value(n).shape for n in tensors)
