"""What a class keeps of the mesh."""

from __future__ import annotations

import re
from collections.abc import Sequence

from partc.codegen.text import Line, block
from partc.quoting import literal


def mesh_attributes(axes: Sequence[str], text: str) -> str:
    """The statements that keep the group of every axis, and the rank's place in those that the
    class's ``text`` reads.

    >>> print(mesh_attributes(["dp", "tp"], "x.chunk(2)[self.dp_rank]"))
            self.dp, self.dp_rank = mesh.get_group("dp"), mesh.get_local_rank("dp")
            self.tp = mesh.get_group("tp")
    """
    placed = [axis for axis in axes if re.search(rf"\bself\.{axis}_rank\b", text)]
    lines = [
        Line(f"self.{a}, self.{a}_rank = {_group(a)}, mesh.get_local_rank({literal(a)})")
        for a in placed
    ]
    if rest := [axis for axis in axes if axis not in placed]:
        names, groups = (f"self.{axis}" for axis in rest), map(_group, rest)
        lines.append(Line(f"{', '.join(names)} = {', '.join(groups)}"))
    return block(lines, 2)


def _group(axis: str) -> str:
    return f"mesh.get_group({literal(axis)})"
