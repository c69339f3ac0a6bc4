"""Refuse buffers whose values decided what was traced, once they hold others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from partc.errors import RunError
from partc.program.tensors.rank_tensors import RankTensors

ALWAYS, EVERY = 3, 100  # the first runs that compare all values, and how often later ones do


class Decided:
    """This rank's pieces of such buffers, compared with the ``values`` that they were traced with.

    In between a buffer is compared when it was written to, which costs nothing where it was not.
    """

    def __init__(self, names: Sequence[str], values: Mapping[str, Tensor], held: RankTensors):
        self.values = {name: values[name] for name in names}
        self.tensors = held
        self.seen: dict[str, tuple[Tensor, int]] = {}
        self.num_runs = 0

    def check(self) -> None:
        """RunError if a buffer has another value."""
        every = self.num_runs < ALWAYS or self.num_runs % EVERY == 0
        self.num_runs += 1
        for name in self.values:
            held = self.tensors.held.get(name)
            if held is None:  # another pipeline rank has it
                continue
            known, version = self.seen.get(name, (None, -1))
            if every or known is not held or version != held._version:
                self._compare(name, held)
                self.seen[name] = held, held._version

    def _compare(self, name: str, held: Tensor) -> None:
        tensors = self.tensors
        piece = tensors.shards[name].take(self.values[name], tensors.mesh, tensors.coords)
        if not same_bytes(piece.to(held.device, held.dtype), held.detach()):
            raise RunError(
                where=name,
                what="this buffer has another value than when the step was compiled",
                why="its value decided what the program does: a size, a selection or a branch",
                do="Compile the model again with the buffer as it is to be.",
            )


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit by bit: NaN equals NaN, and -0.0 is not 0.0."""
    flat = (each.contiguous().flatten().view(torch.uint8) for each in (one, other))
    return torch.equal(*flat)
