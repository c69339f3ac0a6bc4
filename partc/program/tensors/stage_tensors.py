"""The tensors of a stage as a user sees them: DTensors that compute what one device computes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from partc.errors import RunError
from partc.program.tensors.homes import (
    HomeTensor,
    check_read,
    give_memory,
    meet,
    replicated,
    whole_of,
)
from partc.program.tensors.pieces_of_one_rank import own_piece, place_of
from partc.program.tensors.stage_ops import run_op


class StageTensor(HomeTensor):
    """A parameter, a gradient, or what was computed from them.

    Its methods that need other ranks' pieces (``item``, ``tolist``, ``full_tensor``, writing to a
    view) are called by all ranks together.
    """

    assigned: tuple[Tensor, int] | None = None  # whose copy ``data`` is, and its version then

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.is_inference_mode_enabled():  # its tensors cannot be views of others
            with torch.inference_mode(False), torch.no_grad():
                return run_op(func, args, kwargs or {})
        return run_op(func, args, kwargs or {})

    def __format__(self, format_spec: str) -> str:
        return format(self.detach().item(), format_spec) if not self.dim() else str(self)

    def tolist(self) -> Any:
        """The whole tensor's elements, in lists of lists."""
        check_read(self)
        return whole_of(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as an array, which is read-only: it is no memory of the ranks."""
        check_read(self)
        array = whole_of(self).numpy(force=force)
        array.setflags(write=False)
        return array

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor on every rank."""
        check_read(self)
        if not self.parted and self.copied_view is None:
            return super().full_tensor(grad_placements=grad_placements)
        apply: Any = _Joined.apply
        whole: Tensor = apply(self)
        return whole

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> DTensor:
        """The tensor in another layout of DTensor."""
        if not self.parted and self.copied_view is None:
            if not all(each.is_replicate() for each in self.placements):
                meet(self, "another layout")
            return super().redistribute(device_mesh, placements, **options)
        whole = replicated(self.full_tensor(), self)
        return whole.redistribute(device_mesh, placements, **options)

    @property
    def data(self) -> Tensor:
        """The tensor without its history.

        As of any tensor, what is assigned becomes its memory, and what was read before keeps the
        old one. A tensor that lies otherwise on the ranks, or is plain, is copied.
        """
        detached: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return detached

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise _other_data(self, value)
        if self.home.in_pipeline and not isinstance(value, DTensor):
            self._check_place(value)
        shared = give_memory(self, value)
        self.assigned = None if shared or value.is_inference() else (value, value._version)

    def _check_place(self, value: Tensor) -> None:
        """RunError for a part of a vector of more than this pipeline rank's parameters."""
        elements = value.untyped_storage().nbytes() // value.element_size()
        if elements > max(self.home.rank_elements, value.numel()):
            raise _whole_vector(self, elements)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.parted:
            raise _no_pickle(self)
        return own_piece, (self.plain, place_of(self), dist.get_world_size())

    # torch.distributed.checkpoint asks these of a tensor
    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        if not self.parted:
            return super().__create_write_items__(fqn, object)
        from partc.program.tensors.checkpoint_items import write_items

        return write_items(fqn, self.home.shard, self._local_tensor, self.home.chunks)

    def __create_chunk_list__(self) -> Any:
        if not self.parted:
            return super().__create_chunk_list__()  # type: ignore[no-untyped-call]
        from partc.program.tensors.checkpoint_items import storage_of

        return [storage_of(chunk) for chunk in self.home.chunks]

    def __get_tensor_shard__(self, index: Any) -> Any:
        if not self.parted:
            return super().__get_tensor_shard__(index)  # type: ignore[no-untyped-call]
        box = next(each for each in self.home.chunks if each.offsets == tuple(index.offset))
        return box.of(self._local_tensor.detach())


class _Joined(torch.autograd.Function):
    """The whole of a tensor that DTensor cannot gather; the gradient is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, value: StageTensor) -> Tensor:
        ctx.like = value
        return whole_of(value).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        spec = replicated(gradient, ctx.like)._spec
        return StageTensor.of(gradient, spec, ctx.like.home, of_gradient=True)


def _other_data(tensor: StageTensor, value: Tensor) -> RunError:
    return RunError(
        where=f"{tensor.home.shard.name}.data",
        what=f"was assigned {value.dtype}{list(value.shape)}, "
        f"and is {tensor.dtype}{list(tensor.shape)}",
        why="the program was compiled for one shape, and its tensors have one dtype",
        do="Convert all of them by stage.to(dtype), or write parameter.copy_(values).",
    )


def _whole_vector(tensor: StageTensor, elements: int) -> RunError:
    return RunError(
        where=f"{tensor.home.shard.name}.data",
        what=f"was assigned a part of {elements} elements, and this pipeline rank's parameters "
        f"have {tensor.home.rank_elements}",
        why="what goes through the parameters of the whole model by position finds those of this "
        "rank's stages alone, and takes the wrong parts",
        do="Go by name: stage.load_full(state_dict). If the part is right, assign its .clone().",
    )


def _no_pickle(tensor: StageTensor) -> RunError:
    shard = tensor.home.shard
    axes = ", ".join(axis for axis, _, outer in shard.cuts if outer > 1)
    num = max(outer for _, _, outer in shard.cuts)
    return RunError(
        where=shard.name,
        what="its piece cannot be pickled",
        why=f"the plan cuts each of its {num} parts by {axes}, and no DTensor can say that",
        do="Save with save_checkpoint or torch.distributed.checkpoint, or save .full_tensor().",
    )
