"""Permuted rows: the order of a value's rows after a sort by data, as in a mixture of experts.

A mixture of experts sorts the batch's rows by expert and later sorts them back. If the batch is
sharded, each rank sorts its own rows. Between the two sorts a rank's rows are no contiguous piece
of the whole sorted tensor; after the second sort they are a contiguous piece of the batch again.
``partc.rules.rows`` follows the orders through the graph; ``Layout.permuted`` marks such shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RowOrder:
    """The relation of a value to an order of rows that a sort made.

    Orders are numbered by the step's sorts; order 0 is the original order of the batch.

    - ``data``: the value's rows along ``dim`` are in ``order``;
    - ``keys``: the same, and the rows are the ascending sort keys (expert numbers);
    - ``places``: the same, and each row is an index into ``size`` rows that are in the order ``of``
      (the indices that a sort returns);
    - ``counts``: the number of rows of each group (expert), in ``order``;
    - ``ends``: the index at which each group's rows end in ``order`` (the running sum of counts).
    """

    kind: Literal["data", "keys", "places", "counts", "ends"]
    order: int
    dim: int = 0
    of: int = 0
    size: int = 0

    @property
    def counted(self) -> bool:
        """Whether the value is an unfinished sum if each rank counts only its own rows."""
        return self.kind in ("counts", "ends")
