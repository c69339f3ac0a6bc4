"""The attributes in which a class of a program keeps its process groups and coordinates."""

from __future__ import annotations

import re
from collections.abc import Sequence

from partc.codegen.text import Line, block
from partc.quoting import literal


def mesh_attributes(axes: Sequence[str], text: str) -> str:
    """The statements of ``__init__`` that keep the process group of every mesh axis.

    The rank's coordinate is kept for the axes where the class's ``text`` reads that coordinate.

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
