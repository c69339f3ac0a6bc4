"""Fields of a rule that name a slot, an argument or a letter which the op or the rule has not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

import torch

from partc.errors import UsageError
from partc.rules.notation import parse
from partc.rules.wrong_rules import slot_groups
from partc.wrong_calls import did_you_mean

_OF_SLOTS = ("linear", "added", "unread")
_OF_NAMES = ("sizes", "scales", "contiguous", "adjacent", "traced")


def check_places(ops: str, notation: Any, given: Mapping[str, Any]) -> None:
    """UsageError for a slot or an argument that no overload of the ops has, which nothing would
    read, and for a letter that the rule has not. Ops that are not there yet are not looked at.
    """
    each = [[*_overloads(op)] for op in ops.split()]
    if all(each):
        schemas = [overload._schema for overloads in each for overload in overloads]
        _check_slots(ops, given, schemas)
        _check_names(ops, given, schemas)
    if isinstance(notation, str):
        _check_letters(ops, notation, given)


def _overloads(op: str) -> Iterator[Any]:
    namespace, _, rest = op.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None) if packet else None
    if isinstance(found, torch._ops.OpOverloadPacket):
        each = [getattr(found, name) for name in found.overloads() if overload in ("", name)]
        yield from [one for one in each if not one._schema.is_mutable] or each


def _check_slots(op: str, given: Mapping[str, Any], schemas: list[Any]) -> None:
    most = max(_num_slots(schema) for schema in schemas)
    for name in _OF_SLOTS:
        for slot in _slots(op, given.get(name)):
            if slot >= most:
                raise UsageError(
                    where=f"rule({op!r}, ...)", what=f"{name}={given[name]!r} names slot {slot}",
                    why=f"slots are the op's tensor arguments, counted from 0, and it has {most}",
                    do=f"Name slots from 0 to {most - 1}." if most else "Leave it out.",
                )  # fmt: skip


def _num_slots(schema: Any) -> float:
    """How many tensors an op takes; any number of them where it takes a list."""
    kinds = [str(each.type) for each in schema.arguments if "Tensor" in str(each.type)]
    return inf if any("List" in kind for kind in kinds) else len(kinds)


def _slots(op: str, field: Any) -> list[int]:
    if isinstance(field, int):
        return [field]
    if not isinstance(field, str) or field == "all":
        return []  # a function gives them for each call
    return [slot for group in slot_groups(field, f"rule({op!r}, ...)") for slot in group]


def _check_names(op: str, given: Mapping[str, Any], schemas: list[Any]) -> None:
    known = list(dict.fromkeys(each.name for schema in schemas for each in schema.arguments))
    for field in _OF_NAMES:
        named = given.get(field) or ()
        for name in [named] if isinstance(named, str) else named:
            if name not in known:
                raise UsageError(
                    where=f"rule({op!r}, ...)", what=f"{field} names the argument {name!r}",
                    why=f"the op has the arguments {', '.join(known)}",
                    do=did_you_mean(name, known) or "Name one of these, or leave it out.",
                )  # fmt: skip


def _check_letters(ops: str, notation: str, given: Mapping[str, Any]) -> None:
    parsed = parse(notation)
    known = {each for term in (*parsed.operands, *parsed.results) for each in term.letters}
    for name, letters in (given.get("scales") or {}).items():
        if unknown := next((each for each in letters if each not in known), ""):
            raise UsageError(
                where=f"rule({ops!r}, ...)",
                what=f"scales says that {name} shrinks with {unknown!r}",
                why=f"no term of {notation!r} has this letter", do="Name a letter of the rule.",
            )  # fmt: skip
