"""Random numbers, as generated programs carry them: a function of names, not of what ran before."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor


class Draws:
    """Random numbers that follow from seed, step, microbatch, site and place, on every device."""

    def __init__(self) -> None:
        self.seed, self.step = 0, 0
        self.microbatch: int | None = None
        self.device = torch.device("cpu")

    def begin(self, device: torch.device) -> None:
        """Begin the next step, which draws on `device`."""
        self.step, self.device = self.step + 1, device

    def __call__(self, site: str, *place: int) -> torch.Generator:
        """The generator of one draw; `place` is this rank's, on the axes that cut what is drawn."""
        return self.keyed(self.microbatch, site, place)

    def of_step(self, site: str, *place: int) -> torch.Generator:
        """The generator of a draw that is the same in all microbatches."""
        return self.keyed(None, site, place)

    def keyed(self, microbatch: int | None, site: str, place: tuple[int, ...]) -> torch.Generator:
        key = f"{self.seed} {self.step} {microbatch} {site} {place}"
        digest = blake2b(key.encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "big"))


def dropout_mask(x: Tensor, p: float, rng: torch.Generator) -> Tensor:
    """0 with probability ``p``, else ``1 / (1 - p)``: dropout is ``x * mask``."""
    mask = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return mask.bernoulli_(1 - p, generator=rng).div_(1 - p)
