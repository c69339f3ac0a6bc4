"""A batch of which ranks were given pieces of different sizes: all ranks compute all of its rows.

Of 5 rows for 2 data ranks one may have ``i64[3,16]`` and the other ``i64[2,16]``, or one all and
the other ``i64[0,16]``. Each rank gathers ``i64[5,16]``, runs a program of the whole batch, and
takes its own rows of what that returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partc.plan import Plan
from partc.plan.batch import Dealt
from partc.plan.sharding import R
from partc.program import Program
from partc.program.step.batch_fit import Pieces
from partc.program.step.script_backward import Halfway
from partc.program.wanted import Wanted

ROWS_OF_EXAMPLE = 2  # of each rank, in a program that is compiled to see how results are cut


@dataclass(frozen=True)
class UnevenRows:
    """Joins the pieces of ranks whose numbers of rows differ.

    ``pieces``: how inputs are dealt. ``firsts``: of each piece in order the first rank that has it,
    ``of_islands`` the same of every island. ``own``: the number of this rank's piece.
    """

    pieces: Pieces
    firsts: Sequence[int]
    own: int
    of_islands: Sequence[Sequence[int]]

    @classmethod
    def of(cls, program: Program) -> UnevenRows | None:
        """None where all ranks have the whole batch, or a piece is no run of rows."""
        pieces = Pieces.of(program)
        plain = all(outer == 1 for cuts in program.dealt.values() for *_, outer in cuts)
        if not pieces.of_each or not plain:
            return None
        from partc.data.share import Division

        division = Division.of(Plan.parse(program.plan), program.mesh)
        numbers = [division.rank(rank) for rank in range(program.mesh.num_ranks)]
        own = numbers[dist.get_rank()]
        pieces_of = range(division.world)
        of_islands = [
            [numbers.index(before + piece) for piece in pieces_of]
            for before in range(0, max(numbers) + 1, division.world)
        ]
        mine = own // division.world
        return cls(pieces, of_islands[mine], own % division.world, of_islands)

    def whole(self, each: Sequence[Wanted]) -> Wanted | None:
        """The batch of all rows, given what every rank has; None if ranks differ in more, or
        islands in their rows.
        """
        mine = [self.pieces.mine(wanted) for wanted in each]
        dims, first = self._dims(each), mine[0]
        layouts = self.pieces.forward(each[0]) or ()
        if any(layout != R and layout.outer != 1 for layout in layouts):
            return None
        if any(self._without_rows(m, dims) != self._without_rows(first, dims) for m in mine):
            return None
        shapes = [list(shape) for shape, _ in first.inputs]
        for i, dim in enumerate(dims):
            if dim is not None:
                rows = [one.inputs[i][0][dim] for one in mine]
                sums = {sum(rows[rank] for rank in firsts) for firsts in self.of_islands}
                if len(sums) > 1:
                    return None
                shapes[i][dim] = sums.pop()
        pairs = zip(shapes, first.inputs, strict=True)
        inputs = tuple((tuple(shape), dtype) for shape, (_, dtype) in pairs)
        return replace(first, inputs=inputs, replicated=True)

    def gathered(self, inputs: Sequence[Tensor], each: Sequence[Wanted]) -> list[Tensor]:
        """The inputs with the rows of all ranks; all ranks call this together."""
        mine = [self.pieces.mine(wanted) for wanted in each]
        joined = []
        for i, (x, dim) in enumerate(zip(inputs, self._dims(each), strict=True)):
            if dim is None:
                joined.append(x)
                continue
            sizes = [one.inputs[i][0][dim] for one in mine]
            found = gather_uneven(x.movedim(dim, 0), sizes)
            joined.append(torch.cat([found[rank] for rank in self.firsts]).movedim(0, dim))
        return joined

    def own_rows(self, run: Callable[[], Any], each: Sequence[Wanted], cuts: Results) -> Any:
        """What a program of the whole batch returns, of results with rows this rank's alone."""
        mine = [self.pieces.mine(wanted) for wanted in each]
        i, dim = next((i, d) for i, d in enumerate(self._dims(each)) if d is not None)
        sizes = [mine[rank].inputs[i][0][dim] for rank in self.firsts]
        begin, num = sum(sizes[: self.own]), sizes[self.own]

        def taken(results: Mapping[str, Tensor]) -> dict[str, Tensor]:
            found = {}
            for name, value in results.items():
                cut = cuts.get(name)
                found[name] = _narrowed(value, cut[0], begin, num) if cut else value
            return found

        result = run()
        if isinstance(result, Halfway):
            result.shown = taken(result.results)
            of_each = [one.inputs[i][0][dim] for one in mine]
            result.dealt = Unevenly(self, of_each, cuts, begin, num)
            return result
        if isinstance(result, tuple):
            return result[0], taken(result[1])
        return taken(result) if isinstance(result, Mapping) else result

    def of_all(self, x: Tensor, cut: tuple[str, int, int], sizes: Sequence[int]) -> Tensor:
        """What ``_narrowed`` took each rank's rows of, given these; all ranks call this together.

        ``sizes``: the number of rows of each rank.
        """
        _, dim, outer = cut
        found = gather_uneven(x.unflatten(dim, (outer, -1)).movedim(dim + 1, 0), sizes)
        joined = torch.cat([found[rank] for rank in self.firsts])
        return joined.movedim(0, dim + 1).flatten(dim, dim + 1)

    def example(self, wanted: Wanted) -> Wanted:
        """A batch that ranks share, with the arguments of this one."""
        shapes = [list(shape) for shape, _ in wanted.inputs]
        for i, dim in enumerate(self._dims([replace(wanted, replicated=False)])):
            if dim is not None:
                shapes[i][dim] = ROWS_OF_EXAMPLE * len(self.firsts)
        pairs = zip(shapes, wanted.inputs, strict=True)
        inputs = tuple((tuple(shape), dtype) for shape, (_, dtype) in pairs)
        return replace(wanted, inputs=inputs, replicated=False)

    def _dims(self, each: Sequence[Wanted]) -> list[int | None]:
        """The dim of each input along which ranks have rows of their own: that of a rank with the
        most of them, as one row, or none, does not tell rows from a mask for all.
        """
        most = max(each, key=lambda wanted: sum(prod(shape) for shape, _ in wanted.inputs))
        return [next(iter(dims), None) for dims in self.pieces.dims(most)]

    @staticmethod
    def _without_rows(wanted: Wanted, dims: Sequence[int | None]) -> Wanted:
        shapes = [list(shape) for shape, _ in wanted.inputs]
        for shape, dim in zip(shapes, dims, strict=False):
            if dim is not None and dim < len(shape):
                shape[dim] = 0
        pairs = zip(shapes, wanted.inputs, strict=True)
        return replace(wanted, inputs=tuple((tuple(s), dtype) for s, (_, dtype) in pairs))


