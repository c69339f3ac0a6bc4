"""Predicted times: each call takes as long as its arithmetic or its memory traffic, whichever is
longer, and a collective runs beside the calls between its start and its wait.

This is the roofline model (Williams, Waterman and Patterson, 2009), its roofs lowered by what
kernels reach on the mesh's devices (``partc/topology.py``).
"""

from __future__ import annotations

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from partc import collectives
from partc.collective_cost import collective_seconds
from partc.graph import Graph, Phase, first_operand, held, value
from partc.mesh import Mesh
from partc.moves import kind_of
from partc.passes.bytes import moved_bytes, put_in_bytes
from partc.passes.flops import node_flops, op_name
from partc.passes.storage import Replay
from partc.sharding import DTYPE_NAMES
from partc.topology import Device


def phase_seconds(graph: Graph, ran: Replay, mesh: Mesh) -> dict[Phase, float]:
    """The time of each phase of a scheduled graph; what its collectives hide behind costs none.

    Collectives of one axis run one after the other. ``mesh`` has all axes, ``pp`` too:
    how far apart ranks stand depends on them.
    """
    clocks: dict[Phase, _Clock] = {}
    for node in graph.calls():
        clocks.setdefault(value(node).phase, _Clock(mesh)).run(node, ran)
    return {phase: clock.now for phase, clock in clocks.items()}


def call_seconds(node: fx.Node, num_bytes: int, device: Device) -> float:
    """The time of one call that moves so many bytes through memory."""
    work = "attention" if "attention" in op_name(node) else "matmul"
    return device.seconds(node_flops(node), _dtype(node), num_bytes, work)


class _Clock:
    """How far computing has come, and until when each axis is taken."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.device = mesh, mesh.hardware.device
        self.now = 0.0
        self.free: dict[str, float] = {}
        self.ends: dict[fx.Node, float] = {}

    def run(self, node: fx.Node, ran: Replay) -> None:
        if node.target in collectives.COLLECTIVES:
            axis = str(node.kwargs["axis"])
            begin = max(self.now, self.free.get(axis, 0.0))
            seconds = collective_seconds(kind_of(node), put_in_bytes(node), self.mesh, axis)
            self.ends[node] = self.free[axis] = begin + seconds
        elif node.target is collectives.wait:
            self.now = max(self.now, self.ends.get(first_operand(node), 0.0))
        else:
            self.now += call_seconds(node, moved_bytes(node, ran), self.device)


def _dtype(node: fx.Node) -> str:
    """The precision of a call's first result, as in ``Device.flops_per_s``."""
    tensors = [x for x in pytree.tree_leaves(held(node)) if isinstance(x, Tensor)]
    return DTYPE_NAMES.get(tensors[0].dtype, "f8") if tensors else "f32"
