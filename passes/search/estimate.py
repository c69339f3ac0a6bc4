"""The time and memory of a step at given axis sizes, from a profile: what the search compares.

A unit's compute is a roofline over its calls. Its tensor collectives wait where they stand, but for
what weight gradients hide of them in the backward. Weights and gradients move beside the compute,
one unit ahead, on a stream of their own. A pipeline's bubble is that of its schedule's formula.
The plan that is chosen is then compiled, and simulated from its real program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from partc.collective_cost import collective_seconds
from partc.errors import PlanError
from partc.mesh import PP, Mesh
from partc.passes.apply_preset import DATA_AXES
from partc.passes.memory import STATE_COPIES
from partc.passes.search.profile import BACKWARD, FORWARD, TP, Calls, Floats, Profile, Sizes
from partc.topology import Device, Topology

Data = Literal["ddp", "zero1", "fsdp"]
Recompute = Literal["cheap", "block"]
REPLICATE, SHARD = "dp_replicate", "dp_shard"


@dataclass(frozen=True)
class Candidate:
    """One way to train: axis sizes, what the data axes shard, how weights are cut over ``tp``."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    data: Data = "ddp"
    word: str = ""
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: Recompute = "cheap"
    given: Mesh | None = None  # axes that the user has named

    @property
    def data_ranks(self) -> int:
        return self.replicate * self.shard

    def mesh(self, topology: Topology | None) -> Mesh:
        """Its axes, the pipeline outermost and tensor ranks next to each other."""
        if self.given is not None:
            return self.given
        data = [(REPLICATE, self.replicate), (SHARD, self.shard)]
        if self.replicate == 1 or self.shard == 1:
            data = [("dp", self.data_ranks)]
        sizes = [(PP, self.pp), *data, (TP, self.tp)]
        axes = tuple((name, size) for name, size in sizes if size > 1)
        return Mesh(axes, topology and _part(topology, self.num_ranks))

    @property
    def num_ranks(self) -> int:
        return self.given.num_ranks if self.given else self.data_ranks * self.tp * self.pp

    @property
    def preset(self) -> str:
        data = "hsdp" if self.data == "fsdp" and self.replicate > 1 else self.data
        words = [data] if self.data_ranks > 1 or self.tp == 1 else []
        return "+".join([*words, *([self.word] if self.tp > 1 else [])])

    def __str__(self) -> str:
        pipeline = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        order = f", {self.schedule}" if self.pp > 1 else ""
        again = ", blocks recomputed" if self.recompute == "block" else ""
        return f"{self.preset} on {self.mesh(None)}{order}{pipeline}{again}"


@lru_cache(maxsize=256)
def _part(topology: Topology, devices: int) -> Topology:
    """So many of the machines."""
    return topology if topology.num_devices == devices else topology.resized(devices)


