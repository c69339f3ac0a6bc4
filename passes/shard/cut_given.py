"""Shard values that depend on the step's inputs alone (masks, positions) as their readers do.

Shardings spread forward from parameters and inputs, so a mask made from positions is whole although
every attention reads only a shard of the mask. This pass moves the readers' shardings back:
``keep_piece(positions) -> mask`` instead of ``positions -> keep_piece(mask)``. Masks and positions
have no gradients, so that no other value depends on their shardings. A random draw is sharded so
so: each piece has numbers of its own, unless the plan says ``random = "single-device"``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from partc.graph import Graph, picked, tensor_args
from partc.graph.draws import draws_numbers
from partc.graph.input_only import input_only
from partc.passes.shard.price import Choices, Prices
from partc.plan import Plan
from partc.plan.sharding import Layout, R
from partc.rules import strategies


def cut_given(graph: Graph, plan: Plan, choices: Choices) -> None:
    """Shard each whole input-only value as all its readers read it; ``choices`` in place.

    From the last call to the first: a sharded value then asks its own operands for shards.
    """
    known = input_only(graph, draws=True)
    calls = [n for n in graph.calls() if n in known and n.target is not operator.getitem]
    if plan.random == "single-device":
        calls = [n for n in calls if not draws_numbers(n)]
    for axis in graph.mesh.names:
        prices = Prices(graph, plan, axis, choices, {})
        for node in reversed(calls):
            if axis not in choices.get(node, {}):
                wanted = _wanted(node, choices, axis)
                if any(layout != R for layout in wanted.values()):
                    _cut(node, wanted, prices)


def wanted_by_readers(node: fx.Node, choices: Choices, axis: str) -> Layout:
    """The layout in which all readers of a tensor read it; R if they differ, or without any."""
    return _wanted(node, choices, axis).get(0, R)


def _wanted(node: fx.Node, choices: Choices, axis: str) -> dict[int, Layout]:
    """Per result of a call the layout in which all its readers read it; R if they differ."""
    found: dict[int, Layout] = {}
    for result, layout in _reads(node, choices, axis):
        found[result] = layout if found.get(result, layout) == layout else R
    return found


def _reads(node: fx.Node, choices: Choices, axis: str) -> Iterator[tuple[int, Layout]]:
    """The number and the layout of every read of a call's results."""
    for user in node.users:
        if user.target is operator.getitem:
            yield from ((picked(user)[1], layout) for _, layout in _reads(user, choices, axis))
        elif user.op == "output":
            yield 0, R
        else:
            chosen = choices.get(user, {}).get(axis)
            for i, operand in enumerate(tensor_args(user)):
                if operand is node:
                    yield 0, chosen.ins[i] if chosen else R


def _cut(node: fx.Node, wanted: dict[int, Layout], prices: Prices) -> None:
    """Choose the strategy with the ``wanted`` result layouts that reads the fewest bytes, if any.

    A strategy that makes a partial sum does not count: it would need a collective.
    """
    operands = tensor_args(node)
    seen = [(len(operands) + i, layout) for i, layout in wanted.items()]
    fitting = [
        strategy
        for strategy in strategies(node, prices.num, seen)
        if all(strategy.outs[i] == layout for i, layout in wanted.items())
        and all(layout.kind in ("R", "cut") for layout in (*strategy.ins, *strategy.outs))
        and prices.fits(node, operands, strategy)
    ]
    if fitting:
        best = min(fitting, key=lambda s: prices.local(node, operands, s))
        prices.choices.setdefault(node, {})[prices.axis] = best
