"""The arguments and the statements of a block's ``__init__``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from partc.codegen.bodies.block_arguments import own_lines
from partc.codegen.bodies.tables import TABLES, declarations
from partc.codegen.calls.arguments import spelled
from partc.codegen.repeats.numbers import numbers_read
from partc.codegen.text import Line
from partc.quoting import literal

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
    read = numbers_read(read_by_methods(cls)) if cls.inner else {}
    rows = [row for row in rows if not cls.inner or f"self.{row.name}" in read]
    lines += [Line(f"self.{row.name} = {row.name}") for row in rows]
    lines += [Line("self.partials = partials")] if cls.adds_up else []
    if cls.gathers_weights:
        lines.append(Line("self.whole = Gathered()", "weights that are being gathered"))
    for kind, constant in TABLES.items():
        sized = bool(cls.run.kin)
        table = constant.lower() if sized else cls.table(constant)
        own = {node: a for node, a in cls.stored(kind).items() if "." not in a}
        some = len(own) < len(cls.stored(kind))
        lines += declarations(cls.graph, own, kind, table, cls.helpers, some, sized)
    return lines + [_instance(cls, inner) for inner in cls.inner]


def _instance(cls: BlockClass, inner: BlockClass) -> Line:
    """The statement that makes an inner block: ``self.layer_1 = T5LayerFF(mesh, ...)``."""
    within = cls.helpers.use("rows_within")
    tables = [
        constant.lower() if cls.run.kin else cls.table(constant) for constant in inner.tables()
    ]
    given = ["mesh"] if cls.is_distributed else []
    given += [f"{within}({table}, {literal(inner.attribute)})" for table in tables]
    given += [*(["partials"] if inner.adds_up else []), *(["rng"] if inner.draws else [])]
    path = inner.run.module.removeprefix(cls.run.module)
    given += ["f" + literal(f"{{self.name}}{path}")] if inner.is_named else []
    numbers = zip(inner.run.numbers, inner.run.given, strict=True)
    given += [f"{row.name}={x if isinstance(x, str) else spelled(x)}" for row, x in numbers]
    return Line(f"self.{inner.attribute} = {inner.name}({', '.join(given)})")


def read_by_methods(cls: BlockClass) -> list[fx.Node]:
    """The calls that the methods of a class make themselves."""
    items = (item for side in cls.sides for item in side.loop.items())
    return [item for item in items if isinstance(item, fx.Node)]
