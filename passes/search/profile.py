"""What a training step costs at any axis sizes: laws read off one partitioned graph.

A call's arithmetic, and the bytes of a tensor, are those of the whole model over the sizes of the
axes that cut it. So the graph is partitioned once for two data and two tensor ranks; which axis
cuts what holds for every size that divides the same dims, and ``estimate.py`` evaluates plans by
thousands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, fx

from partc import collectives
from partc.graph import Graph, copied, held, picked, tensor_args, value
from partc.mesh import Mesh
from partc.moves import kind_of
from partc.passes.alike_blocks import blocks_of
from partc.passes.apply_preset import complete
from partc.passes.bytes import moved_bytes, put_in_bytes
from partc.passes.flops import node_flops, op_name
from partc.passes.insert_collectives import insert_collectives
from partc.passes.memory import MemoryCurve, memory_curve
from partc.passes.propagate import propagate
from partc.passes.recompute import recompute
from partc.passes.split_bias import fuse_bias, split_bias
from partc.passes.storage import replay
from partc.plan import Plan
from partc.sharding import DTYPE_NAMES

DP, TP = "dp", "tp"
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True)
class Sizes:
    """Bytes by the axes that cut them: by none, by ``tp``, by ``dp``, by both; of the whole."""

    by_cut: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def local(self, dp: int, tp: int) -> float:
        """The bytes of one rank; ``dp`` counts microbatches too."""
        none, tensor, data, both = self.by_cut
        return none + tensor / tp + data / dp + both / (dp * tp)

    def __add__(self, other: Sizes) -> Sizes:
        a, b = self.by_cut, other.by_cut
        return Sizes((a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]))


@dataclass(frozen=True)
class Transfer:
    """A collective over ``tp`` that a unit makes in one phase."""

    unit: int
    phase: int
    kind: str
    size: Sizes  # what a rank puts in


@dataclass(frozen=True)
class Weights:
    """Parameters of one unit: bytes by how ``tp`` cuts them, in number of tensors ``count``."""

    size: Sizes
    count: int
    largest_dtype: str


@dataclass(frozen=True, eq=False)
class Calls:
    """All calls as columns: where they stand, their FLOPs and the axes that cut these, bytes."""

    unit: Ints
    phase: Ints
    is_weight_grad: NDArray[np.bool_]
    flops: Floats
    cut: NDArray[np.bool_]  # [call, (dp, tp)]
    bytes: Floats  # [call, (none, tp, dp, both)]
    dtype: tuple[str, ...]
    is_attention: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Profile:
    """A model's step under one way to cut weights over ``tp``.

    ``units`` are its blocks and what stands between, ``chain`` has them in the order in which they
    run, a block that stands for others several times. ``saved`` is what a unit keeps for its
    backward, ``working`` the most that is live beside it; ``dp_divides`` and ``tp_divides`` are
    what the axis sizes have to divide.
    """

    word: str
    units: tuple[str, ...]
    is_block: tuple[bool, ...]
    chain: tuple[int, ...]
    calls: Calls
    transfers: tuple[Transfer, ...]
    weights: tuple[Weights, ...]
    saved: tuple[Sizes, ...]
    boundary: tuple[Sizes, ...]
    working: Sizes
    dp_divides: int
    tp_divides: int
    flops: float  # of the whole step, without what is computed twice


def profile(graph: Graph, word: str) -> Profile:
    """The laws of a joint graph's step; ``word`` is a tensor preset, or "" for no ``tp``.

    The graph stays as it is. Raises what ``complete`` and ``propagate`` raise.
    """
    local, plan = _representative(graph, word)
    return _Reader(graph, local, plan, word).profile()


def _representative(graph: Graph, word: str) -> tuple[Graph, Plan]:
    """The local graph for two data ranks and, with a word, two tensor ranks."""
    copy = copied(graph)
    axes = ((DP, 2), (TP, 2)) if word else ((DP, 2),)
    copy.mesh = Mesh(axes)
    split_bias(copy)
    plan = complete(Plan(preset="+".join(filter(None, ["ddp", word]))), copy, copy.mesh)
    choices = propagate(copy, plan, warnings=[])
    return recompute(fuse_bias(insert_collectives(copy, plan, choices)), plan), plan


@dataclass
class _Reader:
    """Reads the laws off a local graph; ``graph`` is the joint one."""

    graph: Graph
    local: Graph
    plan: Plan
    word: str
    units: list[str] = field(default_factory=list)
    unit_of: dict[fx.Node, int] = field(default_factory=dict)
    of_module: dict[str, int] = field(default_factory=dict)

    def profile(self) -> Profile:
        self._find_units()
        curve = memory_curve(self.local, self.ran)
        by_name = {node.name: node for node in self.local.fx.nodes}
        return Profile(
            word=self.word,
            units=tuple(self.units),
            is_block=tuple(unit in self.blocks for unit in self.units),
            chain=tuple(self._chain()),
            calls=self._calls(),
            transfers=tuple(self._transfers()),
            weights=tuple(self._weights()),
            saved=tuple(self._saved(curve, by_name)),
            boundary=tuple(self._boundary()),
            working=self._working(curve, by_name),
            dp_divides=self._divides(DP),
            tp_divides=self._divides(TP),
            flops=float(sum(self.graph.times(n) * node_flops(n) for n in self.graph.calls())),
        )

    # units -----------------------------------------------------------------------------------
    def _find_units(self) -> None:
        """Blocks, and what stands before, between and after them, as the forward enters them."""
        self.ran = replay(self.local)
        self.blocks = blocks_of(self.graph)
        here = "before"
        for node in self.local.calls():
            module = value(node).module
            if value(node).phase != "F":
                self.unit_of[node] = self.of_module.get(module, len(self.units) - 1)
                continue
            block = self._block(module)
            if block or here in self.blocks:
                here = block or f"after {here}"
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
        """The unit of a call; gradients that belong to no module are the last unit's."""
        return self.unit_of[node]

    def _chain(self) -> Iterator[int]:
        times = {fold.like: 1 + fold.num for fold in self.graph.folds}
        for number, unit in enumerate(self.units):
            yield from [number] * times.get(unit, 1)

    # what cuts what --------------------------------------------------------------------------
    def _cut(self, node: fx.Node) -> tuple[bool, bool]:
        sharding = value(node).sharding
        return sharding.on(DP).kind == "cut", sharding.on(TP).kind == "cut"

    def _size(self, node: fx.Node) -> Sizes:
        """The bytes of a value, those of its results where it has several."""
        fake = held(node)
        if not isinstance(fake, Tensor):
            parts = [n for n in node.users if n.op == "call_function" and n.args[0] is node]
            return sum({picked(n)[1]: self._size(n) for n in parts}.values(), Sizes())
        data, tensor = self._cut(node)
        whole = fake.numel() * fake.element_size() * (1 + data) * (1 + tensor)
        row = [0.0] * 4
        row[2 * data + tensor] = float(whole)
        return Sizes((row[0], row[1], row[2], row[3]))

    def _divides(self, axis: str) -> int:
        """The greatest number that divides every dim which the axis cuts."""
        found = 0
        for node in self.local.fx.nodes:
            if node.op == "output" or not isinstance(held(node), Tensor):
                continue
            layout = value(node).sharding.on(axis)
            if layout.kind == "cut":
                found = gcd(found, value(node).shape[layout.dim] // layout.outer)
        return found

    # columns ---------------------------------------------------------------------------------
    def _calls(self) -> Calls:
        rows = [row for node in self.local.calls() if (row := self._call(node)) is not None]
        unit, phase, grads, flops, cuts, sizes, dtypes, attention = zip(*rows, strict=True)
        return Calls(
            np.array(unit), np.array(phase), np.array(grads), np.array(flops, dtype=np.float64),
            np.array(cuts), np.array(sizes), tuple(dtypes), np.array(attention),
        )  # fmt: skip

    def _call(self, node: fx.Node) -> tuple[object, ...] | None:
        if node.target in (*collectives.COLLECTIVES, collectives.wait):
            return None
        moved = moved_bytes(node, self.ran)
        flops = node_flops(node)
        if not moved and not flops:
            return None
        touched = [*dict.fromkeys(tensor_args(node)), node]
        cuts = [self._cut(n) for n in touched]
        cut = (any(c[0] for c in cuts), any(c[1] for c in cuts))
        size = sum((self._size(n) for n in touched), Sizes())
        whole = flops * (1 + cut[0]) * (1 + cut[1])
        known = value(node)
        return (
            self._unit(node), BACKWARD if known.phase != "F" else FORWARD,
            _makes_weight_grad(self.local, node), whole, cut, size.by_cut, _dtype(node),
            "attention" in op_name(node),
        )  # fmt: skip

    def _transfers(self) -> Iterator[Transfer]:
        for node in self.local.calls():
            if node.target in collectives.COLLECTIVES and node.kwargs["axis"] == TP:
                phase = BACKWARD if value(node).phase != "F" else FORWARD
                size = sum((self._size(n) for n in tensor_args(node)), Sizes())
                assert put_in_bytes(node) >= 0
                yield Transfer(self._unit(node), phase, kind_of(node), size)

    def _weights(self) -> Iterator[Weights]:
        """Trainable and frozen parameters by the unit that reads them first."""
        found: dict[int, list[fx.Node]] = {}
        for name, node in self.local.params.items():
            block = self._block(name)
            readers = (self._unit(user) for user in node.users if user.op == "call_function")
            unit = self.units.index(block) if block in self.units else min(readers, default=0)
            found.setdefault(unit, []).append(node)
        for number in range(len(self.units)):
            nodes = found.get(number, [])
            size = sum((self._size(n) for n in nodes), Sizes())
            dtypes = [DTYPE_NAMES[held(n).dtype] for n in nodes] or ["f32"]
            yield Weights(size, len(nodes), max(set(dtypes), key=dtypes.count))

    # memory ----------------------------------------------------------------------------------
    def _saved(self, curve: MemoryCurve, by_name: Mapping[str, fx.Node]) -> Iterator[Sizes]:
        found = [Sizes()] * len(self.units)
        for buffer in curve.saved():
            node = by_name[buffer.name]
            found[self._unit(node)] += self._size(node)
        yield from found

    def _working(self, curve: MemoryCurve, by_name: Mapping[str, fx.Node]) -> Sizes:
        """What is live at the peak beside what was saved, and gradients of parameters."""
        at, kept = curve.peak_at, set(map(id, curve.saved()))
        grads = {n.name for n in self.local.grads.values()}
        live = [b for b in curve.buffers if b.born <= at <= b.dies and id(b) not in kept]
        return sum((self._size(by_name[b.name]) for b in live if b.name not in grads), Sizes())

    def _boundary(self) -> Iterator[Sizes]:
        """What the next units' forwards read of a unit."""
        found = [Sizes()] * len(self.units)
        for node in self.local.calls():
            if value(node).phase != "F" or node.target in collectives.COLLECTIVES:
                continue
            unit = self._unit(node)
            readers = [u for u in node.users if u.op == "call_function" and value(u).phase == "F"]
            if any(self._unit(u) > unit for u in readers) and isinstance(held(node), Tensor):
                found[unit] += self._size(node)
        yield from found


def _makes_weight_grad(graph: Graph, node: fx.Node) -> bool:
    return op_name(node) == "weight_grad"


def _dtype(node: fx.Node) -> str:
    fakes: Sequence[object] = held(node) if isinstance(held(node), Sequence) else [held(node)]
    tensors = [x for x in fakes if isinstance(x, Tensor)]
    return DTYPE_NAMES.get(tensors[0].dtype, "f8") if tensors else "f32"
