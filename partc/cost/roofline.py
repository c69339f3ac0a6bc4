"""Predict times by the roofline model (Williams, Waterman and Patterson, 2009).

A call takes as long as its arithmetic or its memory traffic, whichever is longer. A collective runs
beside the calls between its start and its wait. Arithmetic and memory run at the part of their peak
that kernels reach on the mesh's devices (``partc/machines/topology.py``).
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
from partc.cost.sites import NOWHERE, Site
from partc.cost.step_events import Call, Move
from partc.cost.storage import Replay
from partc.graph import fake_of
from partc.machines.devices import Device
from partc.machines.topology import APART_S
from partc.plan.mesh import Mesh
from partc.plan.sharding import DTYPE_NAMES

FUNCTIONS = frozenset(
    f"aten.{name}{suffix}"
    for name in (
        "exp", "log", "erf", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "mish", "elu",
        "softplus", "log_sigmoid_forward", "log_sigmoid", "_softmax", "_log_softmax", "pow",
    )
    for suffix in ("", "_backward", "_backward_data")
) | {"dropout_mask", "cross_entropy_grad"}  # fmt: skip

COMPUTE = "compute"  # the stream that computes
BLOCKS = "blocks"  # of boxes around what the calls of a block, or of a pipeline's action, take
WAIT = "wait"  # of boxes in which computing stands still, where steps are measured


@dataclass
class Spent:
    """Where the seconds of a phase or a step go.

    ``computing``: by what bounds the calls (``arithmetic``, ``memory``, ``launches``).
    ``exposed``: by mesh axis, the time that computing waits for transfers or is slowed by them.
    ``hidden``: by mesh axis, the time that transfers run while computing goes on.
    """

    computing: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.computing.values()) + sum(self.exposed.values())

    @property
    def parts(self) -> dict[str, float]:
        """Computing by what bounds it and exposed transfers by axis, in seconds."""
        return {**self.computing, **self.exposed}

    @property
    def bound(self) -> str:
        """The name of the largest part, ``nothing`` if there is none."""
        parts = self.parts
        return max(parts, key=parts.__getitem__, default="nothing")

    def times(self, factor: float) -> Spent:
        """A new Spent with all seconds multiplied by a factor."""
        whole = Spent()
        whole.add(self, factor)
        return whole

    def add(self, other: Spent, times: float = 1.0) -> None:
        """Add another's seconds, ``times`` times, to these."""
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
    """Seconds of one piece of a call whose rows or batch are cut into ``pieces`` equal ones."""
    call = call_of(node, ran)
    if call is None:
        return 0.0
    piece = call._replace(
        flops=call.flops // pieces, num_bytes=call.num_bytes // pieces,
        rows=-(-call.rows // pieces), written_bytes=call.written_bytes // pieces,
    )  # fmt: skip
    return max(_parts(piece, device).values()) + device.call_s


def call_of(node: fx.Node, ran: Replay) -> Call | None:
    """The FLOPs, bytes and sizes of a call; None for a view and other calls that cost nothing."""
    flops, num_bytes, name = node_flops(node), moved_bytes(node, ran), op_name(node)
    if not flops and not num_bytes:
        return None
    product = product_of(node)
    written = fake_of(node).nbytes if product.rows else 0
    return Call(name, work_of(node), dtype_of(node), flops, num_bytes, *product, written)


def work_of(node: fx.Node) -> str:
    """The kind of work (``topology.WORK``) whose efficiency a call has.

    ``matmul`` is also the answer for calls without FLOPs, whose time is memory traffic alone.
    """
    name = op_name(node)
    return "attention" if "attention" in name else "functions" if name in FUNCTIONS else "matmul"


def _parts(call: Call, device: Device) -> dict[str, float]:
    busy = float(busy_share(device.processors, call.batch, call.rows, call.columns))
    return device.parts(
        call.flops, call.dtype, call.num_bytes, call.work, busy, call.written_bytes
    )  # fmt: skip


def dtype_of(node: fx.Node) -> str:
    """The name in ``Device.flops_per_s`` of the dtype of a call's first result."""
    tensors = [x for x in pytree.tree_leaves(fake_of(node)) if isinstance(x, Tensor)]
    return DTYPE_NAMES.get(tensors[0].dtype, "f8") if tensors else "f32"


class Box(NamedTuple):
    """One span of a time line: what a stream does from ``begin_s`` on, for ``seconds``.

    Streams are ``COMPUTE``, the mesh axes, and ``BLOCKS``, whose boxes enclose a block's calls and
    are named by phase or kind of action. ``site``: the call of the user's model that it is of.
    ``num_bytes``: of a transfer what one rank puts in.
    """

    stream: str
    name: str
    block: str
    begin_s: float
    seconds: float
    site: Site = NOWHERE
    num_bytes: int = 0

    @property
    def title(self) -> str:
        """The box's name in traces, ``partc::<kind>::<site>``."""
        if self.stream == BLOCKS:
            return f"partc::{self.name}::{self.block}"
        return f"partc::{self.stream}::{self.name}"


class Clock:
    """Simulates one rank: one stream that computes, and one stream of transfers per mesh axis.

    Collectives of one axis run one after the other, those of different axes side by side. While a
    transfer runs, computing is slower by the topology's ``contention``. At a wait, ranks also wait
    for the slowest of them (``skew``). A list ``boxes`` receives every span of time.
    """

    def __init__(self, mesh: Mesh, boxes: list[Box] | None = None) -> None:
        self.mesh, self.device = mesh, mesh.hardware.device
        self.now = self.met = 0.0  # seconds; when ranks last waited for each other
        self.free: dict[str, float] = {}  # axis -> when its last transfer ends
        self.bounded: dict[Call, tuple[str, float]] = {}  # kept, as equal layers repeat a call
        self.boxes = boxes
        self.block, self.site = "", NOWHERE

    def compute(self, call: Call, spent: Spent) -> None:
        """Advance the computing stream by the time of one call."""
        if (bounded := self.bounded.get(call)) is None:
            bounded = max(_parts(call, self.device).items(), key=lambda part: part[1])
            self.bounded[call] = bounded
        bound, seconds = bounded
        self._compute(call.name, bound, seconds + self.device.call_s, spent)

    def start(self, move: Move, spent: Spent) -> float:
        """Copy a collective's operands together, start the collective; return when it ends."""
        axis = move.axis
        self._copy(move.packed_bytes, spent)
        begin = max(self.now, self.free.get(axis, 0.0))
        seconds = self.seconds_of(move)
        spent.hidden[axis] = spent.hidden.get(axis, 0.0) + seconds
        self.free[axis] = begin + seconds
        self._note(axis, move.kind, begin, seconds, move.put_in_bytes)
        return begin + seconds

    def seconds_of(self, move: Move) -> float:
        """Seconds of a collective that nothing disturbs."""
        return collective_seconds(move.kind, move.put_in_bytes, self.mesh, move.axis)

    def wait(self, move: Move, end: float, spent: Spent) -> None:
        """Wait until ``end`` for a started collective, then copy what arrived into place."""
        # the longer ranks computed since they last met, the further they are apart
        end += self.mesh.hardware.skew * min(self.now - self.met, APART_S)
        if end > self.now:
            self._expose(move.axis, end - self.now, spent)
            self.now = self.met = end
        self._copy(move.unpacked_bytes, spent)

    def note(self, name: str, seconds: float) -> None:
        """Add a box of the computing stream that begins now and belongs to no block."""
        self.block, self.site = "", NOWHERE
        self._note(COMPUTE, name, self.now, seconds)

    def note_block(self, phase: str, begin_s: float) -> None:
        """Add a box from ``begin_s`` to now around a block's calls of one phase."""
        self.site = NOWHERE
        self._note(BLOCKS, phase, begin_s, self.now - begin_s)

    def _copy(self, num_bytes: int, spent: Spent) -> None:
        if num_bytes:
            self._compute("copy", "memory", self.device.memory_seconds(num_bytes), spent)

    def _compute(self, name: str, bound: str, seconds: float, spent: Spent) -> None:
        spent.computing[bound] = spent.computing.get(bound, 0.0) + seconds
        # of several transfers the one that ends last slows computing for longest
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
        """Count seconds of a transfer as exposed; ``start`` counted them all as hidden."""
        spent.exposed[axis] = spent.exposed.get(axis, 0.0) + seconds
        spent.hidden[axis] = spent.hidden.get(axis, 0.0) - seconds

    def _note(
        self, stream: str, name: str, begin: float, seconds: float, num_bytes: int = 0
    ) -> None:
        if self.boxes is not None:
            box = Box(stream, name, self.block, begin, seconds, self.site, num_bytes)
            self.boxes.append(box)
