"""Edits of graphs: add a call with its `Value` and fake result; replace, erase, rename calls."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.graph import _Namespace

from partc.graph import (
    Graph,
    Value,
    changed,
    collectives,
    fake_of,
    op_word,
    set_fake,
    set_value,
    update,
    value,
)
from partc.graph.fake_calls import call_on_fakes
from partc.graph.targets import check_target
from partc.in_order import in_order
from partc.plan.sharding import REPLICATED


@dataclass(frozen=True)
class Writer:
    """Adds calls to a graph before one node, with the module, source and phase of ``like``."""

    graph: fx.Graph
    before: fx.Node
    like: Value

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        set_value(node, changed(self.like, kind="op", shape=(), name="", sharding=REPLICATED))
        set_fake(node, run_fake(target, args, kwargs))
        return node


def copied(graph: Graph) -> Graph:
    """A copy of a graph with nodes of its own."""
    nodes = fx.Graph()
    result = nodes.graph_copy(graph.fx, {})
    nodes.output(result)
    return replace(graph, fx=nodes)


def call_before(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call right before ``node``, with the origin of ``node`` and a fake result.

    The fake result is computed by running the call on the fakes of its operands. UsageError for
    what a graph does not call, as ``F.gelu``.
    """
    check_target(target, "call_before")
    with node.graph.inserting_before(node):
        new = node.graph.create_node("call_function", target, args, kwargs, name=op_word(target))
    fake = run_on_fakes(new)
    set_value(new, changed(value(node), kind="op", shape=(), dtype=torch.float32))
    set_fake(new, fake)
    return new


def run_on_fakes(node: fx.Node) -> Any:
    """The fake result of a node's call; a factory such as ``aten.zeros`` gives a fake as well."""
    return run_fake_of(node.graph, node.target, node.args, node.kwargs)


def run_fake_of(graph: fx.Graph, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The fake result of a call on nodes of a graph.

    It runs in the graph's fake mode, so that a call without operands gives a fake and no memory.
    """
    with _fake_mode(graph):
        return run_fake(target, args, kwargs)


def replace_by(old: fx.Node, new: fx.Node) -> None:
    """Replace ``old`` by ``new`` in all readers and erase ``old``.

    ``new`` remembers that it replaces ``old``, for backward nodes that name ``old``.
    """
    old.replace_all_uses_with(new)
    stand_in(old, new)
    old.graph.erase_node(old)


def stand_in(old: fx.Node, new: fx.Node) -> None:
    """Note that ``new`` replaces ``old``, so that `rename_calls` updates backward nodes of ``old``.

    A backward node names its forward node by text, which a replacement would leave dangling.
    """
    new.meta.setdefault("stands_for", []).extend([old.name, *old.meta.get("stands_for", [])])


def drop_dead(graph: Graph) -> None:
    """Erase all calls whose result no other node reads."""
    for node in reversed(list(graph.calls())):
        if not node.users:
            graph.fx.erase_node(node)


def rename_calls(graph: Graph) -> None:
    """Name every call after its op, counted in graph order: ``mul``, ``mul_1``.

    ``forward`` of backward nodes follows: a replaced node's name becomes that of its replacement.
    """
    stand_ins = {old: n for n in graph.fx.nodes for old in n.meta.pop("stands_for", [])}
    stand_ins |= {n.name: n for n in graph.fx.nodes}
    # A new namespace counts from zero, so that names do not depend on calls erased before.
    names = graph.fx._graph_namespace = _Namespace()
    forward = {n: stand_ins.get(value(n).forward) for n in graph.calls()}
    for node in graph.fx.nodes:
        word = op_word(node.target) if node.op == "call_function" else node.name
        node.name = names.create_name(word, node)
    for node, of in forward.items():
        update(node, forward=of.name if of is not None else "")


def name_as_before(nodes: fx.Graph, before: Mapping[fx.Node, str]) -> None:
    """Name every call as the whole graph does (``linear_4``), and a transfer after what it moves:
    ``linear_4_all_reduce``. The text of a graph then shows what a pass did.

    ``before`` has for each call, or for what it moves, the name in the whole graph. ``Value.name``
    and ``Value.forward`` are of the whole graph and stay: by these a program names gradients, and
    tells which calls of two blocks correspond.
    """
    names = nodes._graph_namespace = _Namespace()
    for node in nodes.nodes:
        node.name = names.create_name(_word_of(node, before), node)


def _word_of(node: fx.Node, before: Mapping[fx.Node, str]) -> str:
    """The wanted name of a node."""
    if node.op != "call_function":
        return node.name
    word = op_word(node.target)
    if node.target in (*collectives.COLLECTIVES, *collectives.LOCAL):
        return f"{before[node]}_{word}" if node in before else word
    return before.get(node, word)


def fake_like(graph: fx.Graph, tensor: Tensor) -> Tensor:
    """A fake tensor of this graph with the shape and dtype of a real one."""
    with _fake_mode(graph):
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _fake_mode(graph: fx.Graph) -> Any:
    """The FakeTensorMode of the graph's fake tensors; inside of it, factories give fakes too."""
    return detect_fake_mode(next(iter(graph.nodes)).meta.get("val")) or nullcontext()


def run_fake(target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The fake result of a call on the fakes of its argument nodes."""
    return call_on_fakes(target, *fx.map_arg((args, dict(kwargs)), fake_of))


def restore_order(graph: Graph) -> None:
    """Move calls behind what they read, in place; all others keep their order."""
    calls = list(graph.calls())
    place = {node: i for i, node in enumerate(calls)}
    needs = {node: [n for n in node.all_input_nodes if n in place] for node in calls}
    if all(place[n] < place[node] for node, read in needs.items() for n in read):
        return
    anchor = calls[0].prev
    for node in in_order(needs, place.__getitem__):
        anchor.append(node)
        anchor = node
