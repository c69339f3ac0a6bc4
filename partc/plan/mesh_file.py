"""A mesh.toml: the axes, the machines under them, or both.

``[axes]`` has sizes by name. ``machine = "dgx-h100"`` takes machines that come with partc, as many
as there are ranks or ``devices = 1024``; else ``name``, ``[[devices]]`` and ``[[levels]]`` describe
them (``partc/machines/topology_text.py``). A file with nothing but sizes by name is axes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from partc.machines.topology import Topology
from partc.machines.topology_checks import check_keys, refusal
from partc.machines.topology_text import TOPOLOGY_KEYS, read_toml, topology_of
from partc.plan.mesh import Mesh


def read_mesh(path: Path) -> Mesh:
    """The mesh in a file; PlanError names the entry that is wrong."""
    table, where = read_toml(path), str(path)
    axes = table.pop("axes", {})
    if not isinstance(axes, Mapping):
        raise refusal(f"{where}, axes", f"{axes!r} are no axes", "axes are a table of sizes")
    if "machine" in table:
        return Mesh(tuple(axes.items()), _machine(table, axes, where))
    if set(table) & set(TOPOLOGY_KEYS):
        return Mesh(tuple(axes.items()), topology_of(table, where))
    if axes:
        check_keys(where, table, ("axes", "machine", *TOPOLOGY_KEYS))
    return Mesh(tuple((axes or table).items()))


def _machine(table: Mapping[str, Any], axes: Mapping[str, Any], where: str) -> Topology:
    """The machine that comes with partc; the sizes of axes are the mesh's to check."""
    check_keys(where, table, ("machine", "devices"))
    whole = all(isinstance(size, int) for size in axes.values())
    ranks = prod(axes.values()) if axes and whole else None
    return Topology.load(str(table["machine"]), table.get("devices", ranks))
