"""A DTensor that knows to which tensor of a stage it belongs, and how to be read and written whole.

A view of a sharded tensor needs rows of other ranks where it takes some of them, so DTensor makes
it a copy: ``View`` keeps whose view it is, so that what is written there arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from partc.errors import RunError
from partc.plan.mesh import PP
from partc.program.role import Shard
from partc.program.tensors.chunks import Chunk


@dataclass(frozen=True)
class Home:
    """Where a stage's tensor belongs.

    ``shard``: the parameter and its cuts. ``chunks``: where this rank's piece lies in the whole.
    ``groups``: the process groups of all mesh axes. ``join`` makes the whole of the pieces of all
    ranks, ``take`` gives this rank's piece of a whole. ``rank_elements``: of all parameters that
    the ranks with the same stages have. ``has_directions``: gradients arrive as +1 and -1.
    ``meet``: RunError on all ranks where some of them do not call for what this rank calls for.
    """

    shard: Shard
    chunks: list[Chunk]
    groups: Mapping[str, Any]
    join: Callable[[Tensor], Tensor]
    take: Callable[[Tensor], Tensor]
    in_pipeline: bool
    rank_elements: int
    has_directions: bool = False
    meet: Callable[[str], None] = lambda call: None

    @property
    def sharers(self) -> list[Any]:
        """The process groups that span the ranks with the same pipeline stages."""
        return [group for axis, group in self.groups.items() if axis != PP]

    def __deepcopy__(self, memo: object) -> Home:
        return self  # copies of a tensor belong to the same ranks


@dataclass(frozen=True)
class View:
    """Whose view a copy is: of ``base``, by one op after the other."""

    base: HomeTensor
    ops: tuple[Callable[[Tensor], Tensor], ...]

    def of(self, whole: Tensor) -> Tensor:
        """The view of the base's whole tensor, in its memory."""
        for op in self.ops:
            whole = op(whole)
        return whole

    def then(self, op: Callable[[Tensor], Tensor]) -> View:
        """A view of this view."""
        return View(self.base, (*self.ops, op))


class Follower:
    """Is told the tensor, and its new piece, when ``tensor.data`` is assigned; copies have none.

    ``told`` is a method of an object that the follower does not hold, since that has the tensor.
    """

    def __init__(self, told: Callable[[Tensor, Tensor], None]) -> None:
        self._told = WeakMethod(told)

    def call(self, tensor: Tensor, piece: Tensor) -> None:
        """Tell it, if it is still there."""
        if (told := self._told()) is not None:
            told(tensor, piece)

    def __deepcopy__(self, memo: object) -> None:
        return None


class HomeTensor(DTensor):
    """A DTensor with its home.

    ``parted``: whether its parts are sharded one by one, so that its DTensor tells the places of
    rows wrongly. ``of_gradient``: whether it was computed from a gradient. ``copied_view``: whose
    view it is, where its memory is a copy. ``joined``: whether it was computed from several
    parameters of a pipeline rank, whose values are of its own stages alone. ``follower``: of
    a parameter, and of its gradient. ``is_own``: whether it is a parameter or a gradient of a
    stage, or a view of one, and no value that was computed from them. ``factors``: a number of the
    plain numbers with which it was computed.
    """

    home: Home
    parted: bool
    of_gradient: bool
    copied_view: View | None
    joined: bool = False
    follower: Follower | None = None
    is_own: bool = False
    factors: int = 0
    _plain: DTensor | None = None

    @classmethod
    def of(
        cls, piece: Tensor, spec: Any, home: Home, *,
        parted: bool = False, of_gradient: bool = False, view: View | None = None,
    ) -> Self:  # fmt: skip
        """A tensor over a piece's memory; ``spec`` is that of a DTensor which lies the same."""
        new: Any = cls.__new__  # __init__ does nothing, and takes as long as an op
        made: Self = new(cls, piece, spec, requires_grad=False)
        made.home, made.parted = home, parted
        made.of_gradient, made.copied_view = of_gradient, view
        return made

    @classmethod
    def over(cls, plain: DTensor, home: Home, **facts: Any) -> Self:
        """A tensor in the place of one of torch's own DTensors, whose ops run on that."""
        made = cls.of(plain._local_tensor, plain._spec, home, **facts)
        made._plain = plain
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._plain = None  # it would be copied as what it shows, beside it
        if isinstance(self, nn.Parameter) or not self.is_leaf:
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def adopt(self, value: DTensor) -> None:
        """Give one of torch's own DTensors this tensor's home, in its place."""
        value.__class__ = type(self)
        value.home, value.parted = self.home, False  # type: ignore[attr-defined]
        value.of_gradient, value.copied_view = False, None  # type: ignore[attr-defined]

    def like(self, piece: Tensor, spec: Any) -> Self:
        """A tensor over another piece that belongs where this one does."""
        return self.of(
            piece, spec, self.home, parted=self.parted,
            of_gradient=self.of_gradient, view=self.copied_view,
        )  # fmt: skip

    @property
    def plain(self) -> DTensor:
        """torch's own DTensor over the same memory, which ops run on; that of a view is new."""
        if self.copied_view is not None:
            return replicated(whole_of(self), self)
        if self._plain is None:
            self._plain = DTensor(self._local_tensor, self._spec, requires_grad=False)
        return self._plain


