"""The factors by which ranks multiply a step's gradients: all ranks that train one model have the
same.

The loss, and so its gradients, are those of the whole batch. A factor of one rank's own (a weight
of its samples, a number of its tokens) would give each shard of a gradient another factor, and
copies of a weight other values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from partc.errors import RunError
from partc.plan.mesh import ISLAND, Mesh

FIRST, EVERY = 3, 100  # calls that compare


class SameFactor:
    """Compares the factors of all ranks at the first calls, and at every hundredth."""

    def __init__(self, mesh: Mesh, device: torch.device, *, is_one_model: bool = False) -> None:
        """``is_one_model``: islands share the gradients of every step."""
        self.mesh, self.device, self.num_calls = mesh, device, 0
        self.is_one_model = is_one_model

    def check(self, factor: float | Tensor, where: str) -> None:
        """RunError on all ranks if some of them have another factor; all call this together."""
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if self.mesh.num_ranks == 1 or (number >= FIRST and number % EVERY):
            return
        mine = torch.as_tensor(factor, dtype=torch.float64).detach().reshape(1).to(self.device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        found: list[float] = torch.cat(every).tolist()
        if odd := self._odd(found):
            self.num_calls = number  # what was refused is compared again
            raise _other_factor(where, found, odd)

    def _odd(self, factors: Sequence[float]) -> tuple[int, int] | None:
        """Two ranks of a model with different factors."""
        first: dict[int, int] = {}
        for rank, coords in enumerate(self.mesh.all_coords()):
            island = 0 if self.is_one_model else coords.get(ISLAND, 0)
            known = first.setdefault(island, rank)
            a, b = factors[known], factors[rank]
            if a != b and not (a != a and b != b):
                return known, rank
        return None


def _other_factor(where: str, factors: Sequence[float], odd: tuple[int, int]) -> RunError:
    one, other = odd
    return RunError(
        where=where,
        what=f"rank {other} multiplies the loss by {factors[other]:g}, and rank {one} by "
        f"{factors[one]:g}",
        why="the loss and its gradients are those of the whole batch, of which every rank has "
        "pieces or copies: a factor belongs to all of them",
        do="Multiply by the same number on all ranks; weigh samples, or count tokens, inside of "
        "the loss that is compiled.",
    )  # fmt: skip
