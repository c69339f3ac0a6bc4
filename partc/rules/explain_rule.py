"""What partc knows of an op: its rule and the rule's file, or the cuts that an experiment finds.

In: the name of an op, ``aten.mm`` or ``aten.add.Tensor``. Out: an `OpRule` for each overload or
for the rule of all, whose ``str`` is what ``partc explain --rules OP`` prints.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

import torch
from torch._ops import OpOverload

from partc.errors import UsageError
from partc.rules.composite import is_composite, written_as
from partc.rules.discover import discover
from partc.rules.example_calls import alike, unlike
from partc.rules.table import RULES, Rule, find

RANKS = 2
_HOW = {
    "written": "a rule in {file}",
    "elementwise": "torch says that it is elementwise; the rule of such ops is in {file}",
    "experiment": f"no rule; an experiment on {{on}} with {RANKS} ranks found",
    "none": f"no rule; an experiment on {{on}} with {RANKS} ranks found no cut",
    "untried": "no rule, and its signature alone does not say how it is called; partc tries cuts "
    "by experiment on each call that a model makes",
    "opened": "no rule, and no graph has it: torch writes it as other ops{on}",
}


@dataclass(frozen=True)
class OpRule:
    """How an op may be cut.

    ``how`` is ``written`` (a rule of the table), ``elementwise`` (torch's tag), ``experiment`` (no
    rule, and ``found`` has the cuts of the call ``on``), ``none`` (no cut was found for this call),
    ``untried`` (no call could be made from the op's signature alone) or ``opened`` (torch writes
    the op as others, which ``found`` names where a call could be made). ``settings`` are the rule's
    other fields, see `Rule`.
    """

    op: str
    how: str
    letters: str = ""
    file: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    on: str = ""
    found: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = {"letters": self.letters, **self.settings}
        rows = [f"  {name:<8} {text}" for name, text in named.items() if text]
        head = f"{self.op}: {_HOW[self.how].format(file=self.file, on=self.on)}"
        return "\n".join([head, *rows, *(f"  {each}" for each in self.found)])


def all_rules() -> dict[str, str]:
    """Every op with a sharding rule -> the rule's letters, or its function's docstring."""
    return {name: _words(RULES[name].notation) for name in sorted(RULES)}


def explain_rule(name: str) -> list[OpRule]:
    """What is known of an op, or of each overload of an op whose overloads differ.

    Args:
        name: ``aten.mm``, ``aten.add.Tensor`` or ``aten::mm``; an op of another library too.

    Raises:
        UsageError: neither the table nor torch has this op.
    """
    name = name.replace("::", ".")
    if name in RULES:
        return [_written(name, RULES[name], "written")]
    return [_of_overload(each) for each in _overloads(name)]


def _of_overload(overload: OpOverload) -> OpRule:
    name = f"{overload.namespace}.{overload._schema.name.split('::')[1]}"
    full = f"{name}.{overload._overloadname}"
    rule = find(overload)
    if rule is not None:
        is_written = name in RULES or full in RULES
        return _written(full, rule, "written" if is_written else "elementwise")
    if is_composite(overload):
        others = tuple(written_as(overload))
        return OpRule(full, "opened", on=", such as" if others else "", found=others)
    call = next(itertools.chain(alike(overload), unlike(overload)), None)
    if call is None:
        return OpRule(full, "untried")
    found = tuple(map(str, discover(call.node(), RANKS)))
    return OpRule(full, "experiment" if found else "none", on=str(call), found=found)


def _written(name: str, rule: Rule, how: str) -> OpRule:
    plain = Rule(rule.notation)
    names = [f.name for f in fields(rule) if f.name != "module"]
    given = {name: getattr(rule, name) for name in names}
    settings = {n: _words(x) for n, x in given.items() if x != getattr(plain, n)}
    return OpRule(name, how, _words(rule.notation), _file(rule.module), settings)


def _words(given: Any) -> str:
    """A rule's text; of a function the first line of its docstring."""
    if not callable(given):
        return str(given)
    return (given.__doc__ or "depends on the call").strip().splitlines()[0]


def _file(module: str) -> str:
    """The file of a module of partc; other modules are named, as their place is not known."""
    return f"{module.replace('.', '/')}.py" if module.startswith("partc.") else module


def _overloads(name: str) -> list[OpOverload]:
    namespace, _, rest = name.partition(".")
    op, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), op, None) if op else None
    known = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    if overload and overload not in known:
        known = []
    if not known:
        near = " or ".join(_of_word(name) or _near(name))
        raise UsageError(
            where="partc explain --rules",
            what=f"no op is named {name!r}",
            why="neither the table of rules nor torch.ops has it",
            do=f"Did you mean {near}?"
            if near
            else "`partc explain --rules` lists ops with a rule.",
        )
    every = [getattr(packet, each) for each in known if overload in ("", each)]
    return [each for each in every if overload or _takes_tensors(each)]


def _near(name: str) -> list[str]:
    """The ops with names alike, of those with a rule and of those that torch has."""
    each = (op.partition("::") for op in torch._C._dispatch_get_all_op_names())
    there = {f"{library}.{op.partition('.')[0]}" for library, _, op in each}
    known = sorted(op for op in there if not op.endswith("_"))
    full = name if "." in name else f"aten.{name}"
    return get_close_matches(full, [*RULES, *(op for op in known if op not in RULES)])


def _of_word(name: str) -> list[str]:
    """The ops of ATen that a short name means: ``mm``, ``F.gelu``, ``torch.relu``."""
    word = name.rpartition(".")[2]
    each = [f"aten.{word}", f"aten._{word}"]
    known = [op for op in each if op in RULES]
    there = hasattr(torch.ops.aten, word) if word.isidentifier() else False
    return known or (each[:1] if there else [])


def _takes_tensors(overload: OpOverload) -> bool:
    """Whether an overload computes with tensors, and writes into none of them."""
    kinds = [str(argument.type) for argument in overload._schema.arguments]
    return any("Tensor" in kind for kind in kinds) and not overload._schema.is_mutable
