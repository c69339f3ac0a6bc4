"""Choose which gradients are reduced over ranks early, beside the last microbatch's backward.

Gradients accumulate over the microbatches and are reduced over ranks once. In the stage's last
backward a block's gradients are final once the block is done, so that their reduction can overlap
with the backward of the next block. That is one transfer per block instead of a few large ones; it
is chosen where less time is left to wait after the backward (``early_cost.py``).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from partc.cost.bytes import put_in_bytes
from partc.cost.early_cost import EarlyBytes
from partc.cost.flops import node_flops
from partc.cost.stage_cost import StageCost
from partc.errors import CheckError, PlanError
from partc.graph import Graph, Phase, collectives, fake_of, first_operand, value
from partc.graph.early import EarlyReduction
from partc.graph.folds import list_member
from partc.graph.moves import carried, kind_of, start_of, wire_of
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.schedules import Schedule

Chain = tuple[fx.Node, ...]  # collectives in order
REDUCTIONS = (collectives.all_reduce, collectives.reduce_scatter)


def early_of(end: fx.Node, last: int) -> EarlyReduction:
    """The kind of early reduction that collective ``end`` is, begun in microbatch ``last``."""
    dim, outer = int(str(end.kwargs.get("dim", 0))), int(str(end.kwargs.get("outer", 1)))
    return EarlyReduction(
        kind_of(end), str(end.kwargs["axis"]), dim, outer, last, fake_of(end).dtype
    )


Candidates = dict[int, tuple[EarlyReduction, EarlyBytes]]  # by stage


def candidates(
    graphs: Sequence[Graph], costs: Sequence[StageCost], order: Schedule, tied: Sequence[str]
) -> Candidates:
    """The stages that can reduce gradients early, with the reduction and its bytes.

    A stage with a block that owns one of the ``tied`` parameters (shared by several stages) reduces
    no gradient early: the stages first add up their gradients.
    """
    found = {}
    for stage, (graph, cost) in enumerate(zip(graphs, costs, strict=True)):
        if early := _early(graph, cost, _last(order, stage), tied):
            found[stage] = early
    return found


def choose_early_sums(
    found: Candidates, costs: Sequence[StageCost], order: Schedule, plan: Plan, mesh: Mesh
) -> Plan:
    """The plan with ``early_sums`` set to the stages that save time by them, if any stage could
    reduce gradients early and the plan does not say so.
    """
    if plan.early_sums is not None or not found:
        return plan
    at = {stage: mesh.at_place(order.rank_of[stage]) for stage in found}
    saving = (s for s, (_, moved) in found.items() if moved.saved_s(costs[s].spent, at[s]) > 0)
    return plan.changed(early_sums=tuple(saving))


def set_early_sums(graphs: Sequence[Graph], found: Candidates, plan: Plan) -> None:
    """Set ``early`` of each stage graph to its early reduction if the plan names the stage, else to
    None; PlanError for a stage that has none.
    """
    for stage in plan.early_sums or ():
        if stage not in found:
            raise PlanError(
                where="plan, early_sums",
                what=f"stage {stage} has no gradients that could be summed early"
                if stage < len(graphs)
                else f"there is no stage {stage}, of {len(graphs)} counted from 0",
                why=f"stages that have such gradients: {', '.join(map(str, found)) or 'none'}",
                do="Leave the stage out, or the whole line: it is then chosen.",
            )
    for stage, graph in enumerate(graphs):
        graph.early = found[stage][0] if stage in (plan.early_sums or ()) else None


def early_costs(
    found: Candidates, costs: Sequence[StageCost], order: Schedule, plan: Plan, mesh: Mesh
) -> tuple[StageCost, ...]:
    """The stages' costs with the early reductions of the plan."""
    costs = list(costs)
    for stage in plan.early_sums or ():
        cost, moved, at = costs[stage], found[stage][1], mesh.at_place(order.rank_of[stage])
        costs[stage] = replace(cost, early=moved, spent=moved.ending(cost.spent, at))
    return tuple(costs)


