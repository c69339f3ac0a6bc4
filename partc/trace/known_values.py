"""Compute what follows from constants alone while a step is traced on tensors without values.

``x[mask]``, ``mask.nonzero()`` and ``if mask.all():`` need values, and fakes have none. Tensors
that depend on no weight, no input and no random number have one all the same: what a model makes by
``eye``, ``arange`` or ``tensor``, holds as an attribute or closes over, and its small buffers. The
calls on them are noted; where a value is asked for, those behind it run on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from partc.graph.fake_calls import storage_of, tensors_in
from partc.graph.writes import tensors_written
from partc.trace.source_lines import source_here

aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)
SMALL_BYTES = 1 << 20  # tensors up to this size are known by value when compiling
LARGEST = 1 << 20  # elements of a tensor that is worth computing while tracing
NAMED = 3  # buffers that notes name one by one
MASKS = (torch.bool, torch.uint8)
_INDEX = {aten.index.Tensor}
_INDEX_PUT = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class UnknownValueError(Exception):
    """A tensor's value depends on weights, inputs or a random generator."""


class _Call(NamedTuple):
    """A call on known tensors: what it read, what it gave, and the memory that it wrote into."""

    func: Any
    args: Any
    kwargs: Any
    read: tuple[Tensor, ...]
    result: Any
    made: frozenset[int]  # ids of the tensors of the result
    written: frozenset[int]


