"""The order in which gathers of weights start between loops over blocks: in programs as predicted.

A parameter exists from the start, so that its gather could start with the step; then all whole
weights would lie in memory together. As in FSDP, a few are on their way while others are in use:
further gathers start as long as those on their way have fewer bytes than the largest gather.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from operator import itemgetter

from torch import fx

from partc.graph import collectives, fake_of, is_tensor, tensor_args, value
from partc.graph.given_back import is_given_back
from partc.graph.moves import gathers_param


def ahead(calls: Sequence[fx.Node], most: int) -> Iterator[fx.Node]:
    """The calls between two loops, their gathers started while fewer bytes are on their way.

    Those before a wait for a gather, and that gather, are started in any case. In pipelines a start
    moves no further than its phase, and nowhere over the place where a step waits for a script's
    loss.
    """
    for part in _parts(calls):
        yield from _ahead(part, most)


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
    waiting = deque(node for node in calls if gathers_param(node))
    on_their_way: dict[fx.Node, int] = {}

    def starts(wanted: fx.Node | None = None) -> Iterator[fx.Node]:
        while waiting and (wanted in waiting or sum(on_their_way.values()) < most):
            start = waiting.popleft()
            on_their_way[start] = whole_bytes([start])
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


def whole_bytes(calls: Iterable[fx.Node]) -> int:
    """The bytes of the whole weights that the gathers among some calls give."""
    starts = filter(gathers_param, calls)
    return sum(int(str(n.kwargs["num"])) * sum(map(_bytes, tensor_args(n))) for n in starts)


def _bytes(node: fx.Node) -> int:
    return fake_of(node).nbytes if is_tensor(node) else 0


def hidden_by(flops: Sequence[int], wanted: int, least: int = 0) -> int:
    """How many calls, of which each computes so many FLOPs, stand before the start of a gather.

    Those behind compute at least ``wanted`` FLOPs, which hide it; all hide it where they compute
    less. At least ``least`` calls stand before it.
    """
    behind = accumulate(reversed(flops))
    enough = next((i for i, done in enumerate(behind, start=1) if done >= wanted > 0), len(flops))
    return max(least, len(flops) - enough)
