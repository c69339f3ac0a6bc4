"""Which calls of a block may be computed in pieces, and along which dims: a growing region of them.

The rules that say how ranks may cut a call (``partc/rules``) say as well how one rank may, as
pieces in time are like ranks of an axis of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from partc.graph import (
    collectives,
    fake_of,
    is_tensor,
    literals,
    picked,
    results_of,
    set_fake,
    set_value,
    tensor_args,
    value,
)
from partc.passes.recompute.replay_masks import draws_numbers
from partc.plan.mesh import Mesh
from partc.plan.sharding import REPLICATED, Layout, U, cut
from partc.rules import Strategy, strategies

PieceChoices = dict[fx.Node, Strategy]
Found = dict[Hashable, list[Strategy]]
_DIMS = ("dim", "to_dim")  # of a collective: it moves these, and cannot be cut along them


@dataclass
class Region:
    """The calls of ``run``, those of one block and phase in order, that are computed in ``num``
    pieces; ``ways`` says how each of them is cut. ``kept`` has what an earlier run of the block has
    left in pieces, with how these lie; ``found`` the ways to cut calls like those seen before.
    """

    run: Sequence[fx.Node]
    num: int
    mesh: Mesh
    kept: Mapping[fx.Node, Layout]
    found: Found
    ways: PieceChoices = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inside = set(self.run)

    def grow_from(self, start: fx.Node) -> None:
        """Take in a collective and all that can be cut with it, along the dim that takes in most;
        nothing if no dim can be cut.
        """
        if start in self.ways:
            return
        grown = [self.ways]
        for dim in range(fake_of(start).dim()):
            way = self._through(start, cut(dim))
            if way is not None:
                grown.append(self._spread({**self.ways, start: way}, start))
        self.ways = max(grown, key=len)

    # growing ---------------------------------------------------------------------------------
    def _spread(self, ways: PieceChoices, start: fx.Node) -> PieceChoices:
        """Pull in what makes the operands of calls that are cut, and what reads their results."""
        self._pull(start, ways)
        size = 0
        while size < len(ways):
            size = len(ways)
            for node in self.run:
                way = None if node in ways else self._reading(node, ways)
                if way is not None:
                    ways[node] = way
                    self._pull(node, ways)
        return ways

    def _pull(self, node: fx.Node, ways: PieceChoices) -> None:
        """Take in the calls that can make a call's operands in the pieces that it reads."""
        for operand, layout in zip(tensor_args(node), ways[node].ins, strict=True):
            source, result = _made_by(operand)
            if layout.kind == "cut" and source in self.inside and source not in ways:
                fitting = (s for s in self._ways_of(source) if s.outs[result] == layout)
                way = next(fitting, None)
                if way is not None:
                    ways[source] = way
                    self._pull(source, ways)

    def _reading(self, node: fx.Node, ways: PieceChoices) -> Strategy | None:
        """How a call may go on with pieces that it reads; None if it reads none, or cannot."""
        if node.target is operator.getitem:
            return None
        known = {i: self.made(n, ways) for i, n in enumerate(tensor_args(node))}
        known = {i: layout for i, layout in known.items() if layout is not None}
        if not known:
            return None
        fitting = (s for s in self._ways_of(node) if all(s.ins[i] == x for i, x in known.items()))
        return next(fitting, None)

    def made(self, node: fx.Node, ways: PieceChoices) -> Layout | None:
        """How the pieces of a value lie that a call of the region makes, or that are at hand; None
        of others.
        """
        source, result = _made_by(node)
        layout = ways[source].outs[result] if source in ways else self.kept.get(node)
        return layout if layout is not None and layout.kind == "cut" else None

    # how single calls may be cut -------------------------------------------------------------
    def _ways_of(self, node: fx.Node) -> list[Strategy]:
        """The ways to compute a call piece by piece so that it is the same but for roundings."""
        if node.target in (*collectives.COLLECTIVES, *collectives.LOCAL):
            through = (self._through(node, cut(dim)) for dim in range(_dims(node)))
            return [way for way in through if way is not None]
        rows = any(value(n).rows for n in (node, *node.all_input_nodes))
        if rows or draws_numbers(node):
            return []  # of rows in an order of their own; of other numbers than the whole draws
        key = _circumstances(node)
        if key not in self.found:
            self.found[key] = [s for s in strategies(twin(node), self.num) if _is_plain(s)]
        return [s for s in self.found[key] if self._divides(node, s)]

    def _through(self, node: fx.Node, layout: Layout) -> Strategy | None:
        """A collective on pieces, if it leaves the dim that they are cut along alone."""
        moved = [node.kwargs[name] for name in _DIMS if name in node.kwargs]
        single = node.target not in (*collectives.JOINED, collectives.accumulate)
        way = Strategy((layout,), (layout,))
        fits = single and is_tensor(node) and layout.dim not in moved
        return way if fits and self._divides(node, way) else None

    def _divides(self, node: fx.Node, way: Strategy) -> bool:
        """Whether all that is cut has pieces of one size, on every rank."""
        if not is_tensor(node):
            cut_values = [*zip(tensor_args(node), way.ins, strict=True)]
            results = (u for u in node.users if u.target is operator.getitem)
            cut_values += [(u, way.outs[picked(u)[1]]) for u in results]
        else:
            cut_values = [*zip([*tensor_args(node), node], [*way.ins, *way.outs], strict=True)]
        return all(
            piece_shape(n, layout.dim, self.num, self.mesh) is not None
            for n, layout in cut_values
            if layout.kind == "cut"
        )


