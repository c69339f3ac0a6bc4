"""The statements that make the blocks of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partc.codegen.bodies.classes import BlockClass
from partc.codegen.calls.arguments import spelled
from partc.codegen.files.spelling import numbered, with_numbers
from partc.codegen.repeats.layers import FIRST
from partc.codegen.repeats.runs import Run
from partc.codegen.text import Line
from partc.quoting import literal

if TYPE_CHECKING:
    from partc.codegen.files.emit import RoleText


def span_of_table(text: RoleText, cls: BlockClass) -> str:
    """The blocks whose parameters or buffers one table has."""
    same = [c for c in text.own_classes if cls.run.kin and cls in (c, c.sized_like)]
    return ", ".join(text.span(c.run) for c in same) or cls.span


def instances(text: RoleText, cls: BlockClass) -> Line:
    """The statement that makes the blocks of a run: a list of them, or the only one."""
    run = cls.run
    name, numbers = _numbered(text, run) if cls.is_named else ("", "")
    differing = [row for row in run.numbers if len({*row.values}) > 1 or not run.kin]
    given = ["mesh"] if text.is_distributed else []
    given += [*cls.tables().values(), *(["partials"] if cls.adds_up else [])]
    given += ["self.rng"] if cls.draws else []
    given += [name] if name else []
    given += [
        f"{row.name}={row.name if row in differing else spelled(row.values[0])}"
        if run.kin else row.name
        for row in ([] if run.is_called else run.numbers)
    ]  # fmt: skip
    made = f"{cls.name}({', '.join(given)})"
    remark = text.span(run)
    if run.is_one_module:
        return Line(f"self.{cls.attribute} = {made}", remark)
    over = f"i in {numbers}" if name else f"_ in range({len(run.layers)})"
    if differing:
        over = with_numbers(differing, numbers if name else "")
    return Line(f"self.{cls.attribute} = nn.ModuleList([{made} for {over}])", remark)


def _numbered(text: RoleText, run: Run) -> tuple[str, str]:
    """The name of block ``i`` of a run, as an expression, and the numbers that ``i`` has."""
    if run.is_one_module:
        return literal(run.module), ""
    parent, _, first = run.layers[0].rpartition(".")
    numbers = [int(layer.rpartition(".")[2]) for layer in run.layers]
    steady = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    start = f"{first}, " if int(first) else ""
    over = f"range({start}{numbers[-1] + 1})" if steady else literal(tuple(numbers))
    if text.layers is None or not text.layers.has(run.layers[0]):
        return numbered(literal(parent), "i"), over
    if text.layers.path == parent:
        return numbered(literal(parent), f"{FIRST} + i"), over
    return numbered(text.layers.literal(parent), "i"), over
