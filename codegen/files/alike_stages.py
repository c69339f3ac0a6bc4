"""Stages of one rank that have the same text are instances of one class.

They differ in the number of their first layer, which the class then takes, and in who holds buffers
that several of them read: the first one does, and its class takes the table of what to make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partc.codegen.repeats.layers import FIRST
from partc.codegen.text import Line

if TYPE_CHECKING:
    from partc.codegen.files.stages import StageText


def take_in(stage: StageText, other: StageText) -> bool:
    """Let another stage be an instance of this one's class, if it is alike: it may read buffers of
    this one.
    """
    if stage.layers is None or other.layers is None or _text(stage) != _text(other):
        return False
    mine, theirs = (s.stored_tables()[1]["BUFFERS"] for s in (stage, other))
    if mine != theirs and theirs:
        return False
    other.class_of = stage
    stage.lends |= mine != theirs
    stage.title = _and(stage.title, other.title)
    return True


def _text(stage: StageText) -> tuple[Any, ...]:
    """What a stage's class says, but for its buffers."""
    made = stage.declarations(lambda _: FIRST, ["param"])
    return stage.functions, stage.seeds, made, stage.stored_tables()[1]["SHARDS"]


def declared(stage: StageText) -> list[Line]:
    """The statements that make a class's parameters, buffers and blocks."""
    if not stage.lends:
        return stage.declarations(stage.read_table)
    made = f"self.register_buffer(name, {stage.helpers.use('empty')}(*known))"
    buffers = [Line("for name, (_, *known) in buffers.items():"), Line(made, indent=1)]
    return [*stage.declarations(stage.read_table, ["param"]), *buffers]


def given(stage: StageText) -> dict[str, str]:
    """What a class takes beside the mesh, with types."""
    reads = any(f"[{FIRST}]" in line.code for line in declared(stage))
    first = {FIRST: "int"} if reads else {}
    return first | ({"buffers": "dict[str, tuple]"} if stage.lends else {})


def made(stage: StageText, first: int | None) -> str:
    """The call that makes a stage whose layers begin at ``first``."""
    wanted = given(stage.class_of)
    arguments = ["mesh", *([str(first)] if FIRST in wanted else [])]
    if "buffers" in wanted:
        arguments.append("{}" if stage is not stage.class_of else stage.table("BUFFERS"))
    return f"{stage.name}({', '.join(arguments)})"


def _and(title: str, other: str) -> str:
    """
    >>> _and(_and("Stage 1", "Stage 3"), "Stage 5")
    'Stages 1, 3, 5'
    """
    return f"Stages {title.partition(' ')[2]}, {other.partition(' ')[2]}"
