"""Meshes of machines with two ranks each: fast links inside of a machine, slow ones across."""

from __future__ import annotations

from dataclasses import replace

from partc.machines.topology import Level, Topology
from partc.plan.mesh import Mesh

FAST, SLOW = 1e9, 1e6  # bytes per second
LATENCY_S = 1e-4


def in_pairs(
    axes: str, inside: float, across: float, start_s: float = 0, latency_s: float = LATENCY_S
) -> Mesh:
    """A mesh of ``axes`` with two ranks on each machine.

    ``inside`` and ``across`` are bytes per second of the links inside of a machine and between
    machines; ``latency_s`` is the latency of both, ``start_s`` what starting a transfer takes.
    """
    mesh = Mesh.of(axes)
    levels = (
        Level("inside", 2, inside, latency_s),
        Level("across", mesh.num_ranks // 2, across, latency_s),
    )
    devices = ((Topology.load("cpu").device, mesh.num_ranks),)
    return replace(mesh, topology=Topology("pairs", devices, levels, start_s=start_s))
