"""What the tensors in an optimizer's state are: pieces, whole tensors or DTensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.distributed.tensor import DTensor

from partc.program.role import Shard
from partc.program.tensors.rank_tensors import RankTensors

COUNTER = "step"
Form = Literal["pieces", "whole", "dtensors"]


@dataclass(frozen=True)
class OptimizerStates:
    """The states of an optimizer that was built over a stage's parameters.

    ``form``: what a state of its parameter's shape is. States of other shapes (counters, factors)
    are whole on every rank.
    """

    tensors: RankTensors
    form: Form

    def to_piece(self, name: str, value: Tensor) -> tuple[Shard, Tensor]:
        """This rank's piece of a state of the parameter ``name``, and how the state is cut."""
        shard = self.tensors.shards[name]
        alike = Shard("", name, shard.shape, value.dtype, shard.cuts)
        if self.form == "pieces" and value.shape == self.tensors.held[name].shape:
            return alike, value
        if isinstance(value, DTensor):
            if value.shape == shard.shape:
                return alike, self.tensors.piece(shard, value)
            value = value.full_tensor()
        elif self.form == "dtensors" and value.shape == shard.shape:  # whole, set by the script
            return alike, self.tensors.piece(shard, value)
        return Shard("", name, tuple(value.shape), value.dtype, ()), value

    def whole_shape(self, name: str, value: Tensor) -> tuple[int, ...]:
        """The shape of the whole of a state of the parameter ``name``."""
        if self.form == "pieces" and value.shape == self.tensors.held[name].shape:
            return self.tensors.shards[name].shape
        return tuple(value.shape)

    def wanted(self, name: str, saved: Shard) -> Shard:
        """How a state that was saved is cut for this optimizer."""
        shard = self.tensors.shards[name]
        sharded = saved.shape == shard.shape and self.form != "whole"
        return Shard("", name, saved.shape, saved.dtype, shard.cuts if sharded else ())

    def from_piece(self, field: str, name: str, shard: Shard, piece: Tensor) -> Tensor:
        """A state as the optimizer has it, given its piece, which is cut as ``shard`` says.

        A number is a counter, which optimizers of torch keep on the CPU, unless its parameter is
        one too: then it is a moment, but for ``step``, which torch knows by its name.
        """
        param = self.tensors.shards[name]
        if not shard.shape and (param.shape or field == COUNTER):
            return piece.cpu()
        piece = piece.to(self.tensors.device)
        if self.form != "dtensors":
            return piece
        alike = shard.shape == param.shape
        return self.tensors.layouts().parameter(param if alike else shard, piece)

    def in_form(self, name: str, value: Tensor, form: Form) -> Tensor:
        """A state of the parameter ``name`` in another form: ``"pieces"`` or ``"whole"``."""
        shard, piece = self.to_piece(name, value)
        return self.tensors.join(shard, piece) if form == "whole" else piece
