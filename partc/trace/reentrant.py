"""Refuse ``checkpoint(..., use_reentrant=True)`` where nothing that it is given needs a gradient.

It then trains none of the parameters inside of it, of which torch warns and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from partc.errors import TraceError
from partc.trace.source_lines import source_here

_OWN: Any = CheckpointFunction.apply


def reentrant_checked() -> AbstractContextManager[Any]:
    """Lets a reentrant checkpoint say that it would train nothing."""
    return patch.object(CheckpointFunction, "apply", staticmethod(_apply))


def _apply(function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
    needed = any(isinstance(x, Tensor) and x.requires_grad for x in args)
    if needed or not torch.is_grad_enabled():
        return _OWN(function, preserves, *args)
    results = function(*args)  # there is no backward, in which it would be computed again
    if any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(results)):
        raise TraceError(
            where=source_here(),
            what="checkpoint(..., use_reentrant=True) is given tensors without a gradient",
            why="it then computes no gradient of the parameters inside either, so that they are "
            "not trained",
            do="Call checkpoint with use_reentrant=False, or of a model of transformers "
            'gradient_checkpointing_enable({"use_reentrant": False}).',
        )
    return results
