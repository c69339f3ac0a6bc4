"""Replace every call of a region by one call per piece, and join the pieces for other readers."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from partc.graph import (
    Graph,
    Origin,
    Value,
    collectives,
    fake_of,
    is_tensor,
    picked,
    set_fake,
    set_value,
    tensor_args,
    value,
)
from partc.graph.blocks import outermost_block
from partc.graph.graph_edits import run_fake
from partc.passes.overlap.cut_region import Region, piece_shape, twin
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout
from partc.rules import Strategy, write_local_call

aten = torch.ops.aten
AXIS = "turn"

Wanted = tuple[fx.Node, Layout]


def joins_pieces(node: fx.Node) -> bool:
    """Whether a call makes a whole value from its pieces: a ``cat`` or a sum."""
    return value(node).origin is Origin.PIECES and value(node).turn is None


def taken_from(node: fx.Node) -> fx.Node | None:
    """The whole value that a call slices a piece from; None for other calls."""
    takes = value(node).origin is Origin.PIECES and value(node).turn is not None
    return node.all_input_nodes[0] if takes else None


@dataclass
class Pieces:
    """Writes the regions of one graph.

    ``kept`` has, per concatenated value, the layout and nodes of the pieces it was made from.
    """

    graph: Graph
    num: int
    kept: dict[fx.Node, tuple[Layout, list[fx.Node]]] = field(default_factory=dict)

    def at_hand(self, block: str) -> dict[fx.Node, Layout]:
        """The layouts of the pieces that earlier runs of a block (its forward) have left."""
        here = ((node, layout) for node, (layout, _) in self.kept.items())
        return {node: layout for node, layout in here if outermost_block(node) == block}

    def write(self, region: Region) -> None:
        """Replace the region's calls by pieces; readers outside read the concatenated pieces."""
        writer = _Writer(self.graph, region, self.kept)
        for node in region.run:
            if node in region.ways:
                writer.write(node)
        for node in reversed(region.run):
            if node in writer.replaced:
                writer.put_away(node)


