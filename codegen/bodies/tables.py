"""The plain data of a program: which piece of which parameter each attribute is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from partc.codegen.helpers.needed import Helpers
from partc.codegen.text import PAGE, Line
from partc.graph import Graph, Kind, fake_of, typed, value
from partc.quoting import comment, literal

TABLES: dict[Kind, str] = {"param": "SHARDS", "buffer": "BUFFERS"}
MANY = 8  # parameters and buffers; fewer are written one by one
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
    def known(self) -> str:
        """The table entry's right side, behind the name."""
        return ", ".join(map(literal, (self.shape, self.dtype, self.cuts)))


def row(graph: Graph, node: fx.Node, attribute: str) -> Row:
    """The table row of a placeholder."""
    known = value(node)
    sharding = known.sharding
    cuts = tuple((a, lay.dim, sharding.local_outer(a, graph.mesh)) for a, lay in sharding.cuts())
    return Row(
        attribute, known.name, tuple(known.shape), str(known.dtype).removeprefix("torch."), cuts
    )


def is_listed(graph: Graph, nodes: Sequence[fx.Node]) -> bool:
    """Whether parameters or buffers are so many that a loop over their table makes them."""
    many = len(graph.params) + len(graph.buffers) >= MANY
    return many and len(nodes) > 1 and not any(_is_frozen(graph, node) for node in nodes)


def declarations(
    graph: Graph, attributes: Mapping[fx.Node, str], kind: Kind, source: str, helpers: Helpers,
    some: bool = False,
) -> list[Line]:  # fmt: skip
    """The statements that make this rank's pieces of parameters or buffers.

    ``source`` is their table; with ``some`` it has those of blocks too, under dotted names.
    """
    if not is_listed(graph, list(attributes)):
        return [
            Line(_declaration(node, name, kind, _is_frozen(graph, node)), comment(typed(node)))
            for node, name in attributes.items()
        ]
    made = f"{helpers.use('empty')}(*known)"
    if kind == "param":
        made = f"nn.Parameter({made})"
    add = f"self.register_{'parameter' if kind == 'param' else kind}(name, {made})"
    head = Line(f"for name, (_, *known) in {source}.items():")
    if some:
        return [head, Line('if "." not in name:', indent=1), Line(add, indent=2)]
    return [head, Line(add, indent=1)]


def _is_frozen(graph: Graph, node: fx.Node) -> bool:
    return value(node).kind == "param" and value(node).name not in graph.grads


def _declaration(node: fx.Node, attribute: str, kind: Kind, frozen: bool) -> str:
    """The statement that makes this rank's piece of a parameter or buffer."""
    fake = fake_of(node)
    sizes = ", ".join(map(str, fake.shape)) or "()"
    dtype = "" if literal(fake.dtype) == "torch.float32" else f", dtype={literal(fake.dtype)}"
    empty = f"torch.empty({sizes}{dtype})"
    if kind == "buffer":
        return f"self.register_buffer({literal(attribute)}, {empty})"
    return f"self.{attribute} = nn.Parameter({empty}{', requires_grad=False' if frozen else ''})"


def table(name: str, remark: str, entries: Iterable[Line]) -> str:
    """A dict as a module constant, one entry per line; a short one alone beside its braces."""
    rows = list(entries)
    if not rows:
        return f"{name} = {{}}  # {remark}"
    alone = f"{name} = {{{rows[0].code}}}  # {remark}"
    if len(rows) == 1 and not rows[0].remark and "\n" not in alone and len(alone) <= PAGE:
        return alone
    lines = [f"    {row.code}," + (f"  # {row.remark}" if row.remark else "") for row in rows]
    return "\n".join([f"{name} = {{  # {remark}", *lines, "}"])
