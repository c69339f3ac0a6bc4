"""Prints one class for pipeline stages of one rank that have the same text.

An interleaved schedule gives a rank several stages: layers 0 to 3 and layers 8 to 11. Instances of
their class differ in the number ``n`` of the first layer, an argument of the class. A buffer that
several stages read, such as a table of positions, is held by the first of them; then the class
takes the table of the buffers that an instance makes as another argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partc.codegen.files.stored_tables import stored_tables
from partc.codegen.repeats.layers import FIRST
from partc.codegen.text import Line

if TYPE_CHECKING:
    from partc.codegen.files.stages import StageText


def take_in(stage: StageText, other: StageText) -> bool:
    """Make ``other`` an instance of the class of ``stage`` and return True, if their texts agree.

    Their buffers may differ if ``other`` makes none itself and reads those of ``stage``.
    """
    if stage.layers is None or other.layers is None or _text(stage) != _text(other):
        return False
    mine, theirs = (stored_tables(s)[1]["BUFFERS"] for s in (stage, other))
    if mine != theirs and theirs:
        return False
    other.class_of = stage
    stage.lends |= mine != theirs
    stage.title = _and(stage.title, other.title)
    return True


def _text(stage: StageText) -> tuple[Any, ...]:
    """The text of a stage's class without its buffers, to compare stages by."""
    made = stage.declarations(lambda _: FIRST, ["param"])
    return stage.functions, made, stored_tables(stage)[1]["SHARDS"]


def declared(stage: StageText) -> list[Line]:
    """The statements of ``__init__`` that make a stage's parameters, buffers and blocks."""
    lines = [Line("self.rng = rng")] if stage.draws else []
    lines += [Line("self.partials = partials")] if stage.ends.reduces else []
    if any(f"self.{FIRST}" in each["body"] for each in stage.functions):
        lines.append(Line(f"self.{FIRST} = {FIRST}"))
    if not stage.lends:
        return [*lines, *stage.declarations(stage.read_table)]
    made = f"self.register_buffer(name, {stage.helpers.use('empty')}(*known))"
    buffers = [Line("for name, (_, *known) in buffers.items():"), Line(made, indent=1)]
    return [*lines, *stage.declarations(stage.read_table, ["param"]), *buffers]


def given(stage: StageText) -> dict[str, str]:
    """The arguments of a stage's class beside the mesh, with their types: ``n: int``."""
    texts = (f"[{FIRST}]", f"{{{FIRST} ", f"{{{FIRST}}}", f"self.{FIRST} = {FIRST}")
    reads = any(text in line.code for line in declared(stage) for text in texts)
    first = {FIRST: "int"} if reads else {}
    first |= {"buffers": "dict[str, tuple]"} if stage.lends else {}
    first |= {"partials": stage.helpers.use("Partials")} if stage.ends.reduces else {}
    return first | ({"rng": "Draws"} if stage.draws else {})


def made(stage: StageText, first: int | None) -> str:
    """The call that makes an instance of a stage's class: ``Stage1(mesh, 4)``.

    ``first`` is the number of the stage's first layer.
    """
    wanted = given(stage.class_of)
    arguments = ["mesh", *([str(first)] if FIRST in wanted else [])]
    if "buffers" in wanted:
        arguments.append("{}" if stage is not stage.class_of else stage.table("BUFFERS"))
    arguments += ["self.partials"] if stage.ends.reduces else []
    arguments += ["self.rng"] if stage.draws else []
    return f"{stage.name}({', '.join(arguments)})"


def _and(title: str, other: str) -> str:
    """The title of a class for several stages.

    >>> _and(_and("Stage 1", "Stage 3"), "Stage 5")
    'Stages 1, 3, 5'
    """
    return f"Stages {title.partition(' ')[2]}, {other.partition(' ')[2]}"
