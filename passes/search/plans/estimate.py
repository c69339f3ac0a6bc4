"""Estimate time and memory of a step at given axis sizes from a scaling model.

The search compares candidates by these estimates. A unit's compute is the roofline time of its
calls. Collectives over ``tp`` are exposed, but weight gradients hide those that sum gradients. FSDP
all-gathers and reductions run beside the compute, one unit ahead, on a stream of their own. A
pipeline's bubble is that of its schedule's formula. The plan that is chosen is later compiled, and
predicted from its real program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf

import numpy as np

from partc.cost.collective_cost import collective_seconds
from partc.cost.memory import STATE_COPIES
from partc.machines.devices import Device
from partc.machines.topology import APART_S, Topology
from partc.passes.search.plans.call_times import call_seconds
from partc.passes.search.plans.candidate import REPLICATE, Candidate
from partc.passes.search.plans.pipeline_formulas import (
    bubble_s,
    cut_evenly,
    in_flight,
    least_bubble_s,
    sent_s,
)
from partc.passes.search.plans.scaling_model import BACKWARD, FORWARD, Floats, ScalingModel
from partc.passes.search.plans.step_times import (
    Estimate,
    StageTimes,
    UnitTimes,
    Waits,
    bytes_around,
    together,
)
from partc.passes.search.plans.weight_streams import UnitWork, backward_waits
from partc.plan.batch import DATA_AXES
from partc.plan.mesh import PP, TP, Mesh


class Estimator:
    """Estimates candidates of one scaling model (one preset, one recomputation) on one topology."""

    def __init__(self, profile: ScalingModel, topology: Topology, optimizer: str = "adamw") -> None:
        self.profile, self.topology = profile, topology
        self.copies = STATE_COPIES[optimizer]
        self.known: dict[tuple[int, int, Mesh, Device], UnitTimes] = {}
        self.adding: dict[tuple[int, int, Device], Floats] = {}

    def estimate(self, one: Candidate) -> Estimate:
        """Seconds and bytes of a candidate."""
        mesh = one.mesh(self.topology)
        places = [mesh.at_place(place) for place in range(one.pp)]
        by_rank = [self.unit_times(one, at) for at in places]
        times = [by_rank[rank] for rank in one.rank_of]
        stages = self._cut(times)
        each = [
            self._stage(one, places[rank], there, units)
            for rank, there, units in zip(one.rank_of, times, stages, strict=True)
        ]
        ranks = [together(one.of_rank(each, rank)) for rank in range(one.pp)]
        slowest = max(ranks, key=lambda rank: rank.turn)
        count = one.microbatches
        # The pipeline fills and drains: the slowest rank waits for one stage of each other rank.
        others = (sum(rank.turn for rank in ranks) - slowest.turn) / one.chunks
        grads = (sum(rank.weight_grads for rank in ranks) - slowest.weight_grads) / one.chunks
        bubble = bubble_s(one, others, grads)
        mean = sum(rank.turn for rank in ranks) / one.pp
        share = self._share(mean * count / (slowest.turn * count + bubble))
        seconds = {
            "compute": slowest.compute * count * share,
            "tensor transfers": slowest.tensor * count * share,
            "weight transfers": slowest.gathers * count * share,
            "bubble": bubble * share,
            "messages": self._messages_s(one, mesh, stages),
            "gradients": slowest.closing,
            "optimizer": self._optimizer_s(one, stages, places),
        }
        return Estimate(seconds, *self._bytes(one, stages, places))

    def bound_s(self, one: Candidate) -> float:
        """A lower bound on the estimate: perfectly even stages, no transfers of weights, and each
        unit on the fastest of differing devices.
        """
        mesh, chain = one.mesh(self.topology), list(self.profile.chain)
        places = [mesh.at_place(at) for at in range(one.pp if self.topology.is_mixed else 1)]
        times = [self.unit_times(one, at) for at in places]
        fastest = np.minimum.reduce([each.exposed.sum(axis=1) for each in times])
        turn = float(fastest[chain].sum()) / (one.pp * one.chunks)
        grads = float(times[0].weight_grads[chain].sum()) / (one.pp * one.chunks)
        grads = inf if self.topology.is_mixed else grads  # may fill the whole bubble of ZB-H1
        ramp = least_bubble_s(one, (one.pp - 1) * turn, (one.pp - 1) * grads)
        busy = one.microbatches * one.chunks * turn
        return (busy + ramp) * self._share(busy / (busy + ramp))

    def _share(self, busy: float) -> float:
        """The factor on work measured with all ranks busy, if only the share ``busy`` of them is:
        ranks on shared hardware run faster while others idle (``stage_cost.sharing_costs``).
        """
        return max(1 / self.topology.sharing, busy)

    # time --------------------------------------------------------------------------------------
    def _cut(self, times: Sequence[UnitTimes]) -> list[list[int]]:
        """The units of every stage, cut evenly by their seconds on the stage's devices."""
        chain = list(self.profile.chain)
        known = {id(there): there.exposed.sum(axis=1)[chain] for there in times}
        cuts = cut_evenly([known[id(there)] for there in times])
        return [chain[first:end] for first, end in cuts]

    def _messages_s(self, one: Candidate, mesh: Mesh, stages: Sequence[Sequence[int]]) -> float:
        """The exposed seconds of messages between stages."""
        if one.pp == 1:
            return 0.0
        pieces = one.data_ranks * one.microbatches
        sizes = [self.profile.boundary[u[-1]].local(pieces, one.tp) for u in stages[:-1] if u]
        send_s = collective_seconds("send", max(sizes, default=0.0), mesh, PP)
        return sent_s(one, send_s)

    def unit_times(self, one: Candidate, mesh: Mesh) -> UnitTimes:
        """The seconds of each unit on the mesh's devices; of several kinds, on the slowest."""
        pieces = one.data_ranks * one.microbatches
        key = (pieces, one.tp, mesh, mesh.hardware.device)
        if key not in self.known:
            self.known[key] = self._unit_times(pieces, one.tp, mesh)
        return self.known[key]

    def _unit_times(self, dp: int, tp: int, mesh: Mesh) -> UnitTimes:
        """The seconds of each unit; ``dp`` counts data ranks times microbatches."""
        calls, num = self.profile.calls, len(self.profile.units)
        seconds = call_seconds(calls, mesh.hardware.device, dp, tp)
        tensor, sums = np.zeros((num, 2)), np.zeros(num)
        if tp > 1:
            sent: dict[tuple[str, float], float] = {}
            for move in self.profile.transfers:
                key = (move.kind, move.size.local(dp, tp))
                if key not in sent:
                    sent[key] = collective_seconds(*key, mesh, TP)
                tensor[move.unit, move.phase] += sent[key]
                sums[move.unit] += sent[key] * move.sums_gradient
        compute = np.zeros((num, 2))
        np.add.at(compute, (calls.unit, calls.phase), seconds)
        # At each collective all ranks wait for the slowest; ``skew`` is that share of computing.
        tensor += self.topology.skew * compute * (tensor > 0)
        weights = np.zeros(num)
        np.add.at(weights, calls.unit, seconds * calls.is_weight_grad)
        return UnitTimes(compute, weights, tensor, sums)

    def _stage(
        self, one: Candidate, mesh: Mesh, times: UnitTimes, units: Sequence[int]
    ) -> StageTimes:
        forward = self._phase(one, mesh, times, units, FORWARD)
        backward = self._phase(one, mesh, times, units[::-1], BACKWARD)
        compute = float(times.compute[list(units)].sum())
        exposed = times.exposed[list(units)].sum(axis=0)
        waits = float(exposed.sum()) - compute
        if one.pp > 1:
            waits += self._beside_messages_s(one, mesh, units, exposed)
        compute += self._adding_s(one, mesh, units)
        return StageTimes(
            compute, waits, forward.waits + backward.waits, forward.closing + backward.closing,
            float(times.weight_grads[list(units)].sum()),
        )  # fmt: skip

    def _beside_messages_s(
        self, one: Candidate, mesh: Mesh, units: Sequence[int], phases_s: Floats
    ) -> float:
        """Seconds that one microbatch's forward and backward lose to the four messages beside them
        (``stage_cost.with_send_costs``).
        """
        pieces = one.data_ranks * one.microbatches
        size = self.profile.boundary[units[-1]].local(pieces, one.tp) if units else 0.0
        moving = 4 * collective_seconds("send", size, mesh, PP)
        late = float(np.minimum(phases_s, APART_S).sum())
        return self.topology.contention * moving + self.topology.skew * late

    def _phase(
        self, one: Candidate, mesh: Mesh, times: UnitTimes, units: Sequence[int], phase: int
    ) -> Waits:
        """Walk a stage's units in one phase, beside the streams of FSDP gathers and reductions."""
        if not units:
            return Waits(0.0, 0.0)
        gathers = [0.0] * len(units)
        if (one.data == "fsdp" and one.shard > 1) or (one.data == "zero1" and phase == FORWARD):
            gathers = [self._gather_s(one, mesh, unit) for unit in units]
        once = one.data == "zero1"  # all are started when the step begins
        # gradients that are summed once per step leave in the backward of its last microbatch
        turns = one.microbatches * one.pp > 1
        once_per_step = one.data != "fsdp" and turns
        if phase == BACKWARD and one.data == "fsdp" and turns:
            return self._microbatch(one, mesh, times, units, gathers)
        # When each stream is done: `now` computing, `shared` FSDP's gathers and reductions,
        # `between` sums over hsdp's copies, `behind` sums that only the last microbatch starts.
        now = shared = between = waited = behind = last = 0.0
        moved = sum(gathers)
        arrives = accumulate(gathers) if once else iter(())
        arrived = gathers[0]
        for number, unit in enumerate(units):
            arrived = next(arrives) if once else arrived
            waited += max(0.0, arrived - now)
            now = max(now, arrived)
            if number + 1 < len(units) and not once:
                arrived = shared = max(shared, now) + gathers[number + 1]
            now += float(times.exposed[unit, phase])
            if phase == BACKWARD and one.data_ranks > 1 and once_per_step:
                summed = self._reduce_s(one, mesh, unit)
                last += summed
                behind = max(behind, now) + summed
            if phase == BACKWARD and one.data_ranks > 1 and not once_per_step:
                reduced = self._reduce_s(one, mesh, unit)
                shared = max(shared, now) + reduced
                moved += reduced
                between = max(between, shared) + self._reduce_between_s(one, mesh, unit)
        if phase == FORWARD or one.data_ranks == 1:
            waits = waited + self._slowed(moved - waited)
            # what zero1 gathers for all microbatches has arrived before the first one begins
            return Waits(0.0, moved) if once and turns else Waits(waits, 0.0)
        if once_per_step:
            late = self._late(last, behind - now)
            return Waits(waited + self._slowed(moved - waited), late)
        after = max(0.0, shared - now, between - now)
        return Waits(waited + self._slowed(moved - waited - after), after)

    def _microbatch(
        self, one: Candidate, mesh: Mesh, times: UnitTimes, units: Sequence[int],
        gathers: Sequence[float],
    ) -> Waits:  # fmt: skip
        """The backward of one of several microbatches under FSDP, which waits for all gradients.

        hsdp's sums over copies start in the last one alone.
        """
        reduces = one.data_ranks > 1
        work = [
            UnitWork(
                float(times.exposed[unit, BACKWARD]), gathered,
                self._reduce_s(one, mesh, unit) if reduces else 0.0, self._matrices(unit),
            )
            for unit, gathered in zip(units, gathers, strict=True)
        ]  # fmt: skip
        walked = backward_waits(work)
        waits = walked.waited + walked.after
        hidden = sum(each.gathers + each.reductions for each in work) - waits
        behind = last = 0.0
        for unit, end in zip(units, walked.ends, strict=True):
            summed = self._reduce_between_s(one, mesh, unit) if reduces else 0.0
            last += summed
            behind = max(behind, end) + summed
        return Waits(waits + self._slowed(hidden), self._late(last, behind - walked.ends[-1]))

    def _late(self, sums_s: float, left_s: float) -> float:
        """Seconds of the last microbatch's sums: paid once a step, not once a microbatch.

        ``left_s``: what is left of them when its backward ends.
        """
        late = min(sums_s, max(0.0, left_s))
        return late + self._slowed(sums_s - late)

    def _matrices(self, unit: int) -> int:
        """How many weights of a unit are factors of matrix products, at least 1."""
        calls = self.profile.calls
        return max(1, int(calls.is_weight_grad[calls.unit == unit].sum()))

    def _slowed(self, hidden_s: float) -> float:
        """Seconds that computing loses to ``hidden_s`` seconds of transfers beside it."""
        return self.topology.contention * max(0.0, hidden_s)

    def _adding_s(self, one: Candidate, mesh: Mesh, units: Sequence[int]) -> float:
        """Seconds to add a microbatch's gradients to those of earlier microbatches: matrix products
        read the old gradient, other gradients and scattered shards take an addition each.
        """
        if one.microbatches * one.pp == 1:
            return 0.0
        pieces = self._sharded(one) if one.data == "fsdp" else 0
        key = (one.tp, pieces, mesh.hardware.device)
        if key not in self.adding:
            self.adding[key] = np.array([
                self._unit_adding_s(number, *key) for number in range(len(self.profile.units))
            ])  # fmt: skip
        return float(self.adding[key][list(units)].sum())

    def _unit_adding_s(self, unit: int, tp: int, pieces: int, device: Device) -> float:
        """``_adding_s`` of one unit; ``pieces`` shards of each gradient, 0 if not scattered."""
        weights, calls = self.profile.weights[unit], self.profile.calls
        if not weights.count:
            return 0.0
        size = weights.size.local(1, tp) / weights.count
        if pieces:
            return weights.count * (
                max(device.launch_s, device.memory_seconds(3 * size / pieces)) + device.call_s
            )
        products = int(calls.is_weight_grad[calls.unit == unit].sum())
        reading = products * (1 - device.hidden_writes) * device.memory_seconds(size)
        return reading + max(0, weights.count - products) * (device.launch_s + device.call_s)

    def _gather_s(self, one: Candidate, mesh: Mesh, unit: int) -> float:
        """Seconds to gather a unit's weights from shards over the data axis."""
        whole = self.profile.weights[unit].gathered.local(1, one.tp)
        axis, ranks = self._shard_axis(mesh)
        each = whole / ranks
        more = self._more_starts_s("all_gather", unit, each + whole, mesh, axis)
        return collective_seconds("all_gather", each, mesh, axis) + more

    def _reduce_s(self, one: Candidate, mesh: Mesh, unit: int) -> float:
        """Seconds to reduce the gradients of a unit over the data axis."""
        size = self.profile.weights[unit].size.local(1, one.tp)
        axis = self._shard_axis(mesh)[0]
        if one.data == "ddp":
            return collective_seconds("all_reduce", size, mesh, axis)
        more = self._more_starts_s("reduce_scatter", unit, size, mesh, axis)
        return collective_seconds("reduce_scatter", size, mesh, axis) + more

    def _more_starts_s(self, kind: str, unit: int, copied: float, mesh: Mesh, axis: str) -> float:
        """Seconds that a unit's weights take to start, if its matrices are sent one by one: where
        to copy one of them into a bucket takes longer than to start a transfer.

        ``copied``: bytes of the copies of all.
        """
        matrices, start_s = self._matrices(unit), collective_seconds(kind, 0, mesh, axis)
        copying_s = mesh.hardware.device.memory_seconds(2 * copied / matrices)  # read and written
        others = self.profile.weights[unit].count > matrices
        return (matrices - 1 + others) * start_s if copying_s > start_s else 0.0

    def _reduce_between_s(self, one: Candidate, mesh: Mesh, unit: int) -> float:
        """Seconds to all-reduce a unit's scattered gradients between replicas (HSDP), else 0."""
        if one.data != "fsdp" or REPLICATE not in mesh.names:
            return 0.0
        size = self.profile.weights[unit].size.local(1, one.tp) / one.shard
        return collective_seconds("all_reduce", size, mesh, REPLICATE)

    def _shard_axis(self, mesh: Mesh) -> tuple[str, int]:
        """The data axis over which weights are sharded, or gradients reduced, and its size."""
        axes = [name for name in mesh.names if name in DATA_AXES]
        axis = next((name for name in axes if name != REPLICATE), "") or axes[0]
        return axis, mesh.size(axis)

    def _optimizer_s(
        self, one: Candidate, stages: Sequence[Sequence[int]], places: Sequence[Mesh]
    ) -> float:
        """Seconds to read parameters, gradients and states and to write parameters and states."""
        traffic = (3 + 2 * self.copies) / self._sharded(one)
        moved = [traffic * self._weights(one, units) for units in stages]
        devices = [places[rank].hardware.device for rank in one.rank_of]
        pairs = zip(devices, moved, strict=True)
        return max(device.memory_seconds(num_bytes, "optimizer") for device, num_bytes in pairs)

    # memory ------------------------------------------------------------------------------------
    def _weights(self, one: Candidate, units: Sequence[int]) -> float:
        return sum(self.profile.weights[u].size.local(1, one.tp) for u in units)

    def _sharded(self, one: Candidate) -> int:
        return 1 if one.data == "ddp" else one.shard if one.data == "fsdp" else one.data_ranks

    def _bytes(
        self, one: Candidate, stages: Sequence[Sequence[int]], places: Sequence[Mesh]
    ) -> tuple[dict[str, float], int]:
        """The bytes of the fullest pipeline rank by kind, and the memory of its devices."""
        by_rank = [[u for s in one.of_rank(stages, rank) for u in s] for rank in range(one.pp)]
        found: list[tuple[dict[str, float], int]] = []
        for rank, units in enumerate(by_rank):
            weights = self._weights(one, units)
            sharded = self._sharded(one)
            held = {
                "parameters": weights / (sharded if one.data == "fsdp" else 1),
                "optimizer": self.copies * weights / sharded,
            }
            others = in_flight(one, rank) / one.chunks - 1
            times = self._backward_bytes(one, units, others, rank == one.rank_of[-1])
            live = max(times, key=lambda each: sum(each.values()), default={})
            found.append((held | live, places[rank].hardware.memory_bytes))
        return max(found, key=lambda each: sum(each[0].values()) / each[1])

    def _backward_bytes(
        self, one: Candidate, units: Sequence[int], others: float, has_loss: bool
    ) -> Iterator[dict[str, float]]:
        """Bytes live while the backward of each unit runs, with ``others`` microbatches in flight
        beside it: fewer saved activations and more gradients from unit to unit.
        """
        pieces, sharded = one.data_ranks * one.microbatches, self._sharded(one)
        gathers = one.data == "fsdp" and sharded > 1
        weights = [self.profile.weights[u] for u in units]
        sizes = [each.size.local(1, one.tp) for each in weights]
        gathered = [each.gathered.local(1, one.tp) for each in weights]
        grads = [size / (sharded if one.data == "fsdp" else 1) for size in sizes]
        kept = [self.profile.saved[u].local(pieces, one.tp) for u in units]
        accumulates = one.microbatches * one.pp > 1
        for at, unit in reversed(list(enumerate(units))):
            peak = has_loss and at == len(units) - 1
            working = self.profile.working if peak else self.profile.beside[unit]
            yield {
                "gradients": sum(grads if accumulates else grads[at:]),
                "activations": others * sum(kept) + sum(kept[: at + 1]),
                "working": working.local(pieces, one.tp)
                + (bytes_around(sizes, gathered, at) if gathers else 0.0),
            }
