"""Compute what blocks compute alike of the step's inputs, or of values of none of them, only once.

Blocks that each make the same mask from the same positions then read one mask, which belongs to
none of the blocks; so do blocks that each mask one position bias. Forward and backward are merged
apart: a mask that a checkpoint recomputes in the backward stays there.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from partc.graph import (
    Graph,
    Value,
    fake_of,
    innermost_block,
    is_backward,
    is_tensor,
    tensor_args,
    update,
    value,
)
from partc.graph.draws import draws_numbers
from partc.graph.graph_edits import drop_dead, replace_by
from partc.graph.input_only import input_only


def merge_given(graph: Graph) -> None:
    """Merge equal calls on equal operands, in place: those that depend on inputs and constants
    alone, and those of a forward in several blocks that make none of the operands.
    """
    known = input_only(graph)
    first: dict[str, fx.Node] = {}
    path: dict[fx.Node, str] = {}  # the module that a value now stands in
    for node in list(graph.calls()):
        given = node in known
        if (given and _is_filled_later(node, known)) or (not given and not _may_repeat(node)):
            continue
        kept = first.setdefault(_text(node), node)
        around = outside(path.get(kept, value(kept).module), value(node).module)
        if given or (kept is not node and _makes_none(around, node, path)):
            path[kept] = around
            if kept is not node:
                replace_by(node, kept)
    drop_dead(graph)
    _lift(graph, path)


def _may_repeat(node: fx.Node) -> bool:
    """Whether a call of a forward in a block gives the same again, no larger than an operand.

    A larger result would be kept, and sent to other stages, in the place of small operands.
    """
    if not innermost_block(node) or is_backward(node) or draws_numbers(node):
        return False
    if not all(map(is_tensor, (node, *tensor_args(node)))):
        return False
    largest = max((fake_of(operand).numel() for operand in tensor_args(node)), default=0)
    return bool(fake_of(node).numel() <= largest)


def _makes_none(path_outside: str, node: fx.Node, path: Mapping[fx.Node, str]) -> bool:
    """Whether a call is in other blocks than ``path_outside`` is, and none of its operands are."""
    around = {*_blocks(path_outside)}
    operands = [path.get(operand, value(operand).module) for operand in tensor_args(node)]
    other = around != {*_blocks(value(node).module)}
    return other and all(around.issuperset(_blocks(each)) for each in operands)


def _blocks(path: str) -> list[str]:
    """The blocks on a path: ``h.0.experts.1.w`` gives ``h.0`` and ``h.0.experts.1``."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def _is_filled_later(node: fx.Node, known: set[fx.Node]) -> bool:
    """Whether a call fills a tensor (``zeros([512])``) that calls on activations then read.

    To fill such a tensor again is as cheap as to keep it, so it is not merged.
    """
    is_small = is_tensor(node) and fake_of(node).numel() == 1
    return not tensor_args(node) and not is_small and not known.issuperset(node.users)


def _text(node: fx.Node) -> str:
    return f"{value(node).phase} {node.target} {node.args} {node.kwargs}"


def _lift(graph: Graph, path: dict[fx.Node, str]) -> None:
    """Move merged values, and their operands, out of the blocks that not all readers are in."""
    lifted: dict[fx.Node, Value] = {}
    for node in reversed(list(graph.calls())):
        before = value(node)
        if path.get(node, before.module) == before.module:
            continue
        lifted[node] = before
        update(node, module=path[node], at="", calls=())
        for operand in tensor_args(node):
            if operand.op == "call_function":
                own = path.get(operand, value(operand).module)
                path[operand] = outside(own, path[node])
    left = {(value(n).module, value(n).source) for n in graph.calls()}
    for node, before in lifted.items():
        # Where other calls of the line stay in the block, its text describes their result: a moved
        # value keeps only the place, ``model.py:7``.
        if (before.module, before.source) in left:
            update(node, source=before.source.partition(": ")[0])
    _put_in_front(graph, {n: lifted[n].module for n in reversed(lifted)})


def _put_in_front(graph: Graph, lifted: dict[fx.Node, str]) -> None:
    """Move values that were in a block before the first call of any block of the same list.

    ``lifted`` has the path of each value's former block.
    """
    begin: dict[tuple[str, str], fx.Node] = {}
    for node in graph.calls():
        for path in _lists(value(node).module):
            begin.setdefault((value(node).phase, path), node)
    for node, before in lifted.items():
        around = set(_lists(value(node).module))
        left = [path for path in _lists(before) if path not in around]
        at = begin.get((value(node).phase, left[0])) if left else None
        last = max(node.all_input_nodes, default=None)
        if at is not None and at < node:
            at.prepend(node) if last is None or last < at else last.append(node)


def _lists(path: str) -> list[str]:
    """The lists of modules on a path: ``h.0.experts.1`` gives ``h`` and ``h.0.experts``."""
    return [block.rpartition(".")[0] for block in _blocks(path)]


def outside(path: str, other: str) -> str:
    """The innermost module around ``path`` that is in no block which ``other`` is not in.

    >>> outside("model.layers.0.attn", "model.layers.1.attn")
    'model'
    """
    parts, others = path.split("."), other.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and others[: i + 1] != parts[: i + 1]:
            return ".".join(parts[: max(i - 1, 0)])
    return path
