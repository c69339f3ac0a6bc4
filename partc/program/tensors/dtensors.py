"""Turn a rank's shards into DTensors and back, for torch's checkpoints and other meshes.

DTensor shards a dim over mesh axes in the mesh's order. Where a plan shards in another order (tp
first, then dp, although the mesh has dp first), the DTensors get a mesh with reordered axes, made
of the same process groups: one for all tensors of a rank if their orders agree, since torch's ops
refuse operands on two meshes. A cut with ``outer > 1`` (each third of a fused q, k, v weight by
itself) has no public DTensor placement. A tensor with such a cut is gathered, and stands in the
state dict whole and replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

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
        self,
        mesh: Mesh,
        device_mesh: DeviceMesh | None,
        coords: Mapping[str, int],
        shards: Iterable[Shard] = (),
    ) -> None:
        self.mesh, self.device_mesh, self.coords = mesh, device_mesh, coords
        self._meshes = {mesh.names: device_mesh} if device_mesh is not None else {}
        self._order = axis_order(list(shards), mesh)

    def make(self, shard: Shard, piece: Tensor, gather: Gather) -> Tensor:
        """The DTensor of a shard; the shard itself where there is no mesh.

        The DTensor shares the shard's memory, unless placements cannot express the cuts.
        """
        if self.device_mesh is None:
            return piece
        if not expressible(shard):
            shard, piece = whole_of(shard), shard.join(piece, gather)
        return self.over(shard, piece)

    def over(self, shard: Shard, piece: Tensor) -> DTensor:
        """A DTensor over a piece's memory; rows stand wrongly where it is not ``expressible``."""
        names = self._axes(shard)
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
            names = self._axes(shard)
            same = tuple(value.placements) == placements(shard, names)
            if same and value.device_mesh == self._reordered(names):
                return value.to_local()
        return shard.take(value.full_tensor(), self.mesh, self.coords)

    def _axes(self, shard: Shard) -> tuple[str, ...]:
        """The order of axes for one tensor: that of all if there is one."""
        order = self._order or axis_order([shard], self.mesh)
        assert order is not None  # one tensor is cut over an axis once
        return order

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


def axis_order(shards: Iterable[Shard], mesh: Mesh) -> tuple[str, ...] | None:
    """The mesh's axes in an order in which DTensors make the same cuts, as near to the mesh's own.

    None if no order serves all of the shards.
    """
    first = {
        (one, other)
        for shard in shards
        for i, (one, dim, _) in enumerate(shard.cuts)
        for other, its_dim, _ in shard.cuts[i + 1 :]
        if dim == its_dim
    }
    left, order = list(mesh.names), list[str]()
    while left:
        free = [axis for axis in left if not any((other, axis) in first for other in left)]
        if not free:
            return None
        order.append(free[0])
        left.remove(free[0])
    return tuple(order)


def placements(shard: Shard, names: tuple[str, ...]) -> tuple[Placement, ...]:
    """One DTensor placement per mesh axis in this order."""
    dims = {axis: dim for axis, dim, _ in shard.cuts}
    return tuple(DimCut(dims[name]) if name in dims else Replicate() for name in names)
