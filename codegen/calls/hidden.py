"""The comment beside the wait for a transfer: what stands between its start and the wait.

Figures are bytes and FLOPs, which follow from the plan alone. How long that takes depends on the
machine: ``partc explain`` says so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch import fx

from partc.amounts import amount
from partc.codegen.calls.inline import is_free
from partc.codegen.calls.storage import num_bytes
from partc.codegen.helpers.needed import Outlined
from partc.cost.flops import node_flops
from partc.graph import collectives, is_tensor, ops, picked
from partc.graph.moves import moved as moves_of
from partc.passes.overlap.write_pieces import taken_from

NAMES = 2  # so many calls are named, of more their number is said
SMALL = 8  # a call that makes less than 1/8 of the bytes that move hides next to nothing


def hidden_by(start: fx.Node, between: Sequence[fx.Node], name_of: Callable[[fx.Node], str]) -> str:
    """``hidden behind 3 weight gradients (4.2 MB beside 1.6 GFLOP)``; ``exposed`` by nothing.

    ``between`` are the calls whose lines stand between start and wait. Views and transfers hide
    nothing, nor do calls that make much less than what moves.
    """
    moved = sum(map(num_bytes, moves_of(start)))
    calls = [*{_call(n): n for n in reversed(between) if _is_call(n)}.values()][::-1]
    flops = sum(node_flops(_call(n)) for n in calls)
    if not calls:
        return "exposed: its result is needed next"
    heavy = [n for n in calls if node_flops(_call(n)) or isinstance(_call(n).target, Outlined)]
    how = "hidden" if heavy else "partly hidden"
    heavy = heavy or [n for n in calls if num_bytes(n) * SMALL >= moved]
    if not heavy:
        return f"exposed but for small calls: {_listed(calls, name_of)}"
    work = f" beside {amount(flops, 'FLOP')}" if flops else ""
    return f"{how} behind {_listed(heavy, name_of)} ({amount(moved, 'B')}{work})"


def _is_call(node: fx.Node) -> bool:
    """Whether a call computes: no view or transfer. The results of one call are one call."""
    if is_free(node) or taken_from(node) is not None or not is_tensor(node):
        return False
    if node.target is operator.getitem:
        return picked(node)[0].target is not collectives.wait
    return node.target not in (*collectives.COLLECTIVES, *collectives.LOCAL, collectives.wait)


def _call(node: fx.Node) -> fx.Node:
    return picked(node)[0] if node.target is operator.getitem else node


def _listed(calls: Sequence[fx.Node], name_of: Callable[[fx.Node], str]) -> str:
    """Calls by kind and number, or by name if they are few: ``2 weight gradients, mul``."""
    grads = [n for n in calls if n.target is ops.weight_grad]
    others = [n for n in calls if n not in grads]
    found = [f"{len(grads)} weight gradients"] if len(grads) > 1 else [*map(name_of, grads)]
    if len(others) > NAMES:
        return ", ".join([*found, f"{len(others)} {'other ' if found else ''}calls"])
    return ", ".join(dict.fromkeys([*found, *map(name_of, others)]))