def can_have(topology: Topology, devices: int) -> bool:
    """Whether so many of the machines are a topology."""
    try:
        return _part(topology, devices).num_devices == devices
    except PlanError:
        return False


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step by what they go to, and bytes of the fullest rank by what holds them."""

    seconds: dict[str, float] = field(hash=False)
    bytes: dict[str, float] = field(hash=False)

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak_bytes(self) -> float:
        return sum(self.bytes.values())


@dataclass(frozen=True, eq=False)
class UnitTimes:
    """Seconds of each unit and phase, ``[unit, phase]``, of one microbatch."""

    compute: Floats
    weight_grads: Floats  # of the backward, part of ``compute``
    tensor: Floats  # collectives over ``tp``

    @cached_property
    def exposed(self) -> Floats:
        """Compute, and what of the tensor collectives nothing hides."""
        hidden = np.zeros_like(self.compute)
        hidden[:, BACKWARD] = np.minimum(self.tensor[:, BACKWARD], self.weight_grads)
        return self.compute + self.tensor - hidden


class Estimator:
    """Evaluates candidates of one profile on one topology; ``optimizer`` keeps states."""

    def __init__(self, profile: Profile, topology: Topology, optimizer: str = "adamw") -> None:
        self.profile, self.topology = profile, topology
        self.copies = STATE_COPIES[optimizer]
        self.known: dict[tuple[int, int, Recompute, Mesh], UnitTimes] = {}

    def estimate(self, one: Candidate) -> Estimate:
        """Seconds and bytes of a candidate."""
        mesh = one.mesh(self.topology)
        times = self.unit_times(one, mesh)
        stages = _stages(self.profile, times, one.pp * one.chunks)
        slowest = max(
            (self._stage(one, mesh, times, units) for units in stages), key=lambda s: s.turn
        )
        turns = one.microbatches * one.chunks
        seconds = {
            "compute": slowest.compute * turns,
            "tensor transfers": slowest.tensor * turns,
            "weight transfers": slowest.gathers * turns,
            "bubble": _bubble(one, slowest.turn, slowest.weight_grads),
            "gradients": slowest.closing * one.chunks,
            "optimizer": self._optimizer_s(one, stages),
        }
        return Estimate(seconds, self._bytes(one, stages))

    def bound_s(self, one: Candidate) -> float:
        """Less than a step can take: stages as even as they could be, no weights to move."""
        times = self.unit_times(one, one.mesh(self.topology))
        chain = list(self.profile.chain)
        turn = float(times.exposed[chain].sum()) / (one.pp * one.chunks)
        grads = float(times.weight_grads[chain].sum()) / (one.pp * one.chunks)
        return one.microbatches * one.chunks * turn + _bubble(one, turn, grads)

    # time --------------------------------------------------------------------------------------
    def unit_times(self, one: Candidate, mesh: Mesh) -> UnitTimes:
        pieces = one.data_ranks * one.microbatches
        key = (pieces, one.tp, one.recompute, mesh)
        if key not in self.known:
            times = self._unit_times(pieces, one.tp, mesh)
            self.known[key] = self._recomputed(times) if one.recompute == "block" else times
        return self.known[key]

    def _recomputed(self, times: UnitTimes) -> UnitTimes:
        """The same with the forward of every block once more in its backward."""
        blocks = np.array(self.profile.is_block)
        compute, tensor = times.compute.copy(), times.tensor.copy()
        for seconds in (compute, tensor):
            seconds[blocks, BACKWARD] += seconds[blocks, FORWARD]
        return UnitTimes(compute, times.weight_grads, tensor)

    def _unit_times(self, dp: int, tp: int, mesh: Mesh) -> UnitTimes:
        calls, num = self.profile.calls, len(self.profile.units)
        seconds = call_seconds(calls, self.topology.device, dp, tp)
        tensor = np.zeros((num, 2))
        if tp > 1:
            sent: dict[tuple[str, float], float] = {}
            for move in self.profile.transfers:
                key = (move.kind, move.size.local(dp, tp))
                if key not in sent:
                    sent[key] = collective_seconds(*key, mesh, TP)
                tensor[move.unit, move.phase] += sent[key]
        compute = np.zeros((num, 2))
        np.add.at(compute, (calls.unit, calls.phase), seconds)
        weights = np.zeros(num)
        np.add.at(weights, calls.unit, seconds * calls.is_weight_grad)
        return UnitTimes(compute, weights, tensor)

    def _stage(self, one: Candidate, mesh: Mesh, times: UnitTimes, units: Sequence[int]) -> _Stage:
        forward = self._phase(one, mesh, times, units, FORWARD)
        backward = self._phase(one, mesh, times, units[::-1], BACKWARD)
        compute = float(times.compute[list(units)].sum())
        waits = float(times.exposed[list(units)].sum()) - compute
        return _Stage(
            compute, waits, forward.waits + backward.waits, backward.closing,
            float(times.weight_grads[list(units)].sum()),
        )  # fmt: skip

    def _phase(
        self, one: Candidate, mesh: Mesh, times: UnitTimes, units: Sequence[int], phase: int
    ) -> _Waits:
        """Walk a stage's units beside the streams that move its weights and gradients."""
        gathers = [0.0] * len(units)
        if (one.data == "fsdp" and one.shard > 1) or (one.data == "zero1" and phase == FORWARD):
            gathers = [self._gather_s(one, mesh, unit) for unit in units]
        once = one.data == "zero1"  # all are started when the step begins
        now = shared = between = waited = 0.0
        arrives = accumulate(gathers) if once else iter(())
        arrived = gathers[0]
        for number, unit in enumerate(units):
            arrived = next(arrives) if once else arrived
            waited += max(0.0, arrived - now)
            now = max(now, arrived)
            if number + 1 < len(units) and not once:
                arrived = shared = max(shared, now) + gathers[number + 1]
            now += float(times.exposed[unit, phase])
            if phase == BACKWARD and one.data_ranks > 1:
                shared = max(shared, now) + self._reduce_s(one, mesh, unit)
                between = max(between, shared) + self._reduce_between_s(one, mesh, unit)
        return _Waits(waited, max(0.0, shared - now, between - now) if phase == BACKWARD else 0.0)

    def _gather_s(self, one: Candidate, mesh: Mesh, unit: int) -> float:
        weights = self.profile.weights[unit]
        axis, ranks = self._shard_axis(one, mesh)
        return collective_seconds("all_gather", weights.size.local(1, one.tp) / ranks, mesh, axis)

    def _reduce_s(self, one: Candidate, mesh: Mesh, unit: int) -> float:
        """The gradients of a unit; once per step they take a share of each microbatch's time."""
        size = self.profile.weights[unit].size.local(1, one.tp)
        kind = "all_reduce" if one.data == "ddp" else "reduce_scatter"
        seconds = collective_seconds(kind, size, mesh, self._shard_axis(one, mesh)[0])
        return seconds if one.data == "fsdp" else seconds / one.microbatches

    def _reduce_between_s(self, one: Candidate, mesh: Mesh, unit: int) -> float:
        """What replicas add up of the gradients that each has scattered."""
        if one.data != "fsdp" or REPLICATE not in mesh.names:
            return 0.0
        size = self.profile.weights[unit].size.local(1, one.tp) / one.shard
        return collective_seconds("all_reduce", size, mesh, REPLICATE)

    def _shard_axis(self, one: Candidate, mesh: Mesh) -> tuple[str, int]:
        """The axis over which weights are sharded, or gradients summed, and its size."""
        axes = [name for name in mesh.names if name in DATA_AXES]
        axis = next((name for name in axes if name != REPLICATE), "") or axes[0]
        return axis, mesh.size(axis)

    def _optimizer_s(self, one: Candidate, stages: Sequence[Sequence[int]]) -> float:
        """Parameters, gradients and states are read, parameters and states written."""
        size = max(self._weights(one, units) for units in stages) / self._sharded(one)
        moved = size * (3 + 2 * self.copies)
        device = self.topology.device
        return moved / (device.memory_bytes_per_s * device.fraction("pointwise", moved))

    # memory ------------------------------------------------------------------------------------
    def _weights(self, one: Candidate, units: Sequence[int]) -> float:
        return sum(self.profile.weights[u].size.local(1, one.tp) for u in units)

    def _sharded(self, one: Candidate) -> int:
        return 1 if one.data == "ddp" else one.shard if one.data == "fsdp" else one.data_ranks

    def _bytes(self, one: Candidate, stages: Sequence[Sequence[int]]) -> dict[str, float]:
        """The bytes of the fullest pipeline rank."""
        pieces = one.data_ranks * one.microbatches
        by_rank = [
            [u for chunk in range(one.chunks) for u in stages[chunk * one.pp + rank]]
            for rank in range(one.pp)
        ]
        found = []
        for rank, units in enumerate(by_rank):
            weights = self._weights(one, units)
            kept = sum(self._kept(one, u).local(pieces, one.tp) for u in units)
            whole = max(self.profile.weights[u].size.local(1, one.tp) for u in units)
            sharded = self._sharded(one)
            params = weights / sharded if one.data == "fsdp" else weights
            grads = params if one.data != "zero1" else weights
            working = self.profile.working.local(pieces, one.tp) if rank == one.pp - 1 else 0.0
            if one.recompute == "block":
                again = (self.profile.saved[u].local(pieces, one.tp) for u in units)
                working = max(working, *again)
            found.append({
                "parameters": params,
                "gradients": grads,
                "optimizer": self.copies * weights / sharded,
                "activations": kept * _in_flight(one, rank) / one.chunks,
                "working": working + (3 * whole if one.data == "fsdp" and sharded > 1 else 0.0),
            })  # fmt: skip
        return max(found, key=lambda each: sum(each.values()))

    def _kept(self, one: Candidate, unit: int) -> Sizes:
        """What a unit keeps for its backward: a block that is recomputed, only what enters it."""
        again = one.recompute == "block" and self.profile.is_block[unit]
        return self.profile.boundary[unit] if again else self.profile.saved[unit]


