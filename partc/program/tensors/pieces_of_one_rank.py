"""What ``torch.load`` makes of a stage's tensors: one rank's pieces, which are no other rank's.

The names here stand in pickles, and in what torch says where it may not call them: a process that
has imported ``partc.program``, as ``partc.load`` does, may.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from partc.errors import RunError


def own_piece(value: DTensor, place: tuple[int, ...], num_ranks: int) -> Tensor:
    """What was pickled, on the rank that pickled it or one with the same piece; where there are no
    ranks the tensor itself, if it is whole.

    ``place`` is that rank's index along each dim of the mesh, -1 where all have the same;
    ``num_ranks`` the size of its world. RunError on other ranks, which would take it for theirs.
    """
    if not dist.is_initialized():
        if any(index >= 0 for index in place):
            raise _elsewhere(place, "this process is none of its ranks")
        return value.to_local()
    mine = value.device_mesh.mesh == dist.get_rank()
    if dist.get_world_size() != num_ranks or not bool(mine.any()):
        raise _elsewhere(place, "this rank has others")
    here = mine.nonzero()[0].tolist()
    if any(index not in (-1, at) for index, at in zip(place, here, strict=True)):
        raise _elsewhere(place, "this rank has others")
    return value


torch.serialization.add_safe_globals([own_piece])


def place_of(value: DTensor) -> tuple[int, ...]:
    """The place of this rank's piece of a tensor, as ``own_piece`` takes it."""
    at = value.device_mesh.get_coordinate() or [-1] * value.device_mesh.ndim
    return tuple(i if p.is_shard() else -1 for i, p in zip(at, value.placements, strict=True))


def _elsewhere(place: tuple[int, ...], why: str) -> RunError:
    return RunError(
        where="torch.load",
        what=f"the file has one rank's pieces of tensors, and {why}",
        why=f"they were saved at place {[i for i in place if i >= 0]} of the axes that cut them, "
        "in a world of another size or on another rank",
        do="Save stage.full_state_dict() and stage.full_optim_state_dict(optimizer), which are "
        "whole, or call partc.save_checkpoint on all ranks.",
    )
