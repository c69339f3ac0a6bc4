"""Read a mesh.toml, which has the mesh's axes, the machines, or both.

``[axes]`` has the size of each axis by name. ``machine = "dgx-h100"`` names machines that come with
partc; ``devices = 1024`` is their number, else the number of ranks. Other machines are described by
``name``, ``[[devices]]`` and ``[[levels]]`` (``partc/machines/topology_text.py``). A file with
sizes by name and nothing else has only axes.
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
from partc.wrong_calls import quoted

PLAN = ("preset", "params", "schedule", "recompute", "notes", "backend")  # keys of a plan.toml
_AXES = "Write a line [axes], and below it for example dp = 2."


def read_mesh(path: Path) -> Mesh:
    """The mesh in a mesh.toml; PlanError names the entry that is wrong."""
    table, where = read_toml(path), str(path)
    axes = table.pop("axes", {})
    if not isinstance(axes, Mapping):
        do = "Write a line [axes], and the sizes below it: dp = 2."
        raise refusal(f"{where}, axes", f"{axes!r} are no axes", "axes are a table of sizes", do)
    if "machine" in table:
        return Mesh(tuple(axes.items()), _machine(table, axes, where))
    if set(table) & set(TOPOLOGY_KEYS):
        return Mesh(tuple(axes.items()), topology_of(table, where))
    known = ("axes", "machine", *TOPOLOGY_KEYS)
    if axes:
        check_keys(where, table, known)
    name = next((name for name, size in table.items() if isinstance(size, Mapping)), "")
    if name:
        why = "the sizes of axes stand under [axes], or alone in the file"
        raise refusal(where, f"[{name}] is unknown", why, _AXES)
    word = next((name for name, size in table.items() if isinstance(size, str | list)), "")
    if word:
        do = (
            'Pass a plan as plan=, and the mesh by its axes: mesh="dp=2".'
            if word in PLAN
            else _AXES
        )
        raise refusal(where, f"{word} = {quoted(table[word])} is no axis", "an axis has a size", do)
    if not (axes or table):
        raise refusal(where, "it is empty", "it has axes, machines, or both", _AXES)
    return Mesh(tuple((axes or table).items()))


def _machine(table: Mapping[str, Any], axes: Mapping[str, Any], where: str) -> Topology:
    """The machine that the file names; `Mesh` checks the sizes of axes later."""
    check_keys(where, table, ("machine", "devices"))
    whole = all(isinstance(size, int) for size in axes.values())
    ranks = prod(axes.values()) if axes and whole else None
    return Topology.load(str(table["machine"]), table.get("devices", ranks))
