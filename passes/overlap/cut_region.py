"""Find the calls of a block that can be computed in pieces, and the dims of the pieces.

A region grows from a collective to the calls before and behind it. The sharding rules
(``partc/rules``) apply: pieces in time are like the ranks of one more mesh axis.
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
from partc.graph.draws import draws_numbers
from partc.plan.mesh import Mesh
from partc.plan.sharding import REPLICATED, Layout, U, cut
from partc.rules import Strategy, strategies

PieceChoices = dict[fx.Node, Strategy]
Found = dict[Hashable, list[Strategy]]
_DIMS = ("dim", "to_dim")  # of a collective: it moves these, and cannot be cut along them


@dataclass
class Region:
    """The calls among ``run`` (one block and phase, in order) that are computed in ``num`` pieces.

    ``ways`` has the strategy of each such call. ``kept`` has the values that an earlier run of the
    block left in pieces, with their layouts. ``found`` has strategies of calls seen before.
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
        """Add a collective, and all calls that can be computed in pieces with it, to the region.

        Of the collective's dims the one that adds most calls is taken; none if no dim allows it.
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
        """Grow ``ways`` from ``start``: add the makers of operands and the readers of results."""
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
        """Add the calls that can make the operands of ``node`` in the pieces that it reads."""
        for operand, layout in zip(tensor_args(node), ways[node].ins, strict=True):
            source, result = _made_by(operand)
            if layout.kind == "cut" and source in self.inside and source not in ways:
                fitting = (s for s in self._ways_of(source) if s.outs[result] == layout)
                way = next(fitting, None)
                if way is not None:
                    ways[source] = way
                    self._pull(source, ways)

    def _reading(self, node: fx.Node, ways: PieceChoices) -> Strategy | None:
        """The strategy of a call that reads pieces; None if it reads none, or has no strategy."""
        if node.target is operator.getitem:
            return None
        known = {i: self.made(n, ways) for i, n in enumerate(tensor_args(node))}
        known = {i: layout for i, layout in known.items() if layout is not None}
        if not known:
            return None
        fitting = (s for s in self._ways_of(node) if all(s.ins[i] == x for i, x in known.items()))
        return next(fitting, None)

    def made(self, node: fx.Node, ways: PieceChoices) -> Layout | None:
        """The layout of a value's pieces that the region makes or that were kept; None if it has
        no pieces.
        """
        source, result = _made_by(node)
        layout = ways[source].outs[result] if source in ways else self.kept.get(node)
        return layout if layout is not None and layout.kind == "cut" else None

    # how single calls may be cut -------------------------------------------------------------
    def _ways_of(self, node: fx.Node) -> list[Strategy]:
        """The strategies of a call on pieces whose result differs by rounding only."""
        if node.target in (*collectives.COLLECTIVES, *collectives.LOCAL):
            through = (self._through(node, cut(dim)) for dim in range(_dims(node)))
            return [way for way in through if way is not None]
        rows = any(value(n).rows for n in (node, *node.all_input_nodes))
        if rows or draws_numbers(node):
            return []  # sorted rows do not split by position, nor do the numbers of one draw
        key = _circumstances(node)
        if key not in self.found:
            self.found[key] = [s for s in strategies(twin(node), self.num) if _is_plain(s)]
        return [s for s in self.found[key] if self._divides(node, s)]

    def _through(self, node: fx.Node, layout: Layout) -> Strategy | None:
        """The strategy of a collective on pieces along a dim that it does not gather or scatter.

        None if it does, or if it is a bucket.
        """
        moved = [node.kwargs[name] for name in _DIMS if name in node.kwargs]
        single = node.target not in (*collectives.JOINED, collectives.accumulate)
        way = Strategy((layout,), (layout,))
        fits = single and is_tensor(node) and layout.dim not in moved
        return way if fits and self._divides(node, way) else None

    def _divides(self, node: fx.Node, way: Strategy) -> bool:
        """Whether every value that the strategy splits gets pieces of equal size on every rank."""
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
    """The global shape of one of ``num`` pieces: ``f32[8@dp,64]`` in 2 pieces along dim 1 gives
    (8, 32). None if the pieces would differ in size.
    """
    here, whole = list(fake_of(node).shape), list(value(node).shape)
    if dim >= len(here) or here[dim] % num or whole[dim] % num:
        return None
    here[dim], whole[dim] = here[dim] // num, whole[dim] // num
    local = value(node).sharding.local_shape(whole, mesh)
    return tuple(whole) if local == tuple(here) else None


def twin(node: fx.Node) -> fx.Node:
    """A copy of a local call in a graph of its own, as if the local shapes were global ones.

    The sharding rules expect such a call.
    """
    graph = fx.Graph()
    twins = {operand: graph.placeholder(operand.name) for operand in node.all_input_nodes}
    new = graph.node_copy(node, twins.__getitem__)
    for old, copy in (*twins.items(), (node, new)):
        shape = tuple(fake_of(old).shape) if is_tensor(old) else ()
        set_value(copy, replace(value(old), shape=shape, sharding=REPLICATED))
        set_fake(copy, fake_of(old))
    return new


def _made_by(node: fx.Node) -> tuple[fx.Node, int]:
    """The call that makes a value, and the number of the value among the call's results."""
    return picked(node) if node.target is operator.getitem else (node, 0)


def _dims(node: fx.Node) -> int:
    return fake_of(node).dim() if is_tensor(node) else 0


def _is_plain(way: Strategy) -> bool:
    """Whether a strategy runs the unchanged call on pieces, to give pieces or summands."""
    reads = any(layout.kind == "cut" for layout in way.ins)
    whole = all(layout.kind in ("cut", "R") and layout.outer == 1 for layout in way.ins)
    left = all(layout == U or (layout.kind == "cut" and layout.outer == 1) for layout in way.outs)
    return not way.variant and reads and whole and left


def _circumstances(node: fx.Node) -> Hashable:
    operands = [(tuple(fake_of(n).shape), fake_of(n).dtype) if is_tensor(n) else None
                for n in tensor_args(node)]  # fmt: skip
    results = tuple(None if r is None else tuple(r.shape) for r in results_of(node))
    return node.target, literals(node), tuple(operands), results
