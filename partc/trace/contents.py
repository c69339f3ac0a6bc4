"""Say what every tensor of a run on fakes holds, by the calls that computed it.

Fakes have no values. What their memory holds is named by a digest: of a parameter, buffer or input
its name, of a result the call and what its operands held. Two runs of a step compute the same
where their results have equal digests.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from partc.graph.fake_calls import LISTS, storage_of, tensors_in
from partc.graph.writes import tensors_written
from partc.trace.known_values import KnownValues
from partc.trace.odd_tensors import dense_parts, odd_kind

SAMPLED_BYTES = 1 << 20  # of a larger constant, evenly spread elements stand for all
# Ops whose result does not depend on what the tensor that they write held before.
_OVERWRITE = {"copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "exponential_"}
# What ``torch.tensor([1, 2])`` calls on the tensor of the numbers that it was given.
_LITERAL_TENSORS = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
_LITERALS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.layout)


class Content(NamedTuple):
    """What a piece of memory holds, and the run on whose values it depends; 0 for a constant."""

    digest: str
    run: int


@dataclass
class Outside:
    """A tensor that the step closes over, and the line that read it first.

    ``written``: the step writes into it; ``updated``: so that what it held before matters.
    """

    tensor: Tensor
    source: str
    written: bool = False
    updated: bool = False


_UNKNOWN = Content("", 0)


class Call(NamedTuple):
    """A call that is about to run: its digest, and the last run on whose values it depends."""

    digest: str
    run: int
    stale: bool  # reads what an earlier run has left
    fresh: bool  # reads nothing but what follows from numbers and draws


@dataclass
class Contents:
    """What memory holds in the course of several runs of one step, as a mode sees them.

    ``outside`` has the tensors that the first run has closed over, by memory: no call made them,
    and they are no parameters, buffers or inputs. ``calls`` has the digests of the first run's
    calls. ``known`` has the values of what follows from constants in the latest run, ``earlier`` in
    the one before: what that has left is what the latest would compute again.
    ``differentiates``: a run took derivatives by its inputs before the loss was there. ``leaves``
    has the fresh tensors with ``requires_grad`` that a call has read, each with the first line that
    did.
    """

    run: int = 0
    at: dict[int, Content] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)  # memory of parameters, buffers and inputs
    fresh: set[int] = field(default_factory=set)  # memory that was made of numbers and draws alone
    leaves: dict[int, tuple[Tensor, str]] = field(default_factory=dict)  # and that could be trained
    outside: dict[int, Outside] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)
    known: KnownValues = field(default_factory=KnownValues)
    earlier: KnownValues = field(default_factory=KnownValues)
    alive: list[Any] = field(default_factory=list)  # so that no other memory gets the same number
    drawn: int = 0
    differentiates: bool = False

    def begin(self, placeholders: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Begin a run on these parameters, buffers and inputs; ``buffers`` are the model's own."""
        self.run, self.drawn = self.run + 1, 0
        self.earlier, self.known = self.known, KnownValues(decided=self.known.decided)
        for name, real in buffers.items():
            self.known.add(name, placeholders[name], real)
        for name, tensor in placeholders.items():
            self._put(tensor, Content(_digest(name), self.run))
            self.own.add(memory_of(tensor))

    # calls ---------------------------------------------------------------------------------------
    def before(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], source: str = ""
    ) -> Call:
        """Describe a call before it runs, as it may write over what it reads."""
        written = _ids(tensors_written(func, args, kwargs)) if _overwrites(func) else set()
        written |= _ids(tensors_in(kwargs.get("out")))
        if self.run == 1 and func not in _LITERAL_TENSORS:
            self.note_outside([*args, *kwargs.values()], source)
        tensors = [*tensors_in([*args, *kwargs.values()])]
        fresh = all(memory_of(each) in self.fresh for each in tensors)
        self._note_leaves(func, args, kwargs, tensors, source)
        runs: list[int] = []  # of what it reads
        given = (*args, *sorted(kwargs.items()))
        operands = tuple(self._text(each, written, runs) for each in given)
        draw = None
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.drawn += 1
            draw = self.drawn
            runs.append(self.run)
        stale = any(0 < run < self.run for run in runs)
        return Call(_digest(str(func), operands, draw), max(runs, default=0), stale, fresh)

    def behind(
        self, call: Call, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note what the memory of a call's results, and of what it wrote, holds now."""
        for i, tensor in enumerate(tensors_written(func, args, kwargs)):
            before, form = self.content(tensor), form_of(tensor)
            whole = _overwrites(func) and tensor.numel() == _elements(tensor)
            if memory_of(tensor) in self.outside:
                outside = self.outside[memory_of(tensor)]
                outside.written, outside.updated = True, outside.updated or not whole
            digest = _digest(call.digest, i) if whole else _digest(before.digest, form, call.digest)
            self._put(tensor, Content(digest, call.run if whole else max(call.run, before.run)))
            if not call.fresh:
                self.fresh.discard(memory_of(tensor))
        for i, tensor in enumerate(tensors_in(result)):
            if memory_of(tensor) not in self.at:
                self._put(tensor, Content(_digest(call.digest, i), call.run))
                self.fresh |= {memory_of(tensor)} if call.fresh else set()
        if self.run == 1:
            self.calls.add(call.digest)
        self.known.note(func, args, kwargs, result)

    def _note_leaves(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor],
        source: str,
    ) -> None:  # fmt: skip
        """Note who reads fresh memory that could be trained; an ``nn.init`` writes to it."""
        found = [x for x in given if x.requires_grad and x.is_leaf and memory_of(x) in self.fresh]
        written = _ids(tensors_written(func, args, kwargs)) if found else set()
        for each in found:
            if id(each) not in written:
                self.leaves.setdefault(memory_of(each), (each, source))

    # tensors -------------------------------------------------------------------------------------
    def content(self, tensor: Tensor) -> Content:
        """What a tensor's memory holds."""
        known = self.at.get(memory_of(tensor))
        if known is None:
            known = Content(value_digest(tensor), 0)
            self._put(tensor, known)
        return known

    def is_drawn(self, tensor: Tensor) -> bool:
        """Whether fresh memory holds random numbers."""
        return self.content(tensor).run > 0

    def is_computed(self, tensor: Tensor) -> bool:
        """Whether a tensor holds what this run has computed from its parameters or inputs."""
        memory = memory_of(tensor)
        return memory not in self.own and self.at.get(memory, _UNKNOWN).run == self.run

    def described(self, tensor: Tensor) -> Hashable:
        """What a tensor holds: equal for tensors of two runs that were computed alike."""
        return self._described(tensor)[0]

    def _described(self, tensor: Tensor) -> tuple[Hashable, int]:
        """The same, and the run on whose values the tensor depends."""
        content = self.content(tensor)
        run = self._run_of(tensor, content)
        age = "stale" if 0 < run < self.run else "own" if run else "constant"
        return (content.digest, age, form_of(tensor)), run

    def note_outside(self, given: Sequence[Any], source: str) -> None:
        """Note the tensors of the first run that the step closes over."""
        for tensor in tensors_in(given):
            if not isinstance(tensor, FakeTensor) and memory_of(tensor) not in self.at:
                self.outside[memory_of(tensor)] = Outside(tensor, source)

    def _run_of(self, tensor: Tensor, content: Content) -> int:
        """The run on whose values a tensor depends: the latest where an earlier one has left what
        follows from buffers that keep their values, as tables of angles that a model keeps do.
        """
        run = content.run
        if 0 < run < self.run and self.earlier.keeps(tensor):
            self.earlier.decide(tensor)
            return self.run
        return run

    def _text(self, arg: Any, written: set[int], runs: list[int]) -> Any:
        """What an argument is; ``runs`` gets those on whose values depends what is read of it."""
        if isinstance(arg, Tensor):
            if id(arg) in written:
                return form_of(arg)
            described, run = self._described(arg)
            runs.append(run)
            return described
        if isinstance(arg, LISTS):
            return tuple([self._text(each, written, runs) for each in arg])
        return type(arg).__name__, repr(arg) if isinstance(arg, _LITERALS) else ""

    def _put(self, tensor: Tensor, content: Content) -> None:
        self.at[memory_of(tensor)] = content
        self.alive.append(tensor)


