"""Sum what blocks give the gradient of one value before what is applied to each summand alike.

    block 1: e = where(mask, g1, 0)
    block 0: f = e + where(mask, g0, 0)

becomes

    block 0: e = g1 + g0
    behind:  f = where(mask, e, 0)

Where the gradients are parts of a sum over ranks, one transfer behind all blocks then finishes it,
and each block only adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from partc.graph import (
    Graph,
    fake_of,
    innermost_block,
    is_backward,
    is_tensor,
    set_value,
    tensor_args,
    value,
)
from partc.graph.graph_edits import call_before, drop_dead, replace_by
from partc.passes.canonical.merge_given import outside
from partc.passes.canonical.products_first import PRODUCTS, adds, summands
from partc.rules.call import whole_call
from partc.rules.table import find

aten = torch.ops.aten
ZEROS = {
    aten.full.default: 1,
    aten.scalar_tensor.default: 0,
}  # the place of what they are filled with


@dataclass(frozen=True)
class Applied:
    """A summand as a linear call on one value; ``says`` is the same where the same is applied."""

    summand: fx.Node
    operand: fx.Node
    says: str


def sums_first(graph: Graph) -> None:
    """``f(x) + f(y)`` of two blocks becomes ``f(x + y)`` in the backward, in place."""
    for node in reversed(list(graph.calls())):
        if node.users and adds(node) and not any(map(adds, node.users)):
            parts = [*summands(node)]
            for alike in _alike(parts):
                _reorder(node, parts, alike)
                break
    drop_dead(graph)


def _alike(parts: Sequence[fx.Node]) -> Iterator[list[Applied]]:
    """The summands of several blocks that are the same of different values."""
    found: dict[str, list[Applied]] = defaultdict(list)
    for part in parts:
        for applied in _applied(part):
            found[applied.says].append(applied)
    for alike in found.values():
        if len({innermost_block(each.summand) for each in alike}) > 1:
            yield alike


def _applied(part: fx.Node) -> Iterator[Applied]:
    """A summand as what is applied to a gradient of its size, if nothing else reads it."""
    rule = find(part.target) if is_backward(part) and len(part.users) == 1 else None
    if rule is None or part.target in PRODUCTS:
        return
    call = whole_call(part)
    for group in rule.groups(call):
        linear = [slot for i in group if (slot := call.slots[i]) is not None and not _is_zero(slot)]
        if len(linear) == 1 and _is_its_gradient(linear[0], part):
            operand = linear[0]
            said = fx.map_arg((part.args, part.kwargs), lambda n: "_" if n is operand else n)  # noqa: B023
            yield Applied(part, operand, f"{part.target} {said}")


def _is_its_gradient(operand: fx.Node, part: fx.Node) -> bool:
    """Whether an operand is a gradient as large as the result, and the other operands are none."""
    others = [each for each in tensor_args(part) if each is not operand]
    return (
        is_backward(operand)
        and is_tensor(operand)
        and is_tensor(part)
        and tensor_args(part).count(operand) == 1
        and fake_of(operand).shape == fake_of(part).shape
        and fake_of(operand).dtype == fake_of(part).dtype  # a sum is as exact as before
        and not any(is_backward(each) and not _is_zero(each) for each in others)
    )


def _is_zero(node: fx.Node) -> bool:
    return node.target in ZEROS and bool(node.args[ZEROS[node.target]] == 0)


def _reorder(node: fx.Node, parts: Sequence[fx.Node], alike: Sequence[Applied]) -> None:
    """Write a sum anew: what is applied alike to the sum of its operands, then the rest."""
    total = alike[0].operand
    for each in alike[1:]:
        total = _added(total, each.operand, like=each.summand)
    done = _apply(alike, total)
    rest = {each.summand for each in alike}
    for part in parts:
        if part not in rest:
            done = _added(done, part, like=node)
    replace_by(node, done)


def _added(total: fx.Node, other: fx.Node, like: fx.Node) -> fx.Node:
    """The sum of two values, behind the later one."""
    new = call_before(max(total, other).next, aten.add.Tensor, total, other)
    set_value(new, replace(value(like), shape=value(total).shape, dtype=value(total).dtype))
    return new


def _apply(alike: Sequence[Applied], total: fx.Node) -> fx.Node:
    """What all summands are, of the sum of their operands, outside of their blocks."""
    first = alike[0]
    made: dict[fx.Node, Any] = {first.operand: total}
    args, kwargs = fx.map_arg((first.summand.args, first.summand.kwargs), lambda n: made.get(n, n))
    new = call_before(
        max(total, *tensor_args(first.summand)).next, first.summand.target, *args, **kwargs
    )
    path = value(first.summand).module
    for each in alike[1:]:
        path = outside(path, value(each.summand).module)
    set_value(new, replace(value(first.summand), module=path, at="", calls=()))
    return new
