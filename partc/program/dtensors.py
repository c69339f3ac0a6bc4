"""Local pieces as DTensors and back, so that torch's checkpoints can be loaded under another mesh.

DTensor cuts a dim by mesh axes in mesh order. Where our order differs (dp cuts what tp left, but
stands before it), the DTensor lives on a mesh whose axes are reordered, made from the same process
groups. A cut with ``outer > 1`` (each third of a fused q, k, v weight by itself) has no public
DTensor placement: such a tensor is gathered and stands in the state dict whole, replicated.
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
    """Makes DTensors of this rank's pieces; the reordered meshes are made once."""

    def __init__(
        self, mesh: Mesh, device_mesh: DeviceMesh | None, coords: Mapping[str, int]
    ) -> None:
        self.mesh, self.device_mesh, self.coords = mesh, device_mesh, coords
        self._meshes = {mesh.names: device_mesh} if device_mesh is not None else {}

    def make(self, shard: Shard, piece: Tensor, gather: Gather) -> Tensor:
        """The whole tensor as a DTensor that shares the piece's memory where its cuts can be said;
        without a mesh the tensor itself."""
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
        """This rank's piece of a DTensor, however it is laid out."""
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
    """Whether DTensor's placements can say the cuts."""
    return all(outer == 1 for _, _, outer in shard.cuts)


def whole_of(shard: Shard) -> Shard:
    """The same tensor, uncut."""
    return Shard(shard.key, shard.name, shard.shape, shard.dtype, ())


def axis_order(shard: Shard, mesh: Mesh) -> tuple[str, ...]:
    """The mesh's own order if every dim is cut in it, else the cutting axes as they cut."""
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
