"""How fast the islands of a mesh compute, by the machines that they stand on."""

from __future__ import annotations

from partc.plan.mesh import ISLAND, Mesh


def island_speeds(mesh: Mesh, dtype: str) -> list[float]:
    """By island the peak FLOP/s in ``dtype`` of the slowest of its devices.

    ``mesh`` has the machines under it, which may be of several kinds.
    """
    ranks: dict[int, list[int]] = {}
    for rank, coords in enumerate(mesh.all_coords()):
        ranks.setdefault(coords.get(ISLAND, 0), []).append(rank)
    return [mesh.hardware.at(each).device.peak(dtype) for each in ranks.values()]
