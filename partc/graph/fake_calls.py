"""A cache of calls on fake tensors: of equal calls only the first one runs torch's fake kernel.

A fake kernel takes some hundred microseconds of Python, and the blocks of a model repeat the same
few calls. A call's fake result depends only on the literals among its arguments and on each
tensor's form (shape, stride, offset, dtype, device, size of its memory) and shared memory. So an
equal call's result is built from the remembered forms: as views of the operands' memory where the
first result was one, else over new memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from partc.graph.fake_kernels import with_strides

LISTS = (list, tuple)  # a union of types would be made anew each time that it is asked for
MOST = 2048  # calls that each cache remembers, some 2 kB a call; a GPT on three axes has about 600

Call = Callable[[Any, Sequence[Any], Mapping[str, Any]], tuple[Any, int]]


class Form(NamedTuple):
    """A tensor's view of its memory: shape, stride, offset, dtype, device; the memory's size."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    memory_bytes: int

    @classmethod
    def of(cls, tensor: Tensor, memory: torch.UntypedStorage) -> Form:
        offset, size = int(tensor.storage_offset()), int(memory.nbytes())
        return cls(tensor.shape, tensor.stride(), offset, tensor.dtype, tensor.device, size)

    def over(self, memory: torch.UntypedStorage, mode: FakeTensorMode) -> Tensor:
        """The fake tensor with this form over a piece of memory."""
        with no_dispatch():
            meta = torch.empty(0, dtype=self.dtype, device=_META)
            meta.set_(memory, self.offset, self.shape, self.stride)
            return _fake(mode, meta, self.device)

    def new(self, mode: FakeTensorMode) -> Tensor:
        """The fake tensor with this form over new memory."""
        with no_dispatch():
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
            if self.offset or meta.untyped_storage().nbytes() != self.memory_bytes:
                memory = torch.UntypedStorage(self.memory_bytes, device="meta")
                meta.set_(memory, self.offset, self.shape, self.stride)
            return _fake(mode, meta, self.device)


_META = torch.device("meta")
_ATTRIBUTES: dict[torch.device, dict[str, Any]] = {}  # of a new fake, without its mode


def _fake(mode: FakeTensorMode, meta: Tensor, device: torch.device) -> Tensor:
    """As ``FakeTensor(mode, meta, device)``, which looks at all that it may be given and sets each
    attribute by itself: longer than the rest of a remembered call takes.
    """
    if device not in _ATTRIBUTES:
        first = FakeTensor(mode, meta, device)
        _ATTRIBUTES[device] = {k: v for k, v in vars(first).items() if k != "fake_mode"}
        return first
    fake: Tensor = Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(_ATTRIBUTES[device], fake_mode=mode)
    return fake


def new_fake(shape: Sequence[int], dtype: torch.dtype, mode: FakeTensorMode) -> Tensor:
    """A fake on the CPU over new memory, as ``torch.empty`` gives it under the mode."""
    with no_dispatch():
        meta = torch.empty(shape, dtype=dtype, device="meta")
        return _fake(mode, meta, torch.device("cpu"))


class _Made(NamedTuple):
    """A result of a remembered call: its form, and the number of the memory that it views.

    Memory ``i`` is operand i's; numbers behind the operands' are new memory. ``same`` is the number
    of the operand that the call returns itself (an in-place op), -1 for another tensor.
    """

    form: Form
    memory: int
    same: int


@dataclass
class FakeCalls:
    """A cache over ``execute``, which runs a call on fake tensors.

    ``execute(target, args, kwargs)`` gives a call's result and a number that is remembered with the
    result, for example the bytes of the call's temporaries.
    """

    execute: Call
    known: dict[Hashable, tuple[Any, int]] = field(default_factory=dict)

    def __call__(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
        mode: FakeTensorMode | None = None,
    ) -> tuple[Any, int]:  # fmt: skip
        """The result of a call, and the number that the first equal call's ``execute`` gave.

        ``mode``: that of the result where a call has no operands, as ``torch.empty``; without it
        such a call is not remembered.
        """
        operands: list[Tensor] = []
        literals = _literals((args, kwargs), operands)
        if operands and isinstance(operands[0], FakeTensor):
            mode = operands[0].fake_mode
        elif getattr(target, "namespace", "") != "aten":
            mode = None  # it may do something, as a range of a profiler begins with one
        if mode is None or not all(map(_is_plain, operands)) or _restrides(target):
            return self.execute(target, args, kwargs)
        memories = [x.untyped_storage() for x in operands]
        # The key says which operands share memory, since the result may be a view of one of them;
        # and it has the default dtype, which the result of a call with a number depends on.
        numbers: dict[int, int] = {}
        places = [numbers.setdefault(m._cdata, i) for i, m in enumerate(memories)]
        forms = map(Form.of, operands, memories)
        key = target, torch.get_default_dtype(), literals, *places, *forms
        known = self.known.pop(key, None)
        if known is not None:
            self.known[key] = known  # behind all others: what is asked for is forgotten last
            return _again(known[0], operands, memories, mode), known[1]
        result, noted = self.execute(target, args, kwargs)
        if all(map(_is_plain, tensors_in(result))):
            self.known[key] = _made(result, operands, memories), noted
        forget(self.known, MOST)
        forget(FakeTensorMode.cache, 2 * MOST)  # torch has no bound for its own, of the same calls
        return result, noted


