"""What one rank is given of the batch: the whole of it, or with ``batch = "local"`` its piece.

A rank's piece is cut along the data axes alone. Ranks that differ on another axis (tensor or
context parallelism, pipeline stages) are given the same piece, and cut it further themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from partc.plan import Plan
from partc.plan.mesh import MICROBATCH_AXIS, PP, TP, Mesh, layout_mesh
from partc.plan.sharding import Sharding

Cuts = tuple[tuple[str, int, int], ...]  # (axis, dim, outer) in the order they are applied

MODEL_AXES = (PP, TP, "cp", "ep", MICROBATCH_AXIS)  # along these no rank has samples of its own


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which ranks may have samples of their own, in mesh order."""
    return tuple(axis for axis in mesh.names if axis not in MODEL_AXES)


def given(name: str, plan: Plan, mesh: Mesh) -> Sharding:
    """The layout in which a rank is given an input; ``mesh`` has the axes of layouts."""
    if plan.batch == "global":
        return Sharding()
    inside = [axis for axis in mesh.names if axis not in data_axes(mesh)]
    return Sharding.of(plan.stored(name, plan.inputs), mesh).without(inside, mesh)


def dealt(plan: Plan, names: Iterable[str]) -> dict[str, Cuts]:
    """How a rank's piece of each input is cut from the global batch; none for a whole input."""
    assert plan.mesh is not None
    mesh, found = layout_mesh(plan.mesh, plan.microbatches), {}
    for name in names:
        layout = given(name, plan, mesh)
        cuts = ((a, each.dim, layout.local_outer(a, mesh)) for a, each in layout.cuts())
        found[name] = tuple(cuts)
    return {name: cuts for name, cuts in found.items() if cuts}
