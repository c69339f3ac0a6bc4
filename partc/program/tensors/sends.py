"""An op of DTensor that moves pieces between ranks asks first whether all of them call for it.

DTensor gathers what an op cannot take in pieces (``p[:2]`` of sharded rows) without a word, so that
a rank which computes it alone, ``if rank == 0: print(p[:2])``, would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import _utils as of_torch
from torch.distributed.tensor.placement_types import Placement

_OBSERVES = "observe_redistribution"  # what DTensor calls before it moves an op's operand
_PLACES = (torch.ops.aten.argmin.default, torch.ops.aten.argmax.default)  # gather by themselves
_RUNNING: list[Callable[[], None]] = []  # what is asked before a transfer of the op that runs
_WATCHED: list[type] = []


@contextmanager
def asking(func: Any, args: Sequence[Any], ask: Callable[[], None]) -> Iterator[None]:
    """Call ``ask`` before each transfer of an op that runs inside."""
    _watch()
    if func in _PLACES and any(each.is_shard() for each in args[0].placements):
        ask()
    _RUNNING.append(ask)
    try:
        yield
    finally:
        _RUNNING.pop()


def _watch() -> None:
    """Let transfers of DTensor be seen, once in a process."""
    context = getattr(of_torch, "ExplicitRedistributionContext", None)
    if _WATCHED or context is None:
        return
    _WATCHED.append(context)
    plain = getattr(context, _OBSERVES)

    def observe(source: Any, wanted: Any, *others: Any) -> None:
        if _RUNNING and _sends(source.placements, wanted.placements):
            _RUNNING[-1]()
        plain(source, wanted, *others)

    setattr(context, _OBSERVES, staticmethod(observe))


def _sends(source: Sequence[Placement], wanted: Sequence[Placement]) -> bool:
    """Whether a rank needs what another has; of what it has whole it takes its piece."""
    pairs = zip(source, wanted, strict=True)
    return any(one != other and not one.is_replicate() for one, other in pairs)
