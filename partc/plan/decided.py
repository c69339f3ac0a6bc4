"""What choices write into a plan as tables and lists: which entries there may be, and their text.

A choice is made by what machines take; the plan then has it in bytes, FLOPs and numbers, so that a
plan gives the same programs on any machines. None stands for what nobody has decided yet. An empty
table or list is decided: nothing of the kind happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from partc.errors import PlanError
from partc.plan.mesh import Mesh
from partc.wrong_calls import did_you_mean

KINDS = ("all_gather", "all_reduce", "reduce_scatter")  # of transfers that share buckets
MEMORY = "memory"  # in ``flops_per_byte``, beside the mesh axes
WAYS = ("forward", "backward")  # in which pipeline stages send
BACKENDS = GLOO, NCCL = "gloo", "nccl"  # what carries tensors between ranks
PLACES = 3  # of a decimal number that a choice writes: more would only look exact

Sizes = Mapping[str, Mapping[str, float]]
Sends = Mapping[str, int | tuple[int, ...]]


def rounded(number: float) -> float:
    """A number as choices write it: ``0.0123456`` -> ``0.0123``."""
    return float(f"{number:.{PLACES}g}")


# reading ------------------------------------------------------------------------------------------
def flaw_of(name: str, given: Any) -> str:
    """What is wrong with an entry that a choice writes; empty if nothing is."""
    return _FLAWS[name](given)


_EXAMPLES = {  # by entry, with an axis and a size for ``{}``
    "hierarchical": "{ dp_shard = { dp_replicate = 0.25 } }",
    "bucket_copy_mb": "{ dp = { all_gather = 0.3, reduce_scatter = 0.25 } }",
    "grad_parts": "{ dp = 2 }",
    "flops_per_byte": "{ memory = 60, dp = 900 }",
    "sends": "{ forward = 1, backward = 1 }",
    "early_sums": "[0, 1]",
}


def meant_by(name: str, given: Any) -> str:
    """What to write instead of a wrong entry; "" if nobody knows."""
    if name != "bucket_copy_mb" or _sizes_flaw(given):
        example = _EXAMPLES.get(name)
        return f"Write {name} = {example}, or leave it out: it is then chosen." if example else ""
    if {*given} & {*KINDS}:
        return f"Axes come first: {name} = {{ dp = {{ {next(iter(given))} = 0.3 }} }}."
    return did_you_mean(_strange_kind(given), KINDS)


def _is_number(given: Any) -> bool:
    is_real = isinstance(given, int | float) and not isinstance(given, bool)
    return is_real and 0 <= given < float("inf")


def _is_count(given: Any, least: int = 0) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and least <= given <= 65_536


def _sizes_flaw(given: Any) -> str:
    tables = given.values() if isinstance(given, Mapping) else [None]
    if all(isinstance(each, Mapping) and all(map(_is_number, each.values())) for each in tables):
        return ""
    return "it has a table of megabytes for each axis, from 0"


def _copies_flaw(given: Any) -> str:
    if flaw := _sizes_flaw(given):
        return flaw
    strange = _strange_kind(given)
    return f"{strange!r} is none: transfers are {', '.join(KINDS)}" if strange else ""


def _strange_kind(given: Sizes) -> str:
    """The first word for a transfer that is none; "" if all are."""
    return next((kind for each in given.values() for kind in each if kind not in KINDS), "")


def _parts_flaw(given: Any) -> str:
    counts = given.values() if isinstance(given, Mapping) else [None]
    return "" if all(_is_count(each, 1) for each in counts) else "it has a number from 1 per axis"


def _clock_flaw(given: Any) -> str:
    numbers = given.values() if isinstance(given, Mapping) else [None]
    return "" if all(map(_is_number, numbers)) else "it has a number of FLOPs per axis, from 0"


def _stages_flaw(given: Any) -> str:
    numbers = given if isinstance(given, list | tuple) else [None]
    return (
        "" if all(map(_is_count, numbers)) else "it is a list of stages, counted from 0, as [0, 1]"
    )


def _sends_flaw(given: Any) -> str:
    if not isinstance(given, Mapping) or {*given} - {*WAYS}:
        return f"it has the entries {' and '.join(WAYS)}"
    each = (x if isinstance(x, list | tuple) else [x] for x in given.values())
    fine = all(all(_is_count(number) for number in numbers) for numbers in each)
    return "" if fine else "it has a number of messages from 0, or a list with one for each link"


_FLAWS: dict[str, Callable[[Any], str]] = {
    "hierarchical": _sizes_flaw, "bucket_copy_mb": _copies_flaw, "grad_parts": _parts_flaw,
    "flops_per_byte": _clock_flaw, "early_sums": _stages_flaw, "sends": _sends_flaw,
}  # fmt: skip
DECIDED = tuple(_FLAWS)


def read_decided(table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan that choices write, as ``Plan`` has them, of those that are there."""
    found = {name: table[name] for name in DECIDED if name in table}
    if "early_sums" in found:
        found["early_sums"] = tuple(found["early_sums"])
    if "sends" in found:
        found["sends"] = {
            way: tuple(each) if isinstance(each, list) else each
            for way, each in found["sends"].items()
        }
    return found


def check_decided(plan: Any, mesh: Mesh) -> None:
    """PlanError if a decision speaks of an axis that the mesh does not have, or contradicts another
    one.
    """
    for name in ("hierarchical", "bucket_copy_mb", "grad_parts", "flops_per_byte"):
        table = getattr(plan, name) or {}
        others = [*table.values()] if name == "hierarchical" else []
        axes = {*table, *(axis for each in others for axis in each)} - {MEMORY}
        for axis in sorted(axes - {*mesh.names}):
            raise PlanError(
                where=f"plan, {name}",
                what=f"there is no axis {axis!r}",
                why=f"the mesh has {', '.join(mesh.names) or 'no axes'}",
                do=f"Use one of these names, or leave {name} out: it is then chosen anew.",
            )
    check_messages(plan)


def check_messages(plan: Any) -> None:
    """PlanError if the plan asks for messages on another backend than gloo."""
    if plan.messages and plan.backend not in ("", GLOO):
        raise PlanError(
            where="plan, messages",
            what=f"messages = true, and the backend is {plan.backend}",
            why="messages stand in for copies that gloo makes, and nothing else does",
            do='Write messages = false, or backend = "gloo".',
        )


# writing ------------------------------------------------------------------------------------------
def number_text(number: float) -> str:
    """A number as TOML that reads back to the same one: ``25``, ``0.125``."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def inline(entry: Any) -> str:
    """An entry as TOML: a number, a list ``[1, 2]``, a table ``{ dp = 0.5 }``."""
    if isinstance(entry, Mapping):
        texts = ", ".join(f"{name} = {inline(each)}" for name, each in entry.items())
        return f"{{ {texts} }}" if texts else "{}"
    if isinstance(entry, list | tuple):
        return f"[{', '.join(map(inline, entry))}]"
    return number_text(entry)


def decided_lines(plan: Any) -> list[str]:
    """The lines of what choices have written into a plan, each on a line of its own."""
    given = {name: getattr(plan, name) for name in DECIDED}
    return [f"{name} = {inline(each)}" for name, each in given.items() if each is not None]
