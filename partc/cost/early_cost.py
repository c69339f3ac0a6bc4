"""Seconds that gradient reductions still take when a step ends, if some began before the end.

A stage reduces gradients over ranks once, after its last microbatch. Reductions of blocks whose
gradients are final may start in the last backward and run beside the blocks that are left. With
``n`` blocks of ``c`` seconds of computing, ``t`` seconds to reduce one block's gradients, and ``f``
seconds of reductions before the first block, ``max(t, n t - (n - 1) c, f + n t - n c)`` seconds of
reductions are left when the backward ends.
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
    """One rank's operands, in bytes, of a stage's gradient reductions of one kind over one axis.

    ``first`` bytes are reduced before the last backward of the blocks, ``block`` after each of
    ``num`` blocks, ``rest`` when the step ends. ``share``: the blocks' part of the phase's FLOPs.
    """

    kind: str
    axis: str
    first: int
    block: float
    num: int
    rest: int
    share: float

    def saved_s(self, spent: Mapping[Phase, Spent], mesh: Mesh) -> float:
        """Seconds saved against reducing all bytes at the end; negative if starting early loses."""
        first_s, each_s, rest_s = (self._s(b, mesh) for b in (self.first, self.block, self.rest))
        # a stage whose schedule splits the backward makes its gradients in W, not in B
        moved_s = self.num * each_s
        computed_s = self.share * spent["W" if "W" in spent else "B"].seconds
        behind_s = moved_s - computed_s * (self.num - 1) / self.num
        left_s = max(each_s, behind_s, first_s + moved_s - computed_s)
        lost_s = mesh.hardware.contention * (first_s + moved_s - left_s)
        whole = self.first + self.num * self.block + self.rest
        return self._s(whole, mesh) - rest_s - left_s - lost_s

    def ending(self, spent: Mapping[Phase, Spent], mesh: Mesh) -> dict[Phase, Spent]:
        """A stage's times, with the saved seconds of phase E moved from exposed to hidden."""
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
