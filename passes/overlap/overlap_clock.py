"""How long calls and transfers take beside one another, in FLOPs, where blocks are in pieces.

In such a block only so much computing is put before a wait as its transfer takes. The plan counts
time in FLOPs: ``flops_per_byte = { memory = 60, tp = 900 }`` says that a rank computes 900 FLOPs
while one byte crosses ``tp``, and 60 while one is read or written. So the order of calls follows
from the plan alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from partc.cost.bytes import put_in_bytes
from partc.cost.collective_cost import collective_seconds
from partc.cost.roofline import call_of, piece_seconds
from partc.cost.storage import replay
from partc.graph import Graph, collectives, fake_of
from partc.graph.moves import kind_of
from partc.passes.overlap.take_turns import in_turns
from partc.plan import Plan
from partc.plan.decided import MEMORY, rounded
from partc.plan.mesh import Mesh

Flops = Callable[[fx.Node], float]


def choose_overlap_clock(graph: Graph, stages: list[Graph], plan: Plan, mesh: Mesh) -> Plan:
    """The plan with ``flops_per_byte`` set, if a block is computed in pieces.

    The numbers are means over the step: the seconds of transfers of an axis by their bytes, those
    of calls bound by memory by theirs, and for both the FLOPs of products in a second.
    """
    graphs = [each for each in stages or [graph] if in_turns(each)]
    seconds: dict[str, float] = defaultdict(float)
    amounts: dict[str, float] = defaultdict(float)  # bytes, and FLOPs of products
    for each in graphs:
        _count(each, mesh, seconds, amounts)
    if not graphs or not seconds[_PRODUCTS]:
        return plan
    rate = amounts[_PRODUCTS] / seconds[_PRODUCTS]  # FLOPs in a second
    found = {
        name: rounded(rate * seconds[name] / amounts[name])
        for name in (MEMORY, *mesh.names)
        if amounts.get(name)
    }
    return plan.changed(flops_per_byte=found)


_PRODUCTS = ""  # beside the names of axes


def _count(
    graph: Graph, mesh: Mesh, seconds: dict[str, float], amounts: dict[str, float]
) -> None:  # fmt: skip
    """Add the seconds of a graph's calls and transfers, and their FLOPs or bytes, by what bounds
    them.
    """
    ran, device = replay(graph), mesh.hardware.device
    for node in graph.calls():
        times = graph.times(node)
        if node.target in collectives.COLLECTIVES:
            axis = str(node.kwargs["axis"])
            took = collective_seconds(kind_of(node), put_in_bytes(node), mesh, axis)
            seconds[axis] += times * took
            amounts[axis] += times * _crossing_bytes(node)
        elif call := call_of(node, ran):
            name, amount = (_PRODUCTS, call.flops) if call.rows else (MEMORY, call.num_bytes)
            seconds[name] += times * piece_seconds(node, ran, device, 1)
            amounts[name] += times * amount


def call_flops(graph: Graph, plan: Plan) -> Flops | None:
    """The function from a call or transfer to the FLOPs that a rank computes meanwhile.

    None for a graph without blocks in pieces: there all calls that can hide a transfer stand beside
    it, whatever they take.
    """
    if not in_turns(graph) or plan.flops_per_byte is None:
        return None
    ran, per_byte = replay(graph), plan.flops_per_byte

    def flops(node: fx.Node) -> float:
        if node.target in collectives.COLLECTIVES:
            return per_byte.get(str(node.kwargs["axis"]), 0.0) * _crossing_bytes(node)
        call = call_of(node, ran)
        if call is None:
            return 0.0
        return max(float(call.flops), per_byte.get(MEMORY, 0.0) * call.num_bytes)

    return flops


def _crossing_bytes(node: fx.Node) -> int:
    """The bytes that a rank puts into a transfer or takes out of it, whichever are more."""
    arriving = [x.nbytes for x in pytree.tree_leaves(fake_of(node)) if isinstance(x, Tensor)]
    return max(put_in_bytes(node), sum(arriving))
