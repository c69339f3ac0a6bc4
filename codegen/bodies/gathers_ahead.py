"""Starts the gathers of weights in front of loops: early enough to hide, not all at once.

Predictions follow the same order: ``partc/cost/gather_order.py`` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch import fx

from partc.codegen.repeats.runs import Item, Loop
from partc.cost.flops import node_flops
from partc.cost.gather_order import ahead, hidden_by, whole_bytes
from partc.graph.given_back import is_given_back


def gather_ahead(items: Sequence[Item]) -> list[Item]:
    """The items of a step, with the starts of gathers that stand between loops moved up.

    A start moves up to the wait of an earlier gather, or to the loop before.
    """
    largest = max((whole_bytes(_first_calls(item)) for item in items), default=0)
    found: list[Item] = []
    for is_loop, stretch in groupby(items, key=lambda item: isinstance(item, Loop)):
        if is_loop:
            found += stretch
        else:
            found += ahead([item for item in stretch if isinstance(item, fx.Node)], largest)
    return found


def begin_at(calls: Sequence[fx.Node], loop: Loop, num: int) -> int:
    """How many of the calls in front of a loop stand before the start of its first gathers.

    ``num`` blocks are gathered then. As in the loop, as many blocks' FLOPs hide that; calls that
    compute less hide it together. The weights of a block lie whole no longer than they need to.
    It stands behind the place where a step waits for a script's loss: other steps may run
    meanwhile, which gather the same blocks.
    """
    least = next((i + 1 for i, node in enumerate(calls) if is_given_back(node)), 0)
    wanted = num * sum(map(node_flops, loop.groups[0].nodes))
    return hidden_by([*map(node_flops, calls)], wanted, least)


def _first_calls(item: Item) -> Sequence[fx.Node]:
    """A call, or those of a loop's first block."""
    return item.groups[0].nodes if isinstance(item, Loop) else [item]
