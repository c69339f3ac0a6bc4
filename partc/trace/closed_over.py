"""Tensors that a step reads although they are no parameters, buffers or inputs of it.

A parameter that the loss has in a variable of its own is the parameter. Any other tensor from
outside is a constant of the program, which the plan's notes name; one that is trained is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from partc.amounts import amount
from partc.errors import TraceError
from partc.graph.fake_calls import storage_of
from partc.plan.sharding import DTYPE_NAMES
from partc.trace.contents import Contents, Outside, memory_of
from partc.trace.made_layers import check_made
from partc.trace.odd_tensors import dense_parts, odd_kind
from partc.trace.reachable import Place

OUTSIDE = "frozen at trace time, whole on every rank: "  # a note on such a tensor begins so
NAMED = 3  # tensors of one variable that a note names one by one


class OwnTensors(TorchFunctionMode):
    """Lets code that has a parameter or buffer in a variable compute with the fake in its place.

    ``fakes``: the fake by the ``id`` of the model's tensor.
    """

    def __init__(self, fakes: Mapping[int, Tensor]) -> None:
        self.fakes = fakes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*self._own(args), **{k: self._own(v) for k, v in (kwargs or {}).items()})

    def _own(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self.fakes.get(id(arg), arg)
        if type(arg) in (list, tuple):
            own = [self._own(each) for each in arg]
            same = all(a is b for a, b in zip(own, arg, strict=True))
            return arg if same else type(arg)(own)
        return arg


class ReadsOwnError(Exception):
    """The step has read a parameter or buffer of the model that is in a variable of its own."""


def check_own(results: Iterable[Tensor], contents: Contents, fakes: Mapping[int, Tensor]) -> None:
    """ReadsOwnError if the step has read a tensor of the model itself in place of its fake."""
    read = (outside.tensor for outside in contents.outside.values())
    leaves = (leaf for result in results for leaf in _leaves(result.grad_fn))
    if any(id(tensor) in fakes for tensor in (*read, *leaves)):
        raise ReadsOwnError


# what is refused -----------------------------------------------------------------------------
def check_memory(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """TraceError if a trained parameter shares memory with another parameter or with a buffer."""
    by_memory: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in {**params, **buffers}.items():
        if tensor.layout is torch.strided:
            by_memory.setdefault(storage_of(tensor), []).append((name, tensor))
    for sharing in by_memory.values():
        for (name, one), (other, two) in combinations(sharing, 2):
            if (one.requires_grad or two.requires_grad) and overlap(one, two):
                raise TraceError(
                    where=other,
                    what=f"it shares memory with {name}, and one is trained",
                    why="ranks hold pieces, in which the two would no longer be one",
                    do="Make both names one parameter (b.weight = a.weight), or compute the one "
                    "from the other in forward.",
                )


def check_trained(
    loss: Tensor, fakes: Mapping[str, Tensor], params: Mapping[str, Tensor],
    places: Iterable[Place], contents: Contents,
) -> None:  # fmt: skip
    """TraceError if the loss has a gradient for a tensor that is no parameter of the model.

    ``fakes`` stand in the step for the model's own ``params``.
    """
    mine = {id(each) for each in fakes.values()}
    for leaf in _leaves(loss.grad_fn):
        if id(leaf) in mine:
            continue
        if isinstance(leaf, FakeTensor):
            check_made(leaf, contents)
        else:
            param = next((n for n, each in params.items() if each is leaf), "")
            raise _no_view(param) if param else _not_trained(leaf, places)


def _leaves(node: Node | None) -> Iterator[Tensor]:
    """The tensors for which a backward from this node computes gradients."""
    left, seen = [node], {None, node}
    while left:
        latest = left.pop()
        if latest is None:
            continue
        if hasattr(latest, "variable"):
            yield latest.variable
        new = [before for before, _ in latest.next_functions if before not in seen]
        seen.update(new)
        left += dict.fromkeys(new)


def _no_view(param: str) -> TraceError:
    return TraceError(
        where=param,
        what="the loss reads a result that was computed from this parameter before the step",
        why="it would not follow the parameter",
        do="Compute it inside of the loss.",
    )


def _not_trained(tensor: Tensor, places: Iterable[Place]) -> TraceError:
    shape = f"a tensor of shape {tuple(tensor.shape)}"
    place = next((place for place in places if place.value is tensor), None)
    name, do = shape, "Make it a parameter of the module that is traced, or detach it."
    if place is not None:
        name = place.name
        if "[" in name:
            do = "Keep modules in an nn.ModuleList or nn.ModuleDict, and tensors in an "
            do += "nn.ParameterList or nn.ParameterDict, not in a list or a dict: the model knows "
            do += "no others."
        elif isinstance(place.root.value, nn.Module):
            do = "Call the model that the loss is given, loss(model, ...), in place of this one; "
            do += "make a module that is trained too a part of the model; freeze a teacher, "
            do += "requires_grad_(False)."
    return TraceError(
        where=name,
        what="the loss reads a trainable tensor that is no parameter of the model",
        why="its gradient would be lost",
        do=do,
    )


def check_updated(contents: Contents, places: Iterable[Place]) -> None:
    """TraceError if the step updates a tensor in place that is no buffer of the model."""
    for outside in contents.outside.values():
        if outside.updated:
            raise TraceError(
                where=_found(outside, places),
                what="the step updates it in place, and it is no buffer of the model",
                why="the program would have what it held when compiled in every step",
                do="Make it a buffer (register_buffer in __init__) or its module a submodule, as "
                "programs carry buffers from step to step; a teacher's batch norms rest in eval().",
            )


def check_aliases(contents: Contents, own: Mapping[str, Tensor], places: Iterable[Place]) -> None:
    """TraceError if a tensor from outside shares memory with one of ``own``, which steps change."""
    names = {storage_of(each): name for name, each in own.items() if each.layout is torch.strided}
    for memory, outside in contents.outside.items():
        if memory in names:
            name = names[memory]
            raise TraceError(
                where=_found(outside, places),
                what=f"it shares memory with {name}, which is trained",
                why="the program would read what it held when compiled",
                do=f"Read {name} itself in the step, as an attribute of the model.",
            )


def _found(outside: Outside, places: Iterable[Place]) -> str:
    """The name of a tensor from outside, if it has one, and the line that reads it."""
    name = next((place.name for place in places if place.value is outside.tensor), "")
    return f"{name} ({outside.source})" if name and outside.source else name or outside.source


def overlap(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors over one memory have an element in common."""
    if one.numel() == 0 or two.numel() == 0:
        return False
    spans = [(x.storage_offset() * x.element_size(), _end(x)) for x in (one, two)]
    (first, end), (other, other_end) = spans
    if end <= other or other_end <= first:
        return False
    if one.dtype != two.dtype:
        return True
    with _disable_current_modes():  # the two may be fakes; their memory is looked at alone
        size = max(end, other_end) // one.element_size()
        taken = torch.zeros(size, dtype=torch.bool, device="cpu")
        first_there, there = (
            taken.as_strided(each.shape, each.stride(), each.storage_offset())
            for each in (one, two)
        )
        first_there.fill_(True)
        return bool(there.any())


