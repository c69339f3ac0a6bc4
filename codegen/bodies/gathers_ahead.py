"""Starts the gathers of weights in front of loops: early enough to hide, not all at once.

A parameter exists from the start, so that its gather could start with the step; then all whole
weights would lie in memory together. As in FSDP, a few are on their way while others are in use:
further gathers start as long as those on their way have fewer bytes than the largest gather.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from operator import itemgetter

from torch import fx

from partc.codegen.calls.storage import num_bytes
from partc.codegen.repeats.runs import Item, Loop
from partc.cost.flops import node_flops
from partc.graph import collectives, tensor_args, value
from partc.graph.given_back import is_given_back
from partc.graph.moves import gathers_param


def gather_ahead(items: Sequence[Item]) -> list[Item]:
    """The items of a step, with the starts of gathers that stand between loops moved up.

    A start moves up to the wait of an earlier gather, or to the loop before; in pipelines no
    further than its phase, and nowhere over the place where a step waits for a script's loss.
    """
    largest = max(map(_gathered, items), default=0)
    found: list[Item] = []
    for is_loop, stretch in groupby(items, key=lambda item: isinstance(item, Loop)):
        if is_loop:
            found += stretch
        else:
            calls = [item for item in stretch if isinstance(item, fx.Node)]
            for part in _parts(calls):
                found += _ahead(part, largest)
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
    behind = accumulate(node_flops(node) for node in reversed(calls))
    enough = next((i for i, flops in enumerate(behind, start=1) if flops >= wanted > 0), len(calls))
    return max(least, len(calls) - enough)


def _parts(calls: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """The calls of each phase; those behind the wait for a script's loss by themselves, as no
    transfer is under way while a step waits for it.
    """
    waited = [0, *accumulate(map(is_given_back, calls))]
    keys = zip((value(node).phase for node in calls), waited, strict=False)
    pairs = zip(keys, calls, strict=True)
    for _, part in groupby(pairs, key=itemgetter(0)):
        yield [node for _, node in part]


def _ahead(calls: Sequence[fx.Node], most: int) -> Iterator[fx.Node]:
    """The calls between two loops, their gathers started while fewer bytes are on their way.

    Those before a wait for a gather, and that gather, are started in any case.
    """
    waiting = deque(node for node in calls if gathers_param(node))
    on_their_way: dict[fx.Node, int] = {}

    def starts(wanted: fx.Node | None = None) -> Iterator[fx.Node]:
        while waiting and (wanted in waiting or sum(on_their_way.values()) < most):
            start = waiting.popleft()
            on_their_way[start] = _bytes(start)
            yield start

    yield from starts()
    for node in calls:
        if gathers_param(node):
            continue
        if node.target is collectives.wait:
            started = node.all_input_nodes[0]
            yield from starts(started)
            on_their_way.pop(started, None)
            yield from starts()
        yield node


def _gathered(item: Item) -> int:
    """The bytes of whole weights that a call gathers, or one block of a loop."""
    if isinstance(item, Loop):
        return sum(map(_bytes, filter(gathers_param, item.groups[0].nodes)))
    return _bytes(item) if gathers_param(item) else 0


def _bytes(start: fx.Node) -> int:
    """The bytes of the whole weights that a gather gives."""
    shards = sum(map(num_bytes, tensor_args(start)))
    return shards * int(str(start.kwargs["num"]))
