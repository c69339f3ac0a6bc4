"""Collectives as ``torch.distributed`` text: a line that starts one, lines that follow its wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from partc.codegen.helpers.needed import Helpers
from partc.codegen.text import ATOM, COMPARE, NONE, Text
from partc.graph import collectives
from partc.graph.moves import Move, gathers_param, kind_of
from partc.passes.shard.propagate import is_zero
from partc.plan.mesh import MICROBATCH_AXIS

WEIGHTS_AND_GRADS = {
    "all_gather": "gather_weights",
    "all_reduce": "sum_grads",
    "reduce_scatter": "scatter_grads",
}


def start(node: fx.Node, x: Text, name: str, helpers: Helpers, done: str = "") -> str:
    """The statement that starts a collective on ``x`` and binds the result ``name`` and its handle.

    The handle is ``name_done`` if ``done`` gives no other. An all_reduce works in place:
    there ``x`` is ``name``.
    """
    done = done or f"{name}_done"
    k: dict[str, Any] = dict(node.kwargs)
    group = f"self.{k['axis']}"
    if node.target is collectives.all_reduce:
        return f"{done} = {all_reduce(node, name, at_once=False)}"
    operands = [str(x), str(k["num"]), group]
    if node.target is collectives.all_gather:
        call = helpers.use("gather")
    elif node.target is collectives.reduce_scatter:
        call = helpers.use("scatter_sum")
        if cut := _cut(k["dim"], k.get("outer", 1)):
            operands[0] = f"{helpers.use('in_pieces')}({', '.join([str(x), str(k['num']), *cut])})"
    else:
        call = helpers.use("exchange")
        operands += _cut(k["to_dim"], k.get("to_outer", 1), always=True)
    return f"{name}, {done} = {call}({', '.join(operands)})"


def all_reduce(node: fx.Node, name: str, *, at_once: bool = True) -> str:
    """The call that starts a sum, or a maximum, and finishes it ``at_once``."""
    op = ", op=dist.ReduceOp.MAX" if node.kwargs.get("op", "sum") == "max" else ""
    later = "" if at_once else ", async_op=True"
    return f"dist.all_reduce({name}{op}, group=self.{node.kwargs['axis']}{later})"


def transfer(node: fx.Node, tensors: str, each: Sequence[Move], helpers: Helpers) -> str:
    """The call that starts to gather weights, or to reduce gradients, in one transfer.

    ``tensors`` is the text of a list or a dict, ``each`` has its tensors in order.
    """
    name, operands = WEIGHTS_AND_GRADS[kind_of(node)], [tensors]
    name = "gather_grads" if name == "gather_weights" and not gathers_param(node) else name
    operands += [] if name == "sum_grads" else [str(node.kwargs["num"])]
    operands.append(f"self.{node.kwargs['axis']}")
    if name == "scatter_grads" and (cuts := cuts_of(each)):
        name, operands = "scatter_cut_grads", [*operands, *cuts]
    return f"{helpers.use(name)}({', '.join(operands)})"


def taken(gathered: str, each: Sequence[Move], helpers: Helpers) -> str:
    """The weights that transfers have gathered, as a list; ``each`` has them in order."""
    if cuts := cuts_of(each):
        return f"{helpers.use('take_cut')}({', '.join([gathered, *cuts])})"
    return f"{helpers.use('take')}({gathered})"


def cuts_of(each: Sequence[Move]) -> list[str]:
    """Where tensors are cut, as (dim, outer); empty if all of them are on dim 0."""
    cuts = [(m.kwargs["dim"], m.kwargs.get("outer", 1)) for m in each]
    return [str(cut) for cut in cuts] if {*cuts} - {(0, 1)} else []


def after_wait(node: fx.Node, name: str, helpers: Helpers) -> str:
    """The statement that makes the whole of pieces on dim 0; none where they lie as they should."""
    k: dict[str, Any] = dict(node.kwargs)
    if node.target not in (collectives.all_gather, collectives.all_to_all):
        return ""
    if k["dim"] == 0 and k.get("outer", 1) == 1:
        return ""
    operands = [name, str(k["num"]), *_cut(k["dim"], k.get("outer", 1), always=True)]
    return f"{name} = {helpers.use('join')}({', '.join(operands)})"


def local(node: fx.Node, x: Text, helpers: Helpers) -> Text:
    """The text of the ops that depend on the rank but move nothing."""
    k: dict[str, Any] = dict(node.kwargs)
    index = "i" if k["axis"] == MICROBATCH_AXIS else f"self.{k['axis']}_rank"
    if node.target is collectives.axis_index:
        return Text(index)
    if node.target is collectives.keep_first and is_zero(node.all_input_nodes[0]):
        return x
    if node.target is collectives.keep_first:
        return Text(f"{x.at(COMPARE)} if {index} == 0 else torch.zeros_like({x})", NONE - 1)
    if k.get("outer", 1) > 1:
        return Text(f"{helpers.use('piece')}({x}, {k['num']}, {index}, {k['dim']}, {k['outer']})")
    dim = f", {k['dim']}" if k["dim"] else ""
    return Text(f"{x.at(ATOM)}.chunk({k['num']}{dim})[{index}]")


def _cut(dim: int, outer: int, always: bool = False) -> list[str]:
    """``dim`` and ``outer`` as arguments, left out where they are the default."""
    if outer > 1:
        return [str(dim), str(outer)]
    return [str(dim)] if dim or always else []
