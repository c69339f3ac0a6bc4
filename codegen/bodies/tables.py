"""The tables of a program: which shard of which of the model's parameters each attribute holds.

``SHARDS = {"w1_weight": ("w1.weight", (64, 16), "float32", (("tp", 0, 1),))}``. Loading,
checkpoints and DTensors are made from these tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from partc.codegen.helpers.needed import Helpers
from partc.codegen.text import PAGE, Line
from partc.graph import Graph, Kind, fake_of, typed, value
from partc.quoting import comment, literal

TABLES: dict[Kind, str] = {"param": "SHARDS", "buffer": "BUFFERS"}
WHOLE_BATCH = "the global batch: (shape, dtype)"
OWN_PIECE = (
    "(shape in the global batch, dtype, cuts as (axis, dim, outer)); a rank passes its piece"
)
MANY = 8  # from so many parameters and buffers on, a loop over the table makes them
Cuts = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Row:
    """One parameter or buffer: its attribute in the program, and what it is in the model."""

    attribute: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    cuts: Cuts  # (mesh axis, dim, outer), in the order in which they shard the whole tensor

    @property
    def known(self) -> str:
        """The entry's text behind the name in the model: ``(64, 16), "float32", ...``."""
        return ", ".join(map(literal, (self.shape, self.dtype, self.cuts)))


def row(graph: Graph, node: fx.Node, attribute: str) -> Row:
    """The table row of a parameter's or buffer's node."""
    known = value(node)
    sharding = known.sharding
    cuts = tuple((a, lay.dim, sharding.local_outer(a, graph.mesh)) for a, lay in sharding.cuts())
    return Row(
        attribute, known.name, tuple(known.shape), str(known.dtype).removeprefix("torch."), cuts
    )


def input_rows(graph: Graph) -> list[Line]:
    """The entries of INPUTS; one with cuts is this rank's piece of the batch, else it is whole."""
    lines = []
    for name, node in graph.inputs.items():
        entry = row(graph, node, name)
        cuts = (entry.cuts,) if entry.cuts else ()
        lines.append(Line(f"{literal(name)}: {literal((entry.shape, entry.dtype, *cuts))}"))
    return lines


def input_meaning(graph: Graph) -> str:
    """What the table INPUTS is: of the whole batch, or with cuts of this rank's piece."""
    own = any(value(node).sharding.cuts() for node in graph.inputs.values())
    return OWN_PIECE if own else WHOLE_BATCH


def is_listed(graph: Graph, nodes: Sequence[fx.Node]) -> bool:
    """Whether a loop over the table makes these parameters or buffers, and not a line for each.

    A frozen parameter has its own line, as the table does not say ``requires_grad``.
    """
    many = len(graph.params) + len(graph.buffers) >= MANY
    return many and len(nodes) > 1 and not any(_is_frozen(graph, node) for node in nodes)


def declarations(
    graph: Graph, attributes: Mapping[fx.Node, str], kind: Kind, source: str, helpers: Helpers,
    some: bool = False, sized: bool = False,
) -> list[Line]:  # fmt: skip
    """The statements that make this rank's shards of parameters or buffers.

    ``source`` is the text of their table. With ``some`` the table also has the blocks' parameters,
    under dotted names (``layers.0.w``), which the blocks make themselves. ``sized``: their sizes
    are known from the table alone.
    """
    if sized:
        return _sized(graph, attributes, kind, source, helpers, some)
    if some and not attributes:
        return []
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


def _sized(
    graph: Graph, attributes: Mapping[fx.Node, str], kind: Kind, source: str, helpers: Helpers,
    some: bool,
) -> list[Line]:  # fmt: skip
    """The statements that make parameters or buffers of the sizes in a table."""
    frozen = [name for node, name in attributes.items() if _is_frozen(graph, node)]
    if not attributes:
        return []
    made = f"{helpers.use('empty')}(*known)"
    lines = [Line(f"for name, (_, *known) in {source}.items():")]
    lines += [Line('if "." not in name:', indent=1)] if some else []
    if kind == "buffer":
        return [*lines, Line(f"self.register_buffer(name, {made})", indent=len(lines))]
    trained = len(frozen) < len(attributes)
    asks = f"name not in {literal(tuple(frozen))}" if trained else "False"
    rest = f", requires_grad={asks}" if frozen else ""
    return [
        *lines,
        Line(f"self.register_parameter(name, nn.Parameter({made}{rest}))", indent=len(lines)),
    ]


def _is_frozen(graph: Graph, node: fx.Node) -> bool:
    """Whether a node is a parameter that never has a gradient."""
    return value(node).kind == "param" and value(node).name not in graph.trained


def _declaration(node: fx.Node, attribute: str, kind: Kind, frozen: bool) -> str:
    """The statement that makes this rank's shard of one parameter or buffer."""
    fake = fake_of(node)
    sizes = ", ".join(map(str, fake.shape)) or "()"
    dtype = "" if literal(fake.dtype) == "torch.float32" else f", dtype={literal(fake.dtype)}"
    empty = f"torch.empty({sizes}{dtype})"
    if kind == "buffer":
        return f"self.register_buffer({literal(attribute)}, {empty})"
    return f"self.{attribute} = nn.Parameter({empty}{', requires_grad=False' if frozen else ''})"


def table(name: str, remark: str, entries: Iterable[Line]) -> str:
    """A dict as a constant of the file, one entry on a line; a single short entry on the first."""
    rows = list(entries)
    if not rows:
        return f"{name} = {{}}  # {remark}"
    alone = f"{name} = {{{rows[0].code}}}  # {remark}"
    if len(rows) == 1 and not rows[0].remark and "\n" not in alone and len(alone) <= PAGE:
        return alone
    lines = [f"    {row.code}," + (f"  # {row.remark}" if row.remark else "") for row in rows]
    return "\n".join([f"{name} = {{  # {remark}", *lines, "}"])
