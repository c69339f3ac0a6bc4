"""Writes new values of buffers over the old ones, as eager PyTorch does.

The kernel of a batch norm updates its running statistics itself. A counter is printed as
``self.num_batches_tracked += 1``. Any other new value is copied when the step ends, or, in a stage,
where it is made, unless the old one is still read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import torch
from torch import fx

from partc.codegen.calls.storage import alike, owner
from partc.codegen.text import Line, Text
from partc.graph import Graph, fake_of, is_call, set_fake, value
from partc.graph.graph_edits import drop_dead

aten = torch.ops.aten
# Places in the signature of a batch norm: the new running mean and variance have these places among
# the results, the old ones the same places among the arguments.
NEW_MEAN, NEW_VAR = 3, 4
PHASES = ("S", "F", "B", "W", "E")  # in the order in which a microbatch needs them
TRAINING = 5  # the place of the argument `training`
SIGNS = {aten.add.Tensor: "+", aten.sub.Tensor: "-", aten.mul.Tensor: "*"}


def keep_statistics(graph: Graph) -> None:
    """Let the kernel of each batch norm write its running statistics, if no other call reads them.

    A batch norm that the backward recomputes gets no running statistics: they would be updated
    twice.
    """
    functional = aten._native_batch_norm_legit_functional.default
    found = [n for n in graph.calls() if is_call(n, functional)]
    for node in found:
        if not _new(node) and node.args[TRAINING] is True:
            _retarget(node, None, None)
    for node in found:
        _keep(graph, node)


def _keep(graph: Graph, node: fx.Node) -> None:
    """Let one batch norm write its statistics, if only itself and the step's end read them."""
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
        _retarget(node, olds[NEW_MEAN], olds[NEW_VAR])
        drop_dead(graph)


def _new(node: fx.Node) -> dict[int, fx.Node]:
    """The nodes of the new running mean and variance, by their place among the results.

    Where they are cast to the dtype of their buffers, they are the casts: the kernel itself keeps
    the dtype of its buffers.
    """
    picks = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    found: dict[int, fx.Node] = {}
    for index in {NEW_MEAN, NEW_VAR} & picks.keys():
        casts = [u for u in picks[index].users if is_call(u, aten._to_copy.default)]
        found[index] = casts[0] if casts and len(picks[index].users) == 1 else picks[index]
    return found


def _retarget(node: fx.Node, mean: fx.Node | None, var: fx.Node | None) -> None:
    """Turn a functional batch norm into one that writes ``mean`` and ``var``; None: has none."""
    node.target = aten.native_batch_norm.default
    node.args = (*node.args[:NEW_MEAN], mean, var, *node.args[NEW_VAR + 1 :])
    set_fake(node, tuple(fake_of(node)[:NEW_MEAN]))


def counted(
    graph: Graph, order: Collection[fx.Node], late: Collection[str] = ()
) -> dict[fx.Node, fx.Node]:
    """The calls that may be printed as ``buffer += x``, each with the buffer's node.

    That is so where the call adds to the old value, and nothing else reads the old value or, before
    the step ends, the new one. Buffers named in ``late`` keep their old values until then.
    """
    buffers, found = graph.buffers, dict[fx.Node, fx.Node]()
    news = graph.outputs.buffers
    for name, node in news.items():
        old = buffers[name]
        ends = node in order and all(user.op == "output" for user in node.users)
        ends = ends and name not in late and [*news.values()].count(node) == 1
        adds = node.target in SIGNS and not node.kwargs and node.args[0] is old is not node.args[1]
        if ends and adds and alike(node, old) and set(old.users) == {node}:
            found[node] = old
    return found


def written_late(graph: Graph, shared: Collection[str]) -> dict[str, fx.Node]:
    """The new values of buffers that a stage writes when the step ends, by the buffer's name.

    A later phase than the one that computes them reads the old values, or may do so in another
    stage of the rank that has the buffer too (``shared``).
    """
    last: dict[fx.Node, int] = {}  # the last phase that reads a memory
    for node in graph.calls():
        for operand in node.all_input_nodes:
            phase = PHASES.index(value(node).phase)
            last[owner(operand)] = max(phase, last.get(owner(operand), 0))
    last |= {owner(sent): len(PHASES) for sent in graph.outputs.sent.values()}
    return {
        name: new
        for name, new in graph.outputs.buffers.items()
        if name in shared or last.get(graph.buffers[name], 0) > PHASES.index(value(new).phase)
    }


def updates(news: Iterable[tuple[str, fx.Node]], text: Callable[[fx.Node], Text]) -> list[Line]:
    """The statements that copy new values of buffers over the old ones, unless already there.

    ``news`` has the text that reads each buffer, and its new value, which several may share.
    """
    copied = ((place, str(text(node))) for place, node in news)
    return [Line(f"{place}.copy_({new})") for place, new in copied if new != place]
