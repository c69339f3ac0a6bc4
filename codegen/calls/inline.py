"""Which values need no line of their own: they read well inside the statement that uses them."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx

from partc.codegen.calls.storage import VIEWS, num_bytes, owner
from partc.codegen.helpers.needed import Outlined
from partc.graph import collectives, is_tensor, tensor_args, value

DEPTH = 3  # of views, or of pointwise ops, in one expression
_FREE = {"view", "reshape", "_unsafe_view"} | VIEWS - {
    "split",
    "split_with_sizes",
    "unbind",
    "chunk",
}
_PRODUCTS = {"matmul", "mm", "linear"}
_LIGHT = {"sum", "mean", "rsqrt", "cat", "_to_copy", "ones_like"}  # read as pointwise ops do


def inlined(
    order: Sequence[fx.Node],
    kept: set[fx.Node],
    named: set[fx.Node],
    sums: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
) -> set[fx.Node]:
    """The nodes of one function that are written inside their only user.

    Views always; a pointwise value inside a pointwise statement of the same module, unless the user
    gave it a name (``named``) or it would be computed at a worse time; a cast inside the views that
    follow it; a product or what a function gives inside the ``+=`` of ``sums`` that follows it.
    ``kept`` are read outside the function.
    """
    inside = set(order)
    chosen: set[fx.Node] = set()
    depth: dict[fx.Node, int] = {}
    views: dict[fx.Node, int] = {}
    following = _next_statements(order)
    time = _Time(order, sums)
    for node in order:
        user = _only_user(node)
        if user is None or node in kept or user not in inside or not is_tensor(node):
            continue
        if is_free(node):
            views[node] = 1 + views.get(node.all_input_nodes[0], 0)
            if views[node] <= DEPTH and _may_hold(user):
                chosen.add(node)
            else:
                views[node] = 0
        elif _is_next(node, user, following, sums) or _is_cast(node, user, kept):
            chosen.add(node)
        elif node not in named and is_pointwise(node) and is_pointwise(user):
            depth[node] = 1 + max((depth.get(n, 0) for n in node.all_input_nodes), default=0)
            fits = depth[node] <= DEPTH and _together(node, user)
            if fits and (following.get(node) is user or time.may_pass(node, user, chosen)):
                chosen.add(node)
            else:
                depth[node] = 0
    return chosen


class _Time:
    """Whether a value may as well be computed later, where it is read."""

    def __init__(self, order: Sequence[fx.Node], sums: Mapping[fx.Node, fx.Node]) -> None:
        self.order, self.sums = order, sums
        self.at = {node: i for i, node in enumerate(order)}
        self.last: dict[fx.Node, int] = {}  # use of any view of what a node allocated
        for node in order:
            for operand in node.all_input_nodes:
                self.last[owner(operand)] = self.at[node]

    def may_pass(self, node: fx.Node, user: fx.Node, chosen: Container[fx.Node]) -> bool:
        """Not over a transfer, which it hides, nor over a sum that overwrites what it reads, nor
        where its operands would be kept for it alone and take more memory than it does.
        """
        between = self.order[self.at[node] + 1 : self.at[user]]
        if any(n.target in (*collectives.COLLECTIVES, collectives.wait) for n in between):
            return False
        homes = dict.fromkeys(owner(n) for n in _read(node, chosen))
        if any(owner(self.sums[n]) in homes for n in between if n in self.sums):
            return False
        longer = [n for n in homes if n in self.at and self.last[n] < self.at[user]]
        return sum(map(num_bytes, longer)) <= num_bytes(node)


def _read(node: fx.Node, chosen: Container[fx.Node]) -> Iterator[fx.Node]:
    """The values that an expression reads."""
    for operand in node.all_input_nodes:
        if operand in chosen:
            yield from _read(operand, chosen)
        else:
            yield operand


def _only_user(node: fx.Node) -> fx.Node | None:
    """The one call that reads a node, once."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if user.op == "call_function" and tensor_args(user).count(node) == 1 else None


def _next_statements(order: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node the next that is not a view."""
    found: dict[fx.Node, fx.Node] = {}
    after: fx.Node | None = None
    for node in reversed(order):
        if after is not None:
            found[node] = after
        if not is_free(node):
            after = node
    return found


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else ""


def _is_next(
    node: fx.Node, user: fx.Node, following: Mapping[fx.Node, fx.Node],
    sums: Mapping[fx.Node, fx.Node],
) -> bool:  # fmt: skip
    """Whether work is added to a sum by the very next statement."""
    return user in sums and following.get(node) is user and is_work(node)


def _is_cast(node: fx.Node, view: fx.Node, kept: set[fx.Node]) -> bool:
    """Whether a cast is read through the views that follow it, which have a line."""
    return _name(node) == "_to_copy" and node.next is view and _have_line(view, kept)


def is_work(node: fx.Node) -> bool:
    """Whether a value is a product or what a printed function gives."""
    return _name(node) in _PRODUCTS or isinstance(node.target, Outlined)


def _have_line(view: fx.Node, kept: set[fx.Node]) -> bool:
    """Whether a view, or the last of some, is read so often that it stands in a line of its own."""
    while is_free(view) and view not in kept and len(view.users) == 1:
        view = next(iter(view.users))
    return is_free(view)


def is_free(node: fx.Node) -> bool:
    """Whether a call is a view, so that it costs nothing wherever it is written."""
    if node.target is operator.getitem:
        return False
    return node.target is collectives.keep_piece or _name(node) in _FREE


def is_pointwise(node: fx.Node) -> bool:
    """Whether a call may be written inside another one, and others inside it."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _name(node) in _LIGHT


def _together(node: fx.Node, user: fx.Node) -> bool:
    """Whether two calls are of one module, or of a module and its parent."""
    mine, theirs = value(node).module, value(user).module
    return mine == theirs or f"{theirs}." in f"{mine}." or f"{mine}." in f"{theirs}."


def _may_hold(user: fx.Node) -> bool:
    """What is waited for or overwritten needs a name, a function's argument deserves one."""
    if isinstance(user.target, Outlined):
        return False
    return user.target not in (collectives.wait, collectives.all_reduce, operator.getitem)
