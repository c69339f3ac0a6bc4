"""Composite ops of canonical graphs beside ATen: each replaces a few lines of torch.

They are ordinary functions, so a graph with these ops runs; ``codegen`` prints them as short text.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weight_grad(d_y: Tensor, x: Tensor) -> Tensor:
    """Gradient of a linear's weight: ``f32[8,64,O], f32[8,64,I] -> f32[O,I]``."""
    return d_y.flatten(0, -2).T @ x.flatten(0, -2)


def cross_entropy_grad(
    d_loss: Tensor, log_p: Tensor, target: Tensor, place: Tensor, ignored: int
) -> Tensor:
    """Gradient of a summed cross entropy by the logits, from their log-probabilities:
    ``f32[], f32[64,V], i64[64], i64[64] -> f32[64,V]``. Rows whose target is ``ignored`` do not
    count; ``place`` is the column of each target, negative where another rank has it.
    """
    scale = torch.where(target == ignored, 0, d_loss).unsqueeze(1)
    place = place.unsqueeze(1)
    grad = log_p.exp().mul_(scale)
    return grad.scatter_add_(1, place.clamp(min=0), torch.where(place < 0, 0, -scale))


def inverse_order(order: Tensor) -> Tensor:
    """Where each row went that ``order`` names: ``x[order][inverse_order(order)]`` is ``x``."""
    places = torch.arange(order.numel(), dtype=order.dtype, device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def by_columns(x: Tensor) -> Tensor:
    """The same matrices, which lie in memory by columns: ``f32[8,5,5] -> f32[8,5,5]``."""
    return x.mT.clone(memory_format=torch.contiguous_format).mT


def solved(x: Tensor, info: Tensor, name: str) -> Tensor:
    """``x``, which a routine of ``torch.linalg`` gave: ``f32[8,5,5], i32[8] -> f32[8,5,5]``.

    Raises as the routine does where its ``info`` says that it could not.
    """
    torch.ops.aten._linalg_check_errors(info, name, is_matrix=info.dim() == 0)
    return x


def dropout_mask(x: Tensor, p: float) -> Tensor:
    """0 with probability ``p``, else ``1 / (1 - p)``, shaped as ``x``: dropout is ``x * mask``.

    In a program its site and this rank's place on the axes that cut ``x`` decide the numbers.
    """
    mask = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return mask.bernoulli_(1 - p).div_(1 - p)


DRAWS = (dropout_mask,)  # what takes numbers from a generator


def window(
    ids: Tensor, index: int, rows: int, ignore: int | None = None, outside: int = -1, of: int = 0
) -> Tensor:
    """Indices into a table, counted from the first of the ``rows`` rows that rank ``index`` has.

    Rows of other ranks become ``outside``, and so does ``ignore``, which counts for nothing. Any
    other index that is none of the ``of`` rows of all ranks is refused, as torch does.
    """
    local = ids - index * rows
    mine, known = (local >= 0) & (local < rows), (ids >= 0) & (ids < of)
    if ignore is not None:
        mine, known = mine & (ids != ignore), known | (ids == ignore)
    if of:
        torch._assert_async(known.all(), f"index out of range of {of} rows")
    return torch.where(mine, local, outside)


def masked_embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table, 0 where the index is negative: ``f32[V,D], i64[8,64] -> f32[8,64,D]``."""
    return weight[ids.clamp(min=0)].masked_fill((ids < 0).unsqueeze(-1), 0)


def masked_gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``x.gather(dim, index)``, 0 where the index is negative."""
    return x.gather(dim, index.clamp(min=0)).masked_fill(index < 0, 0)
