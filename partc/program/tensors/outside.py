"""A gradient that a user has set and that is no memory of the program's own.

A plain tensor, or a DTensor in another layout, stays the parameter's ``.grad``, as of any
parameter: its values are read before each step, and what the step adds is written to it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partc.errors import RunError


class Outside:
    """The tensor that the user has set as a gradient; None where it is the program's own.

    ``own`` shows the program's gradient, whose memory on this rank is ``piece``. All ranks read
    and write together.
    """

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.tensor, self._version = tensor, -1  # of the piece, when the two were the same

    def is_at(self, shown: Tensor | None) -> bool:
        """Whether a parameter's gradient is the user's tensor."""
        return shown is not None and shown is self.tensor

    def misses(self, piece: Tensor) -> bool:
        """Whether the program's gradient was changed without the user's tensor."""
        return piece._version != self._version

    @torch.no_grad()
    def read(self, own: Tensor, piece: Tensor) -> None:
        """Copy the user's tensor to the program's gradient."""
        assert self.tensor is not None
        own.copy_(self.tensor)
        self._version = piece._version

    @torch.no_grad()
    def write(self, own: Tensor, piece: Tensor) -> None:
        """Copy the program's gradient to the user's tensor."""
        assert self.tensor is not None
        self.tensor.copy_(own)
        self._version = piece._version


def check_in_pipeline(shown: Tensor, name: str) -> None:
    """RunError for a plain gradient, which does not tell that it is of one pipeline rank."""
    if isinstance(shown, DTensor):
        return
    raise RunError(
        where=f"{name}.grad",
        what="was set to a plain tensor, in a pipeline",
        why="a rank has the gradients of its own stages alone, and partc could not see what is "
        "computed from plain ones (a norm over all)",
        do="Leave the gradients as stage.step makes them, or set torch.zeros_like(parameter).",
    )
