"""What is left of sums over ranks when a step ends, where some began in its last backward.

With ``n`` blocks, ``c`` of computing and ``t`` of transfer each, and ``f`` of transfer before all
of them, ``max(t, n t - (n - 1) c, f + n t - n c)`` is left when the backward ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partc.cost.collective_cost import collective_seconds
from partc.cost.roofline import Spent
from partc.graph import Phase
from partc.plan.mesh import Mesh


@dataclass(frozen=True)
class EarlyBytes:
    """Bytes that a rank of a stage puts into sums of one kind and axis: before its blocks' last
    backward, behind each of ``num`` blocks, and at the end. ``share`` of that phase's arithmetic
    is the blocks'.
    """

    kind: str
    axis: str
    first: int
    block: float
    num: int
    rest: int
    share: float

    def saved_s(self, spent: Mapping[Phase, Spent], mesh: Mesh) -> float:
        """Seconds less at the end than with all sums there; below 0 if that is more."""
        first_s, each_s, rest_s = (self._s(b, mesh) for b in (self.first, self.block, self.rest))
        moved_s = self.num * each_s
        computed_s = self.share * spent["W" if "W" in spent else "B"].seconds
        behind_s = moved_s - computed_s * (self.num - 1) / self.num
        left_s = max(each_s, behind_s, first_s + moved_s - computed_s)
        lost_s = mesh.hardware.contention * (first_s + moved_s - left_s)
        whole = self.first + self.num * self.block + self.rest
        return self._s(whole, mesh) - rest_s - left_s - lost_s

    def ending(self, spent: Mapping[Phase, Spent], mesh: Mesh) -> dict[Phase, Spent]:
        """What a stage spends, so much of its end hidden in its last backward."""
        end = spent["E"]
        exposed, hidden = dict(end.exposed), dict(end.hidden)
        saved_s = min(self.saved_s(spent, mesh), exposed.get(self.axis, 0.0))
        exposed[self.axis] = exposed.get(self.axis, 0.0) - saved_s
        hidden[self.axis] = hidden.get(self.axis, 0.0) + saved_s
        return {**spent, "E": Spent(dict(end.computing), exposed, hidden)}

    def _s(self, num_bytes: float, mesh: Mesh) -> float:
        if not num_bytes:
            return 0.0
        return float(collective_seconds(self.kind, num_bytes, mesh, self.axis))
