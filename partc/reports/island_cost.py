"""What it costs that islands meet: bytes and time of a mean step, and memory for what they keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

import torch

from partc.amounts import time_text
from partc.cost.bytes import Traffic, sent_share
from partc.cost.collective_cost import collective_seconds
from partc.cost.island_speeds import island_speeds
from partc.cost.prediction import AxisTime, PhaseTime, Prediction
from partc.plan.local_steps import ALL, RING, LocalSteps
from partc.plan.mesh import ISLAND, Mesh
from partc.plan.servers import Servers, shared_out
from partc.plan.stale import Stale
from partc.plan.uneven import Uneven
from partc.plan.wires import WIRES
from partc.program.role import Role, Shard
from partc.reports.cost import CostReport
from partc.reports.pipeline_cost import PipelineCost
from partc.reports.server_cost import LOSS_BYTES, ring_seconds, server_loads, sizes_of

BUCKET_BYTES = 100_000_000  # as `average_over` fills them


@dataclass(frozen=True)
class Meeting:
    """What one rank's part of the model costs from one meeting to the next, ``period`` steps later.

    ``sent_bytes``: by ``count`` transfers of a ``kind``, which take ``seconds``. ``kept_bytes``:
    of what stays between meetings. ``steps``: how many steps compute meanwhile. ``turns``: by
    island how many microbatches a step has; empty for one each. ``computing``: how many islands
    compute; 0 for all. ``name``: of the time, in reports.
    """

    period: int
    count: int
    sent_bytes: int
    seconds: float
    kept_bytes: int
    steps: int = 0
    kind: str = "all_reduce"
    turns: Sequence[int] = ()
    computing: int = 0
    name: str = "islands"

    @classmethod
    def of(
        cls,
        how: LocalSteps | Stale | Uneven | Servers,
        role: Role,
        mesh: Mesh,
        frozen: Container[str],
        running: Container[str],
    ) -> Meeting:
        """``frozen``, ``running``: parameters that are not trained, buffers that steps change."""
        params = [s for s in role.params if s.name not in frozen]
        kept = sum(prod(s.local_shape(mesh)) * s.dtype.itemsize for s in params) * len(how.keeps)
        if isinstance(how, Stale):
            whole, count, seconds = _sum_of(params, mesh)
            return cls(1, count, whole, seconds, kept, steps=1)
        if isinstance(how, Uneven):
            whole, count, seconds = _sum_of(params, mesh)
            of_one = sum(prod(shape) * dtype.itemsize for shape, dtype in role.inputs.values())
            kept += (max(how.of_each) - 1) * of_one
            return cls(1, count, whole, seconds, kept, turns=how.of_each)
        if isinstance(how, Servers):
            return cls._of_servers(how, params, mesh)
        changed = [b for b in role.buffers if b.name in running]
        if how.partners != ALL:
            whole, count, seconds = _sent_to_partners([*params, *changed], mesh, how)
            return cls(how.period, count, whole, seconds, kept, kind="send")
        if how.wire:
            sums = [_rounded_sum(params, mesh, how), _sum_of(changed, mesh, how.fragments)]
        else:
            sums = [_sum_of([*params, *changed], mesh, how.fragments)]
        sent, counts, times = zip(*sums, strict=True)
        hiding = how.fragments * how.overlap
        return cls(how.period, sum(counts), sum(sent), sum(times), kept, hiding)

    @classmethod
    def _of_servers(cls, how: Servers, params: Sequence[Shard], mesh: Mesh) -> Meeting:
        """Of the rank whose link is busiest, which is a server's unless all islands serve."""
        sizes = sizes_of(params, mesh)
        busiest = max(server_loads(how, mesh, sizes), key=lambda load: load.seconds(mesh))
        seconds, ring = busiest.seconds(mesh), ring_seconds(how, mesh, sizes)
        name = (
            f"servers, {seconds / ring:.2g} times a ring's {time_text(ring)}" if ring else "servers"
        )
        return cls(
            1, busiest.count // 2, busiest.sent_bytes + LOSS_BYTES, seconds,
            len(how.workers(mesh)) * max(shared_out(sizes, how.count)),  # what has arrived
            kind="send", computing=len(how.workers(mesh)), name=name,
        )  # fmt: skip

    @property
    def step_s(self) -> float:
        """Its seconds in a mean step."""
        return self.seconds / self.period


def _sum_of(shards: Sequence[Shard], mesh: Mesh, parts: int = 1) -> tuple[int, int, float]:
    """Bytes, transfers and seconds of the sums over islands of tensors, in so many parts."""
    sizes = _sizes(shards, mesh)
    count = sum(parts * ceil(size / parts / BUCKET_BYTES) for size in sizes.values())
    top, bottom = sent_share("all_reduce", mesh.islands)
    whole = sum(sizes.values())
    one = collective_seconds("all_reduce", whole / count, mesh, ISLAND) if count else 0.0
    return whole * top // bottom, count, count * one


