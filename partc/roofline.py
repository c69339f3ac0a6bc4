"""Predicted times: each call takes as long as its arithmetic or its memory traffic, whichever is
longer, and a collective runs beside the calls between its start and its wait.

This is the roofline model (Williams, Waterman and Patterson, 2009). It is a bound from below: no
kernel reaches a data sheet's figures, and launches are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from partc import collectives
from partc.graph import Graph, Phase, first_operand, held, value
from partc.passes.bytes import moved_bytes, sent_bytes
from partc.passes.flops import node_flops
from partc.passes.storage import Replay
from partc.schedules.step_costs import Link


@dataclass(frozen=True)
class Device:
    """What one device does at best: FLOP/s by dtype, memory traffic, its link to another one."""

    name: str
    flops_per_s: Mapping[torch.dtype, float]
    bytes_per_s: float
    link: Link

    def __str__(self) -> str:
        return (
            f"{self.name}: memory {self.bytes_per_s / 1e12:.3g} TB/s, "
            f"link {self.link.bytes_per_s / 1e9:.3g} GB/s and {self.link.latency_s * 1e6:.3g} us"
        )

    def seconds(self, flops: int, dtype: torch.dtype, num_bytes: int) -> float:
        """The time of some work, its arithmetic in this precision."""
        rate = self.flops_per_s.get(dtype, self.flops_per_s[torch.float32])
        return max(flops / rate, num_bytes / self.bytes_per_s)


# NVIDIA's data sheet of the H100 SXM: dense tensor cores for 16 bits and float64, float32 without
# TF32; NVLink one way. The latency is assumed.
H100 = Device(
    "assumed H100",
    {
        torch.bfloat16: 989e12,
        torch.float16: 989e12,
        torch.float32: 67e12,
        torch.float64: 67e12,
    },
    bytes_per_s=3.35e12,
    link=Link(latency_s=10e-6, bytes_per_s=450e9),
)


def phase_seconds(graph: Graph, ran: Replay, device: Device) -> dict[Phase, float]:
    """The time of each phase of a scheduled graph; what its collectives hide behind costs none.

    Collectives of one axis run one after the other.
    """
    clocks: dict[Phase, _Clock] = {}
    for node in graph.calls():
        clocks.setdefault(value(node).phase, _Clock()).run(node, ran, device)
    return {phase: clock.now for phase, clock in clocks.items()}


def call_seconds(node: fx.Node, num_bytes: int, device: Device) -> float:
    """The time of one call that moves so many bytes through memory."""
    return device.seconds(node_flops(node), _dtype(node), num_bytes)


class _Clock:
    """How far computing has come, and until when each axis is taken."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free: dict[str, float] = {}
        self.ends: dict[fx.Node, float] = {}

    def run(self, node: fx.Node, ran: Replay, device: Device) -> None:
        if node.target in collectives.COLLECTIVES:
            axis = str(node.kwargs["axis"])
            begin = max(self.now, self.free.get(axis, 0.0))
            self.ends[node] = self.free[axis] = begin + device.link.seconds(sent_bytes(node))
        elif node.target is collectives.wait:
            self.now = max(self.now, self.ends.get(first_operand(node), 0.0))
        else:
            self.now += call_seconds(node, moved_bytes(node, ran), device)


def _dtype(node: fx.Node) -> torch.dtype:
    """The precision of a call's first result."""
    tensors = [x for x in pytree.tree_leaves(held(node)) if isinstance(x, Tensor)]
    return tensors[0].dtype if tensors else torch.float32