def _last(order: Schedule, stage: int) -> int:
    """The microbatch whose weight gradients a stage computes last."""
    mine = [a for a in order.orders[order.rank_of[stage]] if a.stage == stage and a.kind in "BW"]
    return mine[-1].microbatch if mine else -1


def closing_chain(node: fx.Node) -> tuple[fx.Node, Chain]:
    """The value that a microbatch adds to a gradient, and the collectives after the last one.

    CheckError if another call follows the accumulation.
    """
    chain: list[fx.Node] = []
    while value(node).phase == "E":
        if node.target is collectives.accumulate:
            return first_operand(node), tuple(reversed(chain))
        operand = carried(node)
        if operand is None:
            raise CheckError(
                where=value(node).module or node.name,
                what=f"{node.name} follows the sum over microbatches",
                why="only collectives are expected there",
                do="Use reduce = 'microbatch' in the plan.",
            )
        if node.target is not collectives.wait:
            chain.append(start_of(node) if node.target is operator.getitem else node)
        node = operand
    return node, ()


@dataclass(frozen=True)
class Leaving:
    """Parameter names by when the reduction of their gradients begins: ``first`` before the blocks'
    backward, ``blocks`` each behind its own block's backward, ``rest`` after the whole backward.
    """

    first: tuple[str, ...]
    blocks: tuple[str, ...]
    rest: tuple[str, ...]


def leaving(
    graph: Graph, early: EarlyReduction, chains: Mapping[str, tuple[fx.Node, Chain]]
) -> Leaving:
    """Sort by time the gradients that one collective of the kind ``early`` finishes.

    ``chains`` has ``closing_chain`` of every gradient.
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
            # Made inside of the block that owns the parameter, so it is final when that is done.
            blocks.append(name)
        elif start and known.phase == final and place[made] < place[start] and not block[0]:
            first.append(name)
        else:
            rest.append(name)
    return Leaving(tuple(first), tuple(blocks), tuple(rest))


def _first_of_blocks(graph: Graph, phase: str) -> fx.Node | None:
    """The first call of a phase that is inside of a block."""
    mine = (n for n in graph.calls() if value(n).phase == phase)
    return next((n for n in mine if list_member(value(n).module)[0]), None)


def _early(
    graph: Graph, cost: StageCost, last: int, tied: Sequence[str]
) -> tuple[EarlyReduction, EarlyBytes] | None:
    """The early reduction that a stage can have, and its bytes; None if there is none.

    One kind of collective can run early: the one that moves most bytes. Sums with fewer bytes are
    one for each block already; where a stage has some, all of its sums begin behind the backward.
    """
    chains = {name: closing_chain(grad) for name, grad in graph.grads.items()}
    if any(wire_of(end) for _, chain in chains.values() for end in chain):
        return None
    sizes: dict[EarlyReduction, int] = defaultdict(int)
    for _, chain in chains.values():
        if len(chain) == 1 and chain[0].target in REDUCTIONS:
            early = early_of(chain[0], last)
            sizes[early] += graph.times(chain[0]) * put_in_bytes(chain[0])
    if not sizes or last < 0 or "E" not in cost.spent:
        return None
    # Axis and dim decide between equal sizes, so that the choice does not depend on an order.
    early = max(sizes, key=lambda one: (sizes[one], one.axis, one.dim))
    groups = leaving(graph, early, chains)
    if not groups.blocks or {*groups.first, *groups.blocks} & {*tied}:
        return None
    return early, _bytes(graph, early, groups, chains, cost)


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
    """The share of a phase's FLOPs that are inside of blocks."""
    flops = {n: graph.times(n) * node_flops(n) for n in graph.calls() if value(n).phase == phase}
    inside = sum(f for n, f in flops.items() if list_member(value(n).module)[0])
    return float(inside / max(sum(flops.values()), 1))
