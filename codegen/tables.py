"""The plain data of a program: which piece of which parameter each attribute is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from partc.graph import Graph, held, value
from partc.quoting import literal

Cuts = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Row:
    """One parameter or buffer: its attribute here and what it is in the model."""

    attribute: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    cuts: Cuts  # (axis, dim, outer), in the order in which they are applied to the whole

    @property
    def value(self) -> str:
        """The table entry's right side."""
        return literal((self.name, self.shape, self.dtype, self.cuts))


def row(graph: Graph, node: fx.Node, attribute: str) -> Row:
    """The table row of a placeholder."""
    known = value(node)
    sharding = known.sharding
    cuts = tuple((a, lay.dim, sharding.local_outer(a, graph.mesh)) for a, lay in sharding.cuts())
    return Row(
        attribute, known.name, tuple(known.shape), str(known.dtype).removeprefix("torch."), cuts
    )


def declaration(node: fx.Node, attribute: str, kind: str, trainable: bool) -> str:
    """The statement that makes this rank's piece of a parameter or buffer."""
    fake = held(node)
    sizes = ", ".join(map(str, fake.shape)) or "()"
    dtype = "" if literal(fake.dtype) == "torch.float32" else f", dtype={literal(fake.dtype)}"
    empty = f"torch.empty({sizes}{dtype})"
    if kind == "buffer":
        return f"self.register_buffer({literal(attribute)}, {empty})"
    frozen = "" if trainable else ", requires_grad=False"
    return f"self.{attribute} = nn.Parameter({empty}{frozen})"


def table(name: str, remark: str, entries: Iterable[str]) -> str:
    """A dict as a module constant, one entry per line."""
    lines = [f"    {entry}," for entry in entries]
    return (
        "\n".join([f"{name} = {{  # {remark}", *lines, "}"])
        if lines
        else f"{name} = {{}}  # {remark}"
    )
