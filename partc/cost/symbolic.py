"""Costs of a graph as sympy expressions of input sizes (batch, sequence) and mesh axis sizes.

The graph is built again at a few other sizes. A polynomial is then fitted to every dim of every
value, and accepted only if it also predicts graphs at further sizes. Mesh axes enter through the
shardings: dim 2 of ``f32[8,64,1024@tp]`` is ``1024 / tp`` on a rank.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import sympy
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from partc.cost.bytes import moved_bytes, put_in_bytes, sent_share
from partc.cost.flops import node_flops
from partc.cost.memory import MemoryCurve, memory_curve
from partc.cost.storage import replay
from partc.errors import PartcError
from partc.graph import Graph, collectives, fake_of, tensor_args, value
from partc.graph.moves import kind_in_words, kind_of, wire_of
from partc.plan.sharding import Sharding

Sizes = Mapping[str, int]
Resized = Callable[[Sizes], Graph]  # makes the same graph, mesh and plan included, at other sizes


@dataclass(frozen=True)
class SymbolicCosts:
    """One rank's costs as expressions; if there are none, ``why`` gives the reason.

    ``at``: the value of each symbol in the graph at hand. ``sent_bytes``: by axis and kind of
    collective. ``saved_bytes``: the saved activations, None where a piece of memory is larger than
    the tensor in it, as expressions are known for tensors only.
    """

    flops: sympy.Expr | None = None
    moved_bytes: sympy.Expr | None = None
    sent_bytes: Mapping[tuple[str, str], sympy.Expr] = field(default_factory=dict)
    param_bytes: sympy.Expr | None = None
    saved_bytes: sympy.Expr | None = None
    at: Mapping[str, int] = field(default_factory=dict)
    why: str = ""


class _NotConfirmed(Exception):
    """Shapes are no polynomials of degree 1 or 2 in the sizes, or other sizes give other calls."""


@dataclass(frozen=True)
class Samples:
    """Values of one symbol to build the graph at: three to fit, two that must be predicted."""

    fitted: tuple[int, ...]
    held_out: tuple[int, ...]

    @classmethod
    def of(cls, size: int, step: int = 1) -> Samples:
        """Values near a size, all multiples of ``step``: below a large size, above a small one.

        The held-out values have other remainders, so that a dim like ``s // 2`` is not taken for
        the polynomial ``s / 2``.
        """
        n = size // step
        if n >= 8:
            fitted, held_out = (n, n // 2, 3 * n // 4), (n - 1, n // 4 + 1)
        else:
            fitted, held_out = (n, 2 * n, 3 * n), (2 * n + 1, 3 * n + 1)
        return cls(tuple(x * step for x in fitted), tuple(x * step for x in held_out))


def symbolic_costs(
    graph: Graph, resized: Resized, sizes: Sizes, steps: Sizes | None = None
) -> SymbolicCosts:
    """Costs of ``graph``, which was built at ``sizes`` (symbol -> number), as expressions.

    ``resized`` builds the same graph at other sizes. ``steps``: for a symbol, the number that
    its values have to be multiples of; for a batch, for example, the number of data-parallel ranks.
    """
    samples = {s: Samples.of(size, (steps or {}).get(s, 1)) for s, size in sizes.items()}
    try:
        shapes = _Shapes(graph, _fit(graph, resized, samples), sizes)
    except (PartcError, _NotConfirmed) as error:
        return SymbolicCosts(why=str(error))
    return shapes.costs()


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True, integer=True)


# following sizes ---------------------------------------------------------------------------------
Dims = dict[str, list[tuple[Any, ...]]]  # node name -> shape of each of its results


def _dims(graph: Graph) -> Dims:
    """The shapes of every node's fakes, by the node's name."""
    nodes = (n for n in graph.fx.nodes if n.op in ("placeholder", "call_function"))
    return {n.name: [tuple(t.shape) for t in _tensors(n)] for n in nodes}


def _tensors(node: fx.Node) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(fake_of(node)) if isinstance(x, Tensor)]


def _fit(graph: Graph, resized: Resized, samples: Mapping[str, Samples]) -> Dims:
    """Every dim as a polynomial, linear in each symbol, or quadratic if linear is not enough."""
    known = {tuple(s.fitted[0] for s in samples.values()): _dims(graph)}

    def at(point: tuple[int, ...]) -> Dims:
        if point not in known:
            known[point] = _dims(resized(dict(zip(samples, point, strict=True))))
        return known[point]

    held_out = list(zip(*(s.held_out for s in samples.values()), strict=True))
    for degree in (1, 2):
        grid = [s.fitted[: degree + 1] for s in samples.values()]
        fitted = _interpolate(grid, list(samples), at)
        if all(_predicts(fitted, dict(zip(samples, p, strict=True)), at(p)) for p in held_out):
            return fitted
    raise _NotConfirmed("sizes in the graph are no polynomials of the input's sizes")


def _interpolate(
    grid: Sequence[Sequence[int]], symbols: Sequence[str], at: Callable[[tuple[int, ...]], Dims]
) -> Dims:
    """The polynomials through the shapes at all points of a grid, by Lagrange's formula."""
    points = list(product(*grid))
    basis = [
        sympy.expand(
            prod(_bump(_symbol(s), xs, x) for s, xs, x in zip(symbols, grid, p, strict=True))
        )
        for p in points
    ]
    seen = [at(point) for point in points]
    if any(_ranks(other) != _ranks(seen[0]) for other in seen):
        raise _NotConfirmed("the graph has other calls at other sizes")
    cache: dict[tuple[int, ...], sympy.Expr] = {}

    def through(values: tuple[int, ...]) -> sympy.Expr:
        if values not in cache:
            terms = (v * b for v, b in zip(values, basis, strict=True))
            constant = len(set(values)) == 1
            cache[values] = sympy.Integer(values[0]) if constant else sympy.expand(sum(terms))
        return cache[values]

    def shape(name: str, result: int) -> tuple[sympy.Expr, ...]:
        return tuple(map(through, zip(*(dims[name][result] for dims in seen), strict=True)))

    return {name: [shape(name, i) for i in range(len(s))] for name, s in seen[0].items()}


