"""Counts the layers of a pipeline stage from the stage's first layer.

Then stages that do the same on different layers have one text: ``model.layers.5.mlp`` of a stage
that begins at layer 4 is ``model.layers.1.mlp``, and the program says ``model.layers.n+1.mlp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from partc.codegen.repeats.equal import mapped
from partc.graph import Graph, fake_of, update, value
from partc.quoting import literal

FIRST = "n"  # the variable of a program that holds the number of a stage's first layer


@dataclass(frozen=True)
class Layers:
    """The list whose layers a stage runs: its ``path``, and the stage's first layer."""

    path: str
    first: int

    @classmethod
    def of(cls, graph: Graph) -> Layers | None:
        """The list that a stage's layers stand in; None if there are several lists, or none."""
        found: dict[str, int] = {}
        for name in _paths(graph):
            parts = name.split(".")
            at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
            if at is not None:
                path, number = ".".join(parts[:at]), int(parts[at])
                found[path] = min(number, found.get(path, number))
        return cls(*found.popitem()) if len(found) == 1 else None

    def relative(self, name: str) -> str:
        """A module path or parameter's name with the layer counted from the stage's first one.

        >>> Layers("model.layers", 4).relative("model.layers.5.mlp")
        'model.layers.1.mlp'
        """
        head, number, rest = self._split(name)
        return name if number is None else f"{head}{number - self.first}{rest}"

    def shown(self, name: str) -> str:
        """A relative path (as ``relative`` gives it) as comments of a program show it.

        >>> Layers("model.layers", 4).shown("model.layers.1.mlp")
        'model.layers.n+1.mlp'
        """
        head, number, rest = self._split(name)
        return name if number is None else f"{head}{FIRST}{f'+{number}' if number else ''}{rest}"

    def literal(self, name: str, first: str = FIRST) -> str:
        """A relative path as a Python expression that gives the name in the model.

        ``first`` is the expression of the first layer's number.

        >>> Layers("blocks", 4).literal("blocks.1.w")
        'f"blocks.{n + 1}.w"'
        """
        head, number, rest = (_escaped(part) for part in self._split(name))
        if number is None:
            return literal(name)
        return "f" + literal(f"{head}{{{first}{f' + {number}' if number else ''}}}{rest}")

    def has(self, name: str) -> bool:
        """Whether a name is the path of a layer, or of a module or parameter inside of a layer."""
        return self._split(name)[1] is not None

    def _split(self, name: str) -> tuple[str, int | None, str]:
        """A name as what stands before the layer's number, the number (None), and the rest."""
        head = f"{self.path}." if self.path else ""
        number, dot, rest = name.removeprefix(head).partition(".")
        if not name.startswith(head) or not number.isdecimal():
            return name, None, ""
        return head, int(number), dot + rest


def _escaped(part: Any) -> Any:
    return part.replace("{", "{{").replace("}", "}}") if isinstance(part, str) else part


def _paths(graph: Graph) -> Iterator[str]:
    """The path of every module, and the name of every parameter and buffer, of a stage."""
    yield from (*graph.params, *graph.buffers)
    yield from (value(node).module for node in graph.calls())


def count_from_first(graph: Graph, layers: Layers) -> Graph:
    """Rename modules, tensors and draws of a graph as ``Layers.relative`` does, in place.

    The graph returned has the same nodes, and tables (``classes``) with the new names.
    """
    outputs, relative = graph.outputs, layers.relative
    for node in graph.fx.nodes:
        if node.op != "output":
            known = value(node)
            name = relative(known.name) if known.kind in ("param", "buffer") else known.name
            update(node, name=name, module=relative(known.module), site=relative(known.site))
            update(node, at=relative(known.at))
    graph.set_outputs(
        replace(
            outputs, grads=_named(outputs.grads, layers), buffers=_named(outputs.buffers, layers)
        )
    )
    return replace(graph, classes=_named(graph.classes, layers))


def _named(table: dict[str, Any], layers: Layers) -> dict[str, Any]:
    return {layers.relative(name): entry for name, entry in table.items()}


def stage_key(graph: Graph, layers: Layers) -> tuple[Any, ...]:
    """A key that is equal for stages which differ in nothing but the numbers of their layers.

    Equal stages have the same calls in the same order, from the same lines of the model, with the
    same shardings, results and random draws: the same text is printed for all of them.
    """
    nodes = [node for node in graph.fx.nodes if node.op != "output"]
    number = {node: i for i, node in enumerate(nodes)}
    forward = {value(node).name or node.name: i for i, node in reversed(list(enumerate(nodes)))}

    def origin(node: fx.Node) -> tuple[Any, ...]:
        known = value(node)
        stored = known.kind in ("param", "buffer", "input")
        if known.kind == "received":  # not its module: another stage's, with another number
            return known.kind, known.shape, known.dtype, str(known.sharding), known.phase
        return (
            known.kind, layers.relative(known.name) if stored else "", known.shape, known.dtype,
            str(known.sharding), layers.relative(known.module), graph.classes.get(known.module),
            known.source, known.calls, known.phase, forward.get(known.forward), known.remark,
            layers.relative(known.site),
        )  # fmt: skip

    def call(node: fx.Node) -> tuple[Any, ...]:
        made = node.op == "call_function"
        return (
            str(node.target) if made else "",
            mapped(node.args, number.__getitem__) if made else (),
            mapped(sorted(node.kwargs.items()), number.__getitem__),
            _layout(fake_of(node)),
            origin(node),
        )

    outputs = graph.outputs
    results = [
        ("loss" if outputs.loss is not None else "", number.get(outputs.loss)),
        *((layers.relative(name), number[node]) for name, node in outputs.grads.items()),
        *((layers.relative(name), number[node]) for name, node in outputs.buffers.items()),
        *((name, number[node]) for name, node in outputs.results.items()),
        *(("", number[node]) for node in outputs.sent.values()),
    ]
    return (tuple(map(call, nodes)), tuple(results), graph.early)


def _layout(fake: Any) -> Any:
    """Shape, dtype and strides of a fake tensor, or of each in a list of them."""
    if isinstance(fake, Tensor):
        strides = fake.stride() if fake.layout is torch.strided else ()
        return (tuple(fake.shape), fake.dtype, strides)
    if isinstance(fake, list | tuple):
        return tuple(map(_layout, fake))
    return repr(fake)
