"""Let no tensor of a run stay in a cache of ``functools``, where the model would find it later."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from itertools import compress, repeat
from operator import is_
from types import ModuleType
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from partc.collecting import collections, made_since

# where no cache keeps a tensor of a model, and some keep thousands of numbers and texts
_OTHERS = {"torch", "partc", "sympy", "networkx", "jinja2", *sys.stdlib_module_names}
_RECOMPUTED = WeakSet[Any]()  # caches that a trace has filled: programs compute what they hold
_KNOWN = WeakSet[Any]()  # all caches
_LOOKED: dict[str, Any] = {}  # of the last look: the collector's counts, and a mark made then
_DEEP = 4  # lists, tuples and dicts in one another


@contextmanager
def no_fakes_cached() -> Iterator[None]:
    """Empty afterwards every ``lru_cache`` that holds a fake tensor.

    Within a run a cache serves as it does outside. What it held before is computed again when it is
    asked for.
    """
    try:
        yield
    finally:
        for cache in _caches():
            if any(isinstance(each, FakeTensor) for each in _tensors(cache)):
                cache.cache_clear()
                _RECOMPUTED.add(cache)


@contextmanager
def caches_restored() -> Iterator[None]:
    """Empty afterwards every ``lru_cache`` that holds a tensor which none held before.

    What a program computes itself is computed here too, in the dtype of this run.
    """
    for cache in _RECOMPUTED:
        cache.cache_clear()
    before = {id(each): each for cache in _caches() for each in _tensors(cache)}
    try:
        yield
    finally:
        for cache in _caches():
            if any(id(each) not in before for each in _tensors(cache)):
                cache.cache_clear()


def _caches() -> list[Any]:
    """The functions with a cache that is in use, wherever they are, without those of torch."""
    _find_new()
    used = [each for each in _KNOWN if each.cache_info().currsize]
    return [each for each in used if not _is_others(str(each.__module__))]


class _Mark:
    """Made at a look: if the collector no longer shows it, it has been frozen, and others too."""


def _find_new() -> None:
    """Add the caches that were made since the last look to those that are known."""
    seen = made_since(_LOOKED["at"]) if _LOOKED else []
    if not any(mark is _LOOKED["mark"] for mark in of_type(_Mark, seen)):
        seen = [*gc.get_objects(), *(_named() if gc.get_freeze_count() else ())]
    _LOOKED.update(at=collections(), mark=_Mark())
    _KNOWN.update(of_type(_lru_cache_wrapper, seen))


def _named() -> list[Any]:
    """What modules and their classes have: the collector shows nothing that was there at a
    ``gc.freeze()``.
    """
    modules = [each for name, each in list(sys.modules.items()) if not _is_others(name)]
    own = [vars(each) for each in modules if isinstance(each, ModuleType)]
    inner = [x for table in own for x in list(table.values())]
    # a class is a variable of many modules, and its attributes take long to list
    found = {id(each): each for each in compress(inner, map(isinstance, inner, repeat(type)))}
    kinds = [vars(each) for each in found.values()]
    return [each for table in (*own, *kinds) for each in list(table.values())]


def of_type(kind: type, objects: Sequence[Any]) -> Iterator[Any]:
    """The objects of exactly this type; a loop in Python would take several times as long."""
    return compress(objects, map(is_, map(type, objects), repeat(kind)))


def _is_others(module: str) -> bool:
    return module.partition(".")[0] in _OTHERS


def _tensors(cache: Any) -> Iterator[Tensor]:
    """The tensors that a cache holds, alone or in lists, tuples and dicts."""
    left = [(each, _DEEP) for each in gc.get_referents(cache)]
    while left:
        each, deep = left.pop()
        if isinstance(each, Tensor):
            yield each
        elif deep and type(each) in (dict, list, tuple):
            inner = each.values() if isinstance(each, dict) else each
            left += [(one, deep - 1) for one in inner]
