"""Which values need no line of their own: they read well inside the statement that uses them."""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence

import torch
from torch import fx

from partc import collectives
from partc.codegen.helpers import Outlined
from partc.codegen.storage import VIEWS
from partc.graph import is_tensor, tensor_args, value

DEPTH = 3  # of views, or of pointwise ops, in one expression
_FREE = {"view", "reshape", "_unsafe_view"} | VIEWS - {
    "split",
    "split_with_sizes",
    "unbind",
    "chunk",
}
_PRODUCTS = {"matmul", "mm", "linear"}
_REDUCE = {"sum", "mean", "rsqrt"}


def inlined(
    order: Sequence[fx.Node], kept: set[fx.Node], named: set[fx.Node], sums: Container[fx.Node] = ()
) -> set[fx.Node]:
    """The nodes of one function that are written inside their only user.

    Views always; a pointwise value inside the very next pointwise statement of the same module,
    unless the user gave it a name (``named``); a product inside the ``+=`` of ``sums`` that follows
    it. ``kept`` are read outside the function.
    """
    inside = set(order)
    chosen: set[fx.Node] = set()
    depth: dict[fx.Node, int] = {}
    views: dict[fx.Node, int] = {}
    following = _next_statements(order)
    for node in order:
        user = _only_user(node)
        if user is None or node in kept or user not in inside or not is_tensor(node):
            continue
        if _is_free(node):
            views[node] = 1 + views.get(node.all_input_nodes[0], 0)
            if views[node] <= DEPTH and _may_hold(user):
                chosen.add(node)
            else:
                views[node] = 0
        elif user in sums and following.get(node) is user and _name(node) in _PRODUCTS:
            chosen.add(node)
        elif (
            node not in named
            and _is_pointwise(node)
            and _takes(user)
            and following.get(node) is user
        ):
            depth[node] = 1 + max((depth.get(n, 0) for n in node.all_input_nodes), default=0)
            if depth[node] <= DEPTH and value(node).module == value(user).module:
                chosen.add(node)
            else:
                depth[node] = 0
    return chosen


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
        if not _is_free(node):
            after = node
    return found


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else ""


def _is_free(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return False
    return node.target is collectives.keep_piece or _name(node) in _FREE


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _name(node) in _REDUCE


def _takes(user: fx.Node) -> bool:
    return _is_pointwise(user) or _name(user) in {"_to_copy", "cat"}


def _may_hold(user: fx.Node) -> bool:
    """What is waited for or overwritten needs a name, a function's argument deserves one."""
    if isinstance(user.target, Outlined):
        return False
    return user.target not in (collectives.wait, collectives.all_reduce, operator.getitem)
