"""The DTensors of a stage that are right where torch's own would be silently wrong, or refuse.

``Gradient`` is the gradient of a parameter. torch's GradScaler asks only the ranks that share the
first gradient's shards whether a gradient is infinite; here every rank learns it. In a pipeline a
rank has the gradients of its own stages, so a value that joins several of them (a norm over all
parameters, LBFGS) is not the model's: it is refused.

``Parted`` is a weight of several parts that are cut one by one, as q, k and v in one weight. This
rank's rows are not neighbours in the whole weight, which no DTensor placement can say. Ops that
take every element by itself are right, norms too; what depends on the place of a row is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from partc.errors import RunError
from partc.program.chunks import Chunk, write_items
from partc.program.dtensors import Gather
from partc.program.role import Shard

_CHECK_FINITE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_PER_TENSOR = ("_foreach_", "_fused_", "_amp_foreach_")  # ops that take lists index by index
_SAME_PLACES = {
    "_to_copy", "alias", "clone", "copy_", "detach", "empty_like", "fill_", "full_like",
    "ones_like", "zero_", "zeros_like",
}  # fmt: skip
_OF_ALL_ELEMENTS = {
    "_foreach_max", "_foreach_norm", "all.default", "any.default", "max.default", "mean.default",
    "min.default", "sum.default",
}  # fmt: skip


@dataclass(frozen=True)
class Home:
    """Where a stage's tensor belongs.

    ``shard``: the parameter and its cuts. ``chunks``: where this rank's piece lies in the whole.
    ``groups``: the process groups of all mesh axes. ``gather``: gives the x of every rank along an
    axis.
    """

    shard: Shard
    chunks: list[Chunk]
    groups: Mapping[str, Any]
    gather: Gather
    in_pipeline: bool

    def __deepcopy__(self, memo: object) -> Home:
        return self  # copies of a tensor belong to the same ranks


class StageTensor(DTensor):
    """A DTensor that knows to which parameter of which stage it belongs."""

    home: Home
    _plain: DTensor | None = None

    @classmethod
    def of(cls, piece: Tensor, spec: Any, home: Home) -> Self:
        """A tensor over a piece's memory; ``spec`` is that of a DTensor which lies the same."""
        made: Self = cls(piece, spec, requires_grad=False)
        made.home = home
        return made

    @property
    def plain(self) -> DTensor:
        """torch's own DTensor over the same memory, which ops run on."""
        if self._plain is None:
            self._plain = DTensor(self._local_tensor, self._spec, requires_grad=False)
        return self._plain


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An op on torch's own DTensors; what it changes in place is returned as it was given."""
    plain = {name: _plain(x) for name, x in kwargs.items()}
    result = func(*map(_plain, args), **plain)
    if args and isinstance(args[0], StageTensor) and result is args[0]._plain:
        return args[0]
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, StageTensor):
        return value.plain
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value


class Gradient(StageTensor):
    """The gradient of a stage's parameter."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _CHECK_FINITE:
            return _check_finite(*args)
        if Parted in types:
            return Parted.__torch_dispatch__(func, types, args, kwargs)
        given = _stage_tensors(args, kwargs)
        if not given[0].home.in_pipeline:
            result = run(func, args, kwargs)
            changed = isinstance(result, DTensor) and args[0] is given[0]
            return _as(cls, result, given[0].home) if changed else result  # it may become .grad
        if _is_per_tensor(func):
            return _each_of_its_stage(args[0], run(func, args, kwargs))
        listed = any(isinstance(x, list | tuple) and x and isinstance(x[0], cls) for x in args)
        if listed or len({x.home.shard.name for x in given}) > 1:
            raise _of_one_rank(func, given)
        result = run(func, args, kwargs)
        return pytree.tree_map_only(DTensor, lambda x: _as(cls, x, given[0].home), result)


def _each_of_its_stage(operands: Sequence[Any], results: Any) -> Any:
    """The results of an op on lists, each as the gradient that it was made of."""
    if not isinstance(results, list | tuple):
        return results
    return [
        _as(Gradient, result, x.home) if isinstance(x, StageTensor) else result
        for x, result in zip(operands, results, strict=True)
    ]


def _stage_tensors(args: Any, kwargs: Any) -> list[StageTensor]:
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, StageTensor)]


class Parted(StageTensor):
    """A parameter of several parts, each cut by itself; its DTensor tells the places wrongly."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _needs_places("pickle", self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _CHECK_FINITE:
            return _check_finite(*args)
        first = next(x for x in _stage_tensors(args, kwargs) if isinstance(x, cls))
        whole = _is_of_all_elements(func, args, kwargs)
        if not (whole or _keeps_places(func)):
            raise _needs_places(func, first)
        firsts = [_places(func, operands) for operands in _operands(func, args, kwargs)]
        result = run(func, args, kwargs)
        if whole and first.home.in_pipeline:
            return pytree.tree_map_only(DTensor, lambda x: _as(Gradient, x, first.home), result)
        if isinstance(result, list | tuple):
            return [_like(x, operand) for x, operand in zip(result, firsts, strict=True)]
        return _like(result, first)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor with its rows in the model's order; all ranks call this together."""
        apply: Any = _Joined.apply
        whole: Tensor = apply(self)
        return whole

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> DTensor:
        """The whole tensor on every rank, the one layout that DTensor can say."""
        if placements is None or any(not isinstance(p, Replicate) for p in placements):
            raise _needs_places("redistribute", self)
        return DTensor.from_local(self.full_tensor(), self.device_mesh, placements, run_check=False)

    # torch.distributed.checkpoint asks these of a tensor
    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self.home.shard, self._local_tensor, self.home.chunks)

    def __create_chunk_list__(self) -> list[Any]:
        return [chunk.storage() for chunk in self.home.chunks]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        box = next(each for each in self.home.chunks if each.offsets == tuple(index.offset))
        return box.of(self._local_tensor.detach())


