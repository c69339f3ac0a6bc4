"""The op between a model's results and their gradients: ``partc.given_back([logits, hidden])``.

A step whose loss the script computes gives out what the model returns, and goes on once the script
gives back the gradients. A program prints the op as ``[d_logits] = yield {"logits": logits}``. What
the gradients are is the script's: here, as where a program is verified, they are those of the sum
of ``sin(result)``, so that each differs from the others and none is zero.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from partc.graph import Graph, collectives

_LIBRARY = torch.library.Library("partc", "FRAGMENT")
_LIBRARY.define("given_back(Tensor[] results, Tensor[] before) -> Tensor[]")


def gradients(results: Sequence[Tensor], before: Sequence[Tensor] = ()) -> list[Tensor]:
    """The gradients that stand for the script's: ``cos(result)``."""
    return [torch.cos(each) if _is_trained(each) else torch.zeros_like(each) for each in results]


_LIBRARY.impl("given_back", gradients, "CompositeExplicitAutograd")
GIVEN_BACK = torch.ops.partc.given_back.default


def waits_for_script(graph: Graph) -> bool:
    """Whether a step gives out results, and goes on with gradients that the script computes."""
    return any(node.target is GIVEN_BACK for node in graph.calls())


def given_out(graph: Graph) -> dict[str, fx.Node]:
    """The results that a step gives out before its backward, by name."""
    behind = {x for node in graph.calls() if is_given_back(node) for x in _behind(node)}
    return {name: x for name, x in graph.outputs.results.items() if x not in behind}


def hold_back(graph: Graph) -> Graph:
    """Let a step wait for the script once the new values of buffers are there, and all results.

    Buffers are written before, since other steps may run meanwhile; results without a gradient,
    such as the classes of a detector, are given out with the others. ``before`` of the op names
    them.
    """
    for node in filter(is_given_back, graph.calls()):
        new = dict.fromkeys([*graph.outputs.buffers.values(), *given_out(graph).values()])
        there = {*_behind(node), *node.all_input_nodes}
        before = [x for x in new if x.op != "placeholder" and x not in there]
        needed = _needed(before)
        for each in [n for n in graph.calls() if n in needed and n > node]:
            node.prepend(each)
        node.args = node.args[0], before
    return graph


def written_before(graph: Graph) -> list[fx.Node]:
    """The new values of buffers that a step writes before it waits for the script."""
    waiting: list[Any] = [node for node in graph.calls() if is_given_back(node)]
    buffers = {*graph.outputs.buffers.values()}
    return [x for node in waiting for x in node.args[1] if x in buffers]


def start_behind(graph: Graph) -> Graph:
    """Let no transfer be under way while a step waits for the script, which may never go on: what
    is waited for behind that starts behind it.
    """
    for node in filter(is_given_back, graph.calls()):
        last = node
        for wait in [n for n in graph.calls() if n.target is collectives.wait and n > node]:
            start = wait.all_input_nodes[0]
            if start < node:
                last.append(start)
                last = start
    return graph


def _needed(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The calls on which some depend, and these."""
    found, left = set[fx.Node](), [*nodes]
    while left:
        if (node := left.pop()) not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _behind(node: fx.Node) -> set[fx.Node]:
    """The calls that depend on a call."""
    found: set[fx.Node] = {node}
    for each in node.graph.nodes:
        if found.intersection(each.all_input_nodes):
            found.add(each)
    return found


def is_given_back(node: fx.Node) -> bool:
    """Whether a call waits for gradients of results."""
    return node.target is GIVEN_BACK


def result_of(node: fx.Node) -> fx.Node | None:
    """The result whose gradient a value is, which the script gives back; None of any other value.

    The memory of such a gradient is not the program's: it is never written over.
    """
    if node.target is not operator.getitem or not is_given_back(node.all_input_nodes[0]):
        return None
    results: Any = node.all_input_nodes[0].args[0]
    found: fx.Node = results[node.args[1]]
    return found


def differentiated(loss: Tensor) -> list[Tensor]:
    """The inputs by which a loss of the script's is differentiated beside the parameters."""
    return [*getattr(loss.grad_fn, "leaves", ())]


def _is_trained(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
