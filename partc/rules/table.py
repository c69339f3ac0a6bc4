"""The table of sharding rules; ``rule("aten.mm", "mk,kn->mn", linear="0|1")`` adds one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cache, lru_cache
from typing import Any, Literal

import torch

from partc.registry import Place, Registry, is_said_twice
from partc.rules.call import Call
from partc.rules.wrong_places import check_places
from partc.rules.wrong_rules import (
    check_rule,
    fails,
    has_rule_already,
    slot_groups,
    warn_if_lost,
)
from partc.users_line import failed_at
from partc.wrong_calls import quoted

MOST_NAMES = 4096  # ops whose names are remembered; many models together have some hundred
Written = str | Callable[[Call], str]
Reduce = Literal["sum", "max", "mean"]


@dataclass(frozen=True)
class Windowed:
    """How to write a call whose indices point into a sharded dim, as in a sharded embedding.

    Indices are changed to count from this rank's first row; an index into another rank's rows
    becomes ``outside``. ``target`` is the function to call instead of the op (None: the op itself).
    ``ignore`` is the argument that names an index to be skipped, such as ``ignore_index``.
    """

    target: Callable[..., Any] | None = None
    ignore: str = ""
    outside: int = -1

    def __str__(self) -> str:
        return "the op itself" if self.target is None else self.target.__name__


@dataclass(frozen=True)
class Rule:
    """The sharding rule of one op. ``notation`` and ``linear`` are texts, or functions of the call.

    ``notation`` is in the language of `notation.py`. The fields with a default:

    - ``linear``: groups of slots that may be unfinished sums together while the other slots are
      replicated: ``"0|1"`` is slot 0 or slot 1 alone, ``"0+1"`` both jointly, ``"all"`` all slots;
    - ``added``: the slot that is added to the result (a bias): it is an unfinished sum if the
      result is one;
    - ``moves``: the op only moves elements, so that an unfinished maximum passes through;
    - ``reduce``: the reduction over letters that the results do not have;
    - ``unread``: a slot of which only shape and dtype matter;
    - ``reshapes``: on pieces the call is a reshape to the result's local shape;
    - ``sizes``: the argument that is the result's shape;
    - ``scales``: arguments that are proportional to the sizes of letters;
    - ``windowed``: how to write the call if its indices point into a sharded dim;
    - ``contiguous``: arguments whose strides the kernels ignore, so that they must be contiguous;
    - ``adjacent``: arguments of which the kernels ignore the stride of the last dim alone;
    - ``traced``: arguments whose memory order, by rows or by columns, says what the results are
      and how the traced gradient reads them;
    - ``module``: the Python module whose call of ``rule`` added it.
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
    adjacent: tuple[str, ...] = ()
    traced: tuple[str, ...] = ()
    module: str = field(default="", compare=False)

    def written(self, call: Call) -> str:
        """The rule's notation for this call, as text; RuleError where its function fails."""
        return self._text("notation", self.notation, call)

    def groups(self, call: Call) -> list[list[int]]:
        """The slots that may be unfinished sums together, for this call."""
        text = self._text("linear", self.linear, call)
        filled = [i for i, slot in enumerate(call.slots) if slot is not None]
        if text == "all":
            return [filled]
        groups = slot_groups(text, f"rule of {name_of(call.target)}")
        if callable(self.linear):  # a text may be that of several ops
            self._check_slots(self.linear, text, groups, call)
        if self.added is not None and self.added in filled:
            groups = [sorted({*group, self.added}) for group in groups]
        return [group for group in groups if set(group) <= set(filled)]

    @staticmethod
    def _check_slots(
        linear: Callable[[Call], str], text: str, groups: list[list[int]], call: Call
    ) -> None:
        num = len(call.slots)
        if any(slot >= num for group in groups for slot in group):
            why = f"it gives {text!r}, and the call has {num} slots, counted from 0"
            raise fails(name_of(call.target), "linear", linear, why)

    def _text(self, name: str, given: Written, call: Call) -> str:
        """A field that is a text, or what its function gives of a call."""
        if not callable(given):
            return given
        try:
            text = given(call)
        except Exception as error:
            raise fails(name_of(call.target), name, given, failed_at(error, given)) from error
        if not isinstance(text, str):
            raise fails(name_of(call.target), name, given, f"it gives {quoted(text)}")
        return text


