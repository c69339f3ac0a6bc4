"""Makes of a scheduled graph the graph that is printed: without unread calls, in the fewest lines.

An example: ``reshape(expand(reshape(x))) -> repeat_interleave(x)``. This is the last pass that
rewrites calls; what it leaves is checked, and then printed. ``spelled`` alone comes behind it: it
chooses calls that write in place, or that copy nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from partc.codegen.calls.buffers_in_place import keep_statistics
from partc.codegen.calls.inline import is_free
from partc.codegen.calls.moved_names import known_as
from partc.graph import (
    Graph,
    first_operand,
    is_backward,
    is_call,
    shape_of,
    update,
    value,
)
from partc.graph.graph_edits import copied, drop_dead
from partc.graph.places import innermost_turn

aten = torch.ops.aten


def tidy(graph: Graph) -> Graph:
    """The graph that is printed, a copy; the one given stays as it is.

    Calls that nobody reads are dropped. Calls that together repeat a dim become one
    ``repeat_interleave``.
    """
    copy = copied(graph)
    for node in copy.calls():
        if is_call(node, aten.clone.default):
            _as_contiguous(node)
    _as_repeats(copy, alone=False)
    _as_one(copy)
    drop_dead(copy)
    _mark_again(copy)
    return copy


def spelled(graph: Graph, *, fused: bool) -> Graph:
    """A copy of a tidied graph whose calls write where they may, and copy nothing they need not.

    Batch norms update their running statistics in place, unless their text is for torch.compile
    (``fused``), whose functions write into no operand. A dim with a single entry is expanded.
    """
    copy = copied(graph)
    _as_repeats(copy, alone=True)
    drop_dead(copy)
    if not fused:
        keep_statistics(copy)
    return copy


def _mark_again(graph: Graph) -> None:
    """Mark the calls of the backward that read forward values alone: they are no gradients.

    Their lines stand with the lines that need them, under no comment of their own module.
    """
    for node in graph.calls():
        forward = not is_backward(node) or bool(value(node).forward)
        update(node, from_forward=not forward and not any(map(_is_gradient, node.all_input_nodes)))


def _is_gradient(node: fx.Node) -> bool:
    return is_backward(node) and not value(node).from_forward


def _as_contiguous(clone: fx.Node) -> None:
    """``clone(x, memory_format=contiguous_format) --> contiguous(x)``: nobody changes the copy."""
    if clone.kwargs.get("memory_format") is torch.contiguous_format:
        clone.target, clone.kwargs = aten.contiguous.default, {}


def _as_one(graph: Graph) -> None:
    """Move the only view of a cast right behind the cast, so that both can be one expression."""
    for node in graph.calls():
        cast = node.all_input_nodes[0] if is_free(node) else node
        if not is_call(cast, aten._to_copy.default) or len(cast.users) > 1:
            continue
        if value(cast).phase == value(node).phase and innermost_turn(cast) == innermost_turn(node):
            cast.append(node)


def _as_repeats(graph: Graph, *, alone: bool) -> None:
    """``reshape(expand(reshape(x))) --> repeat_interleave(x)`` where one dim repeats its entries.

    These are the keys and values of grouped-query attention. ``alone``: where the dim has a single
    entry, which is expanded and copies nothing; else where it has more. What is expanded on one
    rank is repeated on all, so that only the calls as they were show how the dim is cut.
    """
    absorbed: dict[str, str] = {}  # forward calls, by name, and what they became part of
    for node in graph.calls():
        chain = _repeat(node)
        if chain is None:
            continue
        expand, view = chain
        x = first_operand(view)
        dim = _repeated_dim(*(shape_of(n) for n in (x, view, expand, node)))
        if dim is None or alone != (shape_of(x)[dim] == 1):
            continue
        if not alone and not _is_one_call_on_all_ranks(x, node, dim):
            continue
        absorbed |= {known_as(expand): known_as(node), known_as(view): known_as(node)}
        num = shape_of(node)[dim] // shape_of(x)[dim]
        node.target = aten.expand.default if alone else aten.repeat_interleave.self_int
        node.args = (x, list(shape_of(node))) if alone else (x, num, dim)
    for node in graph.calls():
        if value(node).forward in absorbed:
            update(node, forward=absorbed[value(node).forward])


def _is_one_call_on_all_ranks(x: fx.Node, result: fx.Node, dim: int) -> bool:
    """Whether the same call makes the whole of its result from the whole of what is repeated.

    Where the copies are sharded a rank makes fewer: no rule says so of a single call.
    """
    num = shape_of(result)[dim] // shape_of(x)[dim]
    return value(x).shape[dim] * num == value(result).shape[dim]


def _repeat(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The expand and the view before a reshape, if they add a dim that only this reshape reads."""
    if not is_call(node, aten.reshape.default):
        return None
    expand = first_operand(node)
    if not is_call(expand, aten.expand.default) or len(expand.users) > 1:
        return None
    view = first_operand(expand)
    adds = is_call(view, aten.reshape.default, aten.unsqueeze.default)
    return (expand, view) if adds and len(view.users) == 1 else None


def _repeated_dim(
    x: Sequence[int], view: Sequence[int], expanded: Sequence[int], result: Sequence[int]
) -> int | None:
    """The dim whose entries repeat.

    >>> _repeated_dim((2, 3), (2, 1, 3), (2, 4, 3), (8, 3))
    0
    """
    for dim in range(len(x)):
        before, behind = x[: dim + 1], x[dim + 1 :]
        num = expanded[dim + 1] if dim + 1 < len(expanded) else 0
        added = tuple(view) == (*before, 1, *behind) and tuple(expanded) == (*before, num, *behind)
        if added and tuple(result) == (*x[:dim], x[dim] * num, *behind):
            return dim
    return None
