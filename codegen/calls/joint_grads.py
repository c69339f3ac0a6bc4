"""The dicts in which a generated function collects the gradients of one bucket.

A bucket is reduced in one transfer. ``grads[self.w] = ...`` puts a gradient into the dict, by its
parameter; ``scatter_grads(grads, 2, self.dp)`` sends all of them, and the dict is deleted. A second
reduction of the same gradients, over another axis, takes the dict that the first one returns. The
last all_reduce of gradients is sent without a copy: they are written straight into the memory that
is sent, ``flat, grads = room([self.w, ...])``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import fx

from partc.codegen.calls.scope import Scope
from partc.codegen.repeats.equal import ends_step
from partc.graph import Graph, collectives
from partc.graph.moves import Move, carried, moved, moves

REDUCTIONS = (  # the gathers are those of a hierarchical all-reduce: scatter, sum, gather
    collectives.all_gather,
    collectives.all_gather_joined,
    collectives.all_reduce,
    collectives.all_reduce_joined,
    collectives.reduce_scatter,
    collectives.reduce_scatter_joined,
)


class JointGrads:
    """The dicts of one function, and what is in them when.

    ``params`` has for each reduction the parameters (``self.w``) whose gradients it reduces:
    reductions of several gradients, and a last reduce-scatter of one. ``place`` has the reduction
    and the parameter of each gradient that nothing else reads. ``rooms`` has, for each dict whose
    gradients are parts of the memory that is sent, the name of that memory.
    """

    def __init__(
        self, graph: Graph, order: Iterable[fx.Node], stored: Mapping[fx.Node, list[str]]
    ) -> None:
        reductions = [n for n in order if n.target in REDUCTIONS]
        self.params: dict[fx.Node, list[str]] = {}
        for start in reversed(reductions):  # the parameter of a first reduction is the second's
            found = [self._param(move.result, stored) for move in moves(start)]
            if None not in found:
                self.params[start] = [param for param in found if param is not None]
        for start in list(self.params):
            last = ends_step(graph, next(iter(start.users)))
            alone = start.target is collectives.reduce_scatter
            if start.target not in collectives.JOINED and not (last and alone):
                del self.params[start]
        self.place = {
            operand: (start, param)
            for start, params in self.params.items()
            for operand, param in zip(moved(start), params, strict=True)
            if set(operand.users) == {start}
        }
        self.graph = graph
        self.names: dict[fx.Node, str] = {}
        self.rooms: dict[str, str] = {}
        self.entries: dict[str, list[str]] = {}  # parameters, in the order in which they came in
        self.fresh: list[fx.Node] = []

    def _param(self, result: fx.Node | None, stored: Mapping[fx.Node, list[str]]) -> str | None:
        """The parameter whose gradient a reduction's result is, or becomes in a later reduction."""
        if result is None or result in stored:
            return stored[result][0] if result is not None else None
        reader = next(iter(result.users))
        if reader in self.params:
            return self.params[reader][moved(reader).index(result)]
        return self._param(reader, stored) if carried(reader) is result else None

    def name(self, start: fx.Node, scope: Scope) -> str:
        """The name of the dict that holds the gradients of a reduction; made at the first use."""
        if start not in self.names:
            source = self._source(start)
            if source is not None:
                self.names[start] = self.names[source]
            else:
                self.names[start] = self._begin(start, scope)
        return self.names[start]

    def _begin(self, start: fx.Node, scope: Scope) -> str:
        """A new dict for a reduction, or one with room for an all_reduce."""
        in_place = self._ends_in_place(start)
        name = scope.passing("grads")
        self.fresh.append(start)
        self.entries[name] = []
        if in_place:
            self.rooms[name] = scope.passing("flat")
        return name

    def _ends_in_place(self, start: fx.Node) -> bool:
        """Whether a reduction is a last all_reduce: its results are the gradients themselves."""
        whole = start.target is collectives.all_reduce_joined
        return whole and ends_step(self.graph, next(iter(start.users)))

    def _source(self, start: fx.Node) -> fx.Node | None:
        """The reduction whose results this one reduces further, all of them and nothing else."""
        befores = [self._reduced_by(operand) for operand in moved(start)]
        first = befores[0]
        if first is None or first not in self.names or set(befores) != {first}:
            return None
        return first if len(moved(first)) == len(befores) else None

    def _reduced_by(self, node: fx.Node) -> fx.Node | None:
        """The reduction that a value is a result of; None for other values."""
        wait = node.all_input_nodes[0] if carried(node) is not None else node
        return wait.all_input_nodes[0] if wait.target is collectives.wait else None

    def begun(self) -> list[fx.Node]:
        """The reductions whose dict was first used since this was last called."""
        begun, self.fresh = self.fresh, []
        return begun

    def entry(self, node: fx.Node, scope: Scope) -> str:
        """The place in a dict that a gradient is assigned to, ``grads[self.w]``; "" if none."""
        return "" if self.has_room(node, scope) else self._entry(node, scope)

    def part(self, node: fx.Node, scope: Scope) -> str:
        """The part of the memory to send that a gradient is written to; "" if there is none."""
        return self._entry(node, scope) if self.has_room(node, scope) else ""

    def _entry(self, node: fx.Node, scope: Scope) -> str:
        if node not in self.place:
            return ""
        start, param = self.place[node]
        name = self.name(start, scope)
        self.entries[name].append(param)
        return f"{name}[{param}]"

    def has_room(self, node: fx.Node, scope: Scope) -> bool:
        """Whether a gradient is a part of the memory that is sent."""
        return node in self.place and self.name(self.place[node][0], scope) in self.rooms

    def missing(self, start: fx.Node) -> Iterator[tuple[fx.Node, str]]:
        """The gradients of a reduction that are not in its dict yet, each with its place there."""
        name = self.names[start]
        for operand, param in zip(moved(start), self.params[start], strict=True):
            if param not in self.entries[name]:
                self.entries[name].append(param)
                yield operand, f"{name}[{param}]"

    def in_order(self, start: fx.Node) -> list[Move]:
        """The tensors of a reduction, in the order in which its dict got them."""
        by_param = dict(zip(self.params[start], moves(start), strict=True))
        return [by_param[param] for param in self.entries.get(self.names.get(start, ""), by_param)]

    def results(self, start: fx.Node) -> Iterator[tuple[fx.Node, str]]:
        """The results of a reduction, each with its place in the dict."""
        for move, param in zip(moves(start), self.params[start], strict=True):
            if move.result is not None:
                yield move.result, f"{self.names[start]}[{param}]"
