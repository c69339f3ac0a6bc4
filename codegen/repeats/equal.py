"""Whether two blocks compute the same, though their calls may stand in different orders.

The order differs where transfers were scheduled: in the first or last block of a run a transfer may
start, or be waited for, beside other calls than in the blocks between.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx

from partc.codegen.repeats.may_vary import may_vary, names_of_arguments
from partc.codegen.repeats.own_names import own_name
from partc.graph import Graph, Phase, collectives, fake_of, value
from partc.graph.draws import site_in
from partc.graph.places import is_one_call, module_of

Ends = Mapping[fx.Graph, Collection[fx.Node]]  # of graphs that are being printed
_PRINTED: ContextVar[Ends] = ContextVar("printed", default=MappingProxyType({}))
Owner = tuple[str, Phase]  # a block's module path, and its phase: ("model.layers.0", "B")


@dataclass(frozen=True, eq=False)
class Group:
    """The calls of one block (``layer`` is its module path) in one phase, in execution order."""

    layer: str
    nodes: tuple[fx.Node, ...]


class Equal:
    """Compares blocks of one graph; ``owners`` has the block and phase of each call.

    With ``sizes`` blocks may differ in the sizes of tensors; their values from outside, which are
    then arguments, may be different ones in each.
    """

    def __init__(
        self, graph: Graph, owners: Mapping[fx.Node, Owner], *, sizes: bool = False
    ) -> None:
        self.owners, self.sizes = owners, sizes
        self.written = _written(graph)
        self.trained, self.elsewhere = graph.trained, graph.trained_elsewhere
        self.numbers: dict[Any, int] = {}  # equal values of different blocks have one number

    def aligned(self, first: Group | None, other: Group | None) -> Group | None:
        """Reorder ``other`` so that call i of both blocks is the same op on corresponding operands.

        None if the blocks differ, or if just one of them exists.
        """
        if first is None or other is None or len(first.nodes) != len(other.nodes):
            return None
        if self._signature(first) == self._signature(other):
            return other
        alike: dict[int, list[fx.Node]] = defaultdict(list)
        for node, number in self.numbered(other).items():
            alike[number].append(node)
        counterparts = [alike[number] for number in self.numbered(first).values()]
        if not all(counterparts):
            return None
        taken = [nodes.pop(0) if nodes else None for nodes in counterparts]
        ordered = Group(other.layer, tuple(node for node in taken if node is not None))
        return ordered if self._signature(first) == self._signature(ordered) else None

    def all_aligned(
        self, first: Mapping[Phase, Group | None], other: Mapping[Phase, Group | None]
    ) -> dict[Phase, Group | None] | None:
        """All phases of ``other`` in the order of ``first``; None if the two blocks differ."""
        found = {phase: self.aligned(group, other[phase]) for phase, group in first.items()}
        same = all((found[p] is None) == (g is None) for p, g in first.items())
        return found if same else None

    def numbered(self, group: Group) -> dict[fx.Node, int]:
        """For each call a number, which equal calls on equal operands of all blocks share.

        Value numbering: an operand from the same block is known by its number.
        """
        found: dict[fx.Node, int] = {}

        def known_as(node: fx.Node) -> Any:
            return found[node] if node in found else ("outside", *self._outside(node, group.layer))

        for node in group.nodes:
            key = self._call(node, group, known_as)
            found[node] = self.numbers.setdefault(key, len(self.numbers))
        return found

    def _signature(self, group: Group) -> tuple[Any, ...]:
        """What a block computes, in this order of calls; equal for blocks that do the same.

        An operand is known by its place in the block, or by the order in which operands from
        outside are first read.
        """
        number = {node: i for i, node in enumerate(group.nodes)}
        outside: dict[fx.Node, tuple[Any, ...]] = {}

        def known_as(node: fx.Node) -> Any:
            if node in number:
                return ("here", number[node])
            kind = self._kind(node, group.layer)
            return outside.setdefault(node, ("outside", len(outside), *kind))

        return tuple(self._call(node, group, known_as) for node in group.nodes)

    def _call(
        self, node: fx.Node, group: Group, known_as: Callable[[fx.Node], Any]
    ) -> tuple[Any, ...]:
        return (
            str(node.target),
            self._arguments(node, known_as, is_one_call(group.layer)),
            _shapes(fake_of(node), self.sizes),
            str(value(node).sharding),
            site_in(node, group.layer),
            self._results(node, group.layer),
        )

    def _results(self, node: fx.Node, layer: str) -> tuple[Any, ...]:
        """The gradients and new buffers that a block makes, named from the block on.

        Calls of one module make none: what they add up is whole behind the last of them.
        """
        written = [] if is_one_call(layer) else self.written.get(node, [])
        return tuple((kind, own_name(layer, name) or name, at) for kind, name, at in written)

    def _arguments(self, node: fx.Node, known_as: Callable[[fx.Node], Any], calls: bool) -> Any:
        def varies(name: str) -> Callable[[Any], bool]:
            return lambda number: may_vary(node, name, number, sizes=self.sizes, calls=calls)

        given = sorted(names_of_arguments(node), key=lambda item: item[0])
        return tuple((name, mapped(arg, known_as, varies(name))) for name, arg in given)

    def _outside(self, node: fx.Node, layer: str) -> tuple[Any, ...]:
        """An operand from outside the block; one that several blocks read is known by name too."""
        readers = {self.owners[u][0] for u in node.users if u in self.owners}
        shared = node.name if node not in self.owners and len(readers) > 1 else ""
        return (*self._kind(node, layer), shared)

    def _kind(self, node: fx.Node, layer: str) -> tuple[Any, ...]:
        """An operand from outside a block: local shape, dtype and sharding.

        The block's own parameters and buffers also have their names from the block on
        (``.mlp.weight``), and whether another stage trains them. Frozen and trained parameters
        differ: blocks of one class are declared alike.
        """
        known = value(node)
        trained = known.kind == "param" and known.name in self.trained
        module = module_of(layer)
        own = node.op == "placeholder" and known.name.startswith(f"{module}.")
        name = known.name.removeprefix(module) if own else ""
        elsewhere = own and known.name in self.elsewhere
        shapes = _shapes(fake_of(node), self.sizes)
        return (name, trained, elsewhere, shapes, str(known.sharding))


def ends_step(graph: Graph, node: fx.Node) -> bool:
    """Whether a node waits for a last reduction of gradients, or picks one of its results.

    The step does so at its end, in ``finish``, which adds the results to ``.grad``. False where
    anything else reads the result, or where the pieces that arrive are not yet the gradient
    (gathered or exchanged on another dim than 0).
    """
    if (known := _PRINTED.get().get(graph.fx)) is not None:
        return node in known
    if node.target is operator.getitem:
        call = node.all_input_nodes[0]
        return call.target is collectives.wait and ends_step(graph, call)
    if node.target is not collectives.wait:
        return False
    start = node.all_input_nodes[0]
    finals = list(node.users) if start.target in collectives.JOINED else [node]
    if any(set(n.users) != {graph.fx.output_node()} for n in finals):
        return False
    moved = start.target in (collectives.all_gather, collectives.all_to_all)
    whole = not moved or (start.kwargs["dim"] == 0 and start.kwargs.get("outer", 1) == 1)
    outputs = graph.outputs
    grads = Counter(outputs.grads.values())
    others = {outputs.loss, *outputs.buffers.values(), *outputs.results.values()}
    return bool(whole) and all(grads[n] == 1 and n not in others for n in finals)


def all_that_end(graph: Graph) -> set[fx.Node]:
    """The calls that `ends_step` holds of; a wait with hundreds of results is looked at once."""
    waits = [n for n in graph.calls() if n.target is collectives.wait and ends_step(graph, n)]
    picked = (n for wait in waits for n in wait.users if n.target is operator.getitem)
    return {*waits, *picked}


@contextmanager
def printing(graph: Graph) -> Iterator[None]:
    """A context in which nothing of the graph changes, so that `ends_step` looks at it once.

    Each block's class asks for each gradient of the step; a wait may have hundreds of results.
    """
    token = _PRINTED.set({**_PRINTED.get(), graph.fx: all_that_end(graph)})
    try:
        yield
    finally:
        _PRINTED.reset(token)


def made_in_step(graph: Graph, grad: fx.Node) -> fx.Node:
    """The call that makes a gradient, or that starts the reduction which ``finish`` waits for."""
    while ends_step(graph, grad):
        grad = grad.all_input_nodes[0]
    return grad


def _written(graph: Graph) -> dict[fx.Node, list[tuple[str, str, str]]]:
    """For each node the parameters whose final gradient, and the buffers whose new value, it makes.

    Equal blocks make the gradients of the same parameters, named from the block on.
    """
    found: dict[fx.Node, list[tuple[str, str, str]]] = defaultdict(list)
    outputs = graph.outputs
    for kind, results in (("grad", outputs.grads), ("buffer", outputs.buffers)):
        for name, node in results.items():
            which = str(node.args[1]) if node.target is operator.getitem else ""
            found[made_in_step(graph, node)].append((kind, name, which))
    return found


def mapped(
    args: Any, known_as: Callable[[fx.Node], Any],
    varies: Callable[[Any], bool] = lambda number: False,
) -> Any:  # fmt: skip
    """A call's arguments as a hashable value, every node replaced by ``known_as(node)``.

    Of a number that ``varies`` from block to block it says nothing but the type.
    """
    if isinstance(args, fx.Node):
        return known_as(args)
    if isinstance(args, list | tuple):
        return tuple(mapped(a, known_as, varies) for a in args)
    return type(args).__name__ if varies(args) else repr(args)


def says(node: fx.Node) -> object:
    """The op and the results of a call, which are the same in equal blocks."""
    return str(node.target), _shapes(fake_of(node))


def _shapes(fake: Any, sizes: bool = False) -> Any:
    """Shape and dtype of each tensor; with ``sizes``, which may differ, the number of dims."""
    if isinstance(fake, Tensor):
        return (fake.dim() if sizes else tuple(fake.shape), str(fake.dtype))
    if isinstance(fake, list | tuple):
        return tuple(_shapes(f, sizes) for f in fake)
    return type(fake).__name__ if sizes and type(fake) is int else repr(fake)
