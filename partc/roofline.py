"""Predicted times: each call takes as long as its arithmetic or its memory traffic, whichever is
longer, and a collective runs beside the calls between its start and its wait.

This is the roofline model (Williams, Waterman and Patterson, 2009), its roofs lowered by what
kernels reach on the mesh's devices (``partc/topology.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from partc import collectives
from partc.collective_cost import collective_seconds
from partc.graph import Graph, Phase, first_operand, held, value
from partc.mesh import Mesh
from partc.moves import kind_of
from partc.passes.bytes import moved_bytes, packed_bytes, put_in_bytes, unpacked_bytes
from partc.passes.flops import node_flops, op_name
from partc.passes.fold_layers import unfolded_calls
from partc.passes.storage import Replay
from partc.sharding import DTYPE_NAMES
from partc.topology import Device

FUNCTIONS = frozenset(
    f"aten.{name}{suffix}"
    for name in (
        "exp", "log", "erf", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "mish", "elu",
        "softplus", "log_sigmoid_forward", "log_sigmoid", "_softmax", "_log_softmax", "pow",
    )
    for suffix in ("", "_backward", "_backward_data")
)  # fmt: skip


@dataclass
class Spent:
    """Where time goes, in seconds: computing by what bounds it (``arithmetic``, ``memory``,
    ``launches``), and by axis what computing waits for transfers or loses to them (``exposed``) and
    how long they run beside it (``hidden``).
    """

    computing: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.computing.values()) + sum(self.exposed.values())

    @property
    def bound(self) -> str:
        """What takes most of the time."""
        parts = {**self.computing, **self.exposed}
        return max(parts, key=parts.__getitem__, default="nothing")

    def add(self, other: Spent, times: float = 1.0) -> None:
        """Add what another spent, so many times."""
        for mine, theirs in (
            (self.computing, other.computing),
            (self.exposed, other.exposed),
            (self.hidden, other.hidden),
        ):
            for name, seconds in theirs.items():
                mine[name] = mine.get(name, 0.0) + times * seconds

    @classmethod
    def of_json(cls, data: Mapping[str, Mapping[str, float]]) -> Spent:
        return cls(**{name: dict(seconds) for name, seconds in data.items()})


def phase_times(graph: Graph, ran: Replay, mesh: Mesh) -> dict[Phase, Spent]:
    """What each phase of a scheduled graph spends, each run by itself from its first call.

    ``mesh`` has all axes, ``pp`` too: how far apart ranks stand depends on them.
    """
    clocks: dict[Phase, Clock] = {}
    spent: dict[Phase, Spent] = {}
    for node in unfolded_calls(graph):
        phase = value(node).phase
        clocks.setdefault(phase, Clock(mesh, ran)).run(node, spent.setdefault(phase, Spent()))
    return spent


def call_seconds(node: fx.Node, num_bytes: int, device: Device) -> float:
    """The time of one call that moves so many bytes through memory."""
    return _longest(node, num_bytes, device)[1]


def dtype_of(node: fx.Node) -> str:
    """The precision of a call's first result, as in ``Device.flops_per_s``."""
    tensors = [x for x in pytree.tree_leaves(held(node)) if isinstance(x, Tensor)]
    return DTYPE_NAMES.get(tensors[0].dtype, "f8") if tensors else "f32"


class Clock:
    """How far computing has come, and until when the links of each axis are taken.

    Collectives of one axis run one after the other, those of several axes side by side. While any
    runs, computing is slower by the topology's ``contention``.
    """

    def __init__(self, mesh: Mesh, ran: Replay) -> None:
        self.mesh, self.ran, self.device = mesh, ran, mesh.hardware.device
        self.now = 0.0
        self.free: dict[str, float] = {}  # axis -> when its last transfer ends
        self.ends: dict[fx.Node, float] = {}

    def run(self, node: fx.Node, spent: Spent) -> None:
        """Execute the next call of a program."""
        if node.target in collectives.COLLECTIVES:
            self.ends[node] = self.start(node, spent)
        elif node.target is collectives.wait:
            start = first_operand(node)
            if start in self.ends:
                self.wait(start, self.ends.pop(start), spent)
        else:
            self._compute(*_longest(node, moved_bytes(node, self.ran), self.device), spent)

    def start(self, node: fx.Node, spent: Spent) -> float:
        """Start a collective, once its operands lie side by side; when it ends."""
        axis = str(node.kwargs["axis"])
        self._copy(packed_bytes(node), spent)
        begin = max(self.now, self.free.get(axis, 0.0))
        seconds = collective_seconds(kind_of(node), put_in_bytes(node), self.mesh, axis)
        spent.hidden[axis] = spent.hidden.get(axis, 0.0) + seconds
        self.free[axis] = begin + seconds
        return begin + seconds

    def wait(self, node: fx.Node, end: float, spent: Spent) -> None:
        """Wait for a started collective that ends then, and make the whole of what arrived."""
        if end > self.now:
            self._expose(str(node.kwargs["axis"]), end - self.now, spent)
            self.now = end
        self._copy(unpacked_bytes(node), spent)

    def _copy(self, num_bytes: int, spent: Spent) -> None:
        if num_bytes:
            self._compute("memory", self.device.memory_seconds(num_bytes), spent)

    def _compute(self, bound: str, seconds: float, spent: Spent) -> None:
        spent.computing[bound] = spent.computing.get(bound, 0.0) + seconds
        axis = max(self.free, key=self.free.__getitem__, default="")
        speed = 1 - self.mesh.hardware.contention
        beside = self.free.get(axis, 0.0) - self.now  # so long a transfer runs
        if beside > 0 and speed < 1:
            slowed = min(beside, seconds / speed) if speed > 0 else beside
            self._expose(axis, lost := slowed * (1 - speed), spent)
            seconds += lost
        self.now += seconds

    def _expose(self, axis: str, seconds: float, spent: Spent) -> None:
        """Count time of a transfer, hidden so far, as exposed."""
        spent.exposed[axis] = spent.exposed.get(axis, 0.0) + seconds
        spent.hidden[axis] = spent.hidden.get(axis, 0.0) - seconds


def _longest(node: fx.Node, num_bytes: int, device: Device) -> tuple[str, float]:
    """What bounds a call that moves so many bytes, and its seconds; nothing where it does none."""
    flops = node_flops(node)
    if not flops and not num_bytes:
        return "launches", 0.0
    name = op_name(node)
    work = "attention" if "attention" in name else "functions" if name in FUNCTIONS else "matmul"
    parts = device.parts(flops, dtype_of(node), num_bytes, work)
    return max(parts.items(), key=lambda part: part[1])
