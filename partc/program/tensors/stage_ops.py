"""How an op of torch runs on a stage's tensors: on pieces, on whole tensors, or not at all.

What DTensor computes right runs on the ranks' pieces, and no result stays an unfinished sum. What
it cannot run, or would do to a copy of a view alone, runs on whole tensors. In a pipeline a rank
has the gradients of its own stages, so a value that joins several of them (a norm over all
parameters, LBFGS) is not the model's: it is refused.

Of a weight with parts that are sharded one by one (q, k and v in one), DTensor tells the places of
rows wrongly. Ops that take each element by itself run on its pieces, and norms; all else on wholes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from partc.errors import RunError
from partc.program.tensors.homes import HomeTensor, View, check_read, meet, whole_of
from partc.program.tensors.op_errors import collective, number_of_one_rank, of_one_rank
from partc.program.tensors.op_facts import Op, home_tensors
from partc.program.tensors.own_writes import OWN_WRITES, factors_of
from partc.program.tensors.script_tensors import check_kept, fitting
from partc.program.tensors.sends import asking
from partc.program.tensors.whole_ops import reshape_in_place, run_on_whole, view_of

_CHECK_FINITE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_NUMBER = torch.ops.aten._local_scalar_dense.default
_EQUAL = torch.ops.aten.equal.default  # DTensor compares over all ranks, also those of other stages
_HALF = (torch.bfloat16, torch.float16)
_NO_REFUSAL_OF_DTENSOR = (dist.DistError, torch.OutOfMemoryError, RunError)


def run_op(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an op; RunError if it would not be the model's."""
    op, given = Op.of(func), home_tensors(args, kwargs)
    if func is _CHECK_FINITE:
        return _check_finite(*args)
    if func is _NUMBER:
        return _number(args[0])
    if not given[0].home.in_pipeline:
        if not op.writes and _joins_loss(args, given):
            return func(*pytree.tree_map_only(HomeTensor, whole_of, list(args)), **kwargs)
        return _run(op, args, kwargs, given)
    _check_joins(op, args, given)
    check_kept(op, args, kwargs, given)
    with fitting(op, args, kwargs, given):
        result = _run(op, args, kwargs, given)
    if not op.is_per_tensor and (_join(args, given) or any(x.joined for x in given)):
        for x in pytree.tree_leaves(result):
            if isinstance(x, HomeTensor) and all(x is not each for each in given):
                x.joined = True
    return result


def _joins_loss(args: Sequence[Any], given: Sequence[HomeTensor]) -> bool:
    """Whether a number of the weights, such as a penalty, meets a loss of the script's own, which
    is of this rank's rows: their sum is this rank's, and no tensor of all ranks.
    """
    plain = (x for x in pytree.tree_leaves(args) if type(x) is Tensor and not x.dim())
    return all(not x.dim() for x in given) and any(x.requires_grad for x in plain)


def _run(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], given: list[HomeTensor]) -> Any:
    """The result of an op that may be computed on this rank's tensors."""
    func = op.func
    if op.writes:
        OWN_WRITES.note(op, args, kwargs)
        _adopt_written(op, args, kwargs, given[0])
    if op.reshapes_in_place:
        return reshape_in_place(func, *args, **kwargs)
    if op.is_of_torch and _needs_whole(op, args, kwargs, given):
        return run_on_whole(func, args, kwargs)
    try:
        plain = {name: _plain(x) for name, x in kwargs.items()} if kwargs else {}
        with asking(func, args, lambda: meet(given[0], _called(func))):
            result = func(*map(_plain, args), **plain)
    except Exception as error:
        if func.namespace == "c10d":
            raise collective(func) from None
        if not op.is_of_torch or isinstance(error, _NO_REFUSAL_OF_DTENSOR):
            raise
        return run_on_whole(func, args, kwargs)  # which says what is wrong with the operands
    if isinstance(result, DTensor):
        if _is_rounded_early(result):
            return _rounded_once(op, args, kwargs, result.dtype)
        return _Results(op, args, kwargs, given).one(result, 0)
    if isinstance(result, list | tuple):
        results = _Results(op, args, kwargs, given)
        return [results.one(x, i) for i, x in enumerate(result)]
    return result


def _adopt_written(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], first: HomeTensor
) -> None:
    """Make torch's own DTensors that an op writes to tensors of the stage.

    ``torch.load`` gives an optimizer such states; ranks would read their parts of sums of them.
    """
    found = {id(x) for x in op.written(args, kwargs) if type(x) is DTensor}
    for operands in _operands(op, args, kwargs) if found else ():
        beside = next((x for x in operands if isinstance(x, HomeTensor)), first)
        for x in operands:
            if id(x) in found:
                beside.adopt(x)


def _plain(value: Any) -> Any:
    if isinstance(value, HomeTensor):
        return value.plain
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value


