"""The table of rules: ``rule("aten.mm", "mk,kn->mn", linear="0|1")`` adds a line to it."""

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

    ``target`` is the function to call instead, ``ignore`` the argument that names an index which
    counts for nothing, ``outside`` the index that stands for "not on this rank".
    """

    target: Callable[..., Any] | None = None
    ignore: str = ""
    outside: int = -1


@dataclass(frozen=True)
class Rule:
    """How one op may be cut. ``notation`` and ``linear`` are texts, or functions of the call.

    Of the fields with a default,

    - ``linear`` names groups of slots that may be unfinished sums together, the other slots being
      replicated: ``"0|1"`` each alone, ``"0+1"`` jointly, ``"all"`` all of them;
    - ``added`` is the slot that is added to the result: it is unfinished wherever the result is;
    - ``moves`` says that elements are only moved, so that an unfinished maximum stays one;
    - ``reduce`` is what reduced a letter that is missing on the right;
    - ``unread`` is a slot of which only shape and dtype matter;
    - ``reshapes`` says that on pieces the call is a reshape to the result's local shape;
    - ``sizes`` is the argument that is the result's shape;
    - ``scales`` has arguments that are proportional to the sizes of letters;
    - ``windowed`` says how it is called where indices point into a dim that is cut;
    - ``contiguous`` names arguments whose strides the kernels do not look at.
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
    contiguous: tuple[str, ...] = ()

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
    """Add a rule for ops, named ``aten.add.Tensor`` or, with all overloads, ``aten.add``."""
    entry = Rule(notation, **fields)
    for name in ops.split():
        RULES.add(name, entry)


def name_of(target: Any) -> str:
    """``aten.add.Tensor`` of an ATen op, ``partc.ops.weight_grad`` of a function."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
    module = str(target.__module__)
    if module.startswith("partc."):  # an op's name does not say which room its module stands in
        module = f"partc.{module.rpartition('.')[2]}"
    return f"{module.removeprefix('_')}.{target.__name__}"


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
