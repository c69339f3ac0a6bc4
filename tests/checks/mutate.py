"""Mistakes to make in a sound local graph: each mutator spoils one call, or refuses it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, collectives, fake_of, set_fake, tensor_args, typed
from partc.graph.graph_edits import run_fake
from partc.graph.moves import moves

aten = torch.ops.aten
Mutator = Callable[[Graph, fx.Node], bool]  # changes the graph at a node; False where it cannot

STATIC: dict[str, Mutator] = {}  # what a static check has to find
NUMERIC: dict[str, Mutator] = {}  # what may keep every type, so that only numbers tell


def _in(table: dict[str, Mutator], name: str) -> Callable[[Mutator], Mutator]:
    def add(mutator: Mutator) -> Mutator:
        table[name] = mutator
        return mutator

    return add


def mutants(make: Callable[[], Graph], mutator: Mutator) -> Iterator[tuple[str, Graph]]:
    """A fresh spoiled graph for every call at which the mutator applies."""
    for i, node in enumerate(make().calls()):
        graph = make()
        if mutator(graph, list(graph.calls())[i]):
            yield node.name, graph


def is_collective(node: fx.Node) -> bool:
    return node.target in collectives.COLLECTIVES


def _waits(node: fx.Node) -> list[fx.Node]:
    return [u for u in node.users if u.target is collectives.wait]


def _rename(node: fx.Node, target: Callable[..., Any], **kwargs: Any) -> bool:
    """Make a call another one; what it gives on this rank is derived anew, its note stays."""
    named: dict[str, Any] = {k: node.kwargs[k] for k in ("axis", "num")}
    node.target, node.kwargs = target, {**named, **kwargs}
    return _derive(node)


def _derive(node: fx.Node) -> bool:
    with fake_of(tensor_args(node)[0]).fake_mode:
        set_fake(node, run_fake(node.target, node.args, node.kwargs))
    return True


@_in(STATIC, "collective dropped")
def _drop(graph: Graph, node: fx.Node) -> bool:
    if not is_collective(node):
        return False
    for move in moves(node):
        for reader in [move.result, *_waits(node)] if move.result is node else [move.result]:
            assert reader is not None
            reader.replace_all_uses_with(move.operand)
    return True


@_in(STATIC, "collective done twice")
def _duplicate(graph: Graph, node: fx.Node) -> bool:
    if not is_collective(node) or node.target in collectives.JOINED:
        return False
    (waited,) = _waits(node)
    with graph.fx.inserting_after(waited):
        again = graph.fx.node_copy(node, lambda n: waited)
    with graph.fx.inserting_after(again):
        last = graph.fx.node_copy(waited, lambda n: again)
    waited.replace_all_uses_with(last, delete_user_cb=lambda user: user is not again)
    return True


@_in(STATIC, "wrong axis")
def _axis(graph: Graph, node: fx.Node) -> bool:
    if "axis" not in node.kwargs:
        return False
    others = [a for a in graph.mesh.names if a != node.kwargs["axis"]]
    node.kwargs = {**node.kwargs, "axis": others[0], "num": graph.mesh.size(others[0])}
    return True


@_in(STATIC, "wrong number of ranks")
def _num(graph: Graph, node: fx.Node) -> bool:
    if "num" not in node.kwargs:
        return False
    node.kwargs = {**node.kwargs, "num": 2 * graph.mesh.size(str(node.kwargs["axis"]))}
    return True


@_in(STATIC, "wrong dim")
def _dim(graph: Graph, node: fx.Node) -> bool:
    if "dims" in node.kwargs:
        dims: Any = node.kwargs["dims"]
        node.kwargs = {**node.kwargs, "dims": [1 - dims[0], *dims[1:]]}
        return bool(fake_of(tensor_args(node)[0]).dim() == 2)
    if "dim" not in node.kwargs or fake_of(node).dim() < 2:
        return False
    node.kwargs = {**node.kwargs, "dim": (int(str(node.kwargs["dim"])) + 1) % fake_of(node).dim()}
    return True


@_in(STATIC, "all_reduce becomes all_gather")
def _gather(graph: Graph, node: fx.Node) -> bool:
    fits = node.target is collectives.all_reduce and fake_of(node).dim() > 0
    return fits and _rename(node, collectives.all_gather, dim=0)


@_in(STATIC, "all_reduce becomes reduce_scatter")
def _scatter(graph: Graph, node: fx.Node) -> bool:
    fits = node.target is collectives.all_reduce and fake_of(node).dim() > 0
    return fits and _rename(node, collectives.reduce_scatter, dim=0)


@_in(STATIC, "sum becomes max")
def _max(graph: Graph, node: fx.Node) -> bool:
    return node.target is collectives.all_reduce and _rename(node, node.target, op="max")


@_in(STATIC, "transfer becomes all_reduce")
def _reduce(graph: Graph, node: fx.Node) -> bool:
    moves = (collectives.all_gather, collectives.reduce_scatter, collectives.all_to_all)
    if node.target not in moves:
        return False
    return _rename(node, collectives.all_reduce)


@_in(STATIC, "operand of a join dropped")
def _shorter_join(graph: Graph, node: fx.Node) -> bool:
    if node.target not in collectives.JOINED:
        return False
    node.args = (tensor_args(node)[1:],)
    lists = {k: v[1:] for k, v in node.kwargs.items() if isinstance(v, list)}
    node.kwargs = {**node.kwargs, **lists}
    return _derive(node)


@_in(NUMERIC, "operands of a join swapped")
def _swapped_join(graph: Graph, node: fx.Node) -> bool:
    if node.target not in collectives.JOINED:
        return False
    first, second, *rest = tensor_args(node)
    node.args = ([second, first, *rest],)
    return True


@_in(STATIC, "wait missing")
def _no_wait(graph: Graph, node: fx.Node) -> bool:
    if node.target is not collectives.wait:
        return False
    node.replace_all_uses_with(tensor_args(node)[0])
    graph.fx.erase_node(node)
    return True


@_in(STATIC, "waited for twice")
def _two_waits(graph: Graph, node: fx.Node) -> bool:
    if node.target is not collectives.wait:
        return False
    with graph.fx.inserting_after(node):
        graph.fx.node_copy(node, lambda n: n)
    return True


@_in(STATIC, "wait after first reader")
def _late_wait(graph: Graph, node: fx.Node) -> bool:
    readers = [u for u in node.users if u.op == "call_function"]
    if node.target is not collectives.wait or not readers:
        return False
    max(readers, key=list(graph.calls()).index).append(node)
    return True


@_in(STATIC, "reads its operand before the collective")
def _bypass(graph: Graph, node: fx.Node) -> bool:
    """One reader takes the unfinished value, the others the finished one."""
    readers = [u for u in node.users if u.op == "call_function"]
    if node.target is not collectives.wait or not readers:
        return False
    readers[0].replace_input_with(node, tensor_args(tensor_args(node)[0])[0])
    return True


@_in(NUMERIC, "operand of another type")
def _other_operand(graph: Graph, node: fx.Node) -> bool:
    """The first operand becomes an earlier value that lies otherwise or has another shape."""
    if node.target is operator.getitem or not tensor_args(node):
        return False
    old = tensor_args(node)[0]
    earlier = list(graph.fx.nodes)[: list(graph.fx.nodes).index(node)]
    new = next((n for n in earlier if typed(n) != typed(old) and not is_collective(n)), None)
    if new is None or node.target is collectives.wait:
        return False
    node.args = (fx.map_arg(node.args[0], lambda n: new), *node.args[1:])
    return True


@_in(STATIC, "gradient of another parameter")
def _other_gradient(graph: Graph, node: fx.Node) -> bool:
    grads = graph.grads
    owner = next((name for name, grad in grads.items() if grad is node), None)
    others = [n for n, g in grads.items() if owner and typed(g) != typed(node)]
    if owner is None or not others:
        return False
    graph.set_outputs(replace(graph.outputs, grads={**grads, owner: grads[others[0]]}))
    return True


@_in(STATIC, "write into an operand")
def _in_place(graph: Graph, node: fx.Node) -> bool:
    if node.target is not aten.mul.Tensor:
        return False
    node.target = aten.mul_.Tensor
    return True


@_in(NUMERIC, "scale wrong")
def _scale(graph: Graph, node: fx.Node) -> bool:
    scalars = [i for i, a in enumerate(node.args) if isinstance(a, int | float)]
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or not scalars:
        return False
    node.args = tuple(2 * a if i in scalars else a for i, a in enumerate(node.args))  # type: ignore[operator]
    return True


@_in(NUMERIC, "1/N missing")
def _no_mean(graph: Graph, node: fx.Node) -> bool:
    if node.target is not aten.div.Tensor or not isinstance(node.args[1], int | float):
        return False
    node.replace_all_uses_with(tensor_args(node)[0])
    return True


@_in(NUMERIC, "operands of one type swapped")
def _swap(graph: Graph, node: fx.Node) -> bool:
    if node.target is not aten.threshold_backward.default:
        return False
    first, second = tensor_args(node)
    node.args = (second, first, *node.args[2:])
    return typed(second) == typed(first)
