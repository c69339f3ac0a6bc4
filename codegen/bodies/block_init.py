"""The arguments and the statements of a block's ``__init__``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partc.codegen.bodies.block_arguments import own_lines
from partc.codegen.bodies.tables import TABLES, declarations
from partc.codegen.text import Line

if TYPE_CHECKING:
    from partc.codegen.bodies.classes import BlockClass


def init_arguments(cls: BlockClass) -> str:
    """The arguments of ``__init__`` behind ``self``, with their types."""
    given = {
        "mesh: DeviceMesh": cls.is_distributed,
        **{f"{constant.lower()}: dict[str, tuple]": True for constant in cls.tables()},
        "partials: Partials": cls.adds_up,
        "rng: Draws": cls.draws, "name: str": cls.is_named,
    }  # fmt: skip
    rows = [] if cls.run.is_called else cls.run.numbers  # they are arguments of the methods
    numbers = [f"{row.name}: {row.type_name}" for row in rows]
    return ", ".join([*(text for text, is_given in given.items() if is_given), *numbers])


def init_lines(cls: BlockClass) -> list[Line]:
    """The statements that make the block's parameters and buffers."""
    lines = own_lines(draws=cls.draws, named=cls.is_named)
    rows = [] if cls.run.is_called else cls.run.numbers
    lines += [Line(f"self.{row.name} = {row.name}") for row in rows]
    lines += [Line("self.partials = partials")] if cls.adds_up else []
    if cls.gathers_weights:
        lines.append(Line("self.whole = Gathered()", "weights that are being gathered"))
    for kind, constant in TABLES.items():
        sized = bool(cls.run.kin)
        table = constant.lower() if sized else cls.table(constant)
        lines += declarations(cls.graph, cls.stored(kind), kind, table, cls.helpers, sized=sized)
    return lines
