"""The gathers of a block's weights: which calls they are, and the lines that start them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from torch import fx

from partc.codegen.calls.backends import c10d
from partc.codegen.calls.ranges import WAIT_FOR_WEIGHTS, in_ranges, of_transfer
from partc.codegen.calls.statements import Statement
from partc.codegen.helpers.needed import Helpers
from partc.codegen.repeats.slots import Interface
from partc.codegen.text import Line, Range
from partc.graph import Graph, collectives, tensor_args
from partc.graph.moves import gathers_param, moves


def first_gathers(graph: Graph, side: Interface) -> list[fx.Node]:
    """The gathers of the block's own weights with which a phase begins, in a fixed order.

    Gathers of one weight each come before those of several; both are in the order of the
    parameters.
    """
    own = {side.own(slot) for slot in side.of("own")}
    starts = [n for n in side.group.nodes if gathers_param(n) and own.issuperset(tensor_args(n))]
    order = list(graph.params.values())
    return sorted(starts, key=lambda n: (len(tensor_args(n)) > 1, order.index(tensor_args(n)[0])))


def gather_lines(
    starts: Iterable[fx.Node], attribute: Callable[[fx.Node], str], params: list[str],
    helpers: Helpers,
) -> list[Line]:  # fmt: skip
    """The lines that start a phase's gathers; ``self.whole`` holds them until ``take``.

    ``attribute`` gives the text by which methods read a stored weight, ``self.w_weight``;
    ``params`` are the texts of all parameters of the class, in the order of the declarations.
    """
    lines: list[Line] = []
    for alike in _gathered_alike(starts):
        names = [attribute(shard) for node in alike for shard in tensor_args(node)]
        lines += _start(alike, names, names == params, "+=" if lines else "=", helpers)
    return lines


def _start(
    starts: Sequence[fx.Node], names: list[str], every: bool, put: str, helpers: Helpers
) -> list[Line]:
    """The lines that start gathers which are alike: one transfer, or a loop over weights.

    ``every``: they gather all parameters of the class.
    """
    alone = len(starts) == 1
    whole = "self.parameters()" if every else ""
    sent = c10d.shards(names if alone else ["weight"], starts[0], helpers, whole if alone else "")
    call = c10d.transfer(starts[0], sent, helpers)
    ranged = of_transfer(starts[0]) if helpers.ranges else None
    if alone:
        return in_ranges([Line(f"self.whole {put} {call}", range=ranged)])
    empty = [Line("self.whole = Gathered()")] if put == "=" else []
    weights = whole or f"[{', '.join(names)}]"
    started = in_ranges([Line(f"self.whole += {call}", indent=1, range=ranged)])
    return [*empty, Line(f"for weight in {weights}:"), *started]


def _gathered_alike(starts: Iterable[fx.Node]) -> Iterator[list[fx.Node]]:
    """Gathers that one loop can start: neighbours of one weight each over the same axis.

    A gather of several weights is alone.
    """

    def alike(start: fx.Node) -> object:
        joined = start.target in collectives.JOINED
        return start if joined else tuple(start.kwargs.get(k) for k in ("axis", "num", "dtype"))

    return (list(together) for _, together in groupby(starts, key=alike))


def take_whole(
    starts: Iterable[fx.Node], names: Sequence[str], steady: bool, helpers: Helpers
) -> Statement:
    """The lines with which a method takes its gathered weights, of these ``names``.

    ``steady``: they were put together before the first microbatch.
    """
    listed = f"[{names[0]}]" if len(names) == 1 else ", ".join(names)
    if steady:
        return Statement([Line(f"{listed} = self.whole")])
    waits = Range(WAIT_FOR_WEIGHTS) if helpers.ranges else None
    each = [move for start in starts for move in moves(start)]
    joined = c10d.put_together(names, each, helpers)
    return Statement([Line(f"{listed} = self.whole.take()", range=waits), *joined])
