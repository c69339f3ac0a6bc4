"""Where islands own parameters, the states of their optimizer are on owners alone: bring them to
all islands, so that every island can save them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from partc.plan.sharding import dtype_name
from partc.program.role import Shard, dtype_of
from partc.program.tensors.holders import exchange_texts
from partc.program.tensors.rank_tensors import RankTensors

Held = dict[str, tuple[Shard, Tensor]]  # by key, `optimizer/exp_avg/layers.0.w`


def from_owners(held: Held, tensors: RankTensors) -> Held:
    """An optimizer's tensors as the owners of its parameters have them, on every island.

    All ranks call this together. Without owners it gives back what it is given.
    """
    if not tensors.owners:
        return held
    owned = _owned(held, tensors)
    mine = {
        key: [list(shard.shape), dtype_name(piece.dtype), shard.cuts, list(piece.shape)]
        for key, (shard, piece) in owned.items()
    }
    found: Held = {}
    for island, told in enumerate(exchanged(mine, tensors)):
        for key, (shape, dtype, cuts, local) in told.items():
            shard = Shard("", key.split("/", 2)[2], tuple(shape), dtype_of(dtype), _cuts(cuts))
            piece = owned[key][1] if key in owned else torch.empty(local, dtype=shard.dtype)
            there = tensors.from_island(island, piece.to(tensors.device))
            found[key] = shard, there.to(piece.device)
    return dict(sorted(found.items()))


def exchanged(mine: Mapping[str, Any], tensors: RankTensors) -> list[dict[str, Any]]:
    """What each island tells of the parameters that it owns."""
    texts = exchange_texts(json.dumps(mine), tensors.island, tensors.device)
    return [json.loads(text) for text in texts]


def _owned(held: Held, tensors: RankTensors) -> Held:
    here = tensors.here
    return {k: v for k, v in held.items() if tensors.owners.get(k.split("/", 2)[2]) == here}


def _cuts(told: list[list[Any]]) -> tuple[tuple[str, int, int], ...]:
    return tuple((axis, dim, outer) for axis, dim, outer in told)