def _sizes(shards: Sequence[Shard], mesh: Mesh) -> Counter[torch.dtype]:
    """Bytes of a rank's pieces, by dtype."""
    sizes = Counter[torch.dtype]()
    for s in shards:
        sizes[s.dtype] += prod(s.local_shape(mesh)) * s.dtype.itemsize
    return sizes


def _sent_to_partners(
    shards: Sequence[Shard], mesh: Mesh, how: LocalSteps
) -> tuple[int, int, float]:
    """The same of what a mean island sends to those that it meets, one after the other."""
    num, parts = mesh.islands, how.fragments
    others = len({1 % num, -1 % num}) if how.partners == RING else 1
    sizes = _sizes(shards, mesh)
    whole = sum(sizes.values())
    count = others * sum(parts * ceil(size / parts / BUCKET_BYTES) for size in sizes.values())
    one = collective_seconds("send", others * whole / count, mesh, ISLAND) if count else 0.0
    met = num if how.partners == RING else num - num % 2  # of an odd number one stays alone
    return others * whole * met // num, count, count * one


def _rounded_sum(params: Sequence[Shard], mesh: Mesh, how: LocalSteps) -> tuple[int, int, float]:
    """The same of outer gradients in narrow numbers, which take two transfers a fragment."""
    num, parts = mesh.islands, how.fragments
    blocks = sum(ceil(prod(s.local_shape(mesh)) / how.block) for s in params)
    transfers = WIRES[how.wire].sent([(ceil(blocks / parts) * how.block,)], num, how.block)
    sent, seconds = 0, 0.0
    for kind, num_bytes in transfers:
        top, bottom = sent_share(kind, num)
        sent += parts * num_bytes * top // bottom
        seconds += parts * collective_seconds(kind, num_bytes, mesh, ISLAND)
    return sent, parts * len(transfers), seconds


def with_meeting(report: CostReport, one: Meeting, mesh: Mesh) -> CostReport:
    """The cost of a step of one stage, with that of meetings."""
    kind = one.kind if one.period == 1 else f"{one.kind}, in 1 of {one.period} steps"
    traffic = Traffic(ISLAND, kind, one.count, one.sent_bytes // one.period)
    state = replace(report.state, buffers=report.state.buffers + one.kept_bytes)
    step = report.prediction and _slower(report.prediction, one, mesh)
    axes = f"{ISLAND}={mesh.islands} {report.mesh}".strip()
    return replace(
        report, mesh=axes, state=state, traffic=(*report.traffic, traffic), prediction=step
    )


def with_meetings(cost: PipelineCost, ranks: Sequence[Meeting], mesh: Mesh) -> PipelineCost:
    """The cost of a pipeline's step, with that of its ranks' meetings; the slowest one counts."""
    more = tuple(
        replace(rank, buffers_and_inputs=rank.buffers_and_inputs + one.kept_bytes)
        for rank, one in zip(cost.ranks, ranks, strict=True)
    )
    slowest = max(ranks, key=lambda one: one.step_s)
    return replace(cost, ranks=more, prediction=_slower(cost.prediction, slowest, mesh))


def _slower(step: Prediction, one: Meeting, mesh: Mesh) -> Prediction:
    """A step of all islands: their samples together, and the time that meetings take."""
    num = sum(one.turns) or one.computing or mesh.islands
    work = replace(
        step.work, flops=step.work.flops * num, samples=step.work.samples * num,
        tokens=step.work.tokens * num,
    )  # fmt: skip
    if one.turns:
        speeds = island_speeds(mesh, step.work.dtype)  # the step is that of the slowest one
        times = [turns * min(speeds) / own for turns, own in zip(one.turns, speeds, strict=True)]
        step = _repeated(step, max(times))
    hidden = min(step.seconds * one.steps / one.period, one.step_s)
    waited = one.step_s - hidden
    phases = [PhaseTime(one.name, waited, ISLAND, {ISLAND: waited})] if waited else []
    return replace(
        step, seconds=step.seconds + waited, phases=(*step.phases, *phases),
        axes=(*step.axes, AxisTime(ISLAND, hidden, waited)), work=work,
    )  # fmt: skip


def _repeated(step: Prediction, num: float) -> Prediction:
    """A step that computes for so many microbatches, before one step of the optimizer."""

    def times(phase: PhaseTime) -> PhaseTime:
        parts = {bound: num * seconds for bound, seconds in phase.parts.items()}
        return replace(phase, seconds=num * phase.seconds, parts=parts)

    phases = [each if each.name == "optimizer" else times(each) for each in step.phases]
    axes = [AxisTime(a.axis, num * a.hidden_s, num * a.exposed_s) for a in step.axes]
    once = sum(each.seconds for each in step.phases if each.name == "optimizer")
    return replace(
        step, seconds=num * (step.seconds - once) + once, compute_s=num * step.compute_s,
        phases=tuple(phases), axes=tuple(axes), device_flops=num * step.device_flops,
    )  # fmt: skip
