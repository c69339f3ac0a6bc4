"""What the calls of a graph call: ATen ops with their overload, ops of partc, ``getitem``."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from partc.errors import UsageError
from partc.wrong_calls import quoted

_WRITTEN = {  # classes that hold torch's functions and methods, as users write them
    "_VariableFunctionsClass.": "torch.", "_TensorBase.": "torch.Tensor.",
    "TensorBase.": "torch.Tensor.",
}  # fmt: skip


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
    name = str(getattr(target, "__qualname__", "")) or quoted(target)
    for inside, written in _WRITTEN.items():
        name = name.replace(inside, written, 1) if name.startswith(inside) else name
    return name


def _instead(target: Any) -> str:
    """The op of this name, as it is written; "" if ATen has none."""
    word = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    packet = getattr(torch.ops.aten, word.removeprefix("aten.").partition(".")[0], None)
    if not word or not isinstance(packet, OpOverloadPacket):
        return ""
    each = [o for o in packet.overloads() if "out" not in o.split("_") and _runs(packet, o)]
    each = sorted(each, key=lambda o: o != "default")[:4]
    return f"Write {' or '.join(f'torch.ops.aten.{packet.__name__}.{o}' for o in each)}."


def _runs(packet: OpOverloadPacket, overload: str) -> bool:
    """Whether an overload is an op of tensors; ``mul.int`` is one of TorchScript's numbers."""
    return str(getattr(packet, overload).name()) in _op_names()


@cache
def _op_names() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())
