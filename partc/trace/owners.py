"""Read and write what an object has under a key, whatever kind of object it is.

Nothing of the user's runs: properties and ``__getattr__`` are not called.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from torch import Tensor, nn

from partc.trace.states import FIXED, MOST

ABSENT = object()
DEFAULTS = "default of"  # (DEFAULTS, i) is the key of a function's default


def look(owner: Any, key: Any) -> Any:
    """What an object has under a key now; ABSENT if nothing."""
    kind = type(owner)
    try:
        if kind is dict or kind is list or kind is tuple:
            return owner[key]
        own = getattr_dict(owner)
        if kind is not type and key in own:
            return own[key]
        return _other(owner, key)
    except (LookupError, ValueError, TypeError, AttributeError):
        return ABSENT


def _other(owner: Any, key: Any) -> Any:
    if isinstance(owner, FunctionType) and isinstance(key, tuple):
        given = owner.__defaults__ if isinstance(key[1], int) else owner.__kwdefaults__
        return given[key[1]]  # type: ignore[index]
    if isinstance(owner, CellType):
        return owner.cell_contents
    if isinstance(owner, partial):
        return owner.args[key] if isinstance(key, int) else owner.keywords[key]
    if isinstance(owner, nn.Module) and key in {**owner._parameters, **owner._buffers}:
        return owner._parameters[key] if key in owner._parameters else owner._buffers[key]
    if isinstance(owner, dict) and dict.__contains__(owner, key):
        return dict.__getitem__(owner, key)
    if isinstance(owner, list | tuple | deque) and isinstance(key, int):
        return owner[key]
    return static(owner, key)


def static(owner: Any, key: str) -> Any:
    """An attribute of an object or of its class; of a class one of its own or of its bases."""
    own = getattr_dict(owner)
    if not isinstance(owner, type) and key in own:
        return own[key]
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    for kind in kinds:
        if key in vars(kind):
            value = vars(kind)[key]
            if isinstance(value, MemberDescriptorType) and not isinstance(owner, type):
                try:
                    return value.__get__(owner)
                except AttributeError:
                    return ABSENT
            return value
    return ABSENT


def getattr_dict(owner: Any) -> dict[str, Any]:
    """The attributes that an object has of its own, by name; none where it has no such table."""
    try:
        of = threading.local if isinstance(owner, threading.local) else object
        found = of.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def in_class(owner: Any, key: str) -> bool:
    """Whether an attribute is of the object's class, or of the class that the object is."""
    return isinstance(owner, type) or key not in getattr_dict(owner)


def slots(owner: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object with ``__slots__``, as far as they have values."""
    for kind in type(owner).__mro__:
        own = vars(kind) if "__slots__" in vars(kind) else {}
        for key, value in list(own.items()):
            if isinstance(value, MemberDescriptorType):
                found = static(owner, key)
                if found is not ABSENT:
                    yield key, found


def entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """The first entries of a list or dict, or the numbers among a plain object's attributes."""
    if isinstance(value, dict):
        yield from list(dict.items(value))[:MOST]
    elif isinstance(value, list | tuple | deque):
        yield from list(enumerate(content(value)))[:MOST]
    elif not isinstance(value, type | ModuleType | FunctionType):
        own = [*list(getattr_dict(value).items())[:MOST], *slots(value)]
        yield from (pair for pair in own if isinstance(pair[1], (*FIXED, Tensor)))


def content(value: Any) -> Any:
    """A copy of a list, dict or set as a plain one, made by no method of a class of the user's."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, set):
        return set(set.__iter__(value))
    kinds: tuple[Any, ...] = (list, tuple, deque)
    kind = next(kind for kind in kinds if isinstance(value, kind))
    return list(kind.__iter__(value))


def put(owner: Any, key: Any, value: Any, inherited: bool) -> None:
    """Give an object what it had under a key; ``inherited``: its class had it."""
    if isinstance(owner, CellType):
        owner.cell_contents = value
    elif inherited and not isinstance(owner, type):
        getattr_dict(owner).pop(key, None)
    elif isinstance(owner, type):
        type.__setattr__(owner, key, value)
    elif key in getattr_dict(owner):
        getattr_dict(owner)[key] = value
    elif isinstance(owner, dict):
        owner[key] = value
    elif isinstance(key, str) and not isinstance(owner, partial | list | tuple | deque):
        with suppress(AttributeError, TypeError):
            object.__setattr__(owner, key, value)