@dataclass(frozen=True)
class Unevenly:
    """Gradients of results whose rows are of several ranks, not as many of each: all ranks gather
    the rows of all.
    """

    rows: UnevenRows
    sizes: Sequence[int]  # of each rank
    cuts: Results

    @property
    def shares(self) -> int:
        return len(self.rows.firsts)

    begin: int  # of this rank's rows
    num: int

    def mine(self, name: str, grad: Tensor) -> Tensor:
        if cut := self.cuts.get(name):
            return _narrowed(grad, cut[0], self.begin, self.num)
        return grad / self.shares

    def whole(self, name: str, grad: Tensor) -> Tensor:
        if cut := self.cuts.get(name):
            return self.rows.of_all(grad, cut[0], self.sizes)
        found = gather_uneven(grad.reshape(1, -1), [1] * dist.get_world_size())
        return torch.cat([found[rank] for rank in self.rows.firsts]).sum(0).reshape(grad.shape)


def _narrowed(value: Tensor, cut: tuple[str, int, int], begin: int, num: int) -> Tensor:
    """These rows of a result; of a flat one, ``f32[30,9]`` of 6 steps, those of every step."""
    _, dim, outer = cut
    blocks: Tensor = value.unflatten(dim, (outer, -1))
    return blocks.narrow(dim + 1, begin, num).flatten(dim, dim + 1)


Results = Mapping[str, Dealt]  # of a program whose ranks have pieces of the same size


def gather_uneven(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The tensors of all ranks, in rank order, which differ in their rows: ``sizes``, by rank.

    All ranks call this together.
    """
    most = max(sizes)
    bits = x.to(torch.uint8) if x.dtype == torch.bool else x
    padded = torch.cat([bits, bits.new_zeros(most - len(bits), *bits.shape[1:])]).contiguous()
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [each[:num].to(x.dtype) for each, num in zip(found, sizes, strict=True)]