@dataclass(frozen=True)
class _Stage:
    """One stage and microbatch: seconds that compute, and that wait for each kind of transfer."""

    compute: float
    tensor: float
    gathers: float
    closing: float
    weight_grads: float

    @property
    def turn(self) -> float:
        return self.compute + self.tensor + self.gathers


@dataclass(frozen=True)
class _Waits:
    waits: float
    closing: float  # what is still under way when the phase ends


def call_seconds(calls: Calls, device: Device, dp: int, tp: int) -> Floats:
    """``Device.seconds`` of every call's local part."""
    pieces = np.where(calls.cut[:, 0], dp, 1) * np.where(calls.cut[:, 1], tp, 1)
    flops = calls.flops / pieces
    moved = calls.bytes @ np.array([1.0, 1 / tp, 1 / dp, 1 / (dp * tp)])
    peaks = np.array([device.peak(dtype) for dtype in calls.dtype])
    reached = np.where(
        calls.is_attention,
        _fractions(device, "attention", flops),
        _fractions(device, "matmul", flops),
    )
    memory = moved / (device.memory_bytes_per_s * _fractions(device, "pointwise", moved))
    seconds: Floats = np.maximum(np.maximum(flops / (peaks * reached), memory), device.launch_s)
    return seconds


def _fractions(device: Device, work: str, amounts: Floats) -> Floats:
    """``Device.fraction`` of many amounts."""
    points = device.efficiency.get(work, ((1.0, 1.0),))
    at = np.array([amount for amount, _ in points])
    seconds = at / np.array([fraction for _, fraction in points])
    inside: Floats = np.clip(amounts, at[0], at[-1])
    between = inside / np.interp(inside, at, seconds)
    fractions: Floats = between
    return fractions