RULES: Registry[Rule] = Registry("rule")
_PLACES: dict[str, Place] = {}  # where each was said
_USED: dict[str, str] = {}


def rule(ops: str, notation: Written, **fields: Any) -> None:
    """Add a rule for one or more ops, separated by blanks.

    ``aten.add.Tensor`` names one overload, ``aten.add`` all overloads. ``fields`` are those of
    `Rule`. UsageError if an op has a rule already, other than one of a notebook's cell that runs
    again, or a field is of a wrong kind; RuleError for a malformed notation, and an op that torch
    has not got.
    """
    known = [
        each.name for each in dataclass_fields(Rule) if each.name not in ("notation", "module")
    ]
    check_rule(ops, notation, fields, known)
    entry = Rule(notation, **fields, module=sys._getframe(1).f_globals["__name__"])
    if not entry.module.startswith("partc."):
        check_places(ops, notation, fields)
    frame = sys._getframe(1)
    place = frame.f_globals, frame.f_code.co_filename, frame.f_lineno
    for name in ops.split():
        again = name in RULES and entry.module == RULES[name].module == "__main__"
        if name in RULES and (not again or is_said_twice(place, _PLACES.get(name, place))):
            raise has_rule_already(name, RULES[name].notation, RULES[name].module)
        if not entry.module.startswith("partc."):
            _tell_if_opened(name)
        RULES.replace(name, entry)
        _PLACES[name] = place


def _tell_if_opened(name: str) -> None:
    """Tell of a rule for an op that no graph has; partc's passes write some that torch opens."""
    from partc.rules.composite import tell_if_opened  # it needs this module

    if name.rpartition(".")[0] not in RULES:
        tell_if_opened(name)


@lru_cache(maxsize=MOST_NAMES)
def name_of(target: Any) -> str:
    """The name of an op in the table: ``aten.add.Tensor``, or ``partc.ops.weight_grad``."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
    module = str(target.__module__)
    if module.startswith("partc."):  # an op's name does not say which room its module stands in
        module = f"partc.{module.rpartition('.')[2]}"
    return f"{module.removeprefix('_')}.{target.__name__}"


def find(target: Any) -> Rule | None:
    """The rule of an op, None if there is none.

    The order of search: the overload's rule, the rule for all overloads, and for ops with torch's
    pointwise tag the rule of elementwise ops.
    """
    own = own_name(target)
    if own is not None:
        entry = RULES[own]
        if not entry.module.startswith("partc."):
            _USED[own] = entry.module
        return entry
    return elementwise() if _is_pointwise(target) else None


@lru_cache(maxsize=MOST_NAMES)  # torch makes the set of an op's tags anew at each look
def _is_pointwise(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def used_rules() -> dict[str, str]:
    """The rules of other packages that were read in this process, with their modules."""
    return {n: module for n, module in _USED.items() if n in RULES and RULES[n].module == module}


def own_name(target: Any) -> str | None:
    """The name under which the table has a rule of an op, or of all its overloads."""
    name = name_of(target)
    if name in RULES:
        return name
    of_all = name.rpartition(".")[0]
    return of_all if isinstance(target, torch._ops.OpOverload) and of_all in RULES else None


def warn_of_lost_rules() -> None:
    """Warn of rules that other packages wrote for ops which no library has."""
    for name, entry in RULES.items():
        if not entry.module.startswith("partc."):
            warn_if_lost(name)


def pointwise(call: Call) -> str:
    """Every tensor has the same dims, broadcast; all results too.

    For two operands the notation is ``...,...->...``.
    """
    return ",".join(["..."] * len(call.slots)) + "->" + ",".join(["..."] * len(call.results))


def whole_only(call: Call) -> str:
    """Nothing may be cut: the op mixes what its dims hold, or their sizes mean something.

    For a matrix and a vector the notation is ``__->_``: no dim has a letter.
    """
    sides = (call.shapes, call.results)
    left, right = (",".join("_" * len(shape or ()) for shape in side) for side in sides)
    return f"{left}->{right}"


@cache
def elementwise() -> Rule:
    """The rule of elementwise ops that have no rule of their own."""
    return Rule(pointwise, module=__name__)
