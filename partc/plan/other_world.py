"""The mesh of a program for another number of ranks: which axes become smaller or larger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from partc.errors import UsageError
from partc.plan import Cuts, Plan
from partc.plan.batch import data_axes
from partc.plan.mesh import ISLAND, MICROBATCH_AXIS, Mesh
from partc.plan.sharding import R

MOST_TOLD = 24  # numbers of ranks that an error lists
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class World:
    """What a program says of the meshes that may take its place: its mesh, its plan, and the whole
    shapes of its inputs.
    """

    mesh: Mesh
    plan: Plan
    inputs: Shapes

    def of_ranks(self, num: int, where: str) -> Mesh:
        """The mesh of so many ranks that shares the batch evenly; data axes change first, and
        others only become smaller. UsageError if there is none, which says what numbers do.
        """
        found = self._best(num)
        if found is not None:
            return found
        most = 2 * max(self.mesh.num_ranks, min(num, 512))
        do = [each for each in range(1, most + 1) if self._best(each) is not None]
        told = ", ".join(map(str, do[:MOST_TOLD])) + ", ..." * (len(do) > MOST_TOLD)
        raise UsageError(
            where=where, what=f"no mesh of {num} ranks takes the place of {self.mesh}",
            why=f"the global batch stays the same, and they cannot share it: {self._batch()}",
            do=f"Take one of these numbers of ranks: {told}." if do else "Compile anew.",
        )  # fmt: skip

    def with_axes(self, axes: Mesh, where: str) -> Mesh:
        """The mesh with these sizes of its axes, and 1 for those that are not named; UsageError for
        other axes, and where the batch is not shared evenly.
        """
        if strange := [name for name in axes.names if name not in self.mesh.names]:
            raise UsageError(
                where=where, what=f"the program has no axis {strange[0]!r}",
                why=f"it was compiled for {self.mesh}, and its axes get other sizes",
                do="Name these axes; for others compile anew.",
            )  # fmt: skip
        sizes = dict(axes.axes)
        found = Mesh(tuple((name, sizes.get(name, 1)) for name in self.mesh.names))
        if found.islands != self.mesh.islands:
            raise UsageError(
                where=where, what=f"{found.islands} islands are not {self.mesh.islands}",
                why="each island has a batch of its own, so that the global batch would be another",
                do=f"Keep {ISLAND}={self.mesh.islands}, or compile anew.",
            )  # fmt: skip
        if wrong := self._undivided(found):
            raise UsageError(
                where=where, what=f"the ranks of {found} cannot share the batch evenly", why=wrong,
                do="Give the data axes sizes that divide it.",
            )  # fmt: skip
        return found

    def _best(self, num: int) -> Mesh | None:
        every = (mesh for mesh in self._candidates(num) if not self._undivided(mesh))
        return max(every, key=self._kept, default=None)

    def _kept(self, mesh: Mesh) -> tuple[int, ...]:
        """How much of the axes that hold parts of the model is left, the first before others."""
        model = [size for name, size in mesh.axes if name not in data_axes(self.mesh)]
        return prod(model), *model

    def _candidates(self, num: int) -> Iterator[Mesh]:
        data = data_axes(self.mesh)
        model = [(n, size) for n, size in self.mesh.axes if n not in data]
        choices = [[size] if name == ISLAND else _divisors(size) for name, size in model]
        for sizes in product(*choices):
            rest, left = divmod(num, prod(sizes))
            if left or (rest > 1 and not data):
                continue
            found = dict(zip((name for name, _ in model), sizes, strict=True))
            found |= self._dealt(rest, data)
            yield Mesh(tuple((name, found[name]) for name in self.mesh.names))

    def _dealt(self, num: int, data: tuple[str, ...]) -> dict[str, int]:
        """Sizes of the data axes: inner ones stay where they can, as what is sharded along them
        takes as much room then.
        """
        found = {}
        for name in reversed(data[1:]):
            size = self.mesh.size(name)
            found[name] = size if num % size == 0 else num
            num //= found[name]
        return {**found, **dict.fromkeys(data[:1], num)}

    def _undivided(self, mesh: Mesh) -> str:
        """Which input's rows a mesh does not divide; "" if it divides all."""
        for name, shape in self.inputs.items():
            cuts = self.plan.stored(name, self.plan.inputs)
            if wrong := undivided(cuts, shape, mesh, self.plan.microbatches):
                return f"{name} {[*shape]}: {wrong}"
        return ""

    def _batch(self) -> str:
        every = (f"{name} {[*shape]}" for name, shape in self.inputs.items())
        turns, islands = self.plan.microbatches, self.mesh.islands
        told = ", ".join(every) + (f" in {turns} microbatches" if turns > 1 else "")
        return told + (f" on each of {islands} islands" if islands > 1 else "")


def undivided(cuts: Cuts, shape: tuple[int, ...], mesh: Mesh, microbatches: int = 1) -> str:
    """Why a tensor of this shape cannot be cut so on a mesh; "" if it can.

    >>> from partc.plan.sharding import cut
    >>> undivided({"dp": cut(0)}, (12, 4), Mesh.parse("dp=5"))
    'its dim 0, of 12, is not divided by dp=5'
    """
    left = [*shape]
    for axis, layout in cuts.items():
        size = microbatches if axis == MICROBATCH_AXIS else mesh.size(axis)
        if layout == R or size == 1:
            continue
        if left[layout.dim] % (layout.outer * size):
            return f"its dim {layout.dim}, of {left[layout.dim]}, is not divided by {axis}={size}"
        left[layout.dim] //= size
    return ""


def _divisors(size: int) -> list[int]:
    return [each for each in range(1, size + 1) if size % each == 0]
