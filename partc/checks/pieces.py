"""Check blocks that are computed in pieces of a rank's batch, so that transfers of one piece run
beside the computing of another.

A ``slice`` takes a piece out, calls of the same turn compute with the piece, ``cat`` or ``add``
joins the pieces of all turns.
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
    """Check that a call reads pieces of one turn, and that a join reads one piece of every turn."""
    held_by: dict[fx.Node, tuple[int, ...]] = {}  # the turns whose pieces a value is made of
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
            # a cat joins all pieces at once, sums add one piece after the other
            ends = node.target is CAT or not any(_adds_to(node, user) for user in node.users)
            held_by[node] = () if ends else turns


def _adds_to(node: fx.Node, user: fx.Node) -> bool:
    """Whether ``user`` adds the next piece to ``node``, a sum of the pieces before."""
    joins = (
        user.op == "call_function" and user.target is ADD and value(user).origin is Origin.PIECES
    )
    return joins and value(user).turn is None and user.args[0] is node


def is_piecewise(node: fx.Node) -> bool:
    """Whether a call slices or concatenates pieces; ``add``'s rule is enough for sums of pieces."""
    return value(node).origin is Origin.PIECES and node.target in (SLICE, CAT)


def check_piece(node: fx.Node) -> None:
    """Check a slice or cat of pieces.

    The sharding stays, and the piece's dim changes by the same ratio in the whole shape as in this
    rank's.
    """
    dim = int(str(node.args[1]))
    whole, here = value(node), fake_of(node).shape
    shape = whole.shape
    for operand in tensor_args(node):
        known = value(operand)
        sides = (known.shape, shape)
        theirs, ours = ([n for i, n in enumerate(each) if i != dim] for each in sides)
        if known.sharding != whole.sharding or theirs != ours:
            why = f"it is a piece along dim {dim}, or the whole of such, and lies as its operands"
            raise wrong(node, why, "Give it the sharding and the other dims of its operands.")
        if known.shape[dim] * here[dim] != shape[dim] * fake_of(operand).shape[dim]:
            why = f"on a rank dim {dim} has {fake_of(operand).shape[dim]} and then {here[dim]}"
            raise wrong(node, why, f"Note the same ratio of dim {dim} for all ranks together.")
    turn = value(node).turn
    if node.target is SLICE and (turn is None or node.args[2] != turn * here[dim]):
        raise wrong(node, f"piece {turn} does not begin at {node.args[2]}", "Take pieces in order.")
