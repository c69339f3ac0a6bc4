"""The text form of a plan: reading the fields of a plan.toml, and writing its lines.

``Plan.parse`` and ``str(plan)`` are made of these functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from partc.errors import PlanError
from partc.file_text import Unreadable, toml_table
from partc.other_words import told_elsewhere
from partc.plan.allowed import OWN_TABLES
from partc.plan.decided import read_decided
from partc.plan.entries import number_in
from partc.plan.field_kinds import FIELDS, check_fields, check_places, plan_error
from partc.plan.mesh import Mesh
from partc.plan.plan_values import PlannedLayout, read_value
from partc.plan.sharding import Layout, cut
from partc.wrong_calls import RENAMED, did_you_mean

_EACH_MICROBATCH = ("zero2", "fsdp", "hsdp")  # presets that sum gradients once per microbatch
# Comments at the head of a plan: passes of users' packages that ran, and passes that did not.
PASS_SIGNS = (("other_passes", "# passes of others: "), ("left_out", "# left out: "))


OF_MESH = ("axes", "machine", "devices", "levels", "dp", "tp", "pp")  # keys of a mesh.toml alone


def _plain_quotes(text: str) -> str:
    """What to do about typographic quotation marks, which look much like those of TOML."""
    odd = next((each for each in "\u201c\u201d\u201e\u2018\u2019" if each in text), "")
    return f"Write plain quotation marks, \" or ', in the place of {odd}." if odd else ""


def read_fields(text: str, where: str) -> dict[str, Any]:
    """The arguments of ``Plan`` that a plan's text gives; keys that are missing are left out.

    ``where`` is what errors call the text.

    Raises:
        PlanError: this is not TOML, or an entry is unknown or has a wrong value.
    """
    try:
        table = toml_table(text)
    except Unreadable as error:
        from partc.plan.ports.given import no_json  # which reads plans itself

        raise no_json(text, where) or plan_error(
            where, "this is not TOML", str(error), _plain_quotes(text)
        ) from None
    unknown = sorted(set(table) - FIELDS)  # misspelt: the search would decide instead
    if unknown and unknown[0] in RENAMED:
        old, new = unknown[0], RENAMED[unknown[0]]
        raise plan_error(
            where, f"there is no field {old!r}", f"it is called {new!r}", f"Write {new} = ..."
        )
    if of_mesh := next((name for name in OF_MESH if name in unknown), ""):
        raise plan_error(
            where, "it is a mesh, and no plan", f"it has the key {of_mesh} of a mesh.toml",
            f'Pass it as the mesh, and a plan or a preset as the plan: mesh="{where}", plan="fsdp" '
            f"(or --mesh {where} --plan fsdp).",
        )  # fmt: skip
    if unknown:
        do = _no_table(table[unknown[0]], unknown[0]) or _told(unknown[0]) or _of_tool(table)
        why = "" if do else f"fields are {', '.join(sorted(FIELDS))}"
        raise plan_error(where, f"there is no field {unknown[0]!r}", why, do)
    check_places(table, where)
    check_fields(table, where)
    _check_reduce(table, where)
    mesh = Mesh(tuple(table["mesh"].items())) if "mesh" in table else None
    for name in ("params", "inputs"):
        table[name] = {
            k: _read_cuts(v, f"{where}, {name}.{k}") for k, v in table.get(name, {}).items()
        }
    table["values"] = {
        k: _read_value(v, f"{where}, values.{k}") for k, v in table.get("values", {}).items()
    }
    lists = {name: tuple(table.get(name, ())) for name in ("stages", "notes", "hooks", "allow")}
    if isinstance(table.get("recompute"), list):
        lists["recompute"] = tuple(table["recompute"])
    for name in OWN_TABLES.keys() & table.keys():
        table[name] = OWN_TABLES[name].read(table[name], where)
    return {**table, "mesh": mesh, **lists, **read_decided(table), **_read_passes(text)}


def _told(name: str) -> str:
    """What to write for a key that is another tool's, or misspelt; "" for one that says nothing."""
    told = told_elsewhere("plan", name.lower())
    return f"Leave it out: {told}." if told else did_you_mean(name, FIELDS)


def _of_tool(table: Mapping[str, Any]) -> str:
    """What to write in place of the keys of another tool; "" where they are of none."""
    from partc.plan.ports.given import meant_by  # which reads plans itself

    kind, do = meant_by(table)
    return do if kind else ""


def _check_reduce(table: Mapping[str, Any], where: str) -> None:
    """PlanError where a plan writes that gradients are summed once per step, and its preset says
    once per microbatch: the preset would win in silence.
    """
    word = sums_each_microbatch(table.get("preset", ""))
    if word and table.get("reduce") == "step":
        raise plan_error(
            where, f'reduce = "step" contradicts preset = "{word}"',
            f"{word} keeps gradients in shards, and sums them once per microbatch",
            "Leave reduce out, or write the plan without preset.",
        )  # fmt: skip


