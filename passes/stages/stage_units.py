"""The joint graph as a chain of units; a pipeline stage is a run of consecutive units.

A unit is a block of a stack, or a module beside the stack (embedding, norm, head), in forward
order. A unit's name is its module path, at which a stage may begin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from math import prod

from torch import fx

from partc.cost.memory import STATE_COPIES
from partc.cost.roofline import piece_seconds
from partc.cost.storage import Replay, Storage, replay
from partc.graph import Graph, fake_of, is_tensor, is_weight, tensor_args, value
from partc.graph.blocks import blocks_of, prefixes
from partc.graph.graph_edits import copied
from partc.graph.input_only import input_only
from partc.machines.devices import Device
from partc.passes.recompute.choose import recompute
from partc.passes.stages.buffer_units import inseparable, joined
from partc.passes.stages.cut_stages import Unit
from partc.plan import Plan
from partc.plan.mesh import Mesh


def stage_units(
    graph: Graph, plan: Plan, mesh: Mesh, *, stages: int = 1, optimizer: str = "adamw"
) -> list[list[Unit]]:
    """Per pipeline rank the units of an unsharded joint graph with their costs on its devices.

    Equal devices share one list. Units that share a buffer which the step updates are one, with
    those between them, where that leaves enough for ``stages``: else the refusal of the stages
    names the buffer. ``plan`` is complete. Costs are of one rank and microbatch:
    computing divided evenly by a stage's ranks, activations by the axes that shard the batch or
    the sequence. A unit's ``parameter_bytes`` are parameters, gradients and optimizer states.
    """
    if plan.recompute != "none" and graph.loss is not None:
        graph = recompute(copied(graph), plan)
    chain = _Chain(graph, replay(graph))
    ranks = mesh.cutting_axes().num_ranks
    cutting = {axis for cuts in plan.inputs.values() for axis in cuts} | set(plan.scatter)
    # Only axes that shard batch or sequence make activations smaller; computing is divided by all
    # ranks of a stage, whatever their axes shard.
    pieces = plan.microbatches * prod(size for name, size in mesh.axes if name in cutting)
    turns = plan.microbatches * ranks
    state = {
        name: (2 + STATE_COPIES[optimizer]) * _num_bytes(node)
        // prod(mesh.size(axis) for axis in plan.stored(name))
        for name, node in graph.params.items()
    }  # fmt: skip
    crossing, together = chain.crossing(), chain.inseparable(graph)

    @cache
    def on(device: Device) -> list[Unit]:
        units = [
            Unit(
                name=name,
                forward_us=1e6 * chain.seconds(unit.forward, device, turns),
                backward_us=1e6 * chain.seconds(unit.backward, device, turns),
                parameter_bytes=sum(state[name] for name in unit.params()),
                activation_bytes=chain.saved(unit) // pieces,
                boundary_bytes=crossing[number] // pieces,
            )
            for number, unit in enumerate(chain.units)
            for name in unit_names(graph, unit.name)
        ]
        one = joined(units, together)
        return one if len(one) >= stages else units

    return [on(mesh.at_place(at).hardware.device) for at in range(mesh.pipeline_ranks)]


def chain_names(graph: Graph) -> list[str]:
    """The names of all units in forward order, dropped blocks included."""
    units = _Chain(graph, replay(graph)).units
    return [name for unit in units for name in unit_names(graph, unit.name)]


def unit_names(graph: Graph, name: str) -> list[str]:
    """The name of a unit and those of the dropped blocks that the unit stands for."""
    folds = (f for f in graph.folds if f.like == name)
    return [name, *(f"{f.path}.{i}" for f in folds for i in range(f.first, f.last + 1))]


@dataclass
class _Calls:
    """The forward and backward calls of one unit."""

    name: str
    forward: list[fx.Node] = field(default_factory=list)
    backward: list[fx.Node] = field(default_factory=list)

    def params(self) -> dict[str, None]:
        """The names of the parameters that the unit's forward reads."""
        read = (o for node in self.forward for o in node.all_input_nodes if is_weight(o))
        return dict.fromkeys(value(_root(node)).name for node in read)


