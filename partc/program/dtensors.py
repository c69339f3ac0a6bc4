"""Turn a rank's shards into DTensors and back, for torch's checkpoints and other meshes.

DTensor shards a dim over mesh axes in the mesh's order. Where a plan shards in another order (tp
first, then dp, although the mesh has dp first), the DTensor gets a mesh with reordered axes, made
of the same process groups. A cut with ``outer > 1`` (each third of a fused q, k, v weight by
itself) has no public DTensor placement. A tensor with such a cut is gathered, and stands in the
state dict whole and replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as DimCut

from partc.plan.mesh import Mesh
from partc.program.role import Shard

Gather = Callable[[Tensor, str], list[Tensor]]


class DTensors:
    """Converts between this rank's shards and DTensors; each reordered mesh is made once."""

    def __init__(
        self, mesh: Mesh, device_mesh: DeviceMesh | None, coords: Mapping[str, int]
    ) -> None:
        self.mesh, self.device_mesh, self.coords = mesh, device_mesh, coords
        self._meshes = {mesh.names: device_mesh} if device_mesh is not None else {}

    def make(self, shard: Shard, piece: Tensor, gather: Gather) -> Tensor:
        """The DTensor of a shard; the shard itself where there is no mesh.

        The DTensor shares the shard's memory, unless placements cannot express the cuts.
        """
        if self.device_mesh is None:
            return piece
        if not expressible(shard):
            shard, piece = whole_of(shard), shard.join(piece, gather)
        names = axis_order(shard, self.mesh)
        return DTensor.from_local(
            piece,
            self._reordered(names),
            placements(shard, names),
            run_check=False,
            shape=torch.Size(shard.shape),
            stride=torch.empty(shard.shape, device="meta").stride(),
        )

    def piece(self, shard: Shard, value: DTensor) -> Tensor:
        """This rank's shard of a DTensor with any mesh and placements."""
        if self.device_mesh is not None and expressible(shard):
            names = axis_order(shard, self.mesh)
            same = tuple(value.placements) == placements(shard, names)
            if same and value.device_mesh == self._reordered(names):
                return value.to_local()
        return shard.take(value.full_tensor(), self.mesh, self.coords)

    def _reordered(self, names: tuple[str, ...]) -> DeviceMesh:
        if names not in self._meshes:
            assert self.device_mesh is not None
            order = [self.mesh.names.index(name) for name in names]
            self._meshes[names] = DeviceMesh.from_group(
                [self.device_mesh.get_group(name) for name in names],
                self.device_mesh.device_type,
                mesh=self.device_mesh.mesh.permute(order),
                mesh_dim_names=names,
            )
        return self._meshes[names]


def expressible(shard: Shard) -> bool:
    """Whether DTensor placements can express a shard's cuts: none has ``outer > 1``."""
    return all(outer == 1 for _, _, outer in shard.cuts)


def whole_of(shard: Shard) -> Shard:
    """The Shard entry of the same tensor, not sharded."""
    return Shard(shard.key, shard.name, shard.shape, shard.dtype, ())


def axis_order(shard: Shard, mesh: Mesh) -> tuple[str, ...]:
    """The mesh's axes in an order in which DTensor makes the same cuts.

    That is the mesh's own order if every dim is cut in it, else the cutting axes go first.
    """
    cutting = [axis for axis, _, _ in shard.cuts]
    places = [(dim, mesh.names.index(axis)) for axis, dim, _ in shard.cuts]
    in_order = all(
        first < second
        for i, (dim, first) in enumerate(places)
        for other, second in places[i + 1 :]
        if dim == other
    )
    rest = [name for name in mesh.names if name not in cutting]
    return mesh.names if in_order else (*cutting, *rest)


def placements(shard: Shard, names: tuple[str, ...]) -> tuple[Placement, ...]:
    """One DTensor placement per mesh axis in this order."""
    dims = {axis: dim for axis, dim, _ in shard.cuts}
    return tuple(DimCut(dims[name]) if name in dims else Replicate() for name in names)
