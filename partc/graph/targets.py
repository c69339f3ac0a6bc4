"""What the calls of a graph call: ATen ops with their overload, ops of partc, ``getitem``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from partc.errors import UsageError
from partc.wrong_calls import quoted


def check_target(target: Any, where: str) -> None:
    """UsageError for what no call of a graph calls, as ``F.gelu``, ``aten.gelu`` or ``"gelu"``."""
    if isinstance(target, OpOverload) or target is operator.getitem:
        return
    if callable(target) and str(getattr(target, "__module__", "")).startswith("partc."):
        return
    name = _name_of(target)
    raise UsageError(
        where=where, what=f"{name} is what no call of a graph calls",
        why="graphs call ATen ops, each with its overload, and operator.getitem",
        do=_instead(target) or "Print the graph: a call stands there as aten.NAME.OVERLOAD is "
        "written, NAME.OVERLOAD(, or NAME( for NAME.default.",
    )  # fmt: skip


def _name_of(target: Any) -> str:
    if isinstance(target, OpOverloadPacket):
        return f"aten.{target.__name__}"
    return str(getattr(target, "__qualname__", "")) or quoted(target)


def _instead(target: Any) -> str:
    """The op of this name, as it is written; "" if ATen has none."""
    word = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    packet = getattr(torch.ops.aten, word.removeprefix("aten.").partition(".")[0], None)
    if not word or not isinstance(packet, OpOverloadPacket):
        return ""
    each = [o for o in packet.overloads() if "out" not in o.split("_")]
    each = sorted(each, key=lambda o: o != "default")[:4]
    return f"Write {' or '.join(f'torch.ops.aten.{packet.__name__}.{o}' for o in each)}."