def piece_shape(node: fx.Node, dim: int, num: int, mesh: Mesh) -> tuple[int, ...] | None:
    """The shape of the whole, over all ranks, of one of ``num`` pieces of what each rank holds;
    None if they are not equal.
    """
    here, whole = list(fake_of(node).shape), list(value(node).shape)
    if dim >= len(here) or here[dim] % num or whole[dim] % num:
        return None
    here[dim], whole[dim] = here[dim] // num, whole[dim] // num
    local = value(node).sharding.local_shape(whole, mesh)
    return tuple(whole) if local == tuple(here) else None


def twin(node: fx.Node) -> fx.Node:
    """A call of a local graph as the one call of a graph of wholes that have this rank's shapes."""
    graph = fx.Graph()
    twins = {operand: graph.placeholder(operand.name) for operand in node.all_input_nodes}
    new = graph.node_copy(node, twins.__getitem__)
    for old, copy in (*twins.items(), (node, new)):
        shape = tuple(fake_of(old).shape) if is_tensor(old) else ()
        set_value(copy, replace(value(old), shape=shape, sharding=REPLICATED))
        set_fake(copy, fake_of(old))
    return new


def _made_by(node: fx.Node) -> tuple[fx.Node, int]:
    """The call that makes a value, and which of its results it is."""
    return picked(node) if node.target is operator.getitem else (node, 0)


def _dims(node: fx.Node) -> int:
    return fake_of(node).dim() if is_tensor(node) else 0


def _is_plain(way: Strategy) -> bool:
    """Whether a call is written as it is on pieces, and leaves pieces or parts of a sum."""
    reads = any(layout.kind == "cut" for layout in way.ins)
    whole = all(layout.kind in ("cut", "R") and layout.outer == 1 for layout in way.ins)
    left = all(layout == U or (layout.kind == "cut" and layout.outer == 1) for layout in way.outs)
    return not way.variant and reads and whole and left


def _circumstances(node: fx.Node) -> Hashable:
    operands = [(tuple(fake_of(n).shape), fake_of(n).dtype) if is_tensor(n) else None
                for n in tensor_args(node)]  # fmt: skip
    results = tuple(None if r is None else tuple(r.shape) for r in results_of(node))
    return node.target, literals(node), tuple(operands), results
