"""What is no sharding rule: wrong fields, ops that torch has not got, functions that fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from partc.errors import RuleError, UsageError
from partc.rules.notation import ELLIPSIS, Notation, parse
from partc.users_line import warn
from partc.wrong_calls import did_you_mean, quoted

_TORCHS = ("aten", "prims")  # whose ops are all there before a rule can be written
_GROUPS = re.compile(r"all|(\d+(\+\d+)*(\|\d+(\+\d+)*)*)?")
_REDUCE = ("sum", "max", "mean")
# What a field of a rule has to be, in words and as a test.
_SLOT = (
    "the number of a tensor argument, from 0",
    lambda x: x is None or (type(x) is int and x >= 0),
)
_FLAG = ("True or False", lambda x: isinstance(x, bool))
_TEXT = ("the name of an argument", lambda x: isinstance(x, str))
_NAMES = (
    'names of arguments: ("input", "weight")',
    lambda x: isinstance(x, tuple) and all(isinstance(name, str) for name in x),
)
_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "linear": (
        'slots that may be unfinished sums, "0|1" or "0+1", "all", or a function of the call',
        lambda x: callable(x) or (isinstance(x, str) and _GROUPS.fullmatch(x) is not None),
    ),
    "added": _SLOT, "unread": _SLOT, "moves": _FLAG, "reshapes": _FLAG, "sizes": _TEXT,
    "windowed": (
        "a Windowed of partc.rules.table", lambda x: x is None or hasattr(x, "outside"),
    ),
    "contiguous": _NAMES, "adjacent": _NAMES, "traced": _NAMES,
    "reduce": ("one of " + ", ".join(_REDUCE), lambda x: x in _REDUCE),
    "scales": (
        'letters by argument: {"groups": "g"}',
        lambda x: isinstance(x, Mapping) and all(isinstance(v, str) for v in x.values()),
    ),
}  # fmt: skip


def check_rule(ops: Any, notation: Any, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """UsageError for a call of ``rule`` that makes none, RuleError for a text that is no notation.

    ``given`` are the fields of the call, ``known`` the names of all that there are.
    """
    if not isinstance(ops, str) or not ops.strip():
        raise UsageError(
            where="rule", what=f"the op is {str(ops) or quoted(ops)!r}, and no text",
            why="rules are found by names", do='Write its name: rule("aten.mm", "mk,kn->mn").',
        )  # fmt: skip
    known, where = [*known], f"rule({ops!r}, ...)"
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None or not (isinstance(notation, str) or callable(notation)):
        what = f"there is no field {unknown!r}" if unknown else f"the rule is {quoted(notation)}"
        raise UsageError(
            where=where, what=what,
            why=f"a rule is a text such as 'mk,kn->mn', or a function of the call; its fields are "
            f"{', '.join(known)}", do=did_you_mean(unknown, known) if unknown else "Write a text.",
        )  # fmt: skip
    for name, value in given.items():
        kind, fits = _FIELDS.get(name, ("", callable))
        if kind and not fits(value):
            raise UsageError(
                where=where, what=f"{name} is {quoted(value)}", why=f"it is {kind}",
                do="Correct it, or leave it out.",
            )  # fmt: skip
    if isinstance(notation, str):
        with in_rule_of(ops):
            _check_letters(parse(notation), where, notation, "sizes" in given)
    for op in ops.split():
        _check_exists(op)
        if given.get("reduce") == "mean" and op.split(".")[:2] != ["aten", "mean"]:
            raise UsageError(
                where=where, what=f'reduce is "mean", and {op} is no aten.mean',
                why="a mean is written as a sum over the piece, divided by the whole's count, in "
                "the place of the op",
                do="Leave reduce out where the op itself averages, and let its rule cut no letter "
                "that it averages over.",
            )  # fmt: skip


@contextmanager
def in_rule_of(op: str) -> Iterator[None]:
    """Name the op in what is said of its rule's text."""
    try:
        yield
    except RuleError as error:
        if op in error.where:
            raise
        where = f"{error.where} of {op}"
        raise RuleError(where=where, what=error.what, why=error.why, do=error.do) from None


def has_rule_already(op: str, notation: Any, module: str) -> UsageError:
    """The refusal of a second rule for an op."""
    rule = repr(notation) if isinstance(notation, str) else f"the function {notation.__name__}"
    namespace, _, packet = op.partition(".")
    each = [*getattr(getattr(torch.ops, namespace), packet).overloads()] if _has(op) else []
    own = f"rule({f'{op}.{each[0]}'!r}, ...)" if each else ""
    return UsageError(
        where=f"rule({op!r}, ...)", what="the op has a rule",
        why=f"{module} says {rule}, and an op has one",
        do=f"Leave yours out; or write it for one overload, which goes before: {own}." if own
        else "Leave yours out.",
    )  # fmt: skip