def forget(known: dict[Any, Any], most: int) -> None:
    """Drop the oldest entries of a cache beyond ``most``: a process may compile many models."""
    while len(known) > most:
        known.pop(next(iter(known)), None)  # another thread may have dropped it


def call_on_fakes(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a call on fake tensors, from a cache of equal calls."""
    result = as_torch_has_it(target, args, kwargs)
    return with_strides(target, [*args, *kwargs.values()], result)


def as_torch_has_it(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same with the strides of torch's fake kernels, as a step is recorded with them."""
    return _CALLS(target, args, kwargs)[0]


# One for all fake modes, since it remembers forms and no tensors.
_CALLS = FakeCalls(lambda target, args, kwargs: (target(*args, **kwargs), 0))


class RememberingMode(FakeTensorMode):
    """A mode for fakes in which of equal calls only the first one runs torch's fake kernel."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.cache_enabled = False  # torch's own, whose keys take longer than a remembered call

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        def execute(*call: Any) -> tuple[Any, int]:
            return super(RememberingMode, self).dispatch(func, types, args, kwargs or {}), 0

        return FakeCalls(execute, _CALLS.known)(func, args, kwargs or {}, self)[0]


def tensors_in(result: Any) -> Iterator[Tensor]:
    """All tensors of a call's result, which is a tensor or a nested list or tuple."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, LISTS):
        for each in result:
            yield from tensors_in(each)


def _literals(given: Any, operands: list[Tensor]) -> Hashable:
    """A hashable form of arguments, without tensors, which are appended to ``operands``.

    Types are part of the form, since 1, 1.0 and True are equal keys but give different results.
    """
    if isinstance(given, Tensor):
        operands.append(given)
        return Tensor
    if isinstance(given, LISTS):
        return tuple([_literals(each, operands) for each in given])
    if isinstance(given, dict):
        return tuple([(name, _literals(each, operands)) for name, each in given.items()])
    if isinstance(given, slice):
        return slice, _literals((given.start, given.stop, given.step), operands)
    return type(given), given


def _is_plain(tensor: Tensor) -> bool:
    """Whether a `Form` says all about a tensor: no conjugate, no known number, not sparse."""
    return (
        isinstance(tensor, FakeTensor)
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.dtype.is_complex
    )


@lru_cache(maxsize=MOST)  # torch makes the set of an op's tags anew at each look
def _restrides(target: Any) -> bool:
    """Whether a call changes its operand's view of memory in place (``squeeze_``)."""
    return torch.Tag.inplace_view in getattr(target, "tags", ())


def _made(result: Any, operands: Sequence[Tensor], memories: list[torch.UntypedStorage]) -> Any:
    """A result as `_Made` entries, from which `_again` builds an equal call's result.

    Appends new memory to ``memories``.
    """
    if isinstance(result, Tensor):
        same = next((i for i, operand in enumerate(operands) if operand is result), -1)
        memory = result.untyped_storage()
        addresses = [known._cdata for known in memories]
        if memory._cdata not in addresses:
            memories.append(memory)
        number = [*addresses, memory._cdata].index(memory._cdata)
        return _Made(Form.of(result, memory), number, same)
    if isinstance(result, list | tuple):
        parts = [_made(each, operands, memories) for each in result]
        return parts if isinstance(result, list) else tuple(parts)
    return result


def _again(
    made: Any, operands: Sequence[Tensor], memories: list[torch.UntypedStorage],
    mode: FakeTensorMode,
) -> Any:  # fmt: skip
    """Build the result of an equal call over these operands' memory; appends new memory."""
    if isinstance(made, _Made):
        if made.same >= 0:
            return operands[made.same]
        if made.memory == len(memories):
            new = made.form.new(mode)
            memories.append(new.untyped_storage())
            return new
        return made.form.over(memories[made.memory], mode)
    if isinstance(made, list | tuple):
        parts = [_again(each, operands, memories, mode) for each in made]
        return parts if isinstance(made, list) else tuple(parts)
    return made


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory: equal for two tensors that share it."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def quiet_log() -> Iterator[None]:
    """A context in which torch does not log tracebacks of errors on fake tensors.

    The caller handles these errors, for example by a TraceError in partc's words.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled
