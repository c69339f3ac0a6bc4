"""Orders a block's calls so that those of each block inside of it stand one behind the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from partc.cost.flops import node_flops
from partc.graph import collectives, fake_of, is_tensor
from partc.graph.moves import gathers_param, moved
from partc.in_order import in_order

SMALL = 64


def in_one_piece(nodes: Sequence[fx.Node], pieces: Sequence[Sequence[fx.Node]]) -> list[int] | None:
    """The order of a block's calls, by position, in which each piece of them is in one place.

    It stays near the order that the calls have, and each call stands behind what it reads. None
    where there is no such order: some call reads of a piece and is read by the piece.
    """
    piece_of = {node: piece[0] for piece in pieces for node in piece}
    rank: dict[fx.Node, int] = {}
    needs: dict[fx.Node, dict[fx.Node, None]] = defaultdict(dict)
    inside = {*nodes}
    for i, node in enumerate(nodes):
        item = piece_of.get(node, node)
        rank.setdefault(item, i)
        reads = (piece_of.get(n, n) for n in node.all_input_nodes if n in inside)
        needs[item] |= dict.fromkeys(read for read in reads if read is not item)
    order = [*in_order(needs, rank.__getitem__)]
    if len(order) < len(needs):
        return None
    whole = {piece[0]: piece for piece in pieces}
    at = {node: i for i, node in enumerate(nodes)}
    return [at[node] for item in order for node in whole.get(item, (item,))]


def exposes(nodes: Sequence[fx.Node], order: Sequence[int]) -> bool:
    """Whether a transfer loses more than half of what hides it, if calls stand in this order.

    A transfer of up to 1/64 of the block's largest value counts as nothing. Weights are gathered
    before a block's method begins.
    """
    after = [nodes[i] for i in order]
    at, then = ({node: i for i, node in enumerate(each)} for each in (nodes, after))
    largest = max(map(_bytes, nodes), default=0)
    for wait in nodes:
        start = wait.all_input_nodes[0] if wait.target is collectives.wait else None
        if (
            start not in at
            or gathers_param(start)
            or SMALL * sum(map(_bytes, moved(start))) <= largest
        ):
            continue
        before = sum(map(node_flops, nodes[at[start] + 1 : at[wait]]))
        between = after[then[start] + 1 : then[wait]]
        if 2 * sum(map(node_flops, between)) < before:
            return True
    return False


def _bytes(node: fx.Node) -> int:
    fake = fake_of(node)
    return fake.numel() * fake.element_size() if is_tensor(node) else 0
