"""The gradients that scripts give back for results of a model: ranks that have the same results
have to give back the same.

Ranks along a tensor-parallel axis compute one loss together, each in its own process. Where the
script's loss draws random numbers, or a rank has other targets, their gradients differ, and so
would the shards of each weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from partc.errors import RunError
from partc.program.ranks.same_factor import EVERY, FIRST
from partc.program.ranks.tensor_hash import hashes_of, joined


class SameGradients:
    """Compares at the first calls, and at every hundredth.

    ``pieces``: by rank the number of its piece of the batch; ranks with one number are alike.
    """

    def __init__(self, pieces: Sequence[int], device: torch.device) -> None:
        self.pieces, self.device, self.num_calls = pieces, device, 0

    def check(self, grads: Sequence[Tensor]) -> None:
        """RunError on all ranks if some of them have others; all call this together."""
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if len({*self.pieces}) == len(self.pieces) or (number >= FIRST and number % EVERY):
            return
        mine = torch.tensor([joined(hashes_of(grads))], device=self.device)
        every = [torch.empty_like(mine) for _ in self.pieces]
        dist.all_gather(every, mine)
        found: list[int] = torch.cat(every).tolist()
        if odd := self._odd(found):
            self.num_calls = number  # what was refused is compared again
            raise _other_loss(*odd)

    def _odd(self, found: Sequence[int]) -> tuple[int, int] | None:
        """Two ranks with the same results and other gradients of them."""
        first: dict[int, int] = {}
        for rank, piece in enumerate(self.pieces):
            known = first.setdefault(piece, rank)
            if found[known] != found[rank]:
                return known, rank
        return None


def _other_loss(one: int, other: int) -> RunError:
    return RunError(
        where="loss.backward()",
        what=f"ranks {one} and {other} have the same results of the model, and other gradients "
        "of them",
        why="they compute one loss together, each for its own shards of the weights",
        do="Give both the same targets; and where the loss draws random numbers, draw them from a "
        "generator with the same seed: torch.Generator().manual_seed(model.data_rank).",
    )  # fmt: skip