def lie_alike(one: HomeTensor, other: Tensor) -> bool:
    """Whether each rank has the same part of both, laid out alike, in memory of its own."""
    if not isinstance(other, DTensor) or other.placements != one.placements:
        return False
    parts: object = ()
    if isinstance(other, HomeTensor):
        if other.copied_view is not None:
            return False
        parts = other.home.shard.cuts if other.parted else ()
    return (
        other.shape == one.shape
        and other.device_mesh == one.device_mesh
        and parts == (one.home.shard.cuts if one.parted else ())
        and _memory_kind(other._local_tensor) == _memory_kind(one._local_tensor)
    )


def _memory_kind(piece: Tensor) -> tuple[object, ...]:
    return type(piece), piece.stride(), piece.dtype, piece.device, piece.is_inference()


@torch.no_grad()
def give_memory(tensor: HomeTensor, value: Tensor) -> bool:
    """Give a tensor the memory of another, as ``tensor.data = value`` does; whether it is shared.

    Where the two do not lie alike, the tensor gets new memory with the values. What was read from
    ``tensor.data`` before keeps the memory that the tensor had.
    """
    shared = lie_alike(tensor, value)
    if shared:
        piece = value._local_tensor.detach()  # type: ignore[attr-defined]
    else:
        piece = torch.empty_like(tensor._local_tensor)
        tensor.of(piece, tensor._spec, tensor.home, parted=tensor.parted).copy_(value)
    tensor._local_tensor, tensor._plain, tensor.copied_view = piece, None, None
    if tensor.follower is not None:
        tensor.follower.call(tensor, piece)
    return shared


def replicated(whole: Tensor, like: DTensor) -> DTensor:
    """A DTensor of a tensor that every rank has whole, on the mesh of another."""
    everywhere = (Replicate(),) * like.device_mesh.ndim
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(like.device_mesh, everywhere, tensor_meta=meta)
    return DTensor(whole, spec, requires_grad=False)


@torch.no_grad()
def whole_of(value: DTensor) -> Tensor:
    """The whole tensor as it is now, perhaps in the same memory; all ranks call this together."""
    if not isinstance(value, HomeTensor):
        return value.full_tensor()
    if value.copied_view is not None:
        return value.copied_view.of(whole_of(value.copied_view.base))
    if not all(each.is_replicate() for each in value.placements):
        meet(value, "a read of the whole")
    if value.parted:
        return value.home.join(value._local_tensor.detach())
    return value.plain.full_tensor()


def meet(value: HomeTensor, what: str) -> None:
    """RunError on all ranks if some do not call for what takes a transfer between them."""
    of = "the gradient of " if value.of_gradient else ""
    value.home.meet(f"{what} of {of}{value.home.shard.name}")


@torch.no_grad()
def write_whole(value: DTensor, whole: Tensor) -> None:
    """Write this rank's piece of a whole tensor into a tensor's own memory."""
    if isinstance(value, HomeTensor) and value.parted:
        piece = value.home.take(whole)
    else:
        piece = replicated(whole, value).redistribute(placements=value.placements)._local_tensor
    value._local_tensor.copy_(piece)


def check_read(value: HomeTensor) -> None:
    """RunError for the value of what joins parameters, of which a pipeline rank has its own."""
    if value.joined:
        raise RunError(
            where=f"a value of {value.home.shard.name} and other parameters",
            what="is of this pipeline rank's parameters alone",
            why="the other ranks hold those of the model's other stages",
            do="Read them by name from stage.full_state_dict(), or each parameter by itself.",
        )
