"""The moves of a collective: a bucket seen as one collective per tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from partc.graph import collectives, is_tensor, picked, tensor_args, value
from partc.plan.wires import WIRES

GATHERS = (collectives.all_gather, collectives.all_gather_joined)
SINGLE = {*collectives.COLLECTIVES, *collectives.LOCAL} - collectives.JOINED.keys()


@dataclass(frozen=True)
class Move:
    """One tensor of a collective or bucket, as a collective of its own.

    ``result`` is the node that has this tensor's result, None if no node reads the result.
    """

    target: Callable[..., Any]
    operand: fx.Node
    kwargs: dict[str, Any]
    result: fx.Node | None


def moves(node: fx.Node) -> list[Move]:
    """The moves of a collective in order: one per tensor of a bucket, else a single one."""
    kwargs: dict[str, Any] = {k: x for k, x in node.kwargs.items() if k not in ("state", "start")}
    operands = moved(node)
    if node.target not in collectives.JOINED:
        assert callable(node.target)
        return [Move(node.target, operands[0], kwargs, node)]
    each = [dict(kwargs) for _ in operands]
    for of_all, of_one in (("dims", "dim"), ("outers", "outer")):
        for named in each if of_all in kwargs else ():
            del named[of_all]
        for named, at in zip(each, kwargs.get(of_all, ()), strict=False):
            named[of_one] = at
    target: Any = collectives.JOINED[node.target]
    made = zip(operands, each, results(node, len(operands)), strict=True)
    return [Move(target, *one) for one in made]


def moved(node: fx.Node) -> list[fx.Node]:
    """The tensors that a collective moves: its operands without the state that it writes to."""
    return tensor_args(node)[: -len(state_of(node)) or None]


def state_of(node: fx.Node) -> list[fx.Node]:
    """The buffers in which a sum in narrow numbers keeps what rounding has lost; else empty."""
    kept: Any = node.kwargs.get("state", ())
    return list(kept)


def cut_over(node: fx.Node) -> tuple[str, ...]:
    """The axes over which the gradients are cut that a collective sums, so that it sums pieces."""
    return tuple(axis for axis, _ in value(moved(node)[0]).sharding.cuts())


def wire_of(node: fx.Node) -> str:
    """The narrow format in which a sum is sent, "" for any other collective."""
    return str(node.kwargs.get("wire", ""))


def code_of(node: fx.Node) -> str:
    """The code in which a gather sends shards, "" for any other collective."""
    return str(node.kwargs.get("code", ""))


def is_keyed(node: fx.Node) -> bool:
    """Whether a sum in narrow numbers draws random ones, or asks how many steps there were."""
    wire = wire_of(node)
    return wire != "" and (WIRES[wire].drawn != "" or bool(node.kwargs.get("start")))


def results(node: fx.Node, num: int) -> list[fx.Node | None]:
    """The getitem nodes of a call's ``num`` results; None for a result that no node reads.

    The results of a started collective are picked from its wait.
    """
    callers = [node, *(u for u in node.users if u.target is collectives.wait)]
    users = [user for call in callers for user in call.users]
    picks = {picked(u)[1]: u for u in users if u.target is operator.getitem}
    return [picks.get(i) for i in range(num)]


def start_of(pick: fx.Node) -> fx.Node:
    """The call whose result a getitem picks, itself or from its wait."""
    call, _ = picked(pick)
    return call.all_input_nodes[0] if call.target is collectives.wait else call


def carried(node: fx.Node) -> fx.Node | None:
    """The operand whose value a collective, its getitem or its wait carries in another layout.

    None for other calls.
    """
    if node.target is operator.getitem:
        start = start_of(node)
        return tensor_args(start)[picked(node)[1]] if start.target in collectives.JOINED else None
    if node.target in SINGLE or (node.target is collectives.wait and is_tensor(node)):
        return node.all_input_nodes[0]
    return None


def gathers_param(node: fx.Node) -> bool:
    """Whether a collective gathers stored parameters alone, so that it may start at any time."""
    return node.target in GATHERS and all(
        n.op == "placeholder" and value(n).kind == "param" for n in tensor_args(node)
    )


def kind_in_words(node: fx.Node) -> str:
    """The kind of a collective for people: ``all_reduce``, ``all_reduce in int8``."""
    word = wire_of(node) or code_of(node)
    return f"{kind_of(node)} in {word}" if word else kind_of(node)


def kind_of(node: fx.Node) -> str:
    """The kind of a collective: ``all_gather`` for an all_gather and for a bucket of them."""
    target: Any = node.target
    return str(collectives.JOINED.get(target, target).__name__)
