"""Reading a batch before the training begins, so that the training still reads it first."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

DEEP = 4  # steps from a loader to a generator: loader, batch sampler, sampler, generator
MOST = 200  # entries of a list or dict that are looked at


@contextmanager
def draws_kept(source: object) -> Iterator[None]:
    """A context behind which the random generators of a loader are as they were before it.

    Found are those of torch, NumPy and Python in loaders, samplers, datasets and what these hold,
    also in a module or a list that has the loaders.
    The generators of the whole process are not among them.
    """
    restores = [restore for each in _held(source) if (restore := _restore(each)) is not None]
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _held(root: object) -> Iterator[object]:
    """An object, and what can be reached from it by attributes and entries."""
    seen, level = {id(root): root}, [root]  # objects that are held keep their numbers
    for _ in range(DEEP + 1):
        yield from level
        inner = {id(each): each for holder in level for each in _parts(holder)}
        level = [each for number, each in inner.items() if number not in seen]
        seen |= inner


def _parts(holder: object) -> list[object]:
    if isinstance(holder, dict):
        return [*holder.values()][:MOST]
    if isinstance(holder, list | tuple):
        return [*holder[:MOST]]
    if isinstance(holder, type | torch.Tensor | np.ndarray):
        return []
    held = getattr(holder, "__dict__", {})
    if isinstance(holder, torch.nn.Module):  # a LightningModule that makes the loaders
        return [each for name, each in held.items() if not name.startswith("_")]
    return [*held.values()]


def _restore(held: object) -> Callable[[], Any] | None:
    """What gives a generator its state of now back; None for any other object."""
    if isinstance(held, torch.Generator):
        state = held.get_state()
        return lambda: held.set_state(state)
    if isinstance(held, random.Random) and not isinstance(held, random.SystemRandom):
        numbers = held.getstate()
        return lambda: held.setstate(numbers)
    if isinstance(held, np.random.RandomState):
        legacy = held.get_state()
        return lambda: held.set_state(legacy)
    if isinstance(held, np.random.Generator):
        bits = held.bit_generator
        known = bits.state
        return lambda: setattr(bits, "state", known)
    return None
