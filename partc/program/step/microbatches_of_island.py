"""The rows that a step of an island is given: those of its microbatches, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from partc.errors import RunError
from partc.plan import Plan
from partc.plan.mesh import ISLAND
from partc.program import Program


@dataclass(frozen=True)
class MicrobatchesOfIsland:
    """How many microbatches an island computes in a step.

    ``dims``: of each input the dim of its rows; None where every microbatch has all of it.
    """

    num: int
    names: Sequence[str]
    dims: Sequence[int | None]

    @classmethod
    def here(cls, program: Program) -> MicrobatchesOfIsland | None:
        """Those of this process's island."""
        return cls.of(program, dist.get_rank() if dist.is_initialized() else 0)

    @classmethod
    def of(cls, program: Program, rank: int) -> MicrobatchesOfIsland | None:
        """None where all islands compute one, or there is none."""
        how = Plan.parse(program.plan).uneven
        if how is None:
            return None
        names = [*program.inputs]
        num = how.of_each[program.mesh.coords(rank)[ISLAND]]
        return cls(num, names, [how.dim_of(name) for name in names])

    def first(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The first microbatch, as large as any; RunError where the rows do not divide."""
        if len(inputs) != len(self.dims):
            return [*inputs]  # which other checks refuse
        rows = zip(inputs, self.names, self.dims, strict=True)
        return [self._first(x, name, dim) for x, name, dim in rows]

    def repeated(self, first: Sequence[Tensor]) -> list[Tensor]:
        """As many rows as a step is given, all microbatches like the first."""
        rows = zip(first, self.dims, strict=True)
        return [x if dim is None else torch.cat([x] * self.num, dim) for x, dim in rows]

    def _first(self, x: Tensor, name: str, dim: int | None) -> Tensor:
        if dim is None or dim >= x.dim():
            return x
        size = x.shape[dim]
        if size % self.num or not size:
            raise RunError(
                where=f"step, {name}", what=f"it has {size} rows for {self.num} microbatches",
                why="the plan's [uneven] gives this island so many, of equally many rows",
                do="Pass the rows of all of them, as stage.loader(dataset) reads them.",
            )  # fmt: skip
        return x.narrow(dim, 0, size // self.num)
