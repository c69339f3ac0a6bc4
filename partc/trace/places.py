"""What a step can reach besides its inputs, at some time, and how it is left as it was."""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import Tensor, nn

from partc.trace.owners import ABSENT, content, getattr_dict, in_class, look, put, slots
from partc.trace.process_state import process_restored
from partc.trace.ran import Ran
from partc.trace.reachable import Place, Reads, Walk, is_library
from partc.trace.states import FIXED, FUNCTIONS, SAMPLED_BYTES, Unknown, shown, state_of
from partc.trace.tensor_caches import no_fakes_cached

STATELESS = (type, ModuleType, nn.Module, Tensor, partial, *FUNCTIONS)
LENGTH = "len("  # so the name of the state of a list begins
_COPIED = (list, dict, deque, set)
_WEAK = (WeakKeyDictionary, WeakValueDictionary)


class State(NamedTuple):
    """The state of a value, and how it is told."""

    state: Hashable
    text: str


@dataclass(frozen=True)
class Reach:
    """What a step can reach at some time, without the model's parameters and buffers.

    ``attributes``: the names of attributes that its functions read of any object. ``classes``: the
    user's classes of the objects that it reaches, ``watched`` those of which all reads are known.
    ``unseen``: what a step may reach that nobody looked at. ``lines``: of hooks and lambdas, by the
    end of the names of what they reach.
    """

    places: tuple[Place, ...]
    attributes: frozenset[str] = frozenset()
    classes: frozenset[type] = frozenset()
    watched: frozenset[type] = frozenset()
    unseen: tuple[str, ...] = ()
    lines: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: nn.Module, objective: Callable[..., Any], reads: Reads | None = None,
        watched: frozenset[type] = frozenset(), ran: Ran | None = None,
    ) -> Reach:  # fmt: skip
        """What ``objective(model, *inputs)`` can reach now.

        With ``reads``, the attributes that a step has read of modules and of objects of the
        ``watched`` classes, others are left out. With ``ran`` it is what that code can reach.
        """
        walk = Walk(reads, watched, ran)
        walk.step(model, objective)
        kinds = {type(holder.owner) for holder in walk.holders}
        own = {k for k in kinds if not is_library(k.__module__) and not issubclass(k, nn.Module)}
        own |= kinds & {
            Namespace,
            SimpleNamespace,
        }  # which are read by names that a script makes up
        names, unseen = frozenset(walk.names), tuple(walk.unseen)
        return cls(tuple(walk.found), names, frozenset(own), watched, unseen, walk.lines)

    def line_of(self, name: str) -> str:
        """The line of the hook or lambda that reaches a state, in brackets; "" of another one."""
        inner = name.removeprefix(LENGTH).removesuffix(")")
        found = next((line for of, line in self.lines.items() if inner.endswith(of)), "")
        return found and f" ({found})"

    def states(self) -> dict[str, State]:
        """The states of numbers, arrays and iterators, and the lengths of lists, by name."""
        found = {}
        for place in self.places:
            if not isinstance(place.value, STATELESS):
                with suppress(Unknown):
                    known = State(state_of(place.value), shown(place.value))
                    found[told(place)] = known
        return found


def told(place: Place) -> str:
    """The name of the state of a place's value: of a list its length."""
    return (
        f"{LENGTH}{place.name})"
        if isinstance(place.value, list | tuple | dict | deque)
        else place.name
    )


# leaving them as they were ------------------------------------------------------------------------
@contextmanager
def restored(reach: Reach) -> Iterator[None]:
    """Restore what a run changes in lists, arrays, objects and variables that it can reach.

    The attributes of the model's own modules are restored by ``capture.untouched``; iterators go on
    from where they are.
    """
    before = [(place, _held(place.value), _is_inherited(place)) for place in reach.places]
    try:
        with no_fakes_cached(), process_restored():
            yield
    finally:
        for place, held, inherited in before:
            now = look(place.owner, place.key)
            same = now is place.value or (isinstance(now, FIXED) and now == place.value)
            if not same and now is not ABSENT:
                put(place.owner, place.key, place.value, inherited)
            _restore(place.value, held)


def _is_inherited(place: Place) -> bool:
    if not isinstance(place.key, str) or isinstance(place.owner, (*_COPIED, CellType)):
        return False
    return in_class(place.owner, place.key) and not _has_slot(place)


def _has_slot(place: Place) -> bool:
    return any(key == place.key for key, _ in slots(place.owner))


def _held(value: Any) -> Any:
    """What a value has inside, to be put back; None where there is nothing to put back."""
    if isinstance(value, _COPIED):
        return content(value)
    if isinstance(value, _WEAK):
        return dict(value)
    if isinstance(value, FunctionType):
        return dict(vars(value))
    if isinstance(value, (*FIXED, *STATELESS)):
        return None
    memory = _memory(value)
    return memory if memory is not None else (dict(getattr_dict(value)), dict(slots(value)))


def _memory(value: Any) -> bytes | None:
    """The bytes of a small array that can be written; None for anything else."""
    try:
        memory = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    small = memory.nbytes <= SAMPLED_BYTES and memory.c_contiguous
    return memory.tobytes() if small and not memory.readonly else None


def _restore(value: Any, held: Any) -> None:
    if held is None:
        return
    if isinstance(held, bytes):
        if memoryview(value).tobytes() != held:
            memoryview(value).cast("B")[:] = held
    elif isinstance(held, tuple):
        _restore(getattr_dict(value), held[0])
        _restore_slots(value, held[1])
    else:
        table = vars(value) if isinstance(value, FunctionType) else value
        if not _is_same(content(table) if isinstance(table, _COPIED) else dict(table), held):
            table.clear()
            (table.extend if isinstance(table, list | deque) else table.update)(held)


def _restore_slots(value: Any, held: dict[str, Any]) -> None:
    for key, now in list(slots(value)):
        if key not in held:
            object.__delattr__(value, key)
        elif held[key] is not now:
            object.__setattr__(value, key, held[key])


def _is_same(now: Any, before: Any) -> bool:
    """Whether two containers hold the same objects."""
    if len(now) != len(before):
        return False
    if isinstance(now, set):
        return bool(now == before)
    entries = (now.items(), before.items()) if isinstance(now, dict) else (now, before)
    return all(map(_is_same_entry, *entries))


def _is_same_entry(now: Any, before: Any) -> bool:
    pair = isinstance(now, tuple) and isinstance(before, tuple) and len(now) == len(before) == 2
    return all(a is b for a, b in zip(now, before, strict=True)) if pair else now is before
