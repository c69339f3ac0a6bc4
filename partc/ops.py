"""Composite ops that a canonical graph holds beside ATen: each stands for a few lines of torch.

They are ordinary functions, so graphs that hold them run; ``codegen`` prints them as short text.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weight_grad(d_y: Tensor, x: Tensor) -> Tensor:
    """Gradient of a linear's weight: ``f32[8,64,O], f32[8,64,I] -> f32[O,I]``."""
    return d_y.flatten(0, -2).T @ x.flatten(0, -2)


def dropout_mask(x: Tensor, p: float) -> Tensor:
    """0 with probability ``p``, else ``1 / (1 - p)``, shaped as ``x``: dropout is ``x * mask``.

    Draws from this rank's generator for the axes that cut ``x``: pieces get different masks,
    copies equal ones.
    """
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


def window(
    ids: Tensor, index: int, rows: int, ignore: int | None = None, outside: int = -1
) -> Tensor:
    """Indices into a table, counted from the first of the ``rows`` rows that rank ``index`` has.

    Rows of other ranks become ``outside``, and so does ``ignore``, which counts for nothing.
    """
    local = ids - index * rows
    mine = (local >= 0) & (local < rows)
    if ignore is not None:
        mine = mine & (ids != ignore)
    return torch.where(mine, local, outside)


def masked_embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table, 0 where the index is negative: ``f32[V,D], i64[8,64] -> f32[8,64,D]``."""
    return weight[ids.clamp(min=0)].masked_fill((ids < 0).unsqueeze(-1), 0)


def masked_gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``x.gather(dim, index)``, 0 where the index is negative."""
    return x.gather(dim, index.clamp(min=0)).masked_fill(index < 0, 0)