def _stages(profile: Profile, times: UnitTimes, num: int) -> list[list[int]]:
    """The chain cut into stages of about equal time: each ends where its share is reached."""
    chain = list(profile.chain)
    each = times.exposed.sum(axis=1)
    ends = np.cumsum([each[unit] for unit in chain])
    cuts = [int(np.searchsorted(ends, ends[-1] * i / num - each.max() / 2)) for i in range(1, num)]
    edges = [0, *cuts, len(chain)]
    return [chain[a:b] or [chain[min(a, len(chain) - 1)]] for a, b in pairwise(edges)]


def _bubble(one: Candidate, turn: float, weight_grads: float) -> float:
    """Seconds in which a rank has nothing to do, by the schedules' published formulas."""
    if one.pp == 1:
        return 0.0
    ramp = one.pp - 1
    if one.schedule == "zb-h1":
        return ramp * max(0.0, turn - 2 * weight_grads)
    return ramp * turn  # of one chunk's turn: interleaving makes turns shorter


def _in_flight(one: Candidate, rank: int) -> float:
    """Microbatches whose activations a rank holds, in whole ranks' worth of stages times chunks."""
    if one.pp == 1:
        return 1.0 if one.microbatches == 1 else float(one.chunks)
    if one.chunks > 1:
        most = one.chunks * one.pp + one.pp - 1 - 2 * rank + one.pp - 1
        return float(min(one.microbatches * one.chunks, most))
    return float(min(one.microbatches, one.pp - rank))
