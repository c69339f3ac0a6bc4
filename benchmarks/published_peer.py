"""A published system's step: partc's estimate with the peer's kernels, collectives and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.fused import by_hand_values, compiled_values
from benchmarks.published_models import Dims, build, example, loss_of
from benchmarks.published_rows import Row
from partc.cost.collective_cost import collective_seconds
from partc.graph import Graph
from partc.lowering import table, trace
from partc.machines.topology import Topology
from partc.passes.search.plans.candidate import Candidate
from partc.passes.search.plans.estimate import Estimator
from partc.passes.search.plans.read_scaling_model import scaling_models, touched_values
from partc.passes.search.plans.scaling_model import BACKWARD, FORWARD, ScalingModel
from partc.passes.search.plans.step_times import UnitTimes
from partc.plan.mesh import PP, TP, Mesh

TRACED_LAYERS = 6  # equal ones: the laws of one hold for all
KERNELS = {"eager": touched_values, "by hand": by_hand_values, "compiled": compiled_values}


class Peer(Estimator):
    """Estimates a row as its system ran it."""

    def __init__(self, row: Row, topology: Topology) -> None:
        super().__init__(laws(row, row.kernels, plain=True), topology)
        self.row = row

    def unit_times(self, one: Candidate, mesh: Mesh) -> UnitTimes:
        """Full recomputation runs all of a block's forward again, collectives too."""
        times = super().unit_times(one, mesh)
        if self.row.hidden == "none":
            times = replace(times, sums=np.zeros_like(times.sums))
        if not self.row.whole_blocks:
            return times
        blocks = np.array(self.profile.is_block)
        compute, tensor = times.compute.copy(), times.tensor.copy()
        for seconds in (compute, tensor):
            seconds[blocks, BACKWARD] += seconds[blocks, FORWARD]
        return replace(times, compute=compute, tensor=tensor)

    def _messages_s(self, one: Candidate, mesh: Mesh, stages: Sequence[Sequence[int]]) -> float:
        """Megatron-LM's ranks wait for every message; tensor ranks send a share each."""
        if not self.row.waits_for_messages or one.pp == 1:
            return super()._messages_s(one, mesh, stages)
        unit = self.profile.chain[len(self.profile.chain) // 2]
        share = self.profile.boundary[unit].local(one.data_ranks * one.microbatches, 1) / one.tp
        send_s = collective_seconds("send", share, mesh, PP)
        send_s += collective_seconds("all_gather", share, mesh, TP)
        return 2 * one.microbatches * one.chunks * send_s


@cache
def traced(dims: Dims, batch: int) -> Graph:
    """A training step of the model with few of its layers."""
    few = replace(dims, layers=TRACED_LAYERS)
    return trace(build(few), example(few, batch), loss_of, fold=True)


@cache
def laws(row: Row, kernels: str, *, plain: bool) -> ScalingModel:
    """The laws of a row's step with all its layers, as eager PyTorch's if ``plain``."""
    graph = traced(row.dims, row.batch)
    ways, touched = [row.recompute], KERNELS[kernels]
    (found,) = scaling_models(graph, row.word, ways, table(), touched=touched, plain=plain)
    block = next(unit for unit in found.chain if found.is_block[unit])
    at = found.chain.index(block) + 1
    more = row.dims.layers - TRACED_LAYERS
    return replace(found, chain=(*found.chain[:at], *[block] * more, *found.chain[at:]))
