"""Tensors one behind the other, a flat one for each dtype: what a message has of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Flats = tuple[Tensor, ...]


def flat(tensors: Iterable[Tensor]) -> Flats:
    """Copies of tensors, one behind the other, on the CPU."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(x.dtype, []).append(x.detach().flatten().cpu())
    return tuple(torch.cat(same) for same in found.values())


def parts(flats: Flats, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that stand in these, with the shapes and on the devices of others."""
    of = {x.dtype: x for x in flats}
    taken = dict.fromkeys(of, 0)
    found = []
    for x in like:
        first = taken[x.dtype]
        taken[x.dtype] += x.numel()
        found.append(of[x.dtype][first : taken[x.dtype]].view(x.shape).to(x.device))
    return found
