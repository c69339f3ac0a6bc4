"""Printed lists of reduced gradients which arrive as sums, not as pieces to add up.

So they do over NCCL (``nccl.py``), and over gloo by messages (``messages.py``).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from partc.codegen.helpers.links import Partials


class Reduced(list[tuple[dict[nn.Parameter, Tensor], dist.Work]]):
    def finish(self) -> None:
        """Wait for gradients that ranks are summing, and add them to those of the parameters."""
        while self:
            self[0][1].wait()
            for param, grad in self.pop(0)[0].items():  # the handle holds what was sent
                param.grad = grad if param.grad is None else param.grad.add_(grad)


class ReducedParts(Reduced):
    """Parts of gradients that ranks are summing, to be added to those of all microbatches."""

    def __init__(self, partials: Partials) -> None:
        super().__init__()
        self.partials = partials

    def finish(self) -> None:
        """Wait for all transfers, and add what they bring to the parts."""
        while self:
            self[0][1].wait()
            for param, grad in self.pop(0)[0].items():  # the handle holds what was sent
                self.partials.add(param, grad)
