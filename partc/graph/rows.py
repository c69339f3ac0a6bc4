"""Rows in an order of their own: what a sort by data does to the values after it.

A mixture of experts sorts the batch's rows by expert and sorts them back. Where ranks cut the
batch, each sorts its own rows: what it holds between the two is no contiguous piece of the whole,
but what comes back is. ``partc.rules.rows`` follows the orders; ``Layout.permuted`` names such
pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RowOrder:
    """What a value has to do with an order that a sort made.

    Orders are numbered by the step's sorts; 0 is the order in which the batch came.

    - ``data``: its rows, along ``dim``, lie in ``order``;
    - ``keys``: so do they, and they are what it was sorted by, ascending;
    - ``places``: so do they, and each is a place among ``size`` rows that lie in the order ``of``;
    - ``counts``: how many rows of ``order`` each group has, the groups one after the other;
    - ``ends``: where each group of ``order`` ends.
    """

    kind: Literal["data", "keys", "places", "counts", "ends"]
    order: int
    dim: int = 0
    of: int = 0
    size: int = 0

    @property
    def counted(self) -> bool:
        """Whether ranks that hold rows of their own hold parts of a sum of this."""
        return self.kind in ("counts", "ends")
