"""The copies of a value that several calls share: the value as it was made, and at most one copy in
another sharding. A reader that wants a third sharding pays for its own transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partc.passes.search.shardings.transfers import Transfers
from partc.passes.search.solver.problem import Costs

NONE = -1


@dataclass(frozen=True)
class SharedCopies:
    """The choices of shared copies of one value.

    Per choice ``made`` is the sharding that the value is made in, ``other`` that of its second copy
    or ``NONE``, both as numbers of ``Transfers``.
    """

    made: tuple[int, ...]
    other: tuple[int, ...]

    @classmethod
    def of(
        cls, num_bytes: float, made: Sequence[int], wanted: Sequence[int], transfers: Transfers
    ) -> SharedCopies:
        """All useful choices: second copies that some reader may want and that need a transfer."""
        pairs = []
        for have in dict.fromkeys(made):
            costs = [transfers.seconds(num_bytes, have, want) for want in wanted]
            others = [w for w, cost in zip(wanted, costs, strict=True) if 0 < cost < np.inf]
            pairs += [(have, other) for other in (NONE, *others)]
        return cls(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))

    def labels(self, transfers: Transfers) -> tuple[str, ...]:
        """The choices as text: ``tp cut 0 and whole``."""
        names = [transfers.label(n) for n in self.made]
        others = ["" if n == NONE else f" and {transfers.label(n)}" for n in self.other]
        return tuple(a + b for a, b in zip(names, others, strict=True))

    def made_from(self, outs: tuple[int, ...]) -> Costs:
        """f64[source's choices, choices]: 0 where the source makes ``made``, else inf."""
        same = np.array(outs)[:, None] == np.array(self.made)[None, :]
        return np.where(same, 0.0, np.inf)

    def filled(self, num_bytes: float, transfers: Transfers) -> Costs:
        """f64[choices]: seconds to make the second copy from the value as it was made."""
        pairs = zip(self.made, self.other, strict=True)
        times = [0.0 if o == NONE else transfers.seconds(num_bytes, m, o) for m, o in pairs]
        return np.array(times, np.float64)

    def refilled(self, num_bytes: float, before: SharedCopies, transfers: Transfers) -> Costs:
        """f64[choices before, choices]: seconds to make the second copy, if the copies ``before``
        of an earlier phase exist too.
        """
        table = np.full((len(before.made), len(self.made)), np.inf)
        for i, (had, spare) in enumerate(zip(before.made, before.other, strict=True)):
            for j, (made, other) in enumerate(zip(self.made, self.other, strict=True)):
                if had == made:
                    sources = [s for s in (made, spare) if s != NONE]
                    costs = [
                        transfers.seconds(num_bytes, s, other) for s in sources if other != NONE
                    ]
                    table[i, j] = min(costs, default=0.0)
        return table

    def read(self, num_bytes: float, wants: tuple[int, ...], transfers: Transfers) -> Costs:
        """f64[choices, reader's choices]: seconds from the nearer copy to the wanted sharding."""
        direct = transfers.table(num_bytes, self.made, wants)
        others = tuple(m if o == NONE else o for m, o in zip(self.made, self.other, strict=True))
        return np.minimum(direct, transfers.table(num_bytes, others, wants))
