"""Which sums over ranks that end a step begin beside its last backward.

What microbatches add up is summed over ranks once. In the last backward of a stage a block's
gradients are final as soon as the block is done: their sum runs beside the blocks before it.
That is a transfer for each block in place of a few large ones, so it is done where less time is
left when the backward ends (``early_cost.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from partc.cost.bytes import put_in_bytes
from partc.cost.early_cost import EarlyBytes
from partc.cost.flops import node_flops
from partc.cost.stage_cost import StageCost
from partc.errors import CheckError
from partc.graph import Graph, Phase, collectives, value
from partc.graph.early import EarlyReduction
from partc.graph.folds import list_member
from partc.graph.moves import kind_of
from partc.plan.mesh import Mesh
from partc.schedules import Schedule

Chain = tuple[fx.Node, ...]  # collectives in order
REDUCTIONS = (collectives.all_reduce, collectives.reduce_scatter)


def early_of(end: fx.Node, last: int) -> EarlyReduction:
    """The sums that this collective finishes, leaving in microbatch ``last``."""
    dim, outer = int(str(end.kwargs.get("dim", 0))), int(str(end.kwargs.get("outer", 1)))
    return EarlyReduction(kind_of(end), str(end.kwargs["axis"]), dim, outer, last)


def with_early_sums(
    graphs: Sequence[Graph],
    costs: Sequence[StageCost],
    order: Schedule,
    mesh: Mesh,
    tied: Sequence[str],
) -> tuple[StageCost, ...]:
    """Note on the graphs of stages which sums begin early, and what is then left of the costs of
    ending the step. Where a block has parameters of several stages, ``tied``, none do.
    """
    found = []
    for stage, (graph, cost) in enumerate(zip(graphs, costs, strict=True)):
        at = mesh.at_place(order.rank_of[stage])
        early, cost = _early(graph, cost, _last(order, stage), at, tied)
        graph.early = early
        found.append(cost)
    return tuple(found)


def _last(order: Schedule, stage: int) -> int:
    """The microbatch whose weight gradients a stage computes last."""
    mine = [a for a in order.orders[order.rank_of[stage]] if a.stage == stage and a.kind in "BW"]
    return mine[-1].microbatch if mine else -1


def closing_chain(node: fx.Node) -> tuple[fx.Node, Chain]:
    """The value that each microbatch adds to a sum, and what the sum passes after that."""
    chain: list[fx.Node] = []
    while value(node).phase == "E":
        operand = node.all_input_nodes[0]
        if node.target is collectives.accumulate:
            return operand, tuple(reversed(chain))
        if node.target in collectives.COLLECTIVES:
            chain.append(node)
        elif node.target is not collectives.wait:
            raise CheckError(
                where=value(node).module or node.name,
                what=f"{node.name} follows the sum over microbatches",
                why="only collectives are expected there",
                do="Use reduce = 'microbatch' in the plan.",
            )
        node = operand
    return node, ()


@dataclass(frozen=True)
class Leaving:
    """Parameters by when the sums of their gradients begin: ``first`` before the blocks' backward,
    ``blocks`` each behind its own block, ``rest`` at the end.
    """

    first: tuple[str, ...]
    blocks: tuple[str, ...]
    rest: tuple[str, ...]


def leaving(
    graph: Graph, early: EarlyReduction, chains: Mapping[str, tuple[fx.Node, Chain]]
) -> Leaving:
    """When gradients leave that such a collective alone finishes; ``chains`` has what each
    microbatch adds to every gradient's sum, and the collectives after it.
    """
    first: list[str] = []
    blocks: list[str] = []
    rest: list[str] = []
    place = {node: i for i, node in enumerate(graph.calls())}
    at_work = {phase: _first_of_blocks(graph, phase) for phase in ("B", "W")}
    final = "W" if at_work["W"] is not None else "B"
    start = at_work[final]
    for name, (made, chain) in chains.items():
        if [early_of(end, early.last) for end in chain] != [early]:
            continue
        block, known = list_member(name), value(made)
        if block[0] and list_member(known.module) == block:
            blocks.append(name)
        elif start and known.phase == final and place[made] < place[start] and not block[0]:
            first.append(name)
        else:
            rest.append(name)
    return Leaving(tuple(first), tuple(blocks), tuple(rest))


def _first_of_blocks(graph: Graph, phase: str) -> fx.Node | None:
    """The first call of a phase that a block makes."""
    mine = (n for n in graph.calls() if value(n).phase == phase)
    return next((n for n in mine if list_member(value(n).module)[0]), None)


def _early(
    graph: Graph, cost: StageCost, last: int, mesh: Mesh, tied: Sequence[str]
) -> tuple[EarlyReduction | None, StageCost]:
    """What leaves early of the collectives that move most, if less time is left so."""
    chains = {name: closing_chain(grad) for name, grad in graph.grads.items()}
    sizes: dict[EarlyReduction, int] = defaultdict(int)
    for _, chain in chains.values():
        if len(chain) == 1 and chain[0].target in REDUCTIONS:
            early = early_of(chain[0], last)
            sizes[early] += graph.times(chain[0]) * put_in_bytes(chain[0])
    if not sizes or last < 0 or "E" not in cost.spent:
        return None, cost
    early = max(sizes, key=lambda one: (sizes[one], one.axis, one.dim))
    groups = leaving(graph, early, chains)
    if not groups.blocks or {*groups.first, *groups.blocks} & {*tied}:
        return None, cost
    moved = _bytes(graph, early, groups, chains, cost)
    if moved.saved_s(cost.spent, mesh) <= 0:
        return None, cost
    return early, replace(cost, early=moved, spent=moved.ending(cost.spent, mesh))


def _bytes(
    graph: Graph, early: EarlyReduction, groups: Leaving,
    chains: Mapping[str, tuple[fx.Node, Chain]], cost: StageCost,
) -> EarlyBytes:  # fmt: skip
    def num_bytes(names: Sequence[str]) -> int:
        ends = [chains[name][1][0] for name in names]
        return sum(int(graph.times(end) * put_in_bytes(end)) for end in ends)

    num = sum({list_member(n): graph.times(chains[n][1][0]) for n in groups.blocks}.values())
    return EarlyBytes(
        early.kind, early.axis, num_bytes(groups.first), num_bytes(groups.blocks) / num, num,
        num_bytes(groups.rest), _share(graph, "W" if "W" in cost.spent else "B"),
    )  # fmt: skip


def _share(graph: Graph, phase: Phase) -> float:
    """The part of a phase's arithmetic that its blocks do."""
    flops = {n: graph.times(n) * node_flops(n) for n in graph.calls() if value(n).phase == phase}
    inside = sum(f for n, f in flops.items() if list_member(value(n).module)[0])
    return float(inside / max(sum(flops.values()), 1))
