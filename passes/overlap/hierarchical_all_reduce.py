"""Hierarchical all-reduce: sum gradients over two mesh axes by reduce-scatter, all-reduce,
all-gather.

Two all-reduces, one per axis, send the whole gradient over both axes. After a reduce-scatter over
the inner axis (the ranks of one machine) each rank sends only its shard over the outer axis
(between machines), which is often far slower. An all-gather over the inner axis ends the sum (as in
BlueConnect, Cho et al. 2019, MLSys).

    all_reduce(all_reduce(g, outer), inner)
        -->  all_gather(all_reduce(reduce_scatter(g, inner), outer), inner)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from math import inf
from typing import Any

from torch import fx

from partc.graph import Graph, collectives, fake_of, first_operand, set_fake, set_value, value
from partc.graph.graph_edits import run_fake
from partc.passes.overlap.bucket_collectives import BYTES_PER_MB, stack_block_of, ways_out
from partc.passes.shard.reshard import is_innermost
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.sharding import R, Sharding, cut

KIND = "all_reduce"


@dataclass(frozen=True)
class Levels:
    """The axis of the reduce-scatter and all-gather (inner), and that of the all-reduce (outer)."""

    inner: str
    outer: str


def hierarchical_all_reduce(graph: Graph, plan: Plan, mesh: Mesh) -> Graph:
    """Rewrite pairs of all-reduces of gradients as hierarchical ones, in place, where the plan's
    ``hierarchical`` says so.

    All gradients of a block are rewritten alike, so that buckets join them: runs before bucketing.
    """
    for chains in pairs(graph).values():
        levels = _planned(chains, plan, mesh)
        if levels is not None:
            for chain in chains:
                _rewrite(graph, chain, levels)
    graph.fx.lint()
    return graph


Chain = tuple[fx.Node, fx.Node]  # two all-reduces, the second of the first one's result


def pairs(graph: Graph) -> dict[Any, list[Chain]]:
    """Pairs of all-reduces that finish gradients, by block, phase, axes and dtype."""
    found: dict[Any, list[Chain]] = defaultdict(list)
    block_of = stack_block_of(graph)
    for chain in _chains(graph):
        axes = tuple(str(node.kwargs["axis"]) for node in chain)
        found[block_of(chain[0]), value(chain[0]).phase, axes, fake_of(chain[0]).dtype].append(
            chain
        )
    return found


def _chains(graph: Graph) -> Iterator[Chain]:
    """Pairs of all-reduces, over two axes, that finish one gradient."""
    ways = ways_out(graph)
    for node in graph.calls():
        way = [kind for kind, _ in ways.get(node, ())]
        if way == [KIND, KIND]:
            yield node, next(iter(node.users))


def axes_of(chains: list[Chain]) -> tuple[str, str]:
    """The two axes of pairs that belong together, in the order in which they are summed over."""
    first, last = (str(node.kwargs["axis"]) for node in chains[0])
    return first, last


def bytes_of(chains: list[Chain]) -> int:
    """The bytes of all gradients of pairs that belong together."""
    return sum(int(fake_of(first).nbytes) for first, _ in chains)


def _planned(chains: list[Chain], plan: Plan, mesh: Mesh) -> Levels | None:
    """The inner and the outer axis by the plan; None for two plain all-reduces.

    None too where a gradient cannot be scattered over the inner axis.
    """
    for inner, outer in permutations(axes_of(chains)):
        least_mb = (plan.hierarchical or {}).get(inner, {}).get(outer, inf)
        large = bytes_of(chains) >= least_mb * BYTES_PER_MB
        if large and all(_scattered(first, inner, mesh) for first, _ in chains):
            return Levels(inner, outer)
    return None


def _scattered(node: fx.Node, axis: str, mesh: Mesh) -> Sharding | None:
    """The sharding of an all-reduce's operand with dim 0 sharded over ``axis`` too.

    None if ``axis`` does not divide dim 0 or would not be innermost on it.
    """
    shape, operand = value(node).shape, first_operand(node)
    scattered = value(operand).sharding.with_(axis, cut(0), mesh)
    fits = scattered.local_shape(shape, mesh) is not None and is_innermost(scattered, axis)
    return scattered if fits else None


def _rewrite(graph: Graph, chain: Chain, levels: Levels) -> None:
    """Replace two all-reduces by reduce-scatter, all-reduce, all-gather."""
    first, last = chain
    mesh = graph.mesh
    nums = {str(node.kwargs["axis"]): node.kwargs["num"] for node in chain}
    of_inner = {"axis": levels.inner, "num": nums[levels.inner], "dim": 0, "outer": 1}
    scattered = _scattered(first, levels.inner, mesh)
    assert scattered is not None
    steps: list[tuple[Any, dict[str, Any], Any]] = [
        (collectives.reduce_scatter, of_inner, scattered),
        (collectives.all_reduce, {"axis": levels.outer, "num": nums[levels.outer], "op": "sum"},
         scattered.with_(levels.outer, R, mesh)),
        (collectives.all_gather, of_inner, value(last).sharding),
    ]  # fmt: skip
    node = first_operand(first)
    for target, kwargs, after in steps:
        with graph.fx.inserting_before(last):
            new = graph.fx.call_function(target, (node,), dict(kwargs))
        set_value(new, replace(value(first), sharding=after))
        set_fake(new, run_fake(target, (node,), kwargs))
        node = new
    last.replace_all_uses_with(node)
    graph.fx.erase_node(last)
    graph.fx.erase_node(first)