@dataclass
class _Writer:
    """Writes one region.

    ``parts`` has the pieces of a value by layout, ``wholes`` the call that concatenates or adds the
    pieces of a call, ``sums`` the pieces that are summands of a value, ``replaced`` the old calls.
    """

    graph: Graph
    region: Region
    kept: dict[fx.Node, tuple[Layout, list[fx.Node]]]
    parts: dict[Wanted, list[fx.Node]] = field(default_factory=dict)
    wholes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    replaced: dict[fx.Node, None] = field(default_factory=dict)
    sums: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    @property
    def num(self) -> int:
        return self.region.num

    def write(self, node: fx.Node) -> None:
        """Write the calls on the pieces right before the call that they replace."""
        way = self.region.ways[node]
        operands = [
            self._parts(operand, layout, node) if layout.kind == "cut" else [operand] * self.num
            for operand, layout in zip(tensor_args(node), way.ins, strict=True)
        ]
        turns = [list(each) for each in zip(*operands, strict=True)]
        before, first = node.prev, self._call(node, way, turns[0])
        alone = first.prev is before
        calls = [first]
        for each in turns[1:]:
            again = self._again(first, turns[0], each) if alone else self._call(node, way, each)
            calls.append(again)
        for turn, call in enumerate(calls):
            set_value(call, replace(value(call), turn=turn))
        self.replaced[node] = None
        if is_tensor(node):
            self._keep(node, way.outs[0], calls)
            return
        for user in list(node.users):
            _, index = picked(user)
            with self.graph.fx.inserting_before(node):
                picks = [self.graph.fx.call_function(operator.getitem, (c, index)) for c in calls]
            for turn, (pick, call) in enumerate(zip(picks, calls, strict=True)):
                set_value(pick, replace(value(user), turn=turn))
                set_fake(pick, fake_of(call)[index])
            self.replaced[user] = None
            self._keep(user, way.outs[index], picks)

    def put_away(self, node: fx.Node) -> None:
        """Erase a replaced call; its remaining readers read the concatenated pieces."""
        if node.users:
            whole = self._whole(node)
            node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
        self.graph.fx.erase_node(node)

    # pieces ----------------------------------------------------------------------------------
    def _keep(self, node: fx.Node, layout: Layout, pieces: list[fx.Node]) -> None:
        """Note the pieces of a value: shards of it, or summands if ``layout`` is a partial sum."""
        if layout.kind != "cut":
            self.sums[node] = pieces
            return
        shape = self._shape(node, layout)
        for piece in pieces:
            set_value(piece, replace(value(piece), shape=shape))
        self.parts[node, layout] = pieces

    def _shape(self, node: fx.Node, layout: Layout) -> tuple[int, ...]:
        shape = piece_shape(node, layout.dim, self.num, self.graph.mesh)
        assert shape is not None, node
        return shape

    def _parts(self, node: fx.Node, layout: Layout, reader: fx.Node) -> list[fx.Node]:
        """The pieces of an operand: those that were made or kept, else slices of the whole."""
        if (node, layout) not in self.parts:
            source = self._whole(node) if node in self.replaced else node
            made_as, pieces = self.kept.get(source, (None, []))
            if made_as != layout or outermost_block(source) != outermost_block(reader):
                pieces = self._taken(source, layout, reader)
            self.parts[node, layout] = pieces
        return self.parts[node, layout]

    def _taken(self, node: fx.Node, layout: Layout, reader: fx.Node) -> list[fx.Node]:
        """Slices of a value, written before their first reader and in the reader's module."""
        at, known = value(reader), value(node)
        size = fake_of(node).shape[layout.dim] // self.num
        like = replace(
            known, kind="op", shape=self._shape(node, layout), module=at.module, at=at.at,
            source=at.source, calls=at.calls, phase=at.phase, stage=at.stage, origin=Origin.PIECES,
        )  # fmt: skip
        found = []
        for turn in range(self.num):
            args = (node, layout.dim, turn * size, (turn + 1) * size)
            found.append(self._new(reader, aten.slice.Tensor, args, replace(like, turn=turn)))
        return found

    def _whole(self, node: fx.Node) -> fx.Node:
        """The whole value of a call: its pieces concatenated, or added if they are summands."""
        if node not in self.wholes:
            like = replace(value(node), origin=Origin.PIECES)
            if node in self.sums:
                first, *rest = self.sums[node]
                for part in rest:
                    first = self._new(node, aten.add.Tensor, (first, part), like)
                self.wholes[node] = first
            else:
                layout, pieces = next((x, ps) for (n, x), ps in self.parts.items() if n is node)
                whole = self._new(node, aten.cat.default, (pieces, layout.dim), like)
                self.wholes[node] = whole
                self.kept[whole] = layout, pieces
        return self.wholes[node]

    # calls -----------------------------------------------------------------------------------
    def _call(self, node: fx.Node, way: Strategy, operands: list[fx.Node]) -> fx.Node:
        """Write the call on one piece, before ``node``."""
        if node.target in (*collectives.COLLECTIVES, *collectives.LOCAL):
            return self._new(node, node.target, tuple(operands), value(node), dict(node.kwargs))
        whole = twin(node)
        with self.graph.fx.inserting_before(node):
            new = write_local_call(
                self.graph.fx, whole, operands, {AXIS: way}, Mesh(((AXIS, self.num),))
            )
        set_value(new, value(node))
        return new

    def _again(self, first: fx.Node, operands: list[fx.Node], others: list[fx.Node]) -> fx.Node:
        """Copy the first piece's call for another piece, which has the same size."""
        swap = dict(zip(operands, others, strict=True))
        with self.graph.fx.inserting_after(first):
            new = self.graph.fx.node_copy(first, lambda n: swap.get(n, n))
        set_value(new, value(first))
        set_fake(new, fake_of(first))
        return new

    def _new(
        self, before: fx.Node, target: object, args: tuple[object, ...], known: Value,
        kwargs: dict[str, object] | None = None,
    ) -> fx.Node:  # fmt: skip
        with self.graph.fx.inserting_before(before):
            new = self.graph.fx.call_function(target, args, kwargs or {})  # type: ignore[arg-type]
        set_value(new, known)
        set_fake(new, run_fake(target, args, kwargs or {}))
        return new
