"""A stage's layers counted from its first one, so that stages that do the same are equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from partc.codegen.repeats.equal import mapped
from partc.graph import Graph, draw_of, fake_of, update, value
from partc.quoting import literal

FIRST = "n"  # what programs call the number of a stage's first layer


@dataclass(frozen=True)
class Layers:
    """The list whose modules a stage runs: at ``path``, those from number ``first`` on."""

    path: str
    first: int

    @classmethod
    def of(cls, graph: Graph) -> Layers | None:
        """The one list that a stage's modules stand in; None for several, or none."""
        found: dict[str, int] = {}
        for name in _paths(graph):
            parts = name.split(".")
            at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
            if at is not None:
                path, number = ".".join(parts[:at]), int(parts[at])
                found[path] = min(number, found.get(path, number))
        return cls(*found.popitem()) if len(found) == 1 else None

    def relative(self, name: str) -> str:
        """The same path, layers counted from the first.

        >>> Layers("model.layers", 4).relative("model.layers.5.mlp")
        'model.layers.1.mlp'
        """
        head, number, rest = self._split(name)
        return name if number is None else f"{head}{number - self.first}{rest}"

    def shown(self, name: str) -> str:
        """A relative path as comments show it.

        >>> Layers("model.layers", 4).shown("model.layers.1.mlp")
        'model.layers.n+1.mlp'
        """
        head, number, rest = self._split(name)
        return name if number is None else f"{head}{FIRST}{f'+{number}' if number else ''}{rest}"

    def literal(self, name: str) -> str:
        """A relative path as an expression that gives the name in the model.

        >>> Layers("blocks", 4).literal("blocks.1.w")
        'f"blocks.{n + 1}.w"'
        """
        head, number, rest = (_escaped(part) for part in self._split(name))
        if number is None:
            return literal(name)
        return "f" + literal(f"{head}{{{FIRST}{f' + {number}' if number else ''}}}{rest}")

    def has(self, name: str) -> bool:
        """Whether a name is that of a layer, or of something in it."""
        return self._split(name)[1] is not None

    def _split(self, name: str) -> tuple[str, int | None, str]:
        """What stands before the layer's number, the number, and the rest."""
        head = f"{self.path}." if self.path else ""
        number, dot, rest = name.removeprefix(head).partition(".")
        if not name.startswith(head) or not number.isdecimal():
            return name, None, ""
        return head, int(number), dot + rest


def _escaped(part: Any) -> Any:
    return part.replace("{", "{{").replace("}", "}}") if isinstance(part, str) else part


def _paths(graph: Graph) -> Iterator[str]:
    """Every module and every parameter or buffer of a stage."""
    yield from (*graph.params, *graph.buffers)
    yield from (value(node).module for node in graph.calls())


def count_from_first(graph: Graph, layers: Layers) -> Graph:
    """Give a graph relative names, in place; its tables are new ones."""
    outputs, relative = graph.outputs, layers.relative
    for node in graph.fx.nodes:
        if node.op != "output":
            known = value(node)
            name = relative(known.name) if known.kind in ("param", "buffer") else known.name
            update(node, name=name, module=relative(known.module))
    graph.set_outputs(
        replace(
            outputs, grads=_named(outputs.grads, layers), buffers=_named(outputs.buffers, layers)
        )
    )
    return replace(graph, classes=_named(graph.classes, layers))


def _named(table: dict[str, Any], layers: Layers) -> dict[str, Any]:
    return {layers.relative(name): entry for name, entry in table.items()}


def stage_key(graph: Graph, layers: Layers) -> tuple[Any, ...]:
    """What a stage computes, in this order and from these lines of the model; equal for stages that
    differ in the numbers of their layers alone.
    """
    nodes = [node for node in graph.fx.nodes if node.op != "output"]
    number = {node: i for i, node in enumerate(nodes)}
    forward = {value(node).name or node.name: i for i, node in reversed(list(enumerate(nodes)))}
    draws: dict[str, int] = {}

    def origin(node: fx.Node) -> tuple[Any, ...]:
        known = value(node)
        stored = known.kind in ("param", "buffer", "input")
        drawn = draws.setdefault(draw_of(node), len(draws))
        if known.kind == "received":  # whichever module of another stage made it
            return known.kind, known.shape, known.dtype, str(known.sharding), known.phase
        return (
            known.kind, layers.relative(known.name) if stored else "", known.shape, known.dtype,
            str(known.sharding), layers.relative(known.module), graph.classes.get(known.module),
            known.source, known.calls, known.phase, forward.get(known.forward), known.remark, drawn,
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
    """Shape, dtype and strides of what a node holds."""
    if isinstance(fake, Tensor):
        strides = fake.stride() if fake.layout is torch.strided else ()
        return (tuple(fake.shape), fake.dtype, strides)
    if isinstance(fake, list | tuple):
        return tuple(map(_layout, fake))
    return repr(fake)
