"""What a call of ATen writes and shares, and the functional op that computes the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from partc.audit.spread import SAME, ZERO, Known, R, reshaped
from partc.graph.writes import write_places, written_to

FILLS: dict[str, Known] = {"zero_": ZERO, "fill_": SAME}


def made_by(name: str) -> Known:
    """The layout of a tensor that is made from no other."""
    word = name.split(".")[0]
    if word in ("zeros", "empty", "empty_strided"):
        return ZERO
    return SAME if word in ("ones", "full", "scalar_tensor") else R


def functional(func: Any) -> Any:
    """The op that computes what an in-place op, or one with ``out``, writes; None without one."""
    name = func._schema.name.removeprefix("aten::")
    if func.namespace != "aten":
        return func
    packet = func.overloadpacket
    if name.endswith("_") and not name.endswith("__"):
        packet = getattr(torch.ops.aten, name[:-1], None)
        return getattr(packet, func._overloadname, None) if packet is not None else None
    outs = {name for _, name in write_places(func)}
    if not outs:
        return func
    wanted = [a.name for a in func._schema.arguments if a.name not in outs]
    for overload in packet.overloads():
        other = getattr(packet, overload)
        if [a.name for a in other._schema.arguments] == wanted:
            return other
    return None


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call writes."""
    return [x for x in tree_leaves(written_to(func, args, kwargs)) if isinstance(x, Tensor)]


def split_dim(args: Sequence[Any], base: Tensor | None) -> int:
    rank = base.dim() if base is not None else 1
    dim = args[2] if len(args) > 2 else 0
    return int(dim) % max(rank, 1)


def share_memory(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _span(tensor: Tensor) -> tuple[int, int]:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    start = int(tensor.storage_offset())
    return start, start + sum((n - 1) * s for n, s in sizes) + 1


def meet(one: Tensor, other: Tensor) -> bool:
    (a, b), (c, d) = _span(one), _span(other)
    return a < d and c < b


def same_entries(one: Tensor, other: Tensor) -> bool:
    """Whether two views have the same entries in the same order."""
    if one.storage_offset() != other.storage_offset() or one.numel() != other.numel():
        return False
    if one.shape == other.shape:
        return one.stride() == other.stride()
    return one.is_contiguous() and other.is_contiguous()


def viewed(spread: Known, one: Tensor, other: Tensor) -> Known:
    return reshaped(spread, tuple(one.shape), tuple(other.shape))