@dataclass
class KnownValues:
    """The tensors of one run whose values follow from constants, and the calls behind them.

    ``buffers``: name and real tensor of a buffer, by the ``id`` of its fake. ``decided`` gets the
    names of those whose values were asked for, and the line that did: the run depends on what they
    held.
    """

    buffers: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    decided: dict[str, str] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)  # ids of fakes
    memory: set[int] = field(default_factory=set)  # of fakes, where it holds what is known
    overwritten: set[int] = field(default_factory=set)  # memory of real tensors
    lifted: set[int] = field(default_factory=set)  # ids of real tensors that were computed here
    calls: list[_Call] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)  # so that no other tensor gets the same id

    def add(self, name: str, fake: Tensor, real: Tensor) -> None:
        """Take a buffer for known, if it is small and has values."""
        if type(real) is Tensor and _has_values(real):
            self.buffers[id(fake)] = name, real
            self._know(fake)

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note a call that has run: a result of known tensors is known."""
        read = (*tensors_in([*args, *kwargs.values()]),)
        written = [*tensors_written(func, args, kwargs)]
        made = [*tensors_in(result)]
        if all(map(self.is_known, read)) and _is_pure(func) and _are_fakes([*made, *written]):
            places = frozenset(map(storage_of, written))
            ids = frozenset(map(id, made))
            self.calls.append(_Call(func, args, kwargs, read, result, ids, places))
            for each in made:
                self._know(each)
            return
        for each in written:
            if isinstance(each, FakeTensor):
                self.memory.discard(_memory(each))
            else:
                self.overwritten.add(_memory(each))
                self.alive.append(each)

    def is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor's value follows from constants."""
        if isinstance(tensor, FakeTensor):
            return id(tensor) in self.known and _memory(tensor) in self.memory
        if id(tensor) in self.lifted:
            return True
        return _has_values(tensor) and _memory(tensor) not in self.overwritten

    def keeps(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor of a later run has a value that was known in this one."""
        return isinstance(tensor, FakeTensor) and _memory(tensor) in self.memory

    def decide(self, tensor: Tensor) -> None:
        """Note that the buffers are asked for on which the value depends that memory keeps."""
        memory = _memory(tensor)
        for root in [x for x in self.alive if isinstance(x, FakeTensor) and _memory(x) == memory]:
            for each in (root, *(x for call in self._behind(root) for x in call.read)):
                if id(each) in self.buffers:
                    self.decided.setdefault(self.buffers[id(each)][0], source_here())

    def lift(self, value: Tensor) -> Tensor:
        """A computed value as a constant of the run; UnknownValueError if it is large."""
        if value.numel() > LARGEST:
            raise UnknownValueError
        value = value.contiguous()
        self.lifted.add(id(value))
        self.alive.append(value)
        return value

    def value(self, tensor: Tensor) -> Tensor:
        """The value of a tensor, on the CPU; UnknownValueError if it is not known."""
        if not self.is_known(tensor):
            raise UnknownValueError
        calls, found = self._behind(tensor), dict[int, Tensor]()

        def real(each: Tensor) -> Tensor:
            if not isinstance(each, FakeTensor):
                return each.detach().cpu()
            if id(each) not in found:
                name, held = self.buffers[id(each)]
                self.decided.setdefault(name, source_here())
                found[id(each)] = _own_copy(held)
            return found[id(each)]

        with _disable_current_modes(), torch.no_grad():
            try:
                for call in calls:
                    args, kwargs = tree_map_only(Tensor, real, (call.args, call.kwargs))
                    result = call.func(*args, **kwargs)
                    pairs = zip(tensors_in(call.result), tensors_in(result), strict=True)
                    found |= {id(fake): each for fake, each in pairs}
                return real(tensor).cpu()
            except Exception as error:  # a kernel that is not there, or a device
                raise UnknownValueError from error

    def notes(self) -> Iterator[str]:
        """Sentences on the buffers whose values were asked for; of many the first ones."""
        for name, line in [*self.decided.items()][:NAMED]:
            asked = f", asked for at {line.partition(': ')[0]}" if line else ""
            yield f"frozen at trace time: the value of buffer {name}{asked}"
        if len(self.decided) > NAMED:
            yield f"frozen at trace time: the values of {len(self.decided) - NAMED} more buffers"

    def _know(self, fake: Tensor) -> None:
        self.known.add(id(fake))
        self.memory.add(_memory(fake))
        self.alive.append(fake)

    def _behind(self, tensor: Tensor) -> list[_Call]:
        """The calls that a tensor's value depends on, in order."""
        needed, memory = {id(tensor)}, {_memory(tensor)}
        taken = []
        for call in reversed(self.calls):
            if call.made & needed or call.written & memory:
                taken.append(call)
                needed.update(map(id, call.read))
                memory.update(map(_memory, call.read))
        return taken[::-1]


# calls that need values ---------------------------------------------------------------------------
def needs_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether what a call gives, or the size of it, may depend on the values of tensors."""
    if func in _INDEX or func in _INDEX_PUT:
        return any(_is_mask(each) for each in args[1])
    return func in READS or torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


def computed(known: KnownValues, func: Any, args: Any, kwargs: Any, run: Run) -> Any:
    """What a call gives that ``needs_values``; UnknownValueError if these are not known.

    ``run`` calls an op on the tensors that are traced: a value becomes a constant there, and a
    known mask the numbers of the elements that it selects.
    """
    values = known.value
    if func in READS:
        read = [*map(values, args)]
        with _disable_current_modes():
            return func(*read)

    def constant(value: Tensor) -> Any:
        return run(aten.lift_fresh_copy.default, (known.lift(value),), {})

    if func in _INDEX_PUT and args[2].numel() == 1:
        raise UnknownValueError  # it fills where a mask is true, for which no value is needed
    if all(map(known.is_known, tensors_in([*args, *kwargs.values()]))) and func not in _INDEX_PUT:
        args, kwargs = tree_map_only(Tensor, values, (args, kwargs))
        with _disable_current_modes():
            result = func(*args, **kwargs)
        return tree_map_only(Tensor, constant, result)
    if func is aten.masked_select.default:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        mask = values(args[1])
        with _disable_current_modes():
            mask = known.lift(mask.broadcast_to(shape))
        whole = run(aten.expand.default, (args[0], list(shape)), {})
        return run(aten.index.Tensor, (whole, [*_selected([mask], values, constant)]), {})
    if func in _INDEX or func in _INDEX_PUT:
        _check_masks(args[1], args[0])
        places = [*_selected(args[1], values, constant)]
        return run(func, (args[0], places, *args[2:]), kwargs)
    raise UnknownValueError


def _selected(
    places: Iterable[Any], values: Callable[[Tensor], Tensor], constant: Callable[[Tensor], Any]
) -> Iterator[Any]:
    """Indices, with whole numbers in place of each mask: one tensor for each dim of the mask."""
    for place in places:
        if not _is_mask(place):
            yield place
            continue
        with _disable_current_modes():
            rows = values(place).nonzero().unbind(1)
        yield from map(constant, rows)


def _check_masks(places: Iterable[Any], indexed: Tensor) -> None:
    """The IndexError of torch for a mask of another shape than the dims that it selects from."""
    at = 0
    for place in places:
        num = place.dim() if _is_mask(place) else 1
        if _is_mask(place) and place.shape != indexed.shape[at : at + num]:
            raise IndexError(
                f"The shape of the mask {list(place.shape)} at index {at} does not match the "
                f"shape of the indexed tensor {list(indexed.shape)} at index {at}"
            )
        at += num


def _is_mask(place: Any) -> bool:
    return isinstance(place, Tensor) and place.dtype in MASKS


def _is_pure(func: Any) -> bool:
    """Whether an op computes the same whenever it runs, and in one process."""
    random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    return not random and "c10d" not in str(func)


def _are_fakes(tensors: Iterable[Tensor]) -> bool:
    """Whether a call's tensors are ones of the run, and small."""
    return all(
        isinstance(x, FakeTensor) and x.layout is torch.strided and x.numel() <= LARGEST
        for x in tensors
    )


def _own_copy(held: Tensor) -> Tensor:
    """A buffer's value, contiguous as its fake is; calls may write into it."""
    return held.detach().cpu().clone(memory_format=torch.contiguous_format)


def _has_values(tensor: Tensor) -> bool:
    """Whether a tensor from outside of the run is a small constant with values."""
    if isinstance(tensor, FakeTensor | nn.Parameter) or tensor.requires_grad:
        return False
    small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
    return small and not tensor.is_meta and tensor.layout is torch.strided


def _memory(tensor: Tensor) -> int:
    return storage_of(tensor) if tensor.layout is torch.strided else id(tensor)
