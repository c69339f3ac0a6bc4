"""Let no tensor of a run stay in a cache of ``functools``, where the model would find it later."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from types import ModuleType
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_OTHERS = {"torch", "partc"}
_RECOMPUTED = WeakSet[Any]()  # caches that a trace has filled: programs compute what they hold
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
    # by module and class too, as the collector shows nothing that was there at a gc.freeze()
    modules = [each for name, each in list(sys.modules.items()) if not _is_others(name)]
    own = [vars(each) for each in modules if isinstance(each, ModuleType)]
    kinds = [vars(each) for table in own for each in list(table.values()) if isinstance(each, type)]
    named = [each for table in (*own, *kinds) for each in list(table.values())]
    every = [each for each in (*named, *gc.get_objects()) if type(each) is _lru_cache_wrapper]
    used = {id(each): each for each in every if each.cache_info().currsize}
    return [each for each in used.values() if not _is_others(str(each.__module__))]


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
