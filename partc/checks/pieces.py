"""Checks of blocks that are computed in pieces: what takes them out of what a rank holds, what
computes with them, and what joins them.
"""

from __future__ import annotations

import torch
from torch import fx

from partc.checks.calls import wrong
from partc.graph import Graph, Origin, fake_of, tensor_args, value

SLICE, CAT, ADD = (
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.cat.default,
    torch.ops.aten.add.Tensor,
)


def check_turns(graph: Graph) -> None:
    """Pieces are computed from pieces of the same turn, and joined from one of every turn."""
    held_by: dict[fx.Node, tuple[int, ...]] = {}  # the turns that a value has of what is joined
    for node in graph.calls():
        mine = value(node).turn
        turns = tuple(t for n in tensor_args(node) for t in held_by.get(n, ()))
        if mine is not None:
            if any(turn != mine for turn in turns):
                why = f"it is piece {mine} and reads pieces {sorted(set(turns))}"
                raise wrong(node, why, "Let it read the pieces of its own turn.")
            held_by[node] = (mine,)
        elif turns:
            in_order = turns == tuple(range(len(turns)))
            if (
                value(node).origin is not Origin.PIECES
                or node.target not in (CAT, ADD)
                or not in_order
            ):
                why = f"it reads pieces {list(turns)} and is none"
                raise wrong(node, why, "Join them in their order first.")
            ends = node.target is CAT or not any(_adds_to(node, user) for user in node.users)
            held_by[node] = () if ends else turns


def _adds_to(node: fx.Node, user: fx.Node) -> bool:
    """Whether a sum of pieces goes on with the next one."""
    joins = (
        user.op == "call_function" and user.target is ADD and value(user).origin is Origin.PIECES
    )
    return joins and value(user).turn is None and user.args[0] is node


def is_piecewise(node: fx.Node) -> bool:
    """Whether a call is noted as one that takes out or joins pieces; sums follow their own rule."""
    return value(node).origin is Origin.PIECES and node.target in (SLICE, CAT)


def check_piece(node: fx.Node) -> None:
    """The result lies as its operands do, and is as much larger or smaller for all ranks together
    as it is on this one.
    """
    dim = int(str(node.args[1]))
    lies, shape, here = value(node).sharding, value(node).shape, fake_of(node).shape
    for operand in tensor_args(node):
        known = value(operand)
        others = [(size, i) for i, size in enumerate(known.shape) if i != dim]
        if known.sharding != lies or others != [(n, i) for i, n in enumerate(shape) if i != dim]:
            why = f"it is a piece along dim {dim}, or the whole of such, and lies as its operands"
            raise wrong(node, why, "Give it the sharding and the other dims of its operands.")
        if known.shape[dim] * here[dim] != shape[dim] * fake_of(operand).shape[dim]:
            why = f"on a rank dim {dim} has {fake_of(operand).shape[dim]} and then {here[dim]}"
            raise wrong(node, why, f"Note the same ratio of dim {dim} for all ranks together.")
    turn = value(node).turn
    if node.target is SLICE and (turn is None or node.args[2] != turn * here[dim]):
        raise wrong(node, f"piece {turn} does not begin at {node.args[2]}", "Take pieces in order.")