class _Chain:
    """The units of a graph in forward order, with the costs of their calls."""

    def __init__(self, graph: Graph, ran: Replay) -> None:
        self.ran = ran
        self.unit_of: dict[fx.Node, int] = {}
        self.units: list[_Calls] = []
        self._forward(graph)
        self._backward(graph)

    def _forward(self, graph: Graph) -> None:
        """Begin a unit at the first forward call of its module; a call without a module of its own,
        or that one block makes for all of its list, belongs to the unit before it.
        """
        free, blocks = input_only(graph), blocks_of(graph)
        lists = {block.rpartition(".")[0] for block in blocks}
        entered: set[str] = set()
        for node in graph.calls():
            known = value(node)
            if known.phase != "F" or node in free or is_weight(node):
                continue
            inside = list(prefixes(known.module))
            path = next((p for p in inside if p in blocks), known.module)
            if any(a in lists and not b.removeprefix(a)[1:].isdigit() for a, b in pairwise(inside)):
                path = ""
            if not self.units or (path and path not in entered):
                self.units.append(_Calls(path))
            entered.update(inside)
            self.units[-1].forward.append(node)
            self.unit_of[node] = len(self.units) - 1

    def _backward(self, graph: Graph) -> None:
        """A backward call belongs to the unit of the forward call whose gradient it makes."""
        named = {value(node).name or node.name: node for node in self.unit_of}
        here = len(self.units) - 1
        for node in graph.calls():
            if value(node).phase == "B":
                forward = named.get(value(node).forward)
                here = here if forward is None else self.unit_of[forward]
                self.units[here].backward.append(node)

    def inseparable(self, graph: Graph) -> list[tuple[int, int]]:
        """The first and last of units that one stage must have, counted with dropped blocks."""
        calls = ((n, unit.forward + unit.backward) for n, unit in enumerate(self.units))
        spans = inseparable(graph, {node: number for number, each in calls for node in each})
        sizes = (len(unit_names(graph, unit.name)) for unit in self.units)
        ends = list(accumulate(sizes, initial=0))
        return [(ends[first], ends[last + 1] - 1) for first, last in spans]

    def seconds(self, calls: list[fx.Node], device: Device, pieces: int) -> float:
        """Seconds of the calls on one of ``pieces`` pieces.

        A small call runs at a lower rate, so this is more than the whole's seconds / ``pieces``.
        """
        return sum(piece_seconds(node, self.ran, device, pieces) for node in calls)

    def saved(self, unit: _Calls) -> int:
        """Bytes of a unit's saved activations: forward values that a backward call reads."""
        memory: dict[Storage, int] = {}
        for node in unit.forward:
            if any(value(u).phase == "B" for u in node.users if u.op == "call_function"):
                memory |= self.ran.storages(node)
        return sum(memory.values())

    def crossing(self) -> list[int]:
        """Per unit the bytes that would be sent at its end: forward values of this and earlier
        units that later units read.
        """
        change = [0] * (len(self.units) + 1)
        for node, unit in self.unit_of.items():
            last = max((self.unit_of.get(user, unit) for user in node.users), default=unit)
            if is_tensor(node):
                change[unit] += _num_bytes(node)
                change[last] -= _num_bytes(node)
        sums, now = [], 0
        for each in change[:-1]:
            now += each
            sums.append(now)
        return sums


def _root(weight: fx.Node) -> fx.Node:
    """The parameter behind casts and transposes of a weight."""
    while weight.op == "call_function":
        weight = tensor_args(weight)[0]
    return weight


def _num_bytes(node: fx.Node) -> int:
    fake = fake_of(node)
    return int(fake.numel() * fake.element_size())