def memory_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory: equal for two tensors that share it."""
    return id(tensor) if odd_kind(tensor) else storage_of(tensor)


def _ids(tensors: Iterator[Tensor]) -> set[int]:
    return {id(each) for each in tensors}


def _elements(tensor: Tensor) -> int:
    """How many elements a tensor's memory has room for."""
    if tensor.layout is not torch.strided:
        return -1
    return int(tensor.untyped_storage().nbytes()) // tensor.element_size()


def form_of(tensor: Tensor) -> Hashable:
    """Shape, dtype, and how the elements lie in memory."""
    form = tuple(tensor.shape), str(tensor.dtype), tensor.is_conj(), tensor.is_neg()
    if tensor.layout is not torch.strided:
        return form
    return *form, tuple(tensor.stride()), int(tensor.storage_offset())


def _digest(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@cache
def _overwrites(func: Any) -> bool:
    """Whether an op writes tensors without reading what they held."""
    name = str(getattr(func, "_schema", "")).partition("(")[0].rpartition("::")[2]
    return name.partition(".")[0] in _OVERWRITE or name.endswith((".out", "_out"))


def value_digest(tensor: Tensor) -> str:
    """The digest of a constant: of its values, or of some where it is large."""
    if kind := odd_kind(tensor):
        with _disable_current_modes():
            parts = [value_digest(each) for each in dense_parts(tensor.detach())]
        size = () if kind == "nested" else tuple(tensor.shape)
        return _digest(str(tensor.layout), str(tensor.dtype), size, *parts)
    known = tuple(tensor.shape), str(tensor.dtype)
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return _digest(*known)
    with _disable_current_modes():
        flat = tensor.detach().flatten()
        step = 1 + flat.numel() * flat.element_size() // SAMPLED_BYTES
        values = flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return _digest(*known, blake2b(values, digest_size=16).hexdigest())
