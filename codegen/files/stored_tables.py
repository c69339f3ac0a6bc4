"""The tables of a role: one line for each parameter and buffer, of the step or of a block."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import fx

from partc.codegen.bodies.classes import BlockClass
from partc.codegen.bodies.tables import TABLES, is_listed, row, table
from partc.codegen.files.instances import span_of_table
from partc.codegen.files.spelling import row_name, spread_rows
from partc.codegen.text import Line
from partc.graph import typed, value
from partc.quoting import comment, literal

if TYPE_CHECKING:
    from partc.codegen.files.emit import RoleText


def stored_tables(
    text: RoleText, elsewhere: Collection[str] = ()
) -> tuple[list[str], dict[str, list[Line]]]:
    """The tables of blocks, and the entries of SHARDS and BUFFERS.

    Parameters named in ``elsewhere`` stand in another stage's table already and are left out.
    """
    tables, entries = [], {}
    for kind, constant in TABLES.items():
        standing = text.standing(kind)
        here = {n: a for n, a in standing.items() if value(n).name not in elsewhere}
        entries[constant] = _rows(text, here)
        for cls in text.own_classes:
            if cls.stored(kind):
                name = cls.table(constant)
                if cls.sized_like is None:
                    remark = f"of one of {span_of_table(text, cls)}"
                    tables.append(table(name, remark, block_rows(text, cls)[constant]))
                entries[constant].append(Line(spread_rows(cls, name, text.layers is not None)))
    return tables, entries


def share_tables(text: RoleText) -> None:
    """Let runs of one kin whose blocks have the same sizes read the same tables."""
    for cls in text.own_classes:
        kin = [c for c in text.own_classes if cls.run.kin and c.run.kin == cls.run.kin]
        before = [c for c in kin[: kin.index(cls)] if c.sized_like is None] if kin else []
        rows = block_rows(text, cls) if before else {}
        cls.sized_like = next((c for c in before if block_rows(text, c) == rows), None)


def block_rows(text: RoleText, cls: BlockClass) -> dict[str, list[Line]]:
    """The entries of a block's own tables of parameters and of buffers."""
    return {name: _rows(text, cls.stored(kind), cls) for kind, name in TABLES.items()}


def _rows(
    text: RoleText, stored: Mapping[fx.Node, str], cls: BlockClass | None = None
) -> list[Line]:
    """The table entries of parameters or buffers, with the names that those of a block's class have
    in every block.

    An entry has the tensor's type as a comment, where no declaration shows that.
    """
    listed = is_listed(text.graph, list(stored))
    layers = None if cls else text.layers
    lines = []
    for node, attribute in stored.items():
        r = row(text.graph, node, attribute)
        name = row_name(cls, r.name) if cls else r.name
        shown = literal(name) if layers is None else layers.literal(name)
        remark = comment(typed(node)) if listed else ""
        lines.append(Line(f"{literal(attribute)}: ({shown}, {r.known})", remark))
    return lines
