"""What the fields of a plan may be: words, numbers, texts, lists, tables, all of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from partc.errors import PlanError
from partc.plan.allowed import ALLOWED_TABLES, OWN_TABLES
from partc.plan.decided import BACKENDS, DECIDED, flaw_of, meant_by
from partc.plan.field_words import MEANT, SAYS
from partc.schedules import NAMES
from partc.schedules.csv_form import CSV
from partc.schedules.named import is_known, what_to_do
from partc.wrong_calls import did_you_mean, quoted

COMPILERS = ("none", "inductor")  # of the computing between two transfers
RANDOM = ("pieces", "single-device")  # what ranks draw: their pieces, or the whole value
RECOMPUTES = ("cheap", "none", "attention", "block")  # see Plan; module paths are possible too
OWN_ORDER = "auto"  # a schedule that is made for the stages' costs
_SEE = "Correct the plan; `partc explain PTC020` shows one."
_MOST_BYTES = 2**60

_WORDS = {
    "batch": ("global", "local"),
    "batch_norm": ("global", "local"),
    "random": RANDOM,
    "compile": COMPILERS,
    "reduce": ("step", "microbatch"),
    "backend": BACKENDS,
}
# The least and the most. Plans come from strangers: a schedule lists every microbatch of a rank.
_NUMBERS = {
    "microbatches": (1, 65_536),
    "prefetch": (0, 10_000),
    "overlap_pieces": (0, 10_000),
    "virtual_stages": (0, 10_000),
    "memory_bytes": (0, _MOST_BYTES),
}
_EXAMPLES = {"preset": "fsdp", "schedule": "1f1b"}
_FLAGS = ("messages", "profiler_ranges")
_TEXTS = ("preset", "order")
_LISTS = ("stages", "notes", "hooks")
ALLOWED = (*ALLOWED_TABLES,)  # what changes a step's numbers, and so is never chosen silently
_TABLES = ("mesh", "inputs", "params", "gather", "scatter", "values", *OWN_TABLES)
PLAIN = {
    *_WORDS, *_NUMBERS, *_TEXTS, *_LISTS, "schedule", "recompute", "bucket_mb", "profiler_ranges"
}  # fmt: skip
FIELDS = {
    *_WORDS, *_NUMBERS, *_TEXTS, *_LISTS, *_TABLES, *DECIDED,
    "schedule", "recompute", "bucket_mb", "allow", *_FLAGS,
}  # fmt: skip


def check_fields(table: Mapping[str, Any], where: str) -> None:
    """PlanError if a field that is there is none of its words, no such number, or another thing.

    ``where`` is what errors call the table.
    """
    for name, given in table.items():
        rows_are_here = name == "schedule" and table.get("order")  # whatever made them
        check = _text if rows_are_here else _check_of(name)
        check(name, given, where)


def check_places(table: Mapping[str, Any], where: str) -> None:
    """PlanError for a field of the plan that stands behind the head of a table, so that it would be
    an entry of that.
    """
    for name in _TABLES:
        own = _entries_of(name)
        entries = table.get(name, {})
        for key, given in entries.items() if isinstance(entries, Mapping) else ():
            if key in FIELDS - own and given != "whole" and _fits(key, given):
                raise plan_error(
                    where, f"{key!r} stands in the table [{name}]",
                    "a line belongs to the last [table] above it",
                    f"Write {key} = ... above the first line in brackets.",
                )  # fmt: skip


def _entries_of(name: str) -> set[str]:
    """The entries of a table that has a class of its own; none of others."""
    return {each.name for each in fields(OWN_TABLES[name].made)} if name in OWN_TABLES else set()


def _fits(name: str, given: Any) -> bool:
    """Whether a field may be this; tables are entries in any case."""
    try:
        check_fields({name: given}, name)
    except PlanError:
        return False
    return not isinstance(given, Mapping)


def plan_error(where: str, what: str, why: str, do: str = "") -> PlanError:
    """The refusal of a plan; ``do``: "" says how to see a correct one."""
    return PlanError(where=where, what=what, why=why, do=do or _SEE)


def _check_of(name: str) -> Callable[[str, Any, str], None]:
    """The function that checks a field: of its own, or that of its kind."""
    if name in _OWN:
        return _OWN[name]
    kinds = ((_WORDS, _word), (_NUMBERS, _number), (_TEXTS, _text), (_LISTS, _list))
    return next((check for names, check in kinds if name in names), _table)


def _word(name: str, given: Any, where: str) -> None:
    if not isinstance(given, str) or given not in _WORDS[name]:
        raise _no_word(name, given, where, _WORDS[name])


def _no_word(name: str, given: Any, where: str, words: Iterable[str]) -> PlanError:
    listed = ", ".join(map(repr, words))
    field = name.partition(".")[0]
    do = _meant(field, given) or did_you_mean(given, words) or _listed(field, words)
    if name == "batch" and not isinstance(given, str):
        do = "Pass example inputs as the third argument, or as inputs=."
        if isinstance(given, int):
            do = "Leave it out: how many rows a step takes follows from the example inputs."
    if name == "random" and isinstance(given, int):
        do = f"A seed is said to the stage: stage.seed({int(given)}). {do}"
    what = f"{name} = {quoted(given)} means nothing"
    return plan_error(where, what, f"it is one of {listed}", do)


def _listed(name: str, words: Iterable[str]) -> str:
    """The words of a field, with what each says."""
    says = SAYS.get(name, {})
    listed = [f"{word!r}, {says[word]}" if word in says else repr(word) for word in words]
    return f"Write {'; or '.join(listed)}." if says else f"Write one of {', '.join(listed)}."


def _meant(name: str, given: Any) -> str:
    """What to write for a word of another tool; "" for one that is unknown."""
    if not isinstance(given, str | bool):
        return ""
    word = MEANT.get(name, {}).get(given.lower() if isinstance(given, str) else given)
    if word is None:
        return ""
    said = SAYS.get(name, {}).get(word, "")
    return f"Write {word!r}{said and ': ' + said}."


def _number(name: str, given: Any, where: str) -> None:
    least, most = _NUMBERS[name]
    if isinstance(given, int) and not isinstance(given, bool) and least <= given <= most:
        return
    unit = " of bytes" if name == "memory_bytes" else ""
    range_ = f"{least} or more" if most == _MOST_BYTES else f"from {least} to {most:,}"
    do = f"Write a whole number{unit}, {range_}"
    do += ", without quotation marks." if isinstance(given, str) else "."
    if name == "memory_bytes" and not isinstance(given, int):
        do += " 16 GB are 16_000_000_000."
    raise plan_error(where, f"{name} = {quoted(given)} is no such number", f"it is {range_}", do)


def _text(name: str, given: Any, where: str) -> None:
    if not isinstance(given, str):
        words = given if isinstance(given, list | tuple) else ()
        joined = "+".join(map(str, words)) if words and name == "preset" else "..."
        joined = _EXAMPLES.get(name, joined) if joined == "..." else joined
        do = f'Write a text: {name} = "{joined}".'
        raise plan_error(where, f"{name} = {quoted(given)} means nothing", "it is a text", do)


def _list(name: str, given: Any, where: str) -> None:
    texts = given if isinstance(given, list | tuple) else [None]
    if not all(isinstance(each, str) for each in texts):
        do = f'Write a list: {name} = ["...", "..."].'
        if name == "stages":
            do = (
                "Write the modules at which stages behind the first begin: "
                'stages = ["blocks.4"]. How many there are, the axis pp and virtual_stages say.'
            )
        raise plan_error(
            where, f"{name} = {quoted(given)} means nothing", "it is a list of texts", do
        )


def _table(name: str, given: Any, where: str) -> None:
    if not isinstance(given, Mapping):
        do = f"Write a line [{name}], and its entries below it."
        raise plan_error(where, f"{name} = {quoted(given)} means nothing", "it is a table", do)


def _gather(name: str, given: Any, where: str) -> None:
    _table(name, given, where)
    for axis, life in given.items():
        if axis in ("use", "step") and isinstance(life, str):
            do = f'Write gather.{life} = "{axis}".'
            raise plan_error(
                where, f"gather.{axis} = {life!r} means nothing", "axes come first", do
            )
        if life not in ("use", "step"):
            raise _no_word(f"gather.{axis}", life, where, ("use", "step"))


def _scatter(name: str, given: Any, where: str) -> None:
    _table(name, given, where)
    for axis, dim in given.items():
        if not isinstance(dim, int) or isinstance(dim, bool) or not 0 <= dim < 64:
            what = f"scatter.{axis} = {quoted(dim)} is no dim"
            swapped = axis.isdigit() and isinstance(dim, str)
            do = f"Write scatter.{dim} = {axis}." if swapped else f"Write scatter.{axis} = 1."
            raise plan_error(where, what, "dims are counted from 0", do)


def _recompute(name: str, given: Any, where: str) -> None:
    paths = given if isinstance(given, list | tuple) else ["" if given not in RECOMPUTES else given]
    if not all(isinstance(path, str) and path for path in paths):
        raise _no_word(name, given, where, (*RECOMPUTES, '["modules", ...]'))


def _allow(name: str, given: Any, where: str) -> None:
    if isinstance(given, str) and given in ALLOWED:
        do = f'Write allow = ["{given}"].'
        raise plan_error(where, f"allow = {given!r} means nothing", "it is a list of words", do)
    words = given if isinstance(given, list | tuple) else [given]
    if strange := [each for each in words if each not in ALLOWED]:
        raise _no_word(name, strange[0], where, ALLOWED)


def _bucket_mb(name: str, given: Any, where: str) -> None:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1e6:
        what, why = (
            f"bucket_mb = {quoted(given)} means nothing",
            "it is a number of megabytes, from 0",
        )
        raise plan_error(where, what, why, "Write one from 0 to below 1,000,000: bucket_mb = 100.")


def _decided(name: str, given: Any, where: str) -> None:
    if flaw := flaw_of(name, given):
        do = f"Write it as docs/reference/plan.md shows, or leave {name} out: it is then chosen."
        do = meant_by(name, given) or do
        entries = given.items() if isinstance(given, Mapping) else ()
        odd = next(((k, v) for k, v in entries if flaw_of(name, {k: v})), None)
        what = f"{name} = {quoted(given)}" if odd is None else f"{name}.{odd[0]} = {quoted(odd[1])}"
        raise plan_error(where, f"{what} means nothing", flaw, do)


def _flag(name: str, given: Any, where: str) -> None:
    if not isinstance(given, bool):
        what = f"{name} = {quoted(given)} means nothing"
        raise plan_error(where, what, "it is true or false", "Write true or false, or nothing.")


def _schedule(name: str, given: Any, where: str) -> None:
    """A name that is registered, or that of a file."""
    _text(name, given, where)
    if given and given != OWN_ORDER and not given.endswith(CSV) and not is_known(given):
        known = [*NAMES, OWN_ORDER]
        raise plan_error(
            where, f"schedule = {quoted(given)}: no such schedule",
            f"there are {', '.join(known)}", what_to_do(
                given, known, 'Take one of these, or name a file of your own: "own.csv".'
            ),
        )  # fmt: skip


_OWN: dict[str, Callable[[str, Any, str], None]] = {
    "gather": _gather, "scatter": _scatter, "recompute": _recompute, "bucket_mb": _bucket_mb,
    "allow": _allow, "schedule": _schedule, **dict.fromkeys(DECIDED, _decided),
    **dict.fromkeys(_FLAGS, _flag),
}  # fmt: skip
