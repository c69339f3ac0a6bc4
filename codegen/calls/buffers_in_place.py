"""New values of buffers are written where the old ones lie: running statistics of a batch norm by
its kernel, as eager ones are, and what is counted by ``+=``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import fx

from partc.codegen.calls.storage import alike
from partc.codegen.text import Line, Text
from partc.graph import Graph, fake_of, is_call, set_fake

aten = torch.ops.aten
NEW_MEAN, NEW_VAR = 3, 4  # results of a batch norm; the old ones among its arguments
TRAINING = 5  # among its arguments
SIGNS = {aten.add.Tensor: "+", aten.sub.Tensor: "-", aten.mul.Tensor: "*"}


def keep_statistics(graph: Graph) -> None:
    """Let batch norms write their running statistics themselves, and those whose new ones nobody
    reads, as they are computed again, have none.
    """
    functional = aten._native_batch_norm_legit_functional.default
    found = [n for n in graph.calls() if is_call(n, functional)]
    for node in found:
        if not _new(node) and node.args[TRAINING] is True:
            _retarget(node, None, None)
    for node in found:
        _keep(graph, node)


def _keep(graph: Graph, node: fx.Node) -> None:
    """One batch norm whose statistics nobody but itself and the end of the step reads."""
    new, outputs = _new(node), graph.outputs
    names = {b: name for name, b in outputs.buffers.items() if b in new.values()}
    if set(new) != {NEW_MEAN, NEW_VAR} or len(names) < len(new):
        return
    olds = {index: graph.buffers[names[value]] for index, value in new.items()}
    own = all(node.args[index] is old and set(old.users) == {node} for index, old in olds.items())
    ends = all(user.op == "output" for value in new.values() for user in value.users)
    if own and ends:
        left = {name: b for name, b in outputs.buffers.items() if b not in names}
        graph.set_outputs(replace(outputs, buffers=left))
        for value in new.values():
            graph.fx.erase_node(value)
        _retarget(node, olds[NEW_MEAN], olds[NEW_VAR])


def _new(node: fx.Node) -> dict[int, fx.Node]:
    """The new statistics, by their place among the results."""
    picks = (user for user in node.users if user.target is operator.getitem)
    return {user.args[1]: user for user in picks if user.args[1] in (NEW_MEAN, NEW_VAR)}  # type: ignore[misc]


def _retarget(node: fx.Node, mean: fx.Node | None, var: fx.Node | None) -> None:
    """The batch norm that writes its statistics, or that has none."""
    node.target = aten.native_batch_norm.default
    node.args = (*node.args[:NEW_MEAN], mean, var, *node.args[NEW_VAR + 1 :])
    set_fake(node, tuple(fake_of(node)[:NEW_MEAN]))


def counted(graph: Graph, order: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The calls that may write a buffer's new value over the old one, with the buffer."""
    buffers, found = graph.buffers, dict[fx.Node, fx.Node]()
    for name, node in graph.outputs.buffers.items():
        old = buffers[name]
        ends = node in order and all(user.op == "output" for user in node.users)
        adds = node.target in SIGNS and not node.kwargs and node.args[0] is old is not node.args[1]
        if ends and adds and alike(node, old) and set(old.users) == {node}:
            found[node] = old
    return found


def updates(places: Mapping[fx.Node, str], text: Callable[[fx.Node], Text]) -> list[Line]:
    """The statements that copy new values to the places of the old, where they do not lie there."""
    copied = ((place, str(text(node))) for node, place in places.items())
    return [Line(f"{place}.copy_({new})") for place, new in copied if new != place]
