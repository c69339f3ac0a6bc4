"""Predicted times: each call takes as long as its arithmetic or its memory traffic, whichever is
longer, and a collective runs beside the calls between its start and its wait.

This is the roofline model (Williams, Waterman and Patterson, 2009), its roofs lowered by what
kernels reach on the mesh's devices (``partc/machines/topology.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from partc.cost.bytes import moved_bytes
from partc.cost.collective_cost import collective_seconds
from partc.cost.flops import node_flops, op_name
from partc.cost.products import busy_share, product_of
from partc.cost.step_events import Call, Move
from partc.cost.storage import Replay
from partc.graph import fake_of
from partc.machines.topology import APART_S, Device
from partc.plan.mesh import Mesh
from partc.plan.sharding import DTYPE_NAMES

FUNCTIONS = frozenset(
    f"aten.{name}{suffix}"
    for name in (
        "exp", "log", "erf", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "mish", "elu",
        "softplus", "log_sigmoid_forward", "log_sigmoid", "_softmax", "_log_softmax", "pow",
    )
    for suffix in ("", "_backward", "_backward_data")
) | {"dropout_mask", "drawn_mask", "same_mask", "cross_entropy_grad"}  # fmt: skip

COMPUTE = "compute"  # the stream that computes
BLOCKS = "blocks"  # of boxes around what the calls of a block, or of a pipeline's action, take
WAIT = "wait"  # of boxes in which computing stands still, where steps are measured


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
    def parts(self) -> dict[str, float]:
        """Seconds by what computing is bound by, and by the axis that it waits for."""
        return {**self.computing, **self.exposed}

    @property
    def bound(self) -> str:
        """What takes most of the time."""
        parts = self.parts
        return max(parts, key=parts.__getitem__, default="nothing")

    def times(self, factor: float) -> Spent:
        """So many times as much."""
        whole = Spent()
        whole.add(self, factor)
        return whole

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


def piece_seconds(node: fx.Node, ran: Replay, device: Device, pieces: int) -> float:
    """The time of one of so many equal pieces of a call, those of its rows or batch."""
    call = call_of(node, ran)
    if call is None:
        return 0.0
    piece = call._replace(
        flops=call.flops // pieces, num_bytes=call.num_bytes // pieces,
        rows=-(-call.rows // pieces), written_bytes=call.written_bytes // pieces,
    )  # fmt: skip
    return max(_parts(piece, device).values()) + device.call_s


def call_of(node: fx.Node, ran: Replay) -> Call | None:
    """What a roofline asks of a call; None if it does nothing."""
    flops, num_bytes, name = node_flops(node), moved_bytes(node, ran), op_name(node)
    if not flops and not num_bytes:
        return None
    product = product_of(node)
    written = fake_of(node).nbytes if product.rows else 0
    return Call(name, work_of(node), dtype_of(node), flops, num_bytes, *product, written)


def work_of(node: fx.Node) -> str:
    """Which efficiency a call has (``topology.WORK``); calls without FLOPs are not ``matmul``."""
    name = op_name(node)
    return "attention" if "attention" in name else "functions" if name in FUNCTIONS else "matmul"


def _parts(call: Call, device: Device) -> dict[str, float]:
    busy = float(busy_share(device.processors, call.batch, call.rows, call.columns))
    return device.parts(
        call.flops, call.dtype, call.num_bytes, call.work, busy, call.written_bytes
    )  # fmt: skip


def dtype_of(node: fx.Node) -> str:
    """The precision of a call's first result, as in ``Device.flops_per_s``."""
    tensors = [x for x in pytree.tree_leaves(fake_of(node)) if isinstance(x, Tensor)]
    return DTYPE_NAMES.get(tensors[0].dtype, "f8") if tensors else "f32"


