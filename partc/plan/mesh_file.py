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

PLAN = (  # keys of a plan.toml, whose values are no sizes of axes
    "preset", "params", "inputs", "values", "mesh", "batch", "batch_norm", "recompute", "schedule",
    "backend", "stages",
)  # fmt: skip
_AXES = "Write a line [axes], and below it for example dp = 2."


def read_mesh(path: Path) -> Mesh:
    """The mesh in a mesh.toml; PlanError names the entry that is wrong."""
    table, where = read_toml(path), str(path)
    _check_no_plan(table, where)
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
        what = f"{word} = {quoted(table[word])} is no axis"
        raise refusal(where, what, "an axis has a size", _AXES)
    if not (axes or table):
        raise refusal(where, "it is empty", "it has axes, machines, or both", _AXES)
    return Mesh(tuple((axes or table).items()))


def _check_no_plan(table: Mapping[str, Any], where: str) -> None:
    """PlanError for a plan.toml in the place of a mesh.toml."""
    word = next((n for n in PLAN if isinstance(table.get(n), str | list | Mapping)), "")
    if not word:
        return
    axes = table.get("mesh")
    if word == "mesh" and {*table} <= {"mesh", "axes", "machine", *TOPOLOGY_KEYS}:
        raise refusal(
            where, "[mesh] is no table of a mesh.toml", "axes stand under [axes] there, and under "
            "[mesh] in a plan.toml", "Write [axes] in the place of [mesh].",
        )  # fmt: skip
    sizes = axes.items() if isinstance(axes, Mapping) and axes else [("dp", 2)]
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes)
    raise refusal(
        where, "it is a plan, and no mesh", f"it has the key {word} of a plan.toml",
        f'Pass it as the plan, and the mesh by its axes: plan="{where}", mesh="{mesh}" (or --plan '
        f"{where} --mesh {mesh}).",
    )  # fmt: skip


def _machine(table: Mapping[str, Any], axes: Mapping[str, Any], where: str) -> Topology:
    """The machine that the file names; `Mesh` checks the sizes of axes later."""
    check_keys(where, table, ("machine", "devices"))
    whole = all(isinstance(size, int) for size in axes.values())
    ranks = prod(axes.values()) if axes and whole else None
    return Topology.load(str(table["machine"]), table.get("devices", ranks))
