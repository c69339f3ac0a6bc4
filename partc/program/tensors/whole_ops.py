"""Run an op of torch on whole tensors, where DTensor cannot run it on the ranks' pieces.

Every rank gathers the whole operands, runs the op, and takes its piece of what the op has written.
A result is whole on every rank. So any op is right, at the cost of the memory of whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from partc.errors import RunError
from partc.program.tensors.homes import (
    Home,
    HomeTensor,
    View,
    meet,
    replicated,
    whole_of,
    write_whole,
)
from partc.program.tensors.op_facts import Op, home_tensors

_RESIZE = torch.ops.aten.resize_.default


def run_on_whole(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An op on whole tensors; what it writes arrives in the memory of its operands."""
    op = Op.of(func)
    wholes = Wholes(op, home_tensors(args, kwargs)[0])
    written = {id(x) for x in op.written(args, kwargs)}

    def whole(value: Any) -> Any:
        return wholes.to_write(value) if id(value) in written else wholes.to_read(value)

    whole_args = pytree.tree_map_only(Tensor, whole, list(args))
    whole_kwargs = pytree.tree_map_only(Tensor, whole, dict(kwargs))
    with torch.no_grad():
        result = func(*whole_args, **whole_kwargs)
    wholes.write_back()
    return wholes.results(result, view_of(func, args, kwargs) if op.makes_views else None)


@torch.no_grad()
def reshape_in_place(func: Any, value: HomeTensor, *args: Any, **kwargs: Any) -> HomeTensor:
    """An op that makes a tensor a view of what it was (``t_``); RunError for a parameter."""
    if isinstance(value, nn.Parameter) or func is _RESIZE:
        raise shape_changed(func, value)
    was = value.copied_view or View(value.like(value._local_tensor, value._spec), ())
    view = was.then(lambda whole: func(whole.detach(), *args, **kwargs))
    now = replicated(view.of(whole_of(view.base)), value)
    value.copied_view = view
    value._local_tensor, value._spec = now._local_tensor, now._spec
    value.parted, value._plain = False, None
    made: HomeTensor = return_and_correct_aliasing(func, (value, *args), kwargs, value)
    return made


class Wholes:
    """The whole tensors of one op's operands."""

    def __init__(self, op: Op, first: HomeTensor) -> None:
        self.op, self.first = op, first
        self._bases: dict[int, tuple[DTensor, Tensor]] = {}  # what is written, and its whole
        self._targets: list[tuple[Tensor, Tensor]] = []  # an operand, and its part of a whole

    def to_read(self, value: Tensor) -> Tensor:
        """The whole of an operand; a plain tensor has to be the same on all ranks."""
        if isinstance(value, DTensor):
            return whole_of(value)
        if value.dim():
            self._check_same(value)
        return value

    def to_write(self, value: Tensor) -> Tensor:
        """A copy of the whole of an operand that the op writes to."""
        if not isinstance(value, DTensor):
            return value  # it takes the whole
        view = value.copied_view if isinstance(value, HomeTensor) else None
        base = view.base if view is not None else value
        if id(base) not in self._bases:
            self._bases[id(base)] = base, whole_of(base).clone()
        whole = self._bases[id(base)][1]
        target = view.of(whole) if view is not None else whole
        self._targets.append((value, target))
        return target

    def write_back(self) -> None:
        """Bring what the op wrote to the operands' own memory; nothing if it changed a shape."""
        for value, target in self._targets:
            if target.shape != value.shape:
                raise shape_changed(self.op.func, self.first)
        for base, whole in self._bases.values():
            write_whole(base, self._drawn(whole))
        for value, target in self._targets:
            if id(value) not in self._bases and isinstance(value, DTensor):
                write_whole(value, target)  # the copy that a view is

    def results(self, result: Any, view: Callable[[int], View] | None) -> Any:
        """What the op returns: its operands, or tensors that are whole on every rank."""
        operands = {id(target): value for value, target in self._targets}
        leaves, spec = pytree.tree_flatten(result)
        for i, leaf in enumerate(leaves):
            if id(leaf) in operands:
                leaves[i] = operands[id(leaf)]
            elif isinstance(leaf, Tensor):
                leaves[i] = self._made(leaf, None if view is None else view(i))
        return pytree.tree_unflatten(leaves, spec)

    def _made(self, whole: Tensor, view: View | None) -> Tensor:
        first, plain = self.first, replicated(self._drawn(whole), self.first)
        return first.over(plain, first.home, of_gradient=first.of_gradient, view=view)

    def _drawn(self, whole: Tensor) -> Tensor:
        """The numbers of the first rank, where an op drew them."""
        return self._from_first(whole) if self.op.is_random else whole

    def _from_first(self, value: Tensor) -> Tensor:
        meet(self.first, str(self.op.func).removesuffix(".default"))
        return from_first_rank(value, self.first.home)

    def _check_same(self, value: Tensor) -> None:
        home, first = self.first.home, self._from_first(value)
        differs = ((first != value) & ~((first != first) & (value != value))).any().int()
        for group in home.sharers:
            dist.all_reduce(differs, dist.ReduceOp.MAX, group=group)
        if differs.item():
            raise _differs(self.op.func, self.first)


def view_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[int], View] | None:
    """Whose view each result of an op on views is, by the result's number."""
    if not isinstance(args[0], HomeTensor):
        return None
    base, *rest = args

    def op(number: int, whole: Tensor) -> Tensor:
        result = func(whole, *rest, **kwargs)
        view: Tensor = result[number] if isinstance(result, list | tuple) else result
        return view

    start = base.copied_view or View(base, ())
    return lambda number: start.then(partial(op, number))


def from_first_rank(value: Tensor, home: Home) -> Tensor:
    """The tensor of the first rank with the same pipeline stages, on all of them."""
    flat = value.detach().reshape(-1).clone()
    for group in home.sharers:
        dist.broadcast(flat.view(torch.uint8), dist.get_global_rank(group, 0), group=group)
    return flat.view(value.shape)


def shape_changed(func: Any, value: HomeTensor) -> RunError:
    return RunError(
        where=value.home.shard.name,
        what=f"{func} changes the shape of a tensor in place",
        why="a stage's tensors have the shapes that the program was compiled with",
        do="Make a new tensor: the op has a form that is not in place.",
    )


def _differs(func: Any, value: HomeTensor) -> RunError:
    return RunError(
        where=f"{func} of {value.home.shard.name}",
        what="the plain tensor beside it is not the same on all ranks",
        why="it stands for the whole tensor of one device",
        do="Give every rank the same whole tensor: seed all ranks alike, or load it on each.",
    )