def sums_each_microbatch(preset: str) -> str:
    """The word of a preset by which gradients are summed once per microbatch; "" without one."""
    words = [word.strip() for word in preset.split("+")]
    return next((each for each in words if each in _EACH_MICROBATCH), "")


def _read_passes(text: str) -> dict[str, tuple[str, ...]]:
    """The fields that stand as comments at the head of a plan's text."""
    head = takewhile(lambda line: line.startswith("#"), text.splitlines())
    lines = [(name, line.removeprefix(sign)) for line in head for name, sign in PASS_SIGNS
             if line.startswith(sign)]  # fmt: skip
    return {name: tuple(listed.split(", ")) for name, listed in lines}


def pass_lines(name: str, passes: Sequence[str]) -> list[str]:
    """The comment that says which passes a plan was made with or without; none for no passes."""
    return [dict(PASS_SIGNS)[name] + ", ".join(passes)] if passes else []


def _read_cuts(entry: Any, where: str) -> dict[str, Layout]:
    if not isinstance(entry, Mapping):
        first = entry if isinstance(entry, int) and not isinstance(entry, bool) else 0
        name = re.split(r", (?:params|inputs)\.", where)[-1]
        raise plan_error(
            where, f"{entry!r} does not say where to cut", "cuts are written { axis = dim }",
            f'Write "{name}" = {{ dp = {first} }}, with an axis '
            "of the mesh and a dim from 0.",
        )  # fmt: skip
    cuts = {}
    for axis, at in entry.items():
        dim, outer = at if isinstance(at, list) and len(at) == 2 else (at, 1)
        if isinstance(at, Mapping):
            name = f'"{where.rpartition(".")[2]}.{axis}"'
            raise plan_error(
                where, f"{axis!r} is another table", "a name with dots stands in quotation marks",
                f"Write {name} = {{ axis = dim }}, with the whole name.",
            )  # fmt: skip
        if axis.isdigit() and isinstance(at, str):
            raise _swapped(where, axis, at)
        if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in (dim, outer)):
            number = number_in(at) if isinstance(at, str) else None
            do = (
                "" if number is None else f"Write {{ {axis} = {number} }}, without quotation marks."
            )
            if type(at) is int:
                do = "Dims are counted from 0: the last one of a matrix is 1."
            raise plan_error(where, f"{at!r} is not a dim", "write dim, or [dim, outer]", do)
        cuts[axis] = cut(dim, outer)
    return cuts


def _no_table(given: Any, name: str) -> str:
    """What to do about a table that a plan has not, whose keys are those of a plan."""
    if isinstance(given, Mapping) and given and {*given} <= {*FIELDS}:
        return f"Take the line [{name}] away: its keys stand at the top of a plan."
    return ""


def _swapped(where: str, dim: str, axis: str) -> PlanError:
    return plan_error(
        where, f"{{ {dim} = {quote(axis)} }} names the dim before the axis",
        "cuts are written { axis = dim }", f"Write {{ {axis} = {dim} }}.",
    )  # fmt: skip


def _read_value(entry: Any, where: str) -> dict[str, PlannedLayout]:
    for axis, at in entry.items() if isinstance(entry, Mapping) else ():
        if axis.isdigit() and isinstance(at, str):
            raise _swapped(where, axis, at)
    try:
        return read_value(entry)
    except ValueError as error:
        raise plan_error(where, f"{entry!r} is not understood", str(error)) from None


def write_cuts(cuts: Mapping[str, Layout]) -> str:
    """The shards of one tensor as TOML: ``{ tp = dim }``, or ``{ tp = [dim, outer] }``."""
    texts = [f"{a} = {x.dim if x.outer == 1 else f'[{x.dim}, {x.outer}]'}" for a, x in cuts.items()]
    return "{ " + ", ".join(texts) + " }" if texts else "{}"


def word_lines(name: str, given: str | tuple[str, ...]) -> list[str]:
    """The TOML line of a field that is one word or a list of words."""
    if isinstance(given, str):
        return [f"{name} = {quote(given)}"]
    return [f"{name} = [{', '.join(map(quote, given))}]"]


def list_lines(name: str, texts: Iterable[str]) -> list[str]:
    """The TOML lines of a list with an entry per line; none if the list is empty."""
    rows = [f"    {quote(text)}," for text in texts]
    return [f"{name} = [", *rows, "]"] if rows else []


def section_lines(name: str, entries: Mapping[str, str]) -> list[str]:
    """The TOML lines of a table; none if the table is empty."""
    return (
        ["", f"[{name}]", *(f"{key} = {text}" for key, text in entries.items())] if entries else []
    )


def quote(text: str) -> str:
    """A text as TOML, in quotation marks."""
    return f'"{escape(text)}"'


def escape(text: str) -> str:
    """A text as it stands between the quotation marks of TOML."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped)
