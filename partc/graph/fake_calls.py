"""Calls on fake tensors, equal ones executed once.

A fake tensor's shape function takes some hundred microseconds of Python, and the blocks of a model
repeat the same few calls. What a call gives depends on its arguments alone: the literals among
them, and of each tensor how it looks at which memory. So the second time the result is made to
measure, with the same views of the operands' memory and new memory where the first had some.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from partc.graph.fake_kernels import with_strides

Call = Callable[[Any, Sequence[Any], Mapping[str, Any]], tuple[Any, int]]


class Form(NamedTuple):
    """How a tensor looks at its memory, and how large that is."""

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
        """The fake tensor that looks so at a piece of memory."""
        with no_dispatch():
            meta = torch.empty(0, dtype=self.dtype, device="meta")
            meta.set_(memory, self.offset, self.shape, self.stride)
            return FakeTensor(mode, meta, self.device)


class _Made(NamedTuple):
    """A tensor of a result: its form over the n-th memory, of which each operand has one and new
    ones follow; ``same`` is the number of the operand that it is, -1 for a tensor of its own.
    """

    form: Form
    memory: int
    same: int


@dataclass
class FakeCalls:
    """Executes calls, and remembers what they gave and what was noted of them.

    ``execute(target, args, kwargs)`` gives a call's result and a number noted of it, for example
    bytes of temporaries.
    """

    execute: Call
    known: dict[Hashable, tuple[Any, int]] = field(default_factory=dict)

    def __call__(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, int]:
        """The result, and the number noted when an equal call was executed."""
        operands: list[Tensor] = []
        literals = _literals((args, kwargs), operands)
        if not operands or not all(map(_is_plain, operands)) or _restrides(target):
            return self.execute(target, args, kwargs)
        memories = [x.untyped_storage() for x in operands]
        numbers: dict[int, int] = {}
        places = [numbers.setdefault(m._cdata, i) for i, m in enumerate(memories)]
        forms = map(Form.of, operands, memories)
        key = target, torch.get_default_dtype(), literals, *places, *forms
        known = self.known.get(key)
        if known is not None:
            return _again(known[0], operands, memories), known[1]
        result, noted = self.execute(target, args, kwargs)
        if all(map(_is_plain, tensors_in(result))):
            self.known[key] = _made(result, operands, memories), noted
        return result, noted


def call_on_fakes(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives on fake tensors; equal calls are executed once."""
    return _CALLS(target, args, kwargs)[0]


def _executed(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, int]:
    result = target(*args, **kwargs)
    return with_strides(target, [*args, *kwargs.values()], result), 0


_CALLS = FakeCalls(_executed)  # of all modes: it keeps how results look, no tensors


def tensors_in(result: Any) -> Iterator[Tensor]:
    """The tensors of a call's result, a tensor or a tuple of results."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for each in result:
            yield from tensors_in(each)


def _literals(given: Any, operands: list[Tensor]) -> Hashable:
    """Arguments without their tensors, which are appended to ``operands``; 1 is not 1.0 or True."""
    if isinstance(given, Tensor):
        operands.append(given)
        return Tensor
    if isinstance(given, list | tuple):
        return tuple([_literals(each, operands) for each in given])
    if isinstance(given, Mapping):
        return tuple([(name, _literals(each, operands)) for name, each in given.items()])
    if isinstance(given, slice):
        return slice, _literals((given.start, given.stop, given.step), operands)
    return type(given), given


def _is_plain(tensor: Tensor) -> bool:
    """A fake tensor that its form describes: no conjugate, no known number, not sparse."""
    return (
        isinstance(tensor, FakeTensor)
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.dtype.is_complex
    )


def _restrides(target: Any) -> bool:
    """Whether a call changes how its operand looks at memory."""
    return torch.Tag.inplace_view in getattr(target, "tags", ())


def _made(result: Any, operands: Sequence[Tensor], memories: list[torch.UntypedStorage]) -> Any:
    """What to make where the same call comes again; appends memory that it meets first here."""
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


def _again(made: Any, operands: Sequence[Tensor], memories: list[torch.UntypedStorage]) -> Any:
    """The result over these operands' memory; appends new memory as it is met."""
    if isinstance(made, _Made):
        if made.same >= 0:
            return operands[made.same]
        if made.memory == len(memories):
            memories.append(torch.UntypedStorage(made.form.memory_bytes, device="meta"))
        mode = operands[0].fake_mode  # type: ignore[attr-defined]
        return made.form.over(memories[made.memory], mode)
    if isinstance(made, list | tuple):
        parts = [_again(each, operands, memories) for each in made]
        return parts if isinstance(made, list) else tuple(parts)
    return made


def storage_of(tensor: Tensor) -> int:
    """What two tensors have in common that share their memory."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def quiet_log() -> Iterator[None]:
    """Keep torch from logging a traceback for an error that a TraceError will explain."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled
