"""Read the scaling model of a training step off one partitioned graph.

The FLOPs of a call, and the bytes of a tensor, are those of the whole model divided by the sizes of
the axes that shard it. So the graph is partitioned once, for 2 data ranks and 2 tensor ranks. Which
axes shard which tensor is then the same for all sizes that divide the same dims, so that
``estimate.py`` can evaluate thousands of candidates. Searched shardings hold for one size of
``tp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import Literal

import numpy as np
from torch import Tensor, fx

from partc.cost.bytes import moved_bytes, packed_bytes, unpacked_bytes
from partc.cost.flops import node_flops, op_name
from partc.cost.memory import Buffer, MemoryCurve, memory_curve
from partc.cost.products import NONE, Product, product_of
from partc.cost.roofline import work_of
from partc.cost.storage import replay
from partc.graph import Graph, Value, collectives, fake_of, picked, tensor_args, value
from partc.graph.blocks import blocks_of, prefixes
from partc.graph.casts import is_cast
from partc.graph.graph_edits import copied
from partc.graph.moves import kind_of
from partc.passes.runner import State, Table, run
from partc.passes.search.plans.scaling_model import (
    BACKWARD,
    FORWARD,
    Calls,
    ScalingModel,
    Sizes,
    Transfer,
    Weights,
)
from partc.plan import Cuts, Plan
from partc.plan.mesh import DP, TP, Mesh
from partc.plan.sharding import DTYPE_NAMES

Row = tuple[float, float, float, float]
UNCUT = ((False, False),) * 3
RANKS = 2  # size of each axis for which the graph is partitioned
Recompute = Literal["cheap", "none", "attention", "block"] | tuple[str, ...]  # a plan's
Touched = Callable[[Graph], Mapping[fx.Node, Sequence[fx.Node]]]


@dataclass(frozen=True)
class Reading:
    """How a graph is read: for how many data ranks it is partitioned, and whether modules beside
    the blocks are units of their own (``fine``), for a model of fewer blocks than stages.
    """

    data_ranks: int = RANKS
    fine: bool = False


READING = Reading()


def touched_values(local: Graph) -> dict[fx.Node, list[fx.Node]]:
    """Per call the values that it reads from memory or writes there: operands and result."""
    return {node: [*dict.fromkeys(tensor_args(node)), node] for node in local.calls()}


def scaling_models(
    graph: Graph, word: str, ways: Sequence[Recompute], table: Table, *,
    touched: Touched = touched_values, plain: bool = False,
    inputs: Mapping[str, Cuts] | None = None, reading: Reading = READING,
) -> Iterator[ScalingModel]:  # fmt: skip
    """The scaling models of a joint graph, one per recomputation in ``ways`` (``Plan.recompute``).

    ``word`` is a tensor preset, or "" for no ``tp``. ``inputs``: entries of a plan's ``[inputs]``
    for any data axes. The graph, which is not changed, is
    partitioned once for all ways, as that takes most of the time. ``touched(local)`` lists the
    values that each call reads from memory or writes there. ``plain`` describes eager PyTorch: a
    loss's gradient is several calls, and no result overwrites an operand. Raises the errors of
    ``complete`` and ``propagate``.
    """
    preset = Plan(preset="+".join(filter(None, ["ddp", word])), inputs=inputs or {})
    axes = ((DP, reading.data_ranks), (TP, RANKS)) if word else ((DP, reading.data_ranks),)
    mesh = Mesh(axes)
    yield from _profiles(graph, word, mesh, preset, ways, table, touched, plain, reading.fine)


def scaling_models_of_entries(
    graph: Graph, word: str, tensor_ranks: int, entries: Plan, ways: Sequence[Recompute],
    table: Table, reading: Reading = READING,
) -> Iterator[ScalingModel]:  # fmt: skip
    """The scaling models of searched shardings, ``entries`` of a plan for ``tensor_ranks``."""
    mesh = Mesh(((DP, reading.data_ranks), (TP, tensor_ranks)))
    plan = entries.changed(preset="ddp")
    for found in _profiles(graph, word, mesh, plan, ways, table, fine=reading.fine):
        yield replace(found, tp_divides=tensor_ranks)


def _profiles(
    graph: Graph, word: str, mesh: Mesh, plan: Plan, ways: Sequence[Recompute], table: Table,
    touched: Touched = touched_values, plain: bool = False, fine: bool = False,
) -> Iterator[ScalingModel]:  # fmt: skip
    state = _representative(graph, mesh, plan, table.without("fuse_loss") if plain else table)
    for number, again in enumerate(ways, start=1):
        way = state.copied() if number < len(ways) else state
        way.plan = state.plan.changed(recompute=again)
        local = run(way, "recompute").graph
        yield _Reader(graph, local, word, touched(local), plain, fine).profile()


def _representative(graph: Graph, mesh: Mesh, plan: Plan, table: Table) -> State:
    """The state after partitioning for these ranks, before the pass ``recompute``."""
    copy = copied(graph)
    copy.mesh = mesh
    made = {"strict": False, "rows": False}  # which rows to exchange depends on the machines
    state = State(copy, plan, mesh, replace(table, keep_texts=False), made=made)
    return run(state, "place_on_mesh", "count_whole")


@dataclass
class _Reader:
    """Reads the scaling model off a local graph; ``graph`` is the joint graph."""

    graph: Graph
    local: Graph
    word: str
    touched: Mapping[fx.Node, Sequence[fx.Node]]
    plain: bool
    fine: bool = False
    units: list[str] = field(default_factory=list)
    unit_of: dict[fx.Node, int] = field(default_factory=dict)
    of_module: dict[str, int] = field(default_factory=dict)

    def profile(self) -> ScalingModel:
        """The scaling model of the graph."""
        self._find_units()
        curve = memory_curve(self.local, self.ran, in_place=not self.plain)
        by_name = {node.name: node for node in self.local.fx.nodes}
        return ScalingModel(
            word=self.word,
            units=tuple(self.units),
            is_block=tuple(unit in self.blocks for unit in self.units),
            chain=tuple(self._chain()),
            calls=self._calls(),
            transfers=tuple(self._transfers()),
            weights=tuple(self._weights()),
            saved=tuple(self._saved(curve, by_name)),
            boundary=tuple(self._boundary()),
            beside=tuple(self._beside(curve, by_name)),
            working=self._working(curve, by_name),
            dp_divides=self._divides(DP),
            tp_divides=self._divides(TP),
            flops=float(sum(self.graph.times(n) * node_flops(n) for n in self.graph.calls())),
        )

    # units -----------------------------------------------------------------------------------
    def _find_units(self) -> None:
        """Find the units in forward order: blocks, and calls before, between and after blocks."""
        self.ran = replay(self.local)
        self.blocks = blocks_of(self.graph)
        here, entered = "before", set[str]()
        for node in self.local.calls():
            module = value(node).module
            if value(node).phase != "F":
                self.unit_of[node] = self.of_module.get(module, len(self.units) - 1)
                continue
            block = self._block(module)
            if block or here in self.blocks:
                here = block or f"after {here}"
            if self.fine and not block and module not in entered:
                here = module or here
            entered.update(prefixes(module))
            if here not in self.units:
                self.units.append(here)
            self.unit_of[node] = self.units.index(here)
            if module:
                self.of_module.setdefault(module, self.unit_of[node])

    def _block(self, path: str) -> str:
        parts = path.split(".")
        paths = (".".join(parts[: i + 1]) for i in range(len(parts)))
        return next((p for p in paths if p in self.blocks), "")

    def _unit(self, node: fx.Node) -> int:
        """The number of a call's unit; a gradient without a module belongs to the last unit."""
        return self.unit_of[node]

    def _chain(self) -> Iterator[int]:
        times = {fold.like: 1 + fold.num for fold in self.graph.folds}
        for number, unit in enumerate(self.units):
            yield from [number] * times.get(unit, 1)

    # what cuts what --------------------------------------------------------------------------
    def _cut(self, node: fx.Node) -> tuple[bool, bool]:
        sharding = value(node).sharding
        return sharding.on(DP).kind == "cut", sharding.on(TP).kind == "cut"

    def _size(self, node: fx.Node, result: int | None = None) -> Sizes:
        """The global bytes of a value; of a call with several results, all or number ``result``."""
        fake = fake_of(node)
        if not isinstance(fake, Tensor):
            parts = [n for n in node.users if n.op == "call_function" and n.args[0] is node]
            sizes = {picked(n)[1]: self._size(n) for n in parts}
            return (
                sizes.get(result, Sizes()) if result is not None else sum(sizes.values(), Sizes())
            )
        data, tensor = self._cut(node)
        whole = fake.numel() * fake.element_size() * self._ranks((data, tensor))
        row = [0.0] * 4
        row[2 * data + tensor] = float(whole)
        return Sizes((row[0], row[1], row[2], row[3]))

    def _ranks(self, cut: tuple[bool, bool]) -> int:
        """The number of shards that the axes make which are true in ``cut``."""
        sizes = [size for _, size in self.local.mesh.axes]
        return prod(size for size, cuts in zip(sizes, cut, strict=False) if cuts)

    def _divides(self, axis: str) -> int:
        """The greatest common divisor of all dims that the axis shards."""
        found = 0
        for node in self.local.fx.nodes:
            if node.op == "output" or not isinstance(fake_of(node), Tensor):
                continue
            layout = value(node).sharding.on(axis)
            if layout.kind == "cut":
                found = gcd(found, value(node).shape[layout.dim] // layout.outer)
        return found

    # columns ---------------------------------------------------------------------------------
    def _calls(self) -> Calls:
        rows = [row for node in self.local.calls() if (row := self._call(node)) is not None]
        unit, phase, grads, flops, cuts, sizes, dtypes, work, products, of, written = zip(
            *rows, strict=True
        )
        return Calls(
            np.array(unit), np.array(phase), np.array(grads), np.array(flops, dtype=np.float64),
            np.array(cuts), np.array(sizes), tuple(dtypes), np.array(work),
            np.array(products, dtype=np.float64), np.array(of), np.array(written),
        )  # fmt: skip

    def _call(self, node: fx.Node) -> tuple[object, ...] | None:
        """The row of one call in ``Calls``; None for a call that takes no time of its own."""
        if node.target in collectives.COLLECTIVES:
            return self._copies(node)
        if node.target is collectives.wait:
            return None
        moved = moved_bytes(node, self.ran)
        flops = node_flops(node)
        if not moved and not flops:
            return None
        cuts = [self._cut(n) for n in (*tensor_args(node), node)]
        cut = (any(c[0] for c in cuts), any(c[1] for c in cuts))
        size = sum((self._size(n) for n in self.touched[node]), Sizes())
        whole = flops * self._ranks(cut)
        return (
            *self._place(node), _makes_weight_grad(node), whole, cut, size.by_cut,
            _dtype(node), work_of(node), *self._product(node),
        )  # fmt: skip

    def _product(self, node: fx.Node) -> tuple[Product, tuple[tuple[bool, bool], ...], Row]:
        """A matrix product's result: its global sizes, the axes that shard each, and its bytes."""
        made = product_of(node)
        if made == NONE:
            return NONE, UNCUT, Sizes().by_cut
        dims = fake_of(node).dim()
        last = (dims - 3, dims - 2, dims - 1) if made.batch > 1 else (-1, dims - 2, dims - 1)
        cuts = [(False, False)] * 3
        for axis, name in enumerate((DP, TP)):
            layout = value(node).sharding.on(name)
            if layout.kind == "cut":
                of = next((i for i, dim in enumerate(last) if layout.dim <= dim), 2)
                cuts[of] = (cuts[of][0] or axis == 0, cuts[of][1] or axis == 1)
        whole = (size * self._ranks(axes) for size, axes in zip(made, cuts, strict=True))
        return Product(*whole), tuple(cuts), self._size(node).by_cut

    def _place(self, node: fx.Node) -> tuple[int, int]:
        return self._unit(node), BACKWARD if value(node).phase != "F" else FORWARD

    def _copies(self, node: fx.Node) -> tuple[object, ...] | None:
        """The copies into and out of the buffers of a collective over ``tp``, as one call."""
        size = Sizes()
        if node.kwargs["axis"] == TP and packed_bytes(node):
            size += sum((self._size(n) for n in tensor_args(node)), Sizes())
        if node.kwargs["axis"] == TP and unpacked_bytes(node):
            size += self._size(node)
        if size == Sizes():
            return None
        return (
            *self._place(node), False, 0, (False, False), (size + size).by_cut, _dtype(node),
            "pointwise", NONE, UNCUT, Sizes().by_cut,
        )  # fmt: skip

    def _transfers(self) -> Iterator[Transfer]:
        """The collectives over ``tp``."""
        moves = (n for n in self.local.calls() if n.target in collectives.COLLECTIVES)
        forward: set[Value] = set()  # to tell recomputed collectives of the forward from gradients
        for node in (n for n in moves if n.kwargs["axis"] == TP):
            size = sum((self._size(n) for n in tensor_args(node)), Sizes())
            if value(node).phase == "F":
                forward.add(value(node))
            new = value(node).phase != "F" and replace(value(node), phase="F") not in forward
            kind = kind_of(node)
            sums = new and kind in ("all_reduce", "reduce_scatter")
            yield Transfer(*self._place(node), kind, size, sums)

    def _weights(self) -> Iterator[Weights]:
        """The parameters, trainable and frozen, by their block or the first reading unit."""
        found: dict[int, list[fx.Node]] = {}
        for name, node in self.local.params.items():
            block = self._block(name)
            readers = (self._unit(user) for user in node.users if user.op == "call_function")
            unit = self.units.index(block) if block in self.units else min(readers, default=0)
            found.setdefault(unit, []).append(node)
        for number in range(len(self.units)):
            nodes = found.get(number, [])
            size = sum((self._size(n) for n in nodes), Sizes())
            dtypes = [DTYPE_NAMES[fake_of(n).dtype] for n in nodes] or ["f32"]
            gathered = sum((self._size(n).times(_gathered_share(n)) for n in nodes), Sizes())
            commonest = max(dict.fromkeys(dtypes), key=dtypes.count)
            yield Weights(size, len(nodes), commonest, gathered)

    # memory ----------------------------------------------------------------------------------
    def _saved(self, curve: MemoryCurve, by_name: Mapping[str, fx.Node]) -> Iterator[Sizes]:
        found = [Sizes()] * len(self.units)
        for buffer in curve.saved():
            node = by_name[buffer.name]
            found[self._unit(node)] += self._size(node, buffer.result)
        yield from found

    def _beside(self, curve: MemoryCurve, by_name: Mapping[str, fx.Node]) -> Iterator[Sizes]:
        """Per unit the memory live beside saved activations, at the call where it is largest."""
        rest = self._unsaved(curve)
        change = np.zeros(len(curve.calls) + 2)
        for buffer in rest:
            change[buffer.born] += buffer.num_bytes
            change[buffer.dies + 1] -= buffer.num_bytes
        live = np.cumsum(change)[: len(curve.calls)] + np.array(curve.temporary_bytes)
        of_unit = np.array([self.unit_of[by_name[name]] for name in curve.calls])
        for unit in range(len(self.units)):
            calls = np.nonzero(of_unit == unit)[0]
            yield self._live(curve, rest, int(calls[np.argmax(live[calls])]), by_name)

    def _working(self, curve: MemoryCurve, by_name: Mapping[str, fx.Node]) -> Sizes:
        return self._live(curve, self._unsaved(curve), curve.peak_at, by_name)

    def _unsaved(self, curve: MemoryCurve) -> list[Buffer]:
        """All buffers but saved activations and gradients of parameters."""
        kept = {id(buffer) for buffer in curve.saved()}
        return [b for b in curve.buffers if id(b) not in kept and b.dies < len(curve.calls)]

    def _live(
        self, curve: MemoryCurve, buffers: list[Buffer], at: int, by_name: Mapping[str, fx.Node]
    ) -> Sizes:
        """The bytes of the given buffers that are live during call ``at``, plus its workspace."""
        live = [b for b in buffers if b.born <= at <= b.dies]
        data, tensor = self._cut(by_name[curve.calls[at]])
        row = [0.0] * 4
        row[2 * data + tensor] = curve.temporary_bytes[at] * self._ranks((data, tensor))
        inside = Sizes((row[0], row[1], row[2], row[3]))
        return sum((self._size(by_name[b.name], b.result) for b in live), inside)

    def _boundary(self) -> Iterator[Sizes]:
        """Per unit the activations that forward calls of later units read."""
        found = [Sizes()] * len(self.units)
        for node in self.local.calls():
            if value(node).phase != "F" or node.target in collectives.COLLECTIVES:
                continue
            unit = self._unit(node)
            readers = [u for u in node.users if u.op == "call_function" and value(u).phase == "F"]
            if any(self._unit(u) > unit for u in readers) and isinstance(fake_of(node), Tensor):
                found[unit] += self._size(node)
        yield from found


def _gathered_share(param: fx.Node) -> float:
    """The bytes of a parameter as it is gathered, as a share of those that are stored: 0.5 for a
    float32 parameter that the step reads as bf16 alone.
    """
    readers = [user for user in param.users if user.op == "call_function"]
    if not readers or not all(map(is_cast, readers)):
        return 1.0
    sizes = [fake_of(reader).element_size() for reader in readers]
    return min(1.0, float(max(sizes) / fake_of(param).element_size()))


def _makes_weight_grad(node: fx.Node) -> bool:
    return op_name(node) == "weight_grad"


def _dtype(node: fx.Node) -> str:
    fakes: Sequence[object] = (
        fake_of(node) if isinstance(fake_of(node), Sequence) else [fake_of(node)]
    )
    tensors = [x for x in fakes if isinstance(x, Tensor)]
    return DTYPE_NAMES.get(tensors[0].dtype, "f8") if tensors else "f32"