class _Joined(torch.autograd.Function):
    """The whole of a ``Parted``; autograd cannot go back through it."""

    @staticmethod
    def forward(ctx: Any, value: Parted) -> Tensor:
        ctx.value = value
        return value.home.shard.join(value._local_tensor.detach(), value.home.gather)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise _needs_places("the backward of full_tensor", ctx.value)


def _like(result: Any, operand: Parted | None) -> Any:
    """A result of the operand's shape lies as the operand does; others are of all elements."""
    same = operand is not None and isinstance(result, DTensor) and result.shape == operand.shape
    return _as(Parted, result, operand.home) if operand is not None and same else result


def _as(kind: type[StageTensor], value: Any, home: Home) -> Any:
    return value if isinstance(value, kind) else kind.of(value._local_tensor, value._spec, home)


def _check_finite(grads: Sequence[DTensor], found: Tensor, inverse: Tensor) -> None:
    """Unscale the gradients; ``found`` becomes 1 on all ranks if one is not finite on any."""
    _CHECK_FINITE([grad._local_tensor for grad in grads], found, inverse)
    home = next(grad.home for grad in grads if isinstance(grad, StageTensor))
    for group in home.groups.values():
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")


def _is_per_tensor(func: Any) -> bool:
    return _name(func).startswith(_PER_TENSOR)


def _keeps_places(func: Any) -> bool:
    """Whether an op makes each element of the elements at the same place alone."""
    pointwise = torch.Tag.pointwise in func.tags
    return pointwise or _is_per_tensor(func) or _name(func) in _SAME_PLACES


def _is_of_all_elements(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a result is of all elements, in whichever order."""
    if _name(func) == "linalg_vector_norm":
        return (args[2] if len(args) > 2 else kwargs.get("dim")) is None
    return {_name(func), f"{_name(func)}.{func._overloadname}"} & _OF_ALL_ELEMENTS != set()


def _operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[list[Any]]:
    """The tensors that an op takes together; of an op on lists those of each index."""
    given = [*args, *kwargs.values()]
    lists = [x for x in given if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
    if _is_per_tensor(func) and lists:
        most = max(map(len, lists))
        yield from (list(each) for each in zip(*(x for x in lists if len(x) == most), strict=True))
        return
    yield [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]


def _places(func: Any, operands: Sequence[Tensor]) -> Parted | None:
    """The first operand with parts; refused if others of its size have their rows elsewhere."""
    parted = [x for x in operands if isinstance(x, Parted)]
    if not parted:
        return None
    first = parted[0]
    same = all(
        x.shape == first.shape and x.home.shard.cuts == first.home.shard.cuts for x in parted
    )
    if not same or any(x.dim() and not isinstance(x, Parted) for x in operands):
        raise _needs_places(func, first)
    return first


def _needs_places(func: Any, value: Parted) -> RunError:
    shard = value.home.shard
    axes = ", ".join(axis for axis, _, outer in shard.cuts if outer > 1)
    num = max(outer for _, _, outer in shard.cuts)
    return RunError(
        where=shard.name,
        what=f"{func} needs the weight's rows at their places in the model",
        why=f"the plan cuts each of its {num} parts by {axes}, and DTensor cannot say that",
        do="Call stage.step_on_whole(optimizer), which gathers it, read stage.full_state_dict(), "
        "or leave the weight out of this axis in the plan.",
    )


def _of_one_rank(func: Any, given: Sequence[StageTensor]) -> RunError:
    names = list(dict.fromkeys(x.home.shard.name for x in given))
    return RunError(
        where=f"{func} of the gradients of {', '.join(names[:2])}{' ...' * (len(names) > 2)}",
        what="joins gradients of this pipeline rank alone",
        why="the other ranks hold the gradients of the model's other stages",
        do="Clip with stage.clip_grad_norm_, which is over the whole model, and take an optimizer "
        "that treats each parameter by itself.",
    )