def _bump(symbol: sympy.Symbol, xs: Sequence[int], x: int) -> sympy.Expr:
    """Lagrange's basis polynomial: 1 at ``x``, 0 at the other points of ``xs``."""
    others = [o for o in xs if o != x]
    return sympy.prod([(symbol - o) / sympy.Integer(x - o) for o in others])


def _ranks(dims: Dims) -> dict[str, list[int]]:
    return {name: [len(shape) for shape in shapes] for name, shapes in dims.items()}


def _predicts(fitted: Dims, sizes: Sizes, seen: Dims) -> bool:
    """Whether the polynomials give the shapes ``seen`` in a graph that was built at ``sizes``."""
    if _ranks(fitted) != _ranks(seen):
        return False
    where = {_symbol(s): n for s, n in sizes.items()}
    pairs = {
        (expr, size)
        for name, shapes in fitted.items()
        for exprs, shape in zip(shapes, seen[name], strict=True)
        for expr, size in zip(exprs, shape, strict=True)
    }
    return all(expr.subs(where) == size for expr, size in pairs)


# costs -------------------------------------------------------------------------------------------
class _Shapes:
    """A graph and the expressions of its local shapes, with mesh axis sizes as symbols too."""

    def __init__(self, graph: Graph, fitted: Dims, sizes: Sizes) -> None:
        self.graph = graph
        self.at = {**sizes, **dict(graph.mesh.axes)}
        self.of = {n: self._divided(n, fitted[n.name]) for n in graph.fx.nodes if n.name in fitted}

    def costs(self) -> SymbolicCosts:
        ran, graph = replay(self.graph), self.graph
        moving = (n for n in graph.calls() if moved_bytes(n, ran))
        sent: dict[tuple[str, str], Any] = defaultdict(int)
        for node in graph.calls():
            if node.target in collectives.COLLECTIVES:
                kind, axis = kind_of(node), str(node.kwargs["axis"])
                top, bottom = sent_share(kind, _symbol(axis))
                put_in = sum(self._sent(operand, node) for operand in tensor_args(node))
                if wire_of(node):  # padded to pieces and blocks: a number for these sizes alone
                    put_in = put_in_bytes(node)
                sent[axis, kind_in_words(node)] += put_in * top / bottom
        return SymbolicCosts(
            flops=_sum(node_flops(node, self._shapes) for node in graph.calls()),
            moved_bytes=_sum(
                self._bytes(n)
                for call in moving
                for n in {**dict.fromkeys(tensor_args(call)), call: None}
            ),
            sent_bytes={key: sympy.expand(sent[key]) for key in sorted(sent)},
            param_bytes=_sum(map(self._bytes, graph.params.values())),
            saved_bytes=self._saved_bytes(memory_curve(graph, ran)),
            at=self.at,
        )

    def _saved_bytes(self, curve: MemoryCurve) -> sympy.Expr | None:
        nodes = {node.name: node for node in self.graph.calls()}
        where = {_symbol(name): size for name, size in self.at.items()}
        saved = []
        for buffer in curve.saved():
            node = nodes[buffer.name]
            itemsize = _tensors(node)[buffer.result].element_size()
            saved.append(prod(self.of[node][buffer.result]) * itemsize)
            if sympy.sympify(saved[-1]).subs(where) != buffer.num_bytes:
                return None
        return _sum(saved)

    def _shapes(self, node: fx.Node) -> Any:
        single = isinstance(fake_of(node), Tensor)
        return self.of[node][0] if single else self.of[node]

    def _bytes(self, node: fx.Node) -> Any:
        tensors = zip(_tensors(node), self.of[node], strict=True)
        return sum(prod(shape) * tensor.element_size() for tensor, shape in tensors)

    def _sent(self, operand: fx.Node, move: fx.Node) -> Any:
        """The bytes of a collective's operand, in the dtype in which the collective sends it."""
        sent: Any = move.kwargs.get("dtype") or fake_of(operand).dtype
        return prod(self.of[operand][0]) * sent.itemsize

    def _divided(self, node: fx.Node, shapes: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Local shapes, with the size of an axis that shards a dim as a symbol.

        A result that no getitem reads has no sharding, so its shape keeps the axes' numbers.
        """
        if isinstance(fake_of(node), Tensor):
            return [self._cut(shapes[0], value(node).sharding)]
        picks = {u.args[1]: value(u).sharding for u in node.users if u.target is operator.getitem}
        return [self._cut(shape, picks.get(i, Sharding())) for i, shape in enumerate(shapes)]

    def _cut(self, shape: tuple[Any, ...], sharding: Sharding) -> tuple[Any, ...]:
        local = list(shape)
        for axis, layout in sharding.cuts():
            local[layout.dim] = local[layout.dim] * self.graph.mesh.size(axis) / _symbol(axis)
        return tuple(local)


def _sum(terms: Any) -> sympy.Expr:
    return sympy.expand(sympy.Add(*terms))
