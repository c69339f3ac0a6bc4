"""Refuse a step that calls ``torch.distributed`` itself, and note what it asks there.

A step is written for one device: which ranks have what, and what they send, the plan decides.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d

from partc.errors import TraceError
from partc.trace.source_lines import is_users, source_here

_HERE = str(Path(dist.__file__).parent) + os.sep
_WRAPPERS = {"wrapper", "forward", "backward", "apply"}
ASKED = "the step calls torch.distributed."  # a note begins so
_ASKING = "get_"  # of rank, world size, backend: nothing is sent
_GROUPS = [  # one of these every call asks first for its process group; torch changes their names
    (module, name) for module, names in (
        (distributed_c10d, ("_rank_not_in_group", "_get_default_group")),
        (_functional_collectives, ("_resolve_group", "_resolve_group_name")),
    ) for name in names if hasattr(module, name)
]  # fmt: skip


@contextmanager
def without_transfers(asked: dict[str, None]) -> Iterator[None]:
    """Run a step; TraceError where it calls a collective.

    ``asked`` gets what it asks ``torch.distributed``, and where.
    """
    before = [getattr(module, name) for module, name in _GROUPS]
    for (module, name), plain in zip(_GROUPS, before, strict=True):
        setattr(module, name, _watched(plain, asked))
    try:
        yield
    finally:
        for (module, name), plain in zip(_GROUPS, before, strict=True):
            setattr(module, name, plain)


def transfer_notes(asked: dict[str, None]) -> list[str]:
    """Sentences on what the step asked ``torch.distributed``."""
    return [
        f"{each}: a program has the answer that was given when it was compiled. A step is written "
        "for one device and the global batch, so that its loss and gradients need no division by "
        "the number of ranks: leave the call out" for each in asked
    ]  # fmt: skip


def _watched(plain: Callable[..., Any], asked: dict[str, None]) -> Callable[..., Any]:
    def group(*args: Any, **kwargs: Any) -> Any:
        call, source = _called(sys._getframe(1)), source_here()
        if call.startswith(_ASKING) and source:
            asked[f"{ASKED}{call} ({source})"] = None
        elif call and source:
            raise _refusal(call, source)
        return plain(*args, **kwargs)

    return group


def _called(frame: FrameType | None) -> str:
    """The function of ``torch.distributed`` that the user's code has called; "" for none."""
    found = ""
    while frame is not None and not is_users(frame.f_code.co_filename):
        name = frame.f_code.co_name
        own = frame.f_code.co_filename.startswith(_HERE)
        if own and name not in _WRAPPERS and not name.startswith("_"):
            found = name
        frame = frame.f_back
    return found


def _refusal(call: str, source: str) -> TraceError:
    return TraceError(
        where=source, what=f"it calls torch.distributed.{call}",
        why="a step is that of one device on the global batch, and the plan says what ranks send",
        do="Leave the call out: losses and gradients of a program are those of all ranks' rows. "
        "What is for logs alone do behind stage.step(...).",
    )  # fmt: skip
