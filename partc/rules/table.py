"""The table of rules: ``rule("aten.linear", "...k,nk,n->...n", linear="0|1", added=2)`` adds a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from partc.registry import Registry
from partc.rules.call import Call

Written = str | Callable[[Call], str]
Reduce = Literal["sum", "max", "mean"]


@dataclass(frozen=True)
class Windowed:
    """How a call is written where indices are counted from this rank's first row.

    ``target`` is the op to call instead ("" for the same), ``ignore`` the argument naming an index that
    counts for nothing, ``outside`` the index that stands for "not on this rank".
    """

    target: Callable[..., Any] | None = None
    ignore: str = ""
    outside: int = -1


@dataclass(frozen=True)
class Rule:
    """How one op may be cut; ``notation`` and ``linear`` are texts or functions of the call.

    ``linear``: groups of slots that may be unfinished sums together, ``"0|1"`` each alone, ``"0+1"``
    jointly, ``"all"`` all together. ``added``: the slot that is added to the result, so no sum may be
    left open without it. ``moves``: the op only moves elements, so an unfinished max stays one.
    ``reduce``: what a letter that is missing on the right was reduced by. ``unread``: the slot of which
    only the shape matters. ``reshapes``: on pieces the call is a reshape to result 0's shape. ``sizes``: the argument that is result 0's shape. ``scales``: arguments that
    are proportional to a letter's size.
    """

    notation: Written
    linear: Written = ""
    added: int | None = None
    moves: bool = False
    reduce: Reduce = "sum"
    unread: int | None = None
    reshapes: bool = False
    sizes: str = ""
    scales: Mapping[str, str] = field(default_factory=dict)
    windowed: Windowed | None = None

    def written(self, call: Call) -> str:
        """The rule's letters for this call."""
        return self.notation(call) if callable(self.notation) else self.notation

    def groups(self, call: Call) -> list[list[int]]:
        """The slots that may be unfinished sums together, for this call."""
        text = self.linear(call) if callable(self.linear) else self.linear
        filled = [i for i, slot in enumerate(call.slots) if slot is not None]
        if text == "all":
            return [filled]
        groups = [[int(slot) for slot in group.split("+")] for group in text.split("|") if group]
        if self.added is not None and self.added in filled:
            groups = [sorted({*group, self.added}) for group in groups]
        return [group for group in groups if set(group) <= set(filled)]


RULES: Registry[Rule] = Registry("rule")


def rule(ops: str, notation: Written, **fields: Any) -> None:
    """Add a rule for one or more ops: ``"aten.mm aten.bmm"``, with an overload (``"aten.add.Tensor"``) or
    for all of them, or ``"partc.ops.weight_grad"``.
    """
    entry = Rule(notation, **fields)
    for name in ops.split():
        RULES.add(name, entry)


def name_of(target: Any) -> str:
    """``aten.add.Tensor`` of an ATen op, ``partc.ops.weight_grad`` of a function."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
    return f"{target.__module__.removeprefix('_')}.{target.__name__}"


def find(target: Any) -> Rule | None:
    """The rule of an op: its own, its packet's, or for elementwise ops the one for all of them."""
    name = name_of(target)
    if name in RULES:
        return RULES[name]
    if not isinstance(target, torch._ops.OpOverload):
        return None
    packet = name.rpartition(".")[0]
    if packet in RULES:
        return RULES[packet]
    return elementwise() if torch.Tag.pointwise in target.tags else None


def pointwise(call: Call) -> str:
    """Every tensor has the same dims, broadcast; all results too."""
    return ",".join(["..."] * len(call.slots)) + "->" + ",".join(["..."] * len(call.results))


def whole_only(call: Call) -> str:
    """Nothing may be cut: the op mixes what its dims hold, or their sizes mean something."""
    sides = (call.shapes, call.results)
    left, right = (",".join("_" * len(shape or ()) for shape in side) for side in sides)
    return f"{left}->{right}"


def elementwise() -> Rule:
    """The rule of elementwise ops of which no more is known."""
    return Rule(pointwise)
