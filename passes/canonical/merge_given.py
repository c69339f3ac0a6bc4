"""Compute values that depend on the step's inputs alone (masks, positions, scalars) only once.

Blocks that each make the same mask from the same positions then read one mask, which belongs to
none of the blocks. Forward and backward are merged apart: a mask that a checkpoint recomputes in
the backward stays there.
"""

from __future__ import annotations

from torch import fx

from partc.graph import Graph, Value, fake_of, is_tensor, tensor_args, update, value
from partc.graph.graph_edits import drop_dead, replace_by
from partc.graph.input_only import input_only


def merge_given(graph: Graph) -> None:
    """Merge equal calls on equal operands that depend on inputs and constants alone, in place."""
    known = input_only(graph)
    first: dict[str, fx.Node] = {}
    path: dict[fx.Node, str] = {}  # the module that a value now stands in
    for node in list(graph.calls()):
        if node not in known or _is_filled_later(node, known):
            continue
        kept = first.setdefault(_text(node), node)
        path[kept] = _outside(path.get(kept, value(node).module), value(node).module)
        if kept is not node:
            replace_by(node, kept)
    drop_dead(graph)
    _lift(graph, path)


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
                path[operand] = _outside(own, path[node])
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
    parts = path.split(".")
    return [".".join(parts[:i]) for i, part in enumerate(parts) if part.isdigit()]


def _outside(path: str, other: str) -> str:
    """The innermost module around ``path`` that is in no block which ``other`` is not in.

    >>> _outside("model.layers.0.attn", "model.layers.1.attn")
    'model'
    """
    parts, others = path.split("."), other.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and others[: i + 1] != parts[: i + 1]:
            return ".".join(parts[: max(i - 1, 0)])
    return path
