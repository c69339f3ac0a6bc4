"""Where several calls read a value: it stays as it was made, and is brought into at most one other
layout for all of them. What a reader wants beyond that it pays itself.
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
    """Choices of what is at hand: ``made`` has the sharding a value is made in, ``other`` the one
    it is brought into as well or ``NONE``. Both are numbers of ``Transfers``, by choice.
    """

    made: tuple[int, ...]
    other: tuple[int, ...]

    @classmethod
    def of(
        cls, num_bytes: float, made: Sequence[int], wanted: Sequence[int], lies: Transfers
    ) -> SharedCopies:
        """All that is worth having: layouts that some reader may want, and that cost something."""
        pairs = []
        for have in dict.fromkeys(made):
            costs = [lies.seconds(num_bytes, have, want) for want in wanted]
            others = [w for w, cost in zip(wanted, costs, strict=True) if 0 < cost < np.inf]
            pairs += [(have, other) for other in (NONE, *others)]
        return cls(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))

    def labels(self, lies: Transfers) -> tuple[str, ...]:
        """The choices in words."""
        names = [lies.label(n) for n in self.made]
        others = ["" if n == NONE else f" and {lies.label(n)}" for n in self.other]
        return tuple(a + b for a, b in zip(names, others, strict=True))

    def made_from(self, outs: tuple[int, ...]) -> Costs:
        """f64[source's choices, choices]: 0 where the source makes what the hub says, else inf."""
        same = np.array(outs)[:, None] == np.array(self.made)[None, :]
        return np.where(same, 0.0, np.inf)

    def filled(self, num_bytes: float, lies: Transfers) -> Costs:
        """f64[choices]: seconds to bring what was made into the other layout."""
        pairs = zip(self.made, self.other, strict=True)
        times = [0.0 if o == NONE else lies.seconds(num_bytes, m, o) for m, o in pairs]
        return np.array(times, np.float64)

    def refilled(self, num_bytes: float, before: SharedCopies, lies: Transfers) -> Costs:
        """f64[choices before, choices]: the same where an earlier hub of the value has its layouts
        at hand too.
        """
        table = np.full((len(before.made), len(self.made)), np.inf)
        for i, (had, spare) in enumerate(zip(before.made, before.other, strict=True)):
            for j, (made, other) in enumerate(zip(self.made, self.other, strict=True)):
                if had == made:
                    sources = [s for s in (made, spare) if s != NONE]
                    costs = [lies.seconds(num_bytes, s, other) for s in sources if other != NONE]
                    table[i, j] = min(costs, default=0.0)
        return table

    def read(self, num_bytes: float, wants: tuple[int, ...], lies: Transfers) -> Costs:
        """f64[choices, reader's choices]: seconds from the nearer of the two to what is wanted."""
        direct = lies.table(num_bytes, self.made, wants)
        others = tuple(m if o == NONE else o for m, o in zip(self.made, self.other, strict=True))
        return np.minimum(direct, lies.table(num_bytes, others, wants))
