"""Python numbers that a step was traced with, and whether they are others now.

A program holds them as literals. In the process that compiled, a run looks now and then whether the
script has changed one, as by ``model.temperature = 0.5``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CellType
from typing import Any, NamedTuple

from torch import nn

from partc.trace.places import NUMBERS, Place, Reach

NAMED = 3  # numbers of one variable that a note names one by one
AT_ONCE = 100  # numbers that one step looks at, which takes some 50 us


class Number(NamedTuple):
    """A number as it was, and where it is: the ``keys`` that lead from an object to it.

    ``owner()`` is that object, None once it is gone. ``inside`` is the name of the attribute or
    variable with a list or dict that the number is in, if it is in one.
    """

    name: str
    owner: Callable[[], Any]
    keys: tuple[Any, ...]
    value: Any
    inside: str


@dataclass(eq=False)
class FrozenNumbers:
    """The numbers of a traced step; a copy in another process has none."""

    numbers: tuple[Number, ...] = ()
    trains: Callable[[], bool | None] = field(default=lambda: None)  # the model's mode now
    training: bool | None = None  # and when it was traced
    begun: int = 0  # where the next look begins

    @classmethod
    def of(cls, model: nn.Module, reach: Reach, reads: set[tuple[type, str]]) -> FrozenNumbers:
        """The numbers that a step reads, of those that it can reach.

        ``reads``: class and name of the attributes of modules that the step has read.
        """
        found = [place for place in reach.places if isinstance(place.value, NUMBERS)]
        taken = [place for place in found if _is_read(place, reads, reach.attributes)]
        root = weakref.ref(model)
        return cls(tuple(map(_number, taken)), lambda: _mode(root()), model.training)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without numbers: no other process has the objects whose numbers these are."""
        return FrozenNumbers, ()

    def notes(self) -> Iterator[str]:
        """Sentences on numbers in lists and dicts that the step reads."""
        groups: dict[str, list[str]] = {}
        for number in self.numbers:
            if number.inside and type(number.value) in (int, float, complex):
                groups.setdefault(number.inside, []).append(f"{number.name}, {number.value!r}")
        for root, texts in groups.items():
            for text in texts if len(texts) <= NAMED else [f"{len(texts)} numbers in {root}"]:
                yield f"frozen at trace time: {text}"

    def changes(self) -> list[str]:
        """What has changed, as ``model.temperature was 1.0 when compiled and is 0.5 now``.

        A call looks at some numbers after the other, all of them in turn.
        """
        first = self.begun
        self.begun = first + AT_ONCE if first + AT_ONCE < len(self.numbers) else 0
        return list(self._changes(first, first + AT_ONCE))

    def all_changes(self) -> list[str]:
        """The same of all numbers."""
        return list(self._changes(0, len(self.numbers)))

    def _changes(self, first: int, end: int) -> Iterator[str]:
        for name, owner, keys, value, _ in self.numbers[first:end]:
            now = _look(owner(), keys, value)
            if now is not value and _differ(now, value) and self._matters(keys[-1]):
                yield f"{name} was {value!r} when compiled and is {now!r} now"

    def _matters(self, key: Any) -> bool:
        """False for modes of submodules where the whole model has gone to another mode."""
        return key != "training" or self.trains() == self.training


def _is_read(place: Place, reads: set[tuple[type, str]], loaded: frozenset[str]) -> bool:
    if isinstance(place.owner, nn.Module):
        return (type(place.owner), place.key) in reads
    if place.attribute is not None and place.attribute not in reads:
        return False
    plain = not isinstance(place.owner, dict | list | tuple | CellType)
    return place.key in loaded if plain else True


def _number(place: Place) -> Number:
    inside = place.root.name if isinstance(place.owner, list | dict) and place.outer else ""
    first, keys = place, [place.key]
    while first.outer and not isinstance(first.owner, nn.Module):
        first = first.outer
        keys.insert(0, first.key)
    try:
        owner: Callable[[], Any] = weakref.ref(first.owner)
    except TypeError:  # cells of closures and the variables of a module
        owner = _held(first.owner)
    return Number(place.name, owner, tuple(keys), place.value, inside)


def _held(owner: Any) -> Callable[[], Any]:
    return lambda: owner


def _mode(model: nn.Module | None) -> bool | None:
    return None if model is None else model.training


def _look(owner: Any, keys: tuple[Any, ...], value: Any) -> Any:
    """The number as it is now; as it was if its owner or its place there is gone."""
    if owner is None:
        return value
    try:
        for key in keys:
            if isinstance(owner, dict | list | tuple):
                owner = owner[key]
            else:
                owner = owner.cell_contents if isinstance(owner, CellType) else vars(owner)[key]
    except (LookupError, ValueError, TypeError):
        return value
    return owner


def _differ(now: Any, value: Any) -> bool:
    return type(now) is not type(value) or repr(now) != repr(value)
