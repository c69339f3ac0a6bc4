"""Say which call of the forward it was whose backward has failed while it was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_NOTED = "_partc_forward"


@contextmanager
def forward_noted(source: str) -> Iterator[None]:
    """Note on an error of a call without a line of its own where its forward stands."""
    try:
        yield
    except Exception as error:
        if not source and not hasattr(error, _NOTED):
            setattr(error, _NOTED, _forward())
        raise


def forward_of(error: BaseException) -> tuple[str, str]:
    """Module path and line of the forward of what has failed; "" where it was no backward."""
    found: tuple[str, str] = getattr(error, _NOTED, ("", ""))
    return found


def _forward() -> tuple[str, str]:
    node: Any = torch._C._current_autograd_node()
    mode = get_proxy_mode()
    if node is None or mode is None:
        return "", ""
    for call in mode.tracer.graph.nodes:
        noted = call.meta.get("custom", {})
        if call.meta.get("seq_nr") == node._sequence_nr() and noted.get("source"):
            return noted.get("module", ""), noted["source"]
    return "", ""