class _Results:
    """Gives what an op on torch's own DTensors returns a home."""

    def __init__(
        self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], given: list[HomeTensor]
    ) -> None:
        self._op, self._args, self._kwargs, self._given = op, args, kwargs, given
        self._factors = factors_of(args, kwargs)

    def one(self, value: Any, number: int) -> Any:
        """A result; what the op changed in place is the operand that was given."""
        if not isinstance(value, DTensor):
            return value
        for x in self._given:
            if value is x._plain:
                return x
        operand = self._operand(number)
        if any(each.is_partial() for each in value.placements):
            meet(operand, _called(self._op.func))
        value = _finished(value)
        alone = self._op.is_per_tensor
        made = operand.over(
            value,
            operand.home,
            parted=operand.parted and self._lies_as(operand, value),
            of_gradient=any(x.of_gradient for x in ([operand] if alone else self._given)),
            view=self._lost_view(value, number) if self._op.makes_views else None,
        )
        made.is_own = self._op.makes_views and operand.is_own
        made.factors = self._factors
        return made

    def _operand(self, number: int) -> HomeTensor:
        """The first operand with a home; of an op on lists that of the result's number."""
        if self._op.is_per_tensor and isinstance(self._args[0][number], HomeTensor):
            found: HomeTensor = self._args[0][number]
            return found
        return next((x for x in self._given if x.parted), self._given[0])

    def _lies_as(self, operand: HomeTensor, value: DTensor) -> bool:
        whole = self._op.is_of_all_elements(self._args, self._kwargs)
        return not whole and value.shape == operand.shape

    def _lost_view(self, value: DTensor, number: int) -> View | None:
        """Whose view a result is, if writing to it would not reach that tensor's memory."""
        base, view = self._args[0], view_of(self._op.func, self._args, self._kwargs)
        if view is None or (base.copied_view is None and _memory(base) == _memory(value)):
            return None
        return view(number)


def _called(func: Any) -> str:
    return str(func).removesuffix(".default")


def _memory(value: DTensor) -> int:
    return value._local_tensor.untyped_storage().data_ptr()


def _finished(value: DTensor) -> DTensor:
    """The whole value of an unfinished sum; ranks would read their parts of it."""
    if not any(each.is_partial() for each in value.placements):
        return value
    placements = [Replicate() if each.is_partial() else each for each in value.placements]
    return value.redistribute(placements=placements)


def _is_rounded_early(value: DTensor) -> bool:
    """Whether a value is an unfinished sum in half precision, of which ranks round their parts.

    A device adds up in float32 and rounds once. Muon, which computes in bfloat16, would take other
    steps.
    """
    return value.dtype in _HALF and any(each.is_partial() for each in value.placements)


def _rounded_once(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Any:
    """The result of an op in half precision, added up in float32 or on whole tensors."""
    if not op.is_of_all_elements(args, kwargs):
        return run_on_whole(op.func, args, kwargs)
    wide = pytree.tree_map_only(HomeTensor, lambda x: x.float(), list(args))
    sum_in_float = run_op(op.func, wide, {k: v for k, v in kwargs.items() if k != "dtype"})
    return sum_in_float.to(dtype)


def _needs_whole(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[HomeTensor]
) -> bool:
    """Whether DTensor would be wrong: it draws, writes or places rows otherwise than one device."""
    if op.is_random or op.has_out or op.func is _EQUAL:
        return True
    if op.writes and any(map(_is_written_elsewhere, op.written(args, kwargs))):
        return True
    if not any(x.parted for x in given) or op.is_of_all_elements(args, kwargs):
        return False
    return not (op.keeps_places and all(map(_alike, _operands(op, args, kwargs))))


def _is_written_elsewhere(value: Tensor) -> bool:
    """Whether writing to an operand's own memory would not do: a plain tensor, a copied view."""
    lost = isinstance(value, HomeTensor) and value.copied_view is not None
    return lost or not isinstance(value, DTensor)


def _check_finite(grads: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Unscale the gradients; ``found`` becomes 1 on all ranks if one is not finite on any.

    torch's own asks only the ranks that share the first gradient's shards.
    """
    _CHECK_FINITE([getattr(grad, "_local_tensor", grad) for grad in grads], found, inverse)
    first = next(grad for grad in grads if isinstance(grad, HomeTensor))
    meet(first, "GradScaler.unscale_")
    for group in first.home.groups.values():
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)


def _number(value: HomeTensor) -> Any:
    """A tensor's one element as a number of Python."""
    if value.of_gradient and value.home.in_pipeline:
        raise number_of_one_rank(value)
    check_read(value)
    return whole_of(value).item()


def _check_joins(op: Op, args: Sequence[Any], given: Sequence[HomeTensor]) -> None:
    """RunError if an op joins gradients, of which a pipeline rank has those of its stages alone."""
    gradients = [x for x in given if x.of_gradient]
    if op.is_per_tensor or not gradients:
        return
    if _join(args, gradients):
        raise of_one_rank(op.func, gradients)


def _join(args: Sequence[Any], given: Sequence[HomeTensor]) -> bool:
    """Whether an op joins tensors of several parameters.

    A list of one (``stack`` of all norms, where a rank has one parameter) counts: other ranks may
    have more.
    """
    list_of_one = args and isinstance(args[0], list | tuple) and len(args[0]) == 1
    return bool(list_of_one) or len({x.home.shard.name for x in given}) > 1


def _operands(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[list[Any]]:
    """The tensors that an op takes together; of an op on lists those of each index."""
    given = [*args, *kwargs.values()]
    lists = [x for x in given if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
    if op.is_per_tensor and lists:
        most = max(map(len, lists))
        yield from (list(each) for each in zip(*(x for x in lists if len(x) == most), strict=True))
        return
    yield [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]


def _alike(operands: Sequence[Tensor]) -> bool:
    """Whether the rows of all operands lie as those of the first one with parts."""
    first = next((x for x in operands if isinstance(x, HomeTensor) and x.parted), None)
    if first is None:
        return True
    return all(
        not x.dim()
        or (
            isinstance(x, HomeTensor)
            and x.parted
            and x.shape == first.shape
            and x.home.shard.cuts == first.home.shard.cuts
        )
        for x in operands
    )
