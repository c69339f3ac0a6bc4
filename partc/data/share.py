"""Which rows of every step's batch a rank reads: it follows from the plan's cuts of the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from partc.errors import UsageError
from partc.plan import Cuts, Plan
from partc.plan.batch import MODEL_AXES
from partc.plan.mesh import ISLAND, MICROBATCH_AXIS, Mesh
from partc.plan.servers import Servers, batch_of, computing
from partc.plan.sharding import Layout, Sharding, cut
from partc.wrong_calls import is_word, quoted

_ALONE = {*MODEL_AXES} - {MICROBATCH_AXIS}  # ranks that differ on these alone read the same rows
Batch = Literal["local", "global"]
Inputs = Mapping[str, tuple[tuple[int, ...], str]]  # whole shape and dtype, by name


@dataclass(frozen=True)
class Share:
    """The rows of every step's batch that one rank reads.

    Attributes:
        per_step: the number of rows of the whole batch, of all data ranks together; of islands, of
            which each has a batch of its own, of all of these.
        rank: the number of the rank's piece; ranks that differ along tp or pp have one piece.
        world: the number of pieces; 1 where every rank reads the whole batch.
        places: which rows of the batch the piece has, i64[per_step / world].
    """

    per_step: int
    rank: int
    world: int
    places: NDArray[np.int64]

    def of(self, num: int) -> NDArray[np.int64]:
        """The places of this rank's rows in a batch of ``num`` rows: the last may be smaller.

        The pieces of a smaller batch differ by one row at most.
        """
        if num == self.per_step:
            return self.places
        first, end = (num * piece // self.world for piece in (self.rank, self.rank + 1))
        return np.arange(first, end, dtype=np.int64)


@dataclass(frozen=True)
class Division:
    """How the batch of a program is divided among the ranks of its mesh.

    ``cuts``: of the rows, by mesh axis. ``microbatches``: how many of a step each island takes,
    each as large as the batch that was compiled; empty where all take one. ``servers``: the islands
    that own parameters, which may compute nothing.
    """

    mesh: Mesh
    cuts: Cuts
    microbatches: Sequence[int] = ()
    servers: Servers | None = None

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh) -> Division:
        """The cuts of the plan's ``[inputs]`` that divide rows among ranks.

        Microbatches divide them in time, and other dims (a sequence over tp) are divided by the
        program. UsageError if two inputs are cut differently.
        """
        found = {name: _row_cuts(cuts) for name, cuts in plan.inputs.items()}
        kinds = {name: cuts for name, cuts in found.items() if cuts}
        if len({tuple(sorted(cuts.items())) for cuts in kinds.values()}) > 1:
            raise UsageError(
                where="[inputs] of the plan",
                what=f"{' and '.join(list(kinds)[:2])} are cut over different axes",
                why="one sampler gives the rows of all inputs",
                do="Cut them alike, or give each rank its rows by a sampler of your own.",
            )
        microbatches = plan.uneven.of_each if plan.uneven else ()
        return cls(mesh, next(iter(kinds.values()), {}), microbatches, plan.servers)

    @property
    def world(self) -> int:
        """The number of pieces of a batch, of one island."""
        return int(np.prod([self.mesh.size(axis) for axis in self.cuts], dtype=int))

    @property
    def num_batches(self) -> int:
        """How many islands have a batch of their own."""
        return computing(self.servers, self.mesh)

    def rank(self, rank: int) -> int:
        """The number of the piece that a rank computes; pieces of islands count on."""
        return self._piece_number(rank) + self._batch_of(rank) * self.world

    def _batch_of(self, rank: int) -> int:
        """The number of the batch of a rank's island; a server that computes none reads another's,
        so that it takes as many steps.
        """
        return batch_of(self.servers, self.mesh, self.mesh.coords(rank).get(ISLAND, 0))

    def _piece_number(self, rank: int) -> int:
        plain = {axis: cut(0) for axis in self.cuts}
        return int(self._piece(plain, self.world, rank)[0])

    def share(self, rank: int, per_step: int, batch: Batch) -> Share:
        """What a rank reads of a batch: its piece (``"local"``) or all of it (``"global"``)."""
        if not is_word(batch, get_args(Batch)):
            raise UsageError(
                where=f"batch={quoted(batch)}",
                what="there is no such batch",
                why="a step takes the whole batch on every rank, or each rank's piece",
                do='Give "global" or "local".',
            )
        alone = self._of_island(rank, per_step, batch)
        num, island = self.num_batches, self._batch_of(rank)
        if self.mesh.islands == 1:
            return alone
        counts = self.microbatches or [1] * num
        first = sum(counts[:island])
        turns = range(first, first + counts[island])
        own = np.concatenate([alone.places + turn * per_step for turn in turns])
        pieces = alone.rank + island * alone.world
        return Share(sum(counts) * per_step, pieces, num * alone.world, own)

    def _of_island(self, rank: int, per_step: int, batch: Batch) -> Share:
        """What a rank reads of its island's batch."""
        if batch == "global":
            return Share(per_step, 0, 1, np.arange(per_step, dtype=np.int64))
        outer = max([1, *(layout.outer for layout in self.cuts.values())])
        if per_step < 1 or per_step % (self.world * outer):
            raise UsageError(
                where=f"rows_per_step={per_step}",
                what=f"the rows of a step cannot be divided among {self.world} data ranks",
                why="all data ranks take equally many rows",
                do=f"Give a multiple of {self.world * outer}: the rows of all ranks together.",
            )
        places = self._piece(self.cuts, per_step, rank)
        return Share(per_step, int(self._piece_number(rank)), self.world, places)

    def _piece(self, cuts: Cuts, num: int, rank: int) -> NDArray[np.int64]:
        """The places of a rank's rows among ``num``, i64[num / world]."""
        mesh = self.mesh.cutting_axes()
        coords = self.mesh.coords(rank)
        piece = Sharding.of(cuts, mesh).local(torch.arange(num), coords, mesh)
        return np.array(piece.tolist(), dtype=np.int64)


def rows_per_step(plan: Plan, inputs: Inputs) -> int:
    """The number of rows of a program's whole batch; UsageError if the inputs do not agree on it.

    It is the size of the dim that data axes and microbatches cut, else that of dim 0.
    """
    dims = {name: _row_dim(plan.inputs.get(name, {})) for name in inputs}
    divided = [name for name in inputs if {*plan.inputs.get(name, {})} - _ALONE]
    names = divided or [name for name, (shape, _) in inputs.items() if shape]
    sizes = {name: inputs[name][0][dims[name]] for name in names}
    if len(set(sizes.values())) == 1:
        return next(iter(sizes.values()))
    told = ", ".join(f"{name} has {size}" for name, size in sizes.items()) or "no input has dims"
    raise UsageError(
        where="rows_per_step",
        what="the inputs do not say how many rows of the dataset a step takes",
        why=told,
        do="Pass rows_per_step=, the rows of all data ranks together.",
    )


def _row_dim(cuts: Cuts) -> int:
    """The dim of an input that counts the rows of the batch."""
    return next((layout.dim for axis, layout in cuts.items() if axis not in _ALONE), 0)


def _row_cuts(cuts: Cuts) -> dict[str, Layout]:
    """The cuts of an input's rows over ranks, as cuts of dim 0."""
    in_space = (axis for axis in cuts if axis not in MODEL_AXES)
    return {axis: cut(0, cuts[axis].outer) for axis in in_space}
