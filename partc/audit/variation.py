"""Find where a rank's text takes another piece, or another number, than its neighbour's on an axis.

``ids.chunk(2)[self.dp_rank]`` looks the same on every rank to someone who sees one rank's calls.
So the text runs on two ranks that differ on one axis, and the calls' operands are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partc.graph.fake_calls import FakeCalls

Origin = tuple[Any, ...]  # which call made a tensor, and which of its results it is


@dataclass
class Varying:
    """What differs between a rank and its neighbour on each axis, by the number of the call.

    ``picked``: positions of operands that are another result of the same call (a piece by rank).
    ``scaled``: whether a number among the call's arguments differs. ``known``: on this axis the
    calls correspond up to this number.
    """

    picked: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    scaled: dict[int, list[str]] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CallSeen:
    """A call: its op, where its tensors came from, its other arguments as text."""

    name: str
    tensors: tuple[Origin | None, ...]
    others: tuple[str, ...]


class Calls(TorchDispatchMode):
    """Notes every call while it is open."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[CallSeen] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if is_silent(func):
            return with_facts(args, func(*args, **(kwargs or {})))
        tensors, others = flattened((args, kwargs or {}))
        origins = tuple(getattr(tensor, "origin_of_audit", None) for tensor in tensors)
        number = len(self.seen)
        self.seen.append(CallSeen(str(func), origins, others))
        result = run_fake(func, args, kwargs or {})
        for i, tensor in enumerate(flattened(result)[0]):
            tensor.origin_of_audit = (number, i)  # type: ignore[attr-defined]
        return result


def varying(here: Sequence[CallSeen], others: Mapping[str, Sequence[CallSeen]]) -> Varying:
    """Compare a rank's calls with those of its neighbours on each axis."""
    found = Varying()
    for axis, there in others.items():
        found.known[axis] = _compare(here, there, axis, found)
    return found


def _compare(here: Sequence[CallSeen], there: Sequence[CallSeen], axis: str, found: Varying) -> int:
    """Note the differences on one axis; return the number of calls that correspond."""
    for number, (mine, other) in enumerate(zip(here, there, strict=False)):
        if mine.name != other.name or len(mine.tensors) != len(other.tensors):
            return number
        for place, (a, b) in enumerate(zip(mine.tensors, other.tensors, strict=True)):
            if a != b:
                if a is None or b is None or a[0] != b[0]:
                    return number
                found.picked.setdefault((number, place), []).append(axis)
        if mine.others != other.others:
            found.scaled.setdefault(number, []).append(axis)
    return min(len(here), len(there))


def run_fake(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a call on tensors without data."""
    return _CALLS(func, args, kwargs)[0]


# Shared by all runs: it keeps the shapes of results for equal calls, and no tensors.
_CALLS = FakeCalls(lambda func, args, kwargs: (func(*args, **kwargs), 0))


def is_silent(func: Any) -> bool:
    """Whether a call only asks for a device or a dtype, or hands over the same tensor.

    torch adds such calls by itself, not always as many.
    """
    return func.namespace == "prim" or func is torch.ops.aten.detach.default


def with_facts(args: Sequence[Any], result: Any) -> Any:
    """The result of a silent call, with what was noted of its operand."""
    if isinstance(result, Tensor) and args and isinstance(args[0], Tensor):
        result.origin_of_audit = getattr(args[0], "origin_of_audit", None)  # type: ignore[attr-defined]
    return result


def flattened(given: Any) -> tuple[list[Tensor], tuple[str, ...]]:
    """The tensors in nested arguments, and the other arguments as text."""
    tensors: list[Tensor] = []
    others: list[str] = []

    def look(each: Any) -> None:
        if isinstance(each, Tensor):
            tensors.append(each)
        elif isinstance(each, Mapping):
            for inner in each.values():
                look(inner)
        elif isinstance(each, list | tuple):
            for inner in each:
                look(inner)
        else:
            others.append(repr(each))

    look(given)
    return tensors, tuple(others)
