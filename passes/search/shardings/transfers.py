"""Seconds that collectives take to bring a value from one sharding into another."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from partc.cost.collective_cost import estimates
from partc.graph import collectives
from partc.passes.search.solver.problem import Costs
from partc.passes.shard.reshard import reshard_steps
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, Sharding

Hop = tuple[str, str, float]  # a collective, its axis, the share of the whole that a rank puts in
Bar = Callable[[Sharding, Sharding], bool]  # whether the way from one to the other is barred


class Transfers:
    """Shardings by number, and what lies between each two of them.

    ``mesh`` has the axes that cut tensors, ``machines`` all axes and what ranks run on; transfers
    take time on the axes ``counted``, by default on all. Numbers stand for shardings because tables
    are made of millions of look-ups.
    """

    def __init__(self, mesh: Mesh, machines: Mesh, counted: Sequence[str] | None = None) -> None:
        self.mesh, self.machines = mesh, machines
        self.counted = mesh.names if counted is None else counted
        self.shardings: list[Sharding] = []
        self._numbers: dict[Sharding, int] = {}
        self._hops: dict[tuple[int, int], tuple[Hop, ...] | None] = {}
        self._lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self._tables: dict[tuple[float, Sequence[int], Sequence[int]], Costs] = {}
        self._fits: dict[tuple[tuple[int, ...], int], bool] = {}
        self._shares: list[float] = []
        self._labels: dict[int, str] = {}
        self._bar: Bar | None = None
        self.whole = self.number({})

    def number(self, layouts: Mapping[str, Layout]) -> int:
        """The number of the sharding with these layouts."""
        sharding = Sharding.of(layouts, self.mesh)
        if sharding not in self._numbers:
            self._numbers[sharding] = len(self.shardings)
            self.shardings.append(sharding)
            self._shares.append(self._share(sharding))
        return self._numbers[sharding]

    def without(self, bar: Bar) -> Transfers:
        """The same numbers, with some ways barred."""
        other = copy.copy(self)
        other._bar, other._tables = bar, {}
        return other

    def share(self, number: int) -> float:
        """The part of the whole that one rank holds."""
        return self._shares[number]

    def label(self, number: int) -> str:
        """A sharding in words, by axis: ``dp cut 0, tp U``."""
        if number not in self._labels:
            layouts = self.shardings[number].layouts
            self._labels[number] = ", ".join(f"{a} {layout}" for a, layout in layouts) or "whole"
        return self._labels[number]

    def fits(self, shape: tuple[int, ...], number: int) -> bool:
        """Whether all cuts divide the shape."""
        key = shape, number
        if key not in self._fits:
            local = self.shardings[number].local_shape(shape, self.mesh)
            self._fits[key] = local is not None
        return self._fits[key]

    def table(self, num_bytes: float, have: tuple[int, ...], want: tuple[int, ...]) -> Costs:
        """f64[have, want]: seconds from each sharding to each for a whole of so many bytes; inf
        where there is no way. Equal questions have one array for an answer.
        """
        key = num_bytes, have, want
        if key not in self._tables:
            rows, row = np.unique(have, return_inverse=True)
            columns, column = np.unique(want, return_inverse=True)
            pairs = ((h, w) for h in rows.tolist() for w in columns.tolist())
            costs = np.array([self.seconds(num_bytes, h, w) for h, w in pairs], np.float64)
            self._tables[key] = costs.reshape(len(rows), len(columns))[row][:, column]
        return self._tables[key]

    def seconds(self, num_bytes: float, have: int, want: int) -> float:
        """Of the collectives from one sharding to another, one after the other."""
        hops = self._between(have, want)
        if self._bar is not None and self._bar(self.shardings[have], self.shardings[want]):
            return math.inf
        if hops is None:
            return math.inf
        return sum(self._line(kind, axis, share * num_bytes) for kind, axis, share in hops)

    def _line(self, kind: str, axis: str, num_bytes: float) -> float:
        if axis not in self.counted:
            return 0.0
        lines = self._lines.get((kind, axis))
        if lines is None:
            found = estimates(kind, self.machines, axis)
            lines = self._lines[kind, axis] = [(e.latency_s, e.s_per_byte) for e in found]
        return min(latency + per_byte * num_bytes for latency, per_byte in lines)

    def _between(self, have: int, want: int) -> tuple[Hop, ...] | None:
        """The collectives on the way; None where there is no way."""
        key = have, want
        if key not in self._hops:
            before, after = self.shardings[have], self.shardings[want]
            ways = (_reaches(before.on(a), after.on(a)) for a in self.mesh.names)
            self._hops[key] = tuple(self._walk(before, after)) if all(ways) else None
        return self._hops[key]

    def _walk(self, have: Sharding, want: Sharding) -> list[Hop]:
        hops = []
        for step in reshard_steps(have, want, self.mesh):
            if step.target in collectives.COLLECTIVES:
                hops.append((step.target.__name__, str(step.kwargs["axis"]), self._share(have)))
            have = step.after
        return hops

    def _share(self, sharding: Sharding) -> float:
        return 1 / math.prod(self.mesh.size(axis) for axis, _ in sharding.cuts())


def _reaches(have: Layout, want: Layout) -> bool:
    """Sums and maxima can be finished; a sum can be made of what is whole, not of pieces. Rows in
    an order of a rank's own are known to no other.
    """
    if have == want or have.permuted or want.permuted:
        return have == want
    return want.kind in ("R", "cut") or (want.kind == "U" and have.kind == "R")
