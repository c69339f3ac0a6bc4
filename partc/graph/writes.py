"""Say what an op of torch writes to, as its schema tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from partc.graph.fake_calls import tensors_in

_BATCH_NORMS = {
    torch.ops.aten.native_batch_norm.default, torch.ops.aten._native_batch_norm_legit.default,
}  # fmt: skip


@cache
def write_places(func: Any) -> tuple[tuple[int, str], ...]:
    """Number and name of each argument that an op writes to; none for a function of Python."""
    schema = getattr(func, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return tuple((i, each.name) for i, each in enumerate(arguments) if each.is_write)


def written_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a call gives for the arguments that its op writes to: a tensor, a list, or None."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in write_places(func)]


def tensors_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors into whose memory a call writes."""
    if func in _BATCH_NORMS and args[5]:  # training; its schema does not say that it writes
        yield from tensors_in(args[3:5])
    if write_places(func) and torch.Tag.inplace_view not in func.tags:
        yield from tensors_in(written_to(func, args, kwargs))
