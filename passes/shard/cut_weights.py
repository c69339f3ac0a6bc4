"""Choose Megatron's tensor-parallel shardings for any model: column-wise, then row-wise.

One walk over the forward graph. A weight that meets a replicated activation is sharded by column
(an output dim) if the sharded result reaches, without communication, another product with a weight,
or the loss's softmax. That next weight is sharded by row (its contracted dim), and its partial sum
is all-reduced once. An embedding table that the model's inputs index is sharded by vocabulary rows.
All other weights stay replicated on the axis (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053).

Where sequence parallelism scatters the sum of a row-wise product along a dim that weights have too,
such as the channels of images, the weights that meet its pieces are sharded like them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from partc.graph import Graph, is_weight, picked, results_of, tensor_args, value
from partc.graph.casts import is_cast
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, R, Sharding, U, cut
from partc.rules import Strategy
from partc.rules.discover import strategies_for

_LOSS_SOFTMAX = torch.ops.aten._log_softmax.default  # decomposed where the vocabulary is sharded
_OUTERS = (1, 3, 2)  # plain weights, fused q k v, fused k v or gate and up
_ONE_EACH = 2  # dims of a value with one row for each sample, which has nothing to scatter
_DEEPEST = 100  # calls of a chain that are followed by recursion


class _TooDeep(Exception):
    """A chain of calls is longer than a walk along it may be; ``key`` is where it ended."""

    def __init__(self, key: tuple[fx.Node, Layout]) -> None:
        super().__init__(key)
        self.key = key


def cut_weights(
    graph: Graph,
    mesh: Mesh,
    axis: str,
    params: Mapping[str, Mapping[str, Layout]],
    pinned: Collection[str],
    scatter: int | None = None,
) -> dict[str, Layout]:
    """Choose a layout on ``axis`` per parameter name; parameters without an entry stay replicated.

    ``params`` has the layouts on other axes. Parameters in ``pinned`` keep the user's layout.
    ``scatter``: the dim along which unfinished sums are scattered, if they are.
    """
    walk = _Walk(graph, mesh, axis, params, scatter)
    by_name = graph.params
    for name in pinned:
        walk.at[by_name[name]] = params[name].get(axis, R)
    for node in graph.calls():
        if value(node).phase == "F":
            walk.visit(node)
    chosen = {name: walk.at[node] for name, node in by_name.items() if walk.at.get(node, R) != R}
    return {name: layout for name, layout in chosen.items() if name not in pinned}


@dataclass
class _Walk:
    """The walk along the forward. ``at`` has the layout on the axis of every value decided so far;
    a parameter is decided at the first call that reads it with an activation. ``pieces`` has the
    layout of what sequence parallelism scatters, and of what is made of the pieces, where ``at``
    has R; ``in_pieces`` the layouts of all results of such a call.
    """

    graph: Graph
    mesh: Mesh
    axis: str
    params: Mapping[str, Mapping[str, Layout]]
    scatter: int | None = None
    pieces: dict[fx.Node, Layout] = field(default_factory=dict)
    in_pieces: dict[fx.Node, tuple[Layout, ...]] = field(default_factory=dict)
    at: dict[fx.Node, Layout] = field(default_factory=dict)
    results: dict[fx.Node, tuple[Layout, ...]] = field(default_factory=dict)
    known_flows: dict[tuple[fx.Node, Layout], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num = self.mesh.size(self.axis)
        for node in self.graph.fx.nodes:
            if node.op == "placeholder" and value(node).kind != "param":
                self.at[node] = R

    def visit(self, node: fx.Node) -> None:
        """Decide one call: the layouts of its results and of its undecided parameters."""
        if node.target is operator.getitem:
            call, index = picked(node)
            self.at[node] = self.results[call][index]
            if (outs := self.in_pieces.get(call)) and outs[index].kind == "cut":
                self.pieces[node] = outs[index]
            return
        if self._derived(node):
            return  # decided with its parameter, where it meets an activation
        for operand in tensor_args(node):
            self._follow(operand)
        best = self._best(node)
        self._meet_pieces(node, best)
        for operand, layout in zip(tensor_args(node), best.ins, strict=True):
            if operand not in self.at:
                self._fix(operand, layout)
        finished = tuple(R if out.kind in "UM" else out for out in best.outs)
        self.results[node] = finished
        self.at[node] = finished[0] if finished else R

    def _meet_pieces(self, node: fx.Node, best: Strategy) -> None:
        """Note the layouts of a scattered sum, or of what a call makes of pieces of one.

        Weights that such a call reads in pieces are sharded like the pieces.
        """
        operands = tensor_args(node)
        met = [(i, self.pieces[o]) for i, o in enumerate(operands) if o in self.pieces]
        sums, dims = best.outs[:1] == (U,), len(value(node).shape)
        if self.scatter is not None and sums and dims > _ONE_EACH:
            self.pieces[node] = cut(self.scatter)
        elif met and all(layout == R for layout in best.ins):
            if (kept := self._kept(node, operands, met)) is None:
                return
            self.in_pieces[node], self.pieces[node] = kept.outs, kept.outs[0]
            for operand, layout in zip(operands, kept.ins, strict=True):
                if operand not in self.at and layout.kind == "cut":
                    self._fix(operand, layout)

    def _kept(
        self, node: fx.Node, operands: list[fx.Node], met: list[tuple[int, Layout]]
    ) -> Strategy | None:
        """The first strategy that reads the pieces as they are, and whose result is in pieces."""
        for strategy in strategies_for(node, self.num, met):
            keeps = all(strategy.ins[i] == layout for i, layout in met)
            if keeps and strategy.outs[0].kind == "cut" and self._meets(operands, strategy):
                return strategy
        return None

    def _best(self, node: fx.Node) -> Strategy:
        """The first strategy that keeps an arriving sharding or shards a weight, or whole."""
        operands = tensor_args(node)
        free = [o for o in operands if o not in self.at]
        options = [s for s in self._options(node, operands) if self._meets(operands, s)]
        if len(free) == len(operands) == 1:
            options = []  # a view of a weight, which is not looked through as a cast is
        for strategy in options:
            if self._arrives(operands, strategy) or (
                free and self._spreads(node, operands, strategy)
            ):
                return strategy
        return Strategy((R,) * len(operands), (R,) * len(results_of(node)))

    def _options(self, node: fx.Node, operands: list[fx.Node]) -> list[Strategy]:
        """The strategies of one call for the layouts decided so far.

        Also those that shard a fused q k v weight in each of its parts (``outer`` of 3 or 2).
        """
        seen = [(i, self.at[o]) for i, o in enumerate(operands) if self.at.get(o, R) != R]
        options = list(strategies_for(node, self.num, seen))
        for i, operand in enumerate(operands):
            if operand not in self.at:
                for outer in _OUTERS[1:]:
                    tried = [(i, cut(d, outer)) for d in range(len(value(operand).shape))]
                    options += strategies_for(node, self.num, [*seen, *tried])
        return list(dict.fromkeys(options))

    def _meets(self, operands: list[fx.Node], strategy: Strategy) -> bool:
        """Whether each decided operand has the strategy's layout, or is replicated and can be
        sliced without communication.
        """
        for operand, want in zip(operands, strategy.ins, strict=True):
            have = self.at.get(operand)
            if have is None:
                if want.kind in "UM" or not self._divides(operand, want):
                    return False
            elif have != want and not (have == R and want.kind == "cut"):
                return False
        return True

    def _arrives(self, operands: list[fx.Node], strategy: Strategy) -> bool:
        """Whether the strategy keeps the sharding with which an operand arrives."""
        return any(
            self.at.get(o, R).kind == "cut" and self.at[o] == want
            for o, want in zip(operands, strategy.ins, strict=True)
        )

    def _spreads(self, node: fx.Node, operands: list[fx.Node], strategy: Strategy) -> bool:
        """Whether a strategy with replicated activations may shard a weight: by column if the
        result's sharding ``flows``, by row for a vocabulary that an input indexes.
        """
        pairs = list(zip(operands, strategy.ins, strict=True))
        if any(want.kind == "cut" for o, want in pairs if o in self.at):
            return False
        if not any(want.kind == "cut" for o, want in pairs if o not in self.at):
            return False
        if strategy.variant == "window":
            return self._reads_input(node)
        return (
            len(strategy.outs) == 1
            and strategy.outs[0].kind == "cut"
            and self.flows(node, strategy.outs[0])
        )

    def flows(self, node: fx.Node, layout: Layout) -> bool:
        """Whether a value with this layout reaches products with weights without communication.

        A chain of calls that is longer than Python's stack is walked from its far end.
        """
        found, asked = False, [(node, layout)]
        while asked:
            try:
                found = self._carried(*asked[-1], _DEEPEST)
                asked.pop()
            except _TooDeep as further:
                asked.append(further.key)
        return found

    def _carried(self, node: fx.Node, layout: Layout, depth: int) -> bool:
        """The same, of a chain of at most ``depth`` calls; _TooDeep at the end of a longer one."""
        key = (node, layout)
        if key not in self.known_flows:
            if not depth:
                raise _TooDeep(key)
            self.known_flows[key] = False  # the answer, should the walk below come back here
            users = [u for u in node.users if u.op == "output" or value(u).phase == "F"]
            try:
                every = all(self._accepts(u, node, layout, depth - 1) for u in users)
            except _TooDeep:
                del self.known_flows[key]
                raise
            self.known_flows[key] = every
        return self.known_flows[key]

    def _accepts(self, user: fx.Node, node: fx.Node, layout: Layout, depth: int) -> bool:
        """Whether a reader ends the sharding of ``node`` in a row-wise product, or carries it on
        to readers that do.
        """
        if user.op == "output" or user.target is _LOSS_SOFTMAX:
            return user.op != "output"
        if user.target is operator.getitem:
            return self._carried(user, layout, depth)
        operands = tensor_args(user)
        seen = [(i, layout) for i, o in enumerate(operands) if o is node]
        for strategy in strategies_for(user, self.num, seen):
            if any(strategy.ins[i] != layout for i, _ in seen) or not self._plausible(
                operands, node, strategy
            ):
                continue
            if any(out.kind in "UM" for out in strategy.outs):
                if self._ends(operands, node, strategy):
                    return True
            elif self._results_flow(user, strategy, depth):
                return True
        return False

    def _plausible(self, operands: list[fx.Node], node: fx.Node, strategy: Strategy) -> bool:
        """Whether the other operands can have the strategy's layouts: they are undecided, have the
        layout, or are replicated.
        """
        return all(
            o is node or o not in self.at or self.at[o] in (R, want)
            for o, want in zip(operands, strategy.ins, strict=True)
        )

    def _ends(self, operands: list[fx.Node], node: fx.Node, strategy: Strategy) -> bool:
        """Whether a call is the row-wise product that ends a column-wise sharding: with a sharded
        weight, and a partial sum as its result.
        """
        return strategy.outs[0].kind == "U" and any(
            is_weight(o) and want.kind == "cut"
            for o, want in zip(operands, strategy.ins, strict=True)
            if o is not node
        )

    def _results_flow(self, user: fx.Node, strategy: Strategy, depth: int) -> bool:
        outs = strategy.outs
        if len(outs) == 1:
            return outs[0].kind == "cut" and self._carried(user, outs[0], depth)
        gets = [
            u
            for u in user.users
            if u.target is operator.getitem and value(u).phase == "F" and _read_forward(u)
        ]
        return bool(gets) and all(
            outs[picked(g)[1]].kind == "cut" and self._carried(g, outs[picked(g)[1]], depth)
            for g in gets
        )

    # parameters, and what is made of one parameter alone (a cast, a transposed cast)
    # ---------------
    def _derived(self, node: fx.Node) -> bool:
        """Whether a value is a cast of one undecided parameter, or made of such a cast alone
        (``t(cast(w))``).

        Its layout is decided where it meets an activation.
        """
        operands = tensor_args(node)
        if len(operands) != 1 or operands[0] in self.at or len(results_of(node)) != 1:
            return False
        return is_cast(node) or operands[0].op == "call_function"

    def _follow(self, node: fx.Node) -> None:
        """Give a value that is made of one parameter alone the layout that follows from that of the
        parameter, if another reader has decided the parameter since.
        """
        if node in self.at or node.op != "call_function":
            return
        source = tensor_args(node)[0]
        self._follow(source)
        if source in self.at:
            self.at[node] = self._ahead(node, self.at[source])

    def _ahead(self, node: fx.Node, have: Layout) -> Layout:
        """The layout of a one-operand call's result where its operand has the layout ``have``."""
        found = (s.outs[0] for s in strategies_for(node, self.num, [(0, have)]) if s.ins[0] == have)
        return next(found, R) if have != R else R

    def _fix(self, node: fx.Node, layout: Layout) -> None:
        """Set the layout of a parameter, or of a derived value and the parameter behind it."""
        self.at[node] = layout
        if node.op == "call_function":
            source = tensor_args(node)[0]
            if source not in self.at:
                self._fix(source, self._behind(node, layout) or R)

    def _behind(self, node: fx.Node, want: Layout) -> Layout | None:
        """The operand layout from which a one-operand call makes ``want``: of ``t``, the other dim.

        None if no strategy makes ``want``.
        """
        if want == R:
            return R
        source = tensor_args(node)[0]
        tried = [(0, cut(d, want.outer)) for d in range(len(value(source).shape))]
        return next(
            (s.ins[0] for s in strategies_for(node, self.num, tried) if s.outs[0] == want), None
        )

    def _divides(self, operand: fx.Node, layout: Layout) -> bool:
        """Whether the axis divides what the other axes leave of a parameter's dim, also of one that
        ``operand`` is made of.
        """
        if layout.kind != "cut":
            return True
        if operand.op != "placeholder":
            behind = self._behind(operand, layout)
            return behind is not None and self._divides(tensor_args(operand)[0], behind)
        others = self.params.get(value(operand).name, {})
        sharding = Sharding.of({**others, self.axis: layout}, self.mesh)
        return sharding.local_shape(value(operand).shape, self.mesh) is not None

    def _reads_input(self, node: fx.Node) -> bool:
        """Whether an input of the step, or a view or cast of one, indexes the table."""
        for operand in tensor_args(node):
            while operand.op == "call_function" and len(tensor_args(operand)) == 1:
                operand = tensor_args(operand)[0]
            if operand.op == "placeholder" and value(operand).kind == "input":
                return True
        return False


def _read_forward(node: fx.Node) -> bool:
    return any(u.op == "call_function" and value(u).phase == "F" for u in node.users)
