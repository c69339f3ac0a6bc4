"""The FLOPs, bytes and seconds of a pipeline stage, counted on its scheduled graph.

``step_costs`` puts all stages together as the costs that the schedule's simulation takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from partc.cost.bytes import moved_bytes
from partc.cost.collective_cost import cheapest
from partc.cost.early_cost import EarlyBytes
from partc.cost.flops import node_flops
from partc.cost.pipeline_step import Step
from partc.cost.roofline import Spent
from partc.cost.step_walk import phase_times
from partc.cost.storage import Replay, Storage, replay
from partc.graph import Graph, Phase, fake_of, value
from partc.machines.topology import APART_S
from partc.plan.mesh import PP, Mesh
from partc.schedules.step_costs import Link, StepCosts
from partc.schedules.timing import Costs

_NOTHING_GAINED = 1e-9  # relative


@dataclass(frozen=True)
class StageCost:
    """The costs of one pipeline stage, for one microbatch; phases S and E count once per step.

    ``activation_bytes`` are saved from a microbatch's forward to its backward, ``waiting_bytes``
    from its backward to its weight gradients. ``sent_bytes`` go to the next stage in the forward;
    as many come back in the backward. ``spent``: seconds by phase.
    """

    forward_flops: int
    backward_flops: int
    weight_flops: int
    moved_bytes: int
    spent: Mapping[Phase, Spent]
    activation_bytes: int
    waiting_bytes: int
    sent_bytes: int
    early: EarlyBytes | None = None  # the gradient reductions that begin in the last backward

    @property
    def forward_s(self) -> float:
        return self._seconds("F")

    @property
    def backward_s(self) -> float:
        return self._seconds("B")

    @property
    def weight_s(self) -> float:
        return self._seconds("W")

    @property
    def closing_s(self) -> float:
        """Seconds of the gradient reductions that end the step (phase E)."""
        return self._seconds("E")

    def _seconds(self, phase: Phase) -> float:
        return self.spent[phase].seconds if phase in self.spent else 0.0


def sharing_costs(
    stages: Sequence[StageCost], step: Step, sharing: float
) -> tuple[StageCost, ...] | None:
    """The stages' costs where ranks share processors; None if no rank would be faster.

    A rank that waits for another's result (a bubble) leaves its processors to the ranks that work,
    which then run up to ``Topology.sharing`` times faster. A rank that waits for a transfer leaves
    none, as its processors move the data. All working ranks speed up alike (processor sharing), so
    the order of events stays and one factor scales all times.
    """
    whole, num = step.simulated.makespan, len(step.programs)
    spans = step.simulated.working()
    shared = sum(seconds * max(1 / sharing, at_once / num) for seconds, at_once in spans)
    if shared >= whole * (1 - _NOTHING_GAINED):
        return None
    share = shared / whole
    return tuple(
        replace(s, spent={phase: each.times(share) for phase, each in s.spent.items()})
        for s in stages
    )


def with_send_costs(stages: Sequence[StageCost], mesh: Mesh) -> tuple[StageCost, ...]:
    """The stages' costs with the time that their messages take from computing, as exposed ``pp``.

    Computing beside a message is slower (``Topology.contention``), and the receiver of a message
    waits for a sender that may be late (``Topology.skew``).
    """
    hardware = mesh.hardware
    if PP not in mesh.names or mesh.size(PP) == 1 or not (hardware.contention or hardware.skew):
        return tuple(stages)
    link = stage_link(stages, mesh)
    moving = [link.seconds(stage.sent_bytes) for stage in stages[:-1]]  # to and from the next one
    found = []
    for stage, before, behind in zip(stages, [0.0, *moving], [*moving, 0.0], strict=True):
        spent = dict(stage.spent)
        for phase, received_s in (("F", before), ("B", behind)):
            if phase in spent:
                late = hardware.skew * min(spent[phase].seconds, APART_S) if received_s else 0.0
                spent[phase] = spent[phase].times(1.0)
                lost = hardware.contention * (before + behind) + late
                spent[phase].add(Spent(exposed={PP: lost}))
        found.append(replace(stage, spent=spent))
    return tuple(found)


def stage_link(stages: Sequence[StageCost], mesh: Mesh) -> Link:
    """The link between neighbouring pipeline ranks, as the largest message uses it best."""
    if PP not in mesh.names or mesh.size(PP) == 1:
        level = mesh.hardware.levels[0]  # a stage after the other on one rank: no message is sent
        return Link(level.latency_s, level.attained_bytes_per_s)
    send = cheapest("send", max(stage.sent_bytes for stage in stages), mesh, PP)
    return Link(send.latency_s, 1 / send.s_per_byte)


def step_costs(
    stages: Sequence[StageCost], closing_s: Mapping[str, float], link: Link
) -> StepCosts:
    """The costs of all stages, in seconds and bytes, as the simulation of a schedule takes them."""
    costs = Costs(
        forward=tuple(s.forward_s for s in stages),
        input_grad=tuple(s.backward_s for s in stages),
        weight_grad=tuple(s.weight_s for s in stages),
        transfer=(0.0,) * len(stages),
        activation=tuple(float(s.activation_bytes) for s in stages),
        waiting=tuple(float(s.waiting_bytes) for s in stages),
    )
    message = [float(s.sent_bytes) for s in stages]
    return StepCosts.of(costs, message=message, links=[link] * len(stages), collectives=closing_s)


def stage_cost(graph: Graph, mesh: Mesh) -> StageCost:
    ran = replay(graph)
    flops: dict[Phase, int] = {}
    moved = 0
    for node in graph.calls():
        phase = value(node).phase
        times = graph.times(node)
        flops[phase] = flops.get(phase, 0) + times * node_flops(node)
        moved += times * moved_bytes(node, ran) if phase in "FBW" else 0
    activation, waiting = _held_bytes(graph, ran)
    return StageCost(
        forward_flops=flops.get("F", 0),
        backward_flops=flops.get("B", 0),
        weight_flops=flops.get("W", 0),
        moved_bytes=moved,
        spent=phase_times(graph, ran, mesh),
        activation_bytes=activation,
        waiting_bytes=waiting,
        sent_bytes=sum(num_bytes(n) for n in graph.outputs.sent.values() if _is(n, "F")),
    )


def stage_of_json(stage: Mapping[str, Any]) -> StageCost:
    """A StageCost from the plain data of a saved program."""
    spent = {phase: Spent.of_json(each) for phase, each in stage["spent"].items()}
    early = EarlyBytes(**stage["early"]) if stage.get("early") else None
    return StageCost(**{**stage, "spent": spent, "early": early})


def _held_bytes(graph: Graph, ran: Replay) -> tuple[int, int]:
    """Bytes that one microbatch keeps for later phases: from its forward on, and for phase W.

    Each piece of memory counts once, by the phase that made it and the phases that read it.
    """
    made: dict[Storage, Phase] = {}
    sizes: dict[Storage, int] = {}
    read: dict[Storage, set[Phase]] = {}
    for node in graph.fx.nodes:
        if node.op == "output" or (node.op == "placeholder" and value(node).kind != "received"):
            continue
        for storage, size in ran.storages(node).items():
            made.setdefault(storage, value(node).phase)
            sizes.setdefault(storage, graph.times(node) * size)
        for operand in node.all_input_nodes:
            for storage in ran.storages(operand):
                read.setdefault(storage, set()).add(value(node).phase)
    outside = {
        storage
        for node in graph.fx.nodes
        if node.op == "placeholder" and value(node).kind != "received"
        for storage in ran.storages(node)
    }

    def total(makers: str, readers: str) -> int:
        return sum(
            sizes[storage]
            for storage, phase in made.items()
            if storage not in outside and phase in makers and read.get(storage, set()) & {*readers}
        )

    return total("F", "BW"), total("FB", "W")


def _is(node: fx.Node, phase: Phase) -> bool:
    return value(node).phase == phase


def num_bytes(node: fx.Node) -> int:
    """Bytes of a node's tensor, at its fake's shape."""
    fake = fake_of(node)
    return int(fake.numel() * fake.element_size())
