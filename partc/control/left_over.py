"""Send at once what a variant's compressed sums have kept, before another variant runs.

With error feedback, ranks keep what they have not sent, and add it to the gradients of the next
step. In the last step of such a variant its sums are exact instead, and take all of that with them:
what was applied is then the sum of all exact gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partc.plan.compress import Compress
from partc.plan.wires import HELPERS, OWN, PIECE, SCATTERS, WIRES, is_residual
from partc.program.role import Role
from partc.verification.narrow_sums import Arrived


@dataclass
class LeftOver:
    """Stands for the classes of compressed sums in a rank's text, for one step.

    ``kept``: buffers whose contents were sent. ``finite``: whether all sums were.
    """

    dist: Any
    how: Compress
    kept: list[Tensor] = field(default_factory=list)
    finite: bool = True

    def __call__(
        self, flat: Tensor, among: Any, size: int, state: list[Tensor], group: Any, *rng: Any
    ) -> Arrived:
        """The exact sum of the gradients, and of what all ranks have kept of earlier ones."""
        total = flat.flatten().to(torch.float64 if flat.dtype == torch.float64 else torch.float32)
        if state:
            total = self._with_kept(total, state, group)
        self.dist.all_reduce(total, group=group)
        self.finite = self.finite and bool(total.isfinite().all())
        flat.copy_(total.view(flat.shape))
        return Arrived()

    def _with_kept(self, x: Tensor, state: list[Tensor], group: Any) -> Tensor:
        """Gradients and what this rank has kept: of its own, and of the piece that it sums."""
        num = self.dist.get_world_size(group)
        layout = WIRES[self.how.wire].kept([x.shape], num, 1).values()
        parts = {kept.whose: part for kept, part in zip(layout, state, strict=True)}
        own = parts[OWN].flatten().to(x.dtype)
        whole = nn.functional.pad(x, (0, own.numel() - x.numel())) + own
        self.kept.append(parts[OWN])
        if PIECE in parts:
            pieces = whole.view(num, -1)
            pieces[self.dist.get_rank(group)] += parts[PIECE].flatten().to(x.dtype)
            self.kept.append(parts[PIECE])
        return whole[: x.numel()]


@contextmanager
def sending_all(role: Role, how: Compress) -> Iterator[LeftOver]:
    """Inside, a rank's text sums exactly, with all that its buffers have."""
    module = role.module.__dict__
    sums = HELPERS - SCATTERS  # nothing is left over of a sum that is scattered
    before = {name: module[name] for name in sums if name in module}
    stand_in = LeftOver(module["dist"], how)
    module.update(dict.fromkeys(before, stand_in))
    try:
        yield stand_in
    finally:
        module.update(before)


def keeps(role: Role) -> set[str]:
    """The names of a rank's buffers for what its sums have not sent."""
    return {shard.name for shard in role.shards if is_residual(shard.name)}
