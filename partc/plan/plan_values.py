"""The plan's ``[values]``: layouts of calls' results that do not follow from the rest of the plan.

    "model.layers.*:add" = { tp = 1 }
    "model.layers.*.mlp:mul" = "whole"
    "model.norm:d_mul" = { tp = "whole, 1 -> sum" }
    "model.embed_tokens:embedding" = { dp = "1, whole -> 2 -> 0" }

A name is a module's path and an op, as ``passes/shard/value_names.py`` writes it; a parameter's
name stands for the parameter in use. On an axis, ``1`` is a shard along dim 1, ``"whole"`` is
replicated, ``"sum"`` an unfinished sum and ``"max"`` an unfinished maximum. The text
``"1, whole -> 2 -> 0"`` names the operands' layouts, then the result's, then the layout that the
result is converted to for its readers. An entry is about the axes that it names; the entry
``"whole"`` is about all axes. On other axes the layout follows from the rest of the plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partc.plan.sharding import Layout, M, R, U, cut

_WORDS = {"whole": R, "sum": U, "max": M}
_FORMS = f"write dim, dim/outer, {', '.join(_WORDS)}"  # dims are counted from 0
_CUT = re.compile(r"(\d+)(?:/(\d+))?(~?)\Z", re.ASCII)


@dataclass(frozen=True)
class PlannedLayout:
    """The planned layout of a call's (first) result on one mesh axis.

    ``ins`` has the operands' layouts, where several strategies give this result. ``then`` is the
    layout that the result is converted to for its readers; None for no conversion.
    """

    out: Layout = R
    ins: tuple[Layout, ...] | None = None
    then: Layout | None = None

    def allows(self, ins: tuple[Layout, ...], outs: tuple[Layout, ...]) -> bool:
        """Whether a strategy with these operand and result layouts agrees with the plan."""
        return (outs[0] if outs else R) == self.out and self.ins in (None, ins)

    @property
    def layouts(self) -> list[tuple[int, Layout]]:
        """The named layouts by position: those of the operands, if any, then the result's."""
        return list(enumerate((*(self.ins or ()), self.out)))


Values = Mapping[str, Mapping[str, PlannedLayout]]  # name or pattern -> axis -> layout


def planned_on(entry: Mapping[str, PlannedLayout] | None, axis: str) -> PlannedLayout | None:
    """The planned layout on one axis; None if the entry does not mention the axis."""
    if entry is None:
        return None
    return entry.get(axis) if entry else PlannedLayout()


def read_value(entry: Any) -> dict[str, PlannedLayout]:
    """Read an entry of ``[values]``; ValueError says what is wrong with the entry."""
    if entry == "whole":
        return {}
    if not isinstance(entry, Mapping):
        raise ValueError(f'{entry!r} is neither "whole" nor {{ axis = dim }}')
    return {axis: _read(given) for axis, given in entry.items()}


def write_value(planned: Mapping[str, PlannedLayout]) -> str:
    """The entry as TOML; ``read_value`` reads it back."""
    if not planned:
        return '"whole"'
    return "{ " + ", ".join(f"{axis} = {_write(each)}" for axis, each in planned.items()) + " }"


def _read(given: Any) -> PlannedLayout:
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return PlannedLayout(cut(given))
    if not isinstance(given, str):
        raise ValueError(f"{given!r} is no layout: {_FORMS}")
    if given.count("->") > 2:
        raise ValueError(f"{given!r} is no layout: operands -> result -> as it is read")
    parts = given.split("->")
    if len(parts) == 1:
        return PlannedLayout(_layout(given))
    ins = tuple(_layout(text) for text in parts[0].split(",") if text.strip())
    return PlannedLayout(_layout(parts[1]), ins, *map(_layout, parts[2:]))


def _layout(text: str) -> Layout:
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    found = _CUT.match(text)
    if found is None or found.group(2) == "0":
        raise ValueError(f"{text!r} is no layout: {_FORMS}")
    return cut(int(found.group(1)), int(found.group(2) or 1), permuted=bool(found.group(3)))


def _write(planned: PlannedLayout) -> str:
    out = _text(planned.out)
    if planned.ins is not None:
        then = "" if planned.then is None else f" -> {_text(planned.then)}"
        return f'"{", ".join(map(_text, planned.ins))} -> {out}{then}"'
    return out if out.isdigit() else f'"{out}"'


def _text(layout: Layout) -> str:
    for word, each in _WORDS.items():
        if layout == each:
            return word
    outer = f"/{layout.outer}" if layout.outer > 1 else ""
    return f"{layout.dim}{outer}{'~' if layout.permuted else ''}"