def _end(tensor: Tensor) -> int:
    """The byte of a tensor's memory behind its last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return int(last + 1) * tensor.element_size()


# what the plan says ----------------------------------------------------------------------------
def notes_on(contents: Contents, places: Iterable[Place]) -> Iterator[str]:
    """Sentences on the constants of a step that stand outside of it, by variable or attribute."""
    known: dict[int, Place] = {}
    for each in places:
        if isinstance(each.value, Tensor):
            known.setdefault(memory_of(each.value), each)
    groups: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for memory, outside in contents.outside.items():
        place = known.get(memory)
        root = place.root.name if place else outside.source
        if outside.written:
            yield f"the step writes into {place.name if place else root}; a program does not"
            continue
        parts = dense_parts(outside.tensor) if odd_kind(outside.tensor) else [outside.tensor]
        size = sum(each.numel() * each.element_size() for each in parts)
        groups.setdefault(root, []).append(_described(place, outside, size))
        sizes[root] = sizes.get(root, 0) + size
    for root, texts in groups.items():
        many = f"{len(texts)} tensors in {root}, {amount(sizes[root], 'B')}"
        for text in texts if len(texts) <= NAMED else [many]:
            yield f"{OUTSIDE}{text}"


def _described(place: Place | None, outside: Outside, size: int) -> str:
    """``mask of loss_of, f32[8,8], 256 B, read at train.py:12``."""
    tensor = outside.tensor
    kind, dtype = odd_kind(tensor), DTYPE_NAMES.get(tensor.dtype, tensor.dtype)
    typed = kind or f"{dtype}[{','.join(map(str, tensor.shape))}]"
    line = outside.source.partition(": ")[0]
    text = f"{place.name if place else 'a tensor'}, {typed}, {amount(size, 'B')}"
    return f"{text}, read at {line}" if line else text
