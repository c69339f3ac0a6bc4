"""What optimizers step on beside a stage's parameters: a criterion with weights of its own (a
metric loss, a learned temperature) that the script computes with the stage's results.

No stage sums the gradients of these, so that ranks with rows of their own train others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partc.program.ranks.tensor_hash import hashes_of, joined
from partc.program.tensors.homes import HomeTensor

Optimizer = torch.optim.Optimizer
TOGETHER, ALONE = "beside", "alone"  # kinds: in the stage's optimizer, and in one of their own
OF_BESIDE = ("shapes", "values")
DO = (
    "A stage sums gradients of its own parameters alone; a criterion or another module beside it, "
    "with parameters that train, gets those of this rank's rows. Put it into the model that is "
    "compiled; or start it alike on all ranks, and add up its gradients before optimizer.step(): "
    "dist.all_reduce(p.grad), then p.grad /= model.data_world."
)


@dataclass(frozen=True)
class Beside:
    """Parameters that are none of a stage's, of optimizers that have stepped on them."""

    params: Sequence[Tensor] = ()
    optimizer: str = ""

    @classmethod
    def of(cls, stepped: Mapping[Optimizer, Mapping[int, int]]) -> Beside:
        """Those with a gradient, which is not 0 by a parameter's id: a model that takes its first
        step later has none, and weights of its own on each rank until then.
        """
        found: list[Tensor] = []
        name = ""
        for each, grads in stepped.items():
            every = [p for group in each.param_groups for p in group["params"] if grads.get(id(p))]
            mine = [p for p in every if _is_whole(p)]
            name, found = (type(each).__name__ if mine else name), found + mine
        return cls(found, name)

    def numbers(self) -> list[int]:
        """One number of the shapes, which pieces of other wrappers have unlike, and one of the
        values; 0 where there are none.
        """
        if not self.params:
            return [0, 0]
        shapes = str([[*p.shape] for p in self.params]).encode()
        values = joined(hashes_of(self.params))
        return [int.from_bytes(sha256(shapes).digest()[:8]) >> 1, values]

    def __str__(self) -> str:
        shape = [*self.params[0].shape] if self.params else "unknown"
        return (
            f"tensor of shape {shape} in {self.optimizer or 'an optimizer'}, none of the stage's,"
        )


def is_of_stage(param: object) -> bool:
    """Whether it is a parameter of a stage, of this one or of another."""
    return isinstance(param, HomeTensor)


def _is_whole(param: Tensor) -> bool:
    """Whether a rank has it for itself: no stage, no fully_shard and no FSDP has made it."""
    other = is_of_stage(param) or isinstance(param, DTensor) or hasattr(param, "_is_flat_param")
    return param.requires_grad and not other and not param.is_meta


def told(found: str) -> str:
    """The warning where ranks train tensors of an optimizer of their own to unlike values."""
    return f"partc: step: {found}. {DO} Where each rank is to train its own, this is right"
