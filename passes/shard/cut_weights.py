"""Choose Megatron's cuts along a tensor axis for any model: by column where the cut flows, by row
where it arrives.

Walks the forward graph once. A weight that meets a whole activation is cut along an output dim if
that cut then flows, without communication, to another contraction with a weight (or to the loss's
softmax); there it is met by a row cut, whose unfinished sum is reduced once. A vocabulary table
read by the model's inputs is cut by rows. What fits neither stays whole.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from partc.graph import Graph, is_weight, picked, results_of, tensor_args, value
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, R, Sharding, cut
from partc.rules import Strategy
from partc.rules.discover import strategies_for

_LOSS_SOFTMAX = torch.ops.aten._log_softmax.default  # opened over a cut vocabulary
_OUTERS = (1, 3, 2)  # plain weights, fused q k v, fused k v or gate and up


def cut_weights(
    graph: Graph,
    mesh: Mesh,
    axis: str,
    params: Mapping[str, Mapping[str, Layout]],
    pinned: Collection[str],
) -> dict[str, Layout]:
    """Cuts along ``axis`` by parameter name; ``params`` has the cuts already fixed, ``pinned``
    whose are final.
    """
    walk = _Walk(graph, mesh, axis, params)
    for name in pinned:
        walk.at[graph.params[name]] = params[name].get(axis, R)
    for node in graph.calls():
        if value(node).phase == "F":
            walk.visit(node)
    chosen = {
        name: walk.at[node] for name, node in graph.params.items() if walk.at.get(node, R) != R
    }
    return {name: layout for name, layout in chosen.items() if name not in pinned}


@dataclass
class _Walk:
    """``at`` has the layout on the axis of every value decided so far; parameters join as they are
    met.
    """

    graph: Graph
    mesh: Mesh
    axis: str
    params: Mapping[str, Mapping[str, Layout]]
    at: dict[fx.Node, Layout] = field(default_factory=dict)
    results: dict[fx.Node, tuple[Layout, ...]] = field(default_factory=dict)
    known_flows: dict[tuple[fx.Node, Layout], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num = self.mesh.size(self.axis)
        for node in self.graph.fx.nodes:
            if node.op == "placeholder" and value(node).kind != "param":
                self.at[node] = R

    def visit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            call, index = picked(node)
            self.at[node] = self.results[call][index]
            return
        best = self._best(node)
        for operand, layout in zip(tensor_args(node), best.ins, strict=True):
            if operand not in self.at:
                self._fix(operand, layout)
        finished = tuple(R if out.kind in "UM" else out for out in best.outs)
        self.results[node] = finished
        if not self._derived(node):
            self.at[node] = finished[0] if finished else R

    def _best(self, node: fx.Node) -> Strategy:
        operands = tensor_args(node)
        free = [o for o in operands if o not in self.at]
        options = [s for s in self._options(node, operands) if self._meets(operands, s)]
        if self._derived(node):
            options = []
        for strategy in options:
            if self._arrives(operands, strategy) or (
                free and self._spreads(node, operands, strategy)
            ):
                return strategy
        return Strategy((R,) * len(operands), (R,) * len(results_of(node)))

    def _options(self, node: fx.Node, operands: list[fx.Node]) -> list[Strategy]:
        """Strategies for the layouts at hand, with the outer factors that weights may be cut by."""
        seen = [(i, self.at[o]) for i, o in enumerate(operands) if self.at.get(o, R) != R]
        options = list(strategies_for(node, self.num, seen))
        for i, operand in enumerate(operands):
            if operand not in self.at:
                for outer in _OUTERS[1:]:
                    tried = [(i, cut(d, outer)) for d in range(len(value(operand).shape))]
                    options += strategies_for(node, self.num, [*seen, *tried])
        return list(dict.fromkeys(options))

    def _meets(self, operands: list[fx.Node], strategy: Strategy) -> bool:
        """Whether what is decided fits the strategy: equal, or whole and sliced for free."""
        for operand, want in zip(operands, strategy.ins, strict=True):
            have = self.at.get(operand)
            if have is None:
                if want.kind in "UM" or not self._divides(operand, want):
                    return False
            elif have != want and not (have == R and want.kind == "cut"):
                return False
        return True

    def _arrives(self, operands: list[fx.Node], strategy: Strategy) -> bool:
        """A cut that comes in with an activation and goes on, or ends in a sum over a weight's
        cut.
        """
        return any(
            self.at.get(o, R).kind == "cut" and self.at[o] == want
            for o, want in zip(operands, strategy.ins, strict=True)
        )

    def _spreads(self, node: fx.Node, operands: list[fx.Node], strategy: Strategy) -> bool:
        """A weight cut while all activations are whole: by column if it flows, by row for a
        vocabulary.
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
        """Whether this cut of a value reaches contractions with weights by rules alone."""
        key = (node, layout)
        if key not in self.known_flows:
            self.known_flows[key] = False  # while it is being found out
            users = [u for u in node.users if u.op == "output" or value(u).phase == "F"]
            self.known_flows[key] = all(self._accepts(u, node, layout) for u in users)
        return self.known_flows[key]

    def _accepts(self, user: fx.Node, node: fx.Node, layout: Layout) -> bool:
        if user.op == "output" or user.target is _LOSS_SOFTMAX:
            return user.op != "output"
        if user.target is operator.getitem:
            return self.flows(user, layout)
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
            elif self._results_flow(user, strategy):
                return True
        return False

    def _plausible(self, operands: list[fx.Node], node: fx.Node, strategy: Strategy) -> bool:
        """Whether the other operands can be had so: undecided ones may be, decided ones are equal
        or whole.
        """
        return all(
            o is node or o not in self.at or self.at[o] in (R, want)
            for o, want in zip(operands, strategy.ins, strict=True)
        )

    def _ends(self, operands: list[fx.Node], node: fx.Node, strategy: Strategy) -> bool:
        """A contraction with a weight: the row cut that takes the column cut up."""
        return strategy.outs[0].kind == "U" and any(
            is_weight(o) and want.kind == "cut"
            for o, want in zip(operands, strategy.ins, strict=True)
            if o is not node
        )

    def _results_flow(self, user: fx.Node, strategy: Strategy) -> bool:
        if len(strategy.outs) == 1:
            return strategy.outs[0].kind == "cut" and self.flows(user, strategy.outs[0])
        gets = [
            u
            for u in user.users
            if u.target is operator.getitem and value(u).phase == "F" and _read_forward(u)
        ]
        return bool(gets) and all(
            strategy.outs[picked(g)[1]].kind == "cut" and self.flows(g, strategy.outs[picked(g)[1]])
            for g in gets
        )

    # parameters, and what is made of one parameter alone (a transposed or cast weight)
    # ---------------
    def _derived(self, node: fx.Node) -> bool:
        """A value of one undecided parameter alone: it is decided when it meets an activation."""
        operands = tensor_args(node)
        return len(operands) == 1 and operands[0] not in self.at and len(results_of(node)) == 1

    def _fix(self, node: fx.Node, layout: Layout) -> None:
        """Decide a parameter, or the parameter behind a derived value, by the layout it is used
        in.
        """
        self.at[node] = layout
        if node.op == "call_function":
            source = tensor_args(node)[0]
            if source not in self.at:
                self._fix(source, self._behind(node, layout) or R)

    def _behind(self, node: fx.Node, want: Layout) -> Layout | None:
        """The operand layout from which a one-operand call makes ``want``."""
        if want == R:
            return R
        source = tensor_args(node)[0]
        tried = [(0, cut(d, want.outer)) for d in range(len(value(source).shape))]
        return next(
            (s.ins[0] for s in strategies_for(node, self.num, tried) if s.outs[0] == want), None
        )

    def _divides(self, operand: fx.Node, layout: Layout) -> bool:
        """Whether a parameter's other cuts leave room for this one."""
        if layout.kind != "cut" or operand.op != "placeholder":
            return True
        others = self.params.get(value(operand).name, {})
        sharding = Sharding.of({**others, self.axis: layout}, self.mesh)
        return sharding.local_shape(value(operand).shape, self.mesh) is not None

    def _reads_input(self, node: fx.Node) -> bool:
        """Whether a table is indexed by an input of the step, through views and casts only."""
        for operand in tensor_args(node):
            while operand.op == "call_function" and len(tensor_args(operand)) == 1:
                operand = tensor_args(operand)[0]
            if operand.op == "placeholder" and value(operand).kind == "input":
                return True
        return False


def _read_forward(node: fx.Node) -> bool:
    return any(u.op == "call_function" and value(u).phase == "F" for u in node.users)