def _has(op: str) -> bool:
    """Whether torch has an op of all whose overloads this is the name."""
    namespace, _, packet = op.partition(".")
    return "." not in packet and namespace in _TORCHS


def _check_letters(notation: Notation, where: str, text: str, makes_dims: bool) -> None:
    """RuleError for a letter of a result that no operand has, unless the op makes new dims."""
    known = {letter for term in notation.operands for letter in term.letters}
    known |= {term.index_of for term in notation.operands}
    for letter in (each for term in notation.results for each in term.letters):
        new = letter not in known and letter != ELLIPSIS and not letter.isdigit()
        if new and known and not makes_dims:
            raise RuleError(
                where=where, what=f"a result has the letter {letter!r}, which no operand has",
                why=f"a letter is the same dim in all terms of {text!r}, and nothing says how much "
                "of this one a rank computes",
                do="Write the letter of the operand's dim that it is, with a term for each operand "
                f"(this rule has {len(notation.operands)}), or _ for a dim that is never split.",
            )  # fmt: skip


def _check_exists(op: str) -> None:
    """RuleError for an op of torch that torch has not got; others may come later."""
    namespace, _, rest = op.partition(".")
    if "::" in op:
        raise RuleError(
            where=f"rule({op!r}, ...)", what="it is not the name of an op here",
            why="a rule is found by the name that an op has in torch.ops, with a dot",
            do=f"Write {op.replace('::', '.')!r}, and import before what defines it.",
        )  # fmt: skip
    if not rest:
        raise RuleError(
            where=f"rule({op!r}, ...)", what="an op's name has two parts",
            why="the library that has it, and its name there",
            do=f"Write 'aten.{op}'." if hasattr(torch.ops.aten, op)
            else did_you_mean(f"aten.{op}", [f"aten.{each}" for each in dir(torch.ops.aten)])
            or "`partc explain --rules` lists ops and their rules.",
        )  # fmt: skip
    if namespace not in _TORCHS:
        return
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    if found is None or (overload and overload not in found.overloads()):
        each = found.overloads() if found is not None else dir(getattr(torch.ops, namespace))
        raise RuleError(
            where=f"rule({op!r}, ...)", what=f"torch has no op {op}",
            why="a rule is found by the op's name, so that this one would never be",
            do=did_you_mean(overload if found is not None else packet, each)
            or "`partc explain --rules` lists ops and their rules.",
        )  # fmt: skip


def warn_if_lost(op: str) -> None:
    """Warn where no library that is imported has an op for which there is a rule."""
    namespace, _, rest = op.partition(".")
    packet, _, overload = rest.partition(".")
    of = getattr(torch.ops, namespace)
    found = getattr(of, packet, None) if packet else None
    if found is not None and (not overload or overload in found.overloads()):
        return
    each = sorted(_ops_of(namespace) if found is None else found.overloads())
    near = did_you_mean(packet if found is None else overload, each)
    has = f"torch.ops.{namespace} has {', '.join(each[:6])}" if each else "no library has these"
    warn(
        f"partc: rule({op!r}, ...) is never read: there is no such op ({has}). "
        + (near or "Correct the name, or import before partc.compile what defines the op.")
    )


def _ops_of(namespace: str) -> set[str]:
    """The names of a namespace's ops that are registered by now."""
    start = f"{namespace}::"
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(start)]
    return {name.removeprefix(start).partition(".")[0] for name in names}


def fails(op: str, field: str, function: Callable[..., Any], why: str) -> RuleError:
    """The error for a function of a rule that does not give what it should."""
    example = "mk,kn->mn" if field == "notation" else "0|1"
    return RuleError(
        where=f"rule of {op}, {field}={getattr(function, '__qualname__', function)}",
        what=f"the function does not give a text such as {example!r}", why=why,
        do="Mend the function: it is given a partc.rules.call.Call, which has the shapes and "
        "arguments of one call of the op.",
    )  # fmt: skip


def slot_groups(text: str, where: str) -> list[list[int]]:
    """The slots of ``"0|1+2"``, as ``[[0], [1, 2]]``; RuleError for another text."""
    if not _GROUPS.fullmatch(text):
        raise RuleError(
            where=where, what=f"linear={text!r} names no slots", why=_FIELDS["linear"][0],
            do='Write for example "0|1": slot 0 or slot 1 alone.',
        )  # fmt: skip
    return [[int(slot) for slot in group.split("+")] for group in text.split("|") if group]
