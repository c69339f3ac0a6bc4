"""Meshes of machines with two processes each."""

from __future__ import annotations

from dataclasses import replace

from partc.machines.topology import Level, Topology
from partc.plan.mesh import Mesh

FAST, SLOW = 1e9, 1e6  # bytes per second
LATENCY_S = 1e-4


def in_pairs(
    axes: str, inside: float, across: float, start_s: float = 0, latency_s: float = LATENCY_S
) -> Mesh:
    """Two processes on every machine, and the links inside and across."""
    mesh = Mesh.of(axes)
    levels = (
        Level("inside", 2, inside, latency_s),
        Level("across", mesh.num_ranks // 2, across, latency_s),
    )
    devices = ((Topology.load("cpu").device, mesh.num_ranks),)
    return replace(mesh, topology=Topology("pairs", devices, levels, start_s=start_s))
