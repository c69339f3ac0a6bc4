"""What the shape of a matrix product costs beside its FLOPs: processors that stand idle in the last
wave of tiles, and a result that is written when the arithmetic is done.

A library cuts the result into tiles, one for each processor at a time. Where 5.3 waves of tiles are
6, the sixth takes as long as the others ("wave quantization" in NVIDIA's Matrix Multiplication
Background User's Guide, which names tiles of 256 x 128 as the fastest ones).
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
    """Sizes of the results of a batch of matrix products; 0 where a call makes none."""

    batch: int
    rows: int
    columns: int


NONE = Product(0, 0, 0)


def product_of(node: fx.Node) -> Product:
    """The matrix products that a call makes of what its graph holds."""
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
    """The share of all processors that have a tile, over all waves; numbers or arrays.

    1 where the number of processors is not known (0), and where tiles are few.
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
