"""The share of a device's processors that a matrix product keeps busy (wave quantization).

A library cuts the result into tiles and gives each processor one tile at a time. If the tiles fill
the processors 5.3 times, there are 6 waves, and the last takes as long as a full one: the product
is 6 / 5.3 times slower. See "wave quantization" in NVIDIA's Matrix Multiplication Background User's
Guide, which names tiles of 256 x 128 as the fastest ones.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, fx

from partc.cost.flops import op_name
from partc.graph import fake_of

TILES = ((256, 128), (128, 256))
FEWEST_WAVES = 2  # with fewer, libraries take smaller tiles

FLAT = frozenset({"aten.mm", "aten.addmm", "aten.linear"})
BATCHED = frozenset({"aten.bmm", "aten.baddbmm", "aten.matmul"})


class Product(NamedTuple):
    """The result of a batched matrix product, ``[batch, rows, columns]``; all 0 for other calls."""

    batch: int
    rows: int
    columns: int


NONE = Product(0, 0, 0)


def product_of(node: fx.Node) -> Product:
    """The matrix product that a call computes, at its fake's shape; ``NONE`` for other calls."""
    name, fake = op_name(node), fake_of(node)
    if not isinstance(fake, Tensor) or fake.dim() < 2:
        return NONE
    *leading, rows, columns = fake.shape
    if name == "weight_grad":
        return Product(1, rows, columns)
    if name in FLAT or (name == "aten.matmul" and _is_matrix(node.args[1])):
        return Product(1, prod(leading) * rows, columns)
    return Product(prod(leading), rows, columns) if name in BATCHED else NONE


def _is_matrix(operand: Any) -> bool:
    return isinstance(operand, fx.Node) and fake_of(operand).dim() == 2


def busy_share(processors: int, batch: Any, rows: Any, columns: Any) -> Any:
    """The mean share of processors that have a tile, over all waves; for numbers or arrays.

    1 where the number of processors is not known (0), and where there are fewer than
    ``FEWEST_WAVES`` waves.
    """
    if not processors:
        return np.ones_like(np.asarray(rows, dtype=np.float64))
    found = np.zeros_like(np.asarray(rows, dtype=np.float64))
    for high, wide in TILES:
        tiles = batch * np.ceil(rows / high) * np.ceil(columns / wide)
        waves = np.maximum(tiles, 1) / processors
        share = np.where(waves < FEWEST_WAVES, 1.0, waves / np.ceil(waves))
        found = np.maximum(found, share)
    return found
