"""Give kernels their operands in the memory order for which their results are right.

torch's own gradient formulas copy an operand before a kernel that ignores strides, and a user does
so before a kernel of his own. partc drops such copies, since shards have other strides than whole
tensors, and makes those that are needed here, from the strides that a rank's operand has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from partc.graph import Graph, fake_of, is_tensor
from partc.graph.dense import surely_dense
from partc.graph.graph_edits import call_before
from partc.graph.ops import by_columns
from partc.rules.call import parameters
from partc.rules.table import find

aten = torch.ops.aten
Write = Callable[..., fx.Node]  # like, target, *args, **kwargs


def in_order(write: Write, node: fx.Node, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a rank's call of ``node``, with copies of operands in a wrong order."""
    wanted = _orders(node.target)
    given = [*node.args, *[None] * (len(args) - len(node.args))]
    return tuple(
        _copied(write, arg, wanted[i], whole) if i in wanted and _is_operand(arg) else arg
        for i, (arg, whole) in enumerate(zip(args, given, strict=True))
    )


def ordered(target: Any, args: Sequence[Any]) -> list[Any]:
    """The operands of a call on tensors, those copied that a rank's call would get as copies.

    In a graph before `in_order` has run, an operand may lie so that its kernel refuses it:
    ``view_as_complex(permute(x))``, where the user's copy between the two has been dropped.
    """
    orders = _ignored(target)
    return [
        arg.contiguous() if i in orders and not _is_right_at(args, i, orders[i]) else arg
        for i, arg in enumerate(args)
    ]


def keep_order(graph: Graph) -> None:
    """Write down how matrices lie whose order decides what a call computes, as it was traced.

    ``det(x.mT)`` becomes ``det(by_columns(x.mT))``: passes drop copies, and join transposes.
    """
    for node in list(graph.calls()):
        for i in (i for i, order in _orders(node.target).items() if order == "traced"):
            matrix: Any = node.args[i]
            if not fake_of(matrix).is_contiguous():
                node.update_arg(i, call_before(node, by_columns, matrix))


def misread(target: Any, args: Sequence[Any]) -> list[str]:
    """The operands of a call whose strides its kernel ignores, and which lie otherwise, by name.

    The matrices of a rule's ``traced`` are not among them: programs have ``by_columns`` for these.
    """
    wrong = [i for i, order in _ignored(target).items() if not _is_right_at(args, i, order)]
    return [parameters(target)[i][0] for i in wrong]


def _is_right_at(args: Sequence[Any], i: int, order: str) -> bool:
    return i >= len(args) or not isinstance(args[i], Tensor) or _is_right(args[i], order)


def _ignored(target: Any) -> dict[int, str]:
    """What is asked of arguments whose strides the kernel is known to ignore, by place."""
    entry = find(target)
    if entry is None or not (entry.contiguous or entry.adjacent):
        return {}
    return {i: order for i, order in _orders(target).items() if order != "traced"}


def _orders(target: Any) -> dict[int, str]:
    """What is asked of arguments, by place: contiguous, adjacent, traced; or, without a rule,
    contiguous as far as fakes say.
    """
    entry = find(target)
    if entry is not None:
        asked = entry.contiguous, entry.adjacent, entry.traced
        return _places(target, *asked) if any(asked) else {}
    schema = getattr(target, "_schema", None)
    if schema is None or schema.is_mutable:
        return {}
    return dict.fromkeys(range(len(schema.arguments)), "as fakes say")  # nobody has looked at it


@cache
def _places(target: Any, *asked: tuple[str, ...]) -> dict[int, str]:
    """The places of the arguments that a rule names for each of the orders."""
    orders = zip(("contiguous", "adjacent", "traced"), asked, strict=True)
    names = [name for name, _, _ in parameters(target)]
    return {names.index(name): order for order, of in orders for name in of if name in names}


def _is_operand(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and is_tensor(arg)


def _is_right(fake: Tensor, order: str) -> bool:
    if order == "adjacent":
        return not fake.dim() or fake.shape[-1] == 1 or fake.stride(-1) == 1
    return fake.is_contiguous()


def _copied(write: Write, arg: fx.Node, order: str, whole: Any) -> fx.Node:
    """The operand, or a copy of it; ``whole`` is the operand of the traced call."""
    fake = fake_of(arg)
    if order == "traced" and whole.target is by_columns:
        return write(arg, by_columns, arg) if fake.is_contiguous() else arg
    is_sure = order != "contiguous" or surely_dense(arg)
    return arg if is_sure and _is_right(fake, order) else _dense(write, arg)


def _dense(write: Write, arg: fx.Node) -> fx.Node:
    return write(arg, aten.clone.default, arg, memory_format=torch.contiguous_format)