class Box(NamedTuple):
    """What a stream does from ``begin_s`` on: the one that computes, or that of an axis. Those of
    ``BLOCKS`` are named by phase, or kind of action.
    """

    stream: str
    name: str
    block: str
    begin_s: float
    seconds: float

    @property
    def title(self) -> str:
        """Its name in traces, ``partc::<kind>::<site>``."""
        if self.stream == BLOCKS:
            return f"partc::{self.name}::{self.block}"
        return f"partc::{self.stream}::{self.name}"


class Clock:
    """How far computing has come, and until when the links of each axis are taken.

    Collectives of one axis run one after the other, those of several axes side by side. While any
    runs, computing is slower by the topology's ``contention``; where ranks meet, they wait for the
    slowest (``skew``). With ``boxes`` it notes all of it.
    """

    def __init__(self, mesh: Mesh, boxes: list[Box] | None = None) -> None:
        self.mesh, self.device = mesh, mesh.hardware.device
        self.now = self.met = 0.0  # seconds; when ranks last waited for each other
        self.free: dict[str, float] = {}  # axis -> when its last transfer ends
        self.boxes = boxes
        self.block = ""

    def compute(self, call: Call, spent: Spent) -> None:
        """Execute a call."""
        bound, seconds = max(_parts(call, self.device).items(), key=lambda part: part[1])
        self._compute(call.name, bound, seconds + self.device.call_s, spent)

    def start(self, move: Move, spent: Spent) -> float:
        """Start a collective, once its operands lie side by side; when it ends."""
        axis = move.axis
        self._copy(move.packed_bytes, spent)
        begin = max(self.now, self.free.get(axis, 0.0))
        seconds = collective_seconds(move.kind, move.put_in_bytes, self.mesh, axis)
        spent.hidden[axis] = spent.hidden.get(axis, 0.0) + seconds
        self.free[axis] = begin + seconds
        self._note(axis, move.kind, begin, seconds)
        return begin + seconds

    def wait(self, move: Move, end: float, spent: Spent) -> None:
        """Wait for a started collective that ends then, and make the whole of what arrived."""
        end += self.mesh.hardware.skew * min(self.now - self.met, APART_S)
        if end > self.now:
            self._expose(move.axis, end - self.now, spent)
            self.now = self.met = end
        self._copy(move.unpacked_bytes, spent)

    def note(self, name: str, seconds: float) -> None:
        """Note what runs now and takes so long, in none of the blocks."""
        self.block = ""
        self._note(COMPUTE, name, self.now, seconds)

    def note_block(self, phase: str, begin_s: float) -> None:
        """Note that the calls of a block's phase are done which began then."""
        self._note(BLOCKS, phase, begin_s, self.now - begin_s)

    def _copy(self, num_bytes: int, spent: Spent) -> None:
        if num_bytes:
            self._compute("copy", "memory", self.device.memory_seconds(num_bytes), spent)

    def _compute(self, name: str, bound: str, seconds: float, spent: Spent) -> None:
        spent.computing[bound] = spent.computing.get(bound, 0.0) + seconds
        axis = max(self.free, key=self.free.__getitem__, default="")
        speed = 1 - self.mesh.hardware.contention
        beside = self.free.get(axis, 0.0) - self.now  # so long a transfer runs
        if beside > 0 and speed < 1:
            slowed = min(beside, seconds / speed) if speed > 0 else beside
            self._expose(axis, lost := slowed * (1 - speed), spent)
            seconds += lost
        self._note(COMPUTE, name, self.now, seconds)
        self.now += seconds

    def _expose(self, axis: str, seconds: float, spent: Spent) -> None:
        """Count time of a transfer, hidden so far, as exposed."""
        spent.exposed[axis] = spent.exposed.get(axis, 0.0) + seconds
        spent.hidden[axis] = spent.hidden.get(axis, 0.0) - seconds

    def _note(self, stream: str, name: str, begin: float, seconds: float) -> None:
        if self.boxes is not None:
            self.boxes.append(Box(stream, name, self.block, begin, seconds))
