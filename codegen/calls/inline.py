"""Which values need no line of their own: they read well inside the statement that reads them.

``t = w.T; y = x @ t`` becomes ``y = x @ w.T``.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx
from torch._ops import OpOverload

from partc.codegen.calls.storage import VIEWS, WRITES, num_bytes, owner
from partc.codegen.helpers.needed import Outlined
from partc.graph import collectives, is_tensor, ops, tensor_args, value
from partc.passes.overlap.spare_weights import sizes_alone
from partc.passes.shard.zeros import is_zero

DEPTH = 3  # how many views, or pointwise ops, may stand inside each other in one expression
# Views of one result; those with several have a line that names all results.
_FREE = {"view", "reshape", "_unsafe_view"} | VIEWS - {
    "split",
    "split_with_sizes",
    "unbind",
    "chunk",
}
_PRODUCTS = {"matmul", "mm", "linear"}
# Not pointwise, or without the tag, but as easy to read inside of a pointwise expression.
_LIGHT = {"sum", "mean", "rsqrt", "cat", "stack", "_to_copy", "ones_like"}


def inlined(
    order: Sequence[fx.Node],
    kept: set[fx.Node],
    named: set[fx.Node],
    sums: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
) -> set[fx.Node]:
    """The nodes of one function that are written inside the only call that reads them:

    - every view, up to DEPTH of them;
    - a pointwise value inside a pointwise call of the same module, unless the user's code has a
      variable for it (``named``), or it would then be computed at a worse time (``_Time``); what
      a dropout leaves of a value needs no name of its own: ``x + o * mask``;
    - a cast inside the views of it that follow;
    - the memory that a call is given for a weight of which it reads the sizes alone;
    - what the ``+=`` that follows adds (``sums`` has each sum with the value that it is written
      over): it would be the right side of a line of its own.

    ``kept`` has the nodes that are read outside the function, which need a name.
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
        joins = node not in named and _is_added(node, user, following, sums)
        if is_free(node):
            views[node] = 1 + views.get(node.all_input_nodes[0], 0)
            if views[node] <= DEPTH and _may_hold(user):
                chosen.add(node)
            else:
                views[node] = 0
        elif joins or _is_cast(node, user, kept) or _is_of_sizes(node, user):
            chosen.add(node)
        elif (node not in named or _is_dropout(node)) and is_pointwise(node) and is_pointwise(user):
            depth[node] = 1 + max((depth.get(n, 0) for n in node.all_input_nodes), default=0)
            fits = depth[node] <= DEPTH and _together(node, user)
            if fits and (following.get(node) is user or time.may_pass(node, user, chosen)):
                chosen.add(node)
            else:
                depth[node] = 0
    return chosen


class _Time:
    """Whether a value may be computed later, where it is read, at no cost."""

    def __init__(self, order: Sequence[fx.Node], sums: Mapping[fx.Node, fx.Node]) -> None:
        self.order, self.sums = order, sums
        self.at = {node: i for i, node in enumerate(order)}
        self.last: dict[fx.Node, int] = {}  # the last use of any view of a node's memory
        for node in order:
            for operand in node.all_input_nodes:
                self.last[owner(operand)] = self.at[node]

    def may_pass(self, node: fx.Node, user: fx.Node, chosen: Container[fx.Node]) -> bool:
        """Whether the computation of ``node`` may move down to ``user``.

        It may not move over the start or wait of a transfer, which it helps to hide; nor over a sum
        that overwrites an operand; nor where operands larger than the value itself would have to
        live longer.
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
    """The values with a name that an expression reads, through operands written inside of it."""
    for operand in node.all_input_nodes:
        if operand in chosen:
            yield from _read(operand, chosen)
        else:
            yield operand


def _only_user(node: fx.Node) -> fx.Node | None:
    """The only call that reads a node, if there is one and it reads the node once."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if user.op == "call_function" and tensor_args(user).count(node) == 1 else None


def _next_statements(order: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node the next call in order that is not a view, and so has a statement."""
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


def _is_added(
    node: fx.Node, user: fx.Node, following: Mapping[fx.Node, fx.Node],
    sums: Mapping[fx.Node, fx.Node],
) -> bool:  # fmt: skip
    """Whether the next statement adds a value: ``d_x += d_y @ self.w1_weight``."""
    added = user.target is torch.ops.aten.add.Tensor and sums.get(user) not in (None, node)
    # What writes entries into new zeros does so in place, in a line of its own.
    is_expression = is_work(node) or (
        isinstance(node.target, OpOverload) and node.target not in WRITES
    )
    return added and is_expression and following.get(node) is user


def _is_cast(node: fx.Node, view: fx.Node, kept: set[fx.Node]) -> bool:
    """Whether a cast is read only through the view behind it, and this view has a line."""
    return _name(node) == "_to_copy" and node.next is view and _have_line(view, kept)


def _is_of_sizes(node: fx.Node, user: fx.Node) -> bool:
    """Whether memory stands for a weight of which ``user``, a backward, reads the sizes alone."""
    return _name(node) == "empty" and node in sizes_alone(user)


def is_work(node: fx.Node) -> bool:
    """Whether a call does real work: a matrix product, or a printed function."""
    return _name(node) in _PRODUCTS or isinstance(node.target, Outlined)


def _have_line(view: fx.Node, kept: set[fx.Node]) -> bool:
    """Whether the last of a chain of views has a line: several calls read it, or one outside."""
    while is_free(view) and view not in kept and len(view.users) == 1:
        view = next(iter(view.users))
    return is_free(view)


def is_free(node: fx.Node) -> bool:
    """Whether a call is a view, so that it costs nothing wherever it is written."""
    if node.target is operator.getitem:
        return False
    if node.target is collectives.keep_first and is_zero(node.all_input_nodes[0]):
        return True  # zeros are the same on every rank
    return node.target is collectives.keep_piece or _name(node) in _FREE


def is_pointwise(node: fx.Node) -> bool:
    """Whether a call reads well inside a pointwise expression, and other such calls inside it."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _name(node) in _LIGHT


def _is_dropout(node: fx.Node) -> bool:
    """Whether a call multiplies a value with the mask of a dropout."""
    product = node.target is torch.ops.aten.mul.Tensor
    return product and any(n.target is ops.dropout_mask for n in node.all_input_nodes)


def _together(node: fx.Node, user: fx.Node) -> bool:
    """Whether two calls are of one module, or of a module and one that it stands in."""
    mine, theirs = value(node).module, value(user).module
    return mine == theirs or f"{theirs}." in f"{mine}." or f"{mine}." in f"{theirs}."


def _may_hold(user: fx.Node) -> bool:
    """Whether views may be written inside a call.

    A value that is waited for or overwritten needs a name; so does the argument of a printed
    function, for the reader.
    """
    if isinstance(user.target, Outlined):
        return False
    return user.target not in (collectives.wait, collectives.all_reduce, operator.getitem)
