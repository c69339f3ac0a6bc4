"""Whether data ranks can share a batch's rows, and filling up batches whose sizes differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

from partc.errors import RunError
from partc.plan import Plan
from partc.plan.mesh import MICROBATCH_AXIS, Mesh
from partc.plan.sharding import Layout, R
from partc.program.choices import IGNORED, pad_of
from partc.program.step.other_shape import is_for_all, rows_now
from partc.program.wanted import Wanted

if TYPE_CHECKING:
    from partc.program import Program


Dims = Mapping[int, int]  # of an input: into how many pieces each dim is cut
Shapes = Sequence[Sequence[int]]
Inputs = Mapping[str, tuple[tuple[int, ...], str]]  # shape and dtype, by name
Forward = Callable[[Wanted], Sequence[Layout] | None]


def _usual(wanted: Wanted) -> None:
    """Along dim 0."""


@dataclass(frozen=True)
class Rows:
    """How the rows of a batch are shared, by the plan of a stage's first program.

    ``cuts``: of each input, by name and in order, into how many pieces data ranks cut each dim;
    ``first``: the shape that it has in the first program.
    ``most``: pieces of an input that the first program does not have, on dim 0, or as ``forward``
    says.
    """

    cuts: Mapping[str, Mapping[int, int]]
    first: Shapes
    most: int
    forward: Forward = _usual

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, inputs: Inputs, forward: Forward = _usual) -> Rows:
        tables = {name: plan.stored(name, plan.inputs) for name in inputs}
        cuts = {
            name: {
                dim: prod(mesh.size(a) for a in _axes(table) if table[a].dim == dim)
                for dim in dict.fromkeys(layout.dim for layout in table.values())
            }
            for name, table in tables.items()
        }
        most = max((num for dims in cuts.values() for num in dims.values()), default=1)
        return cls(cuts, [shape for shape, _ in inputs.values()], most, forward)

    def sizes(self, wanted: Wanted) -> Iterator[tuple[int, int, int, int]]:
        """Of every dim that data ranks cut: number of the input, dim, rows, pieces."""
        layouts = self.forward(wanted)
        if layouts is not None:
            for i, ((shape, _), each) in enumerate(zip(wanted.inputs, layouts, strict=True)):
                if each != R:
                    yield i, each.dim, shape[each.dim], self.most
            return
        by_name = of_rows([*self.cuts.values()], self.first, wanted)
        if wanted.kind == "forward" or len(by_name) != len(wanted.inputs):
            by_name = [{0: self.most}] * len(wanted.inputs)
        first = max((shape[0] for shape, _ in wanted.inputs if shape), default=1)
        for i, ((shape, _), dims) in enumerate(zip(wanted.inputs, by_name, strict=True)):
            if wanted.kind == "forward" and shape and shape[0] == 1 < first:
                continue  # a mask for all rows
            yield from ((i, dim, shape[dim], num) for dim, num in dims.items() if dim < len(shape))

    def batch_dims(self) -> dict[str, int]:
        """The dim that data ranks cut, of each input that they cut."""
        dims = {
            name: [dim for dim, num in cut.items() if num > 1] for name, cut in self.cuts.items()
        }
        return {name: each[0] for name, each in dims.items() if each}

    def uneven(self, wanted: Wanted) -> list[tuple[int, int]]:
        """Rows and pieces of the dims that cannot be cut."""
        return [(rows, num) for _, _, rows, num in self.sizes(wanted) if rows % num]

    def microbatches(self, wanted: Wanted, num: int) -> int:
        """The most microbatches, of those that divide ``num``, that divide the rows of a rank."""
        if wanted.replicated:
            return 1
        return gcd(num, *(rows // pieces for _, _, rows, pieces in self.sizes(wanted)))

    def filled(self, wanted: Wanted) -> Wanted:
        """The same for a batch with as many more rows as make it even."""
        shapes = [list(shape) for shape, _ in wanted.inputs]
        for i, dim, rows, num in self.sizes(wanted):
            shapes[i][dim] = -(-rows // num) * num
        pairs = zip(shapes, wanted.inputs, strict=True)
        return replace(wanted, inputs=tuple((tuple(shape), dtype) for shape, (_, dtype) in pairs))


@dataclass(frozen=True)
class Pieces:
    """How a batch of one rank and that of all are related: the same, or the rank has a piece.

    ``of``: of each input, by name and in order, how many pieces ranks have along each dim; empty
    where all have the whole batch. ``first``: the shapes of the first program's. ``forward``: along
    which dims forwards have it, if not dim 0.
    """

    of_each: tuple[Mapping[int, int], ...] = ()
    first: Shapes = ()
    forward: Forward = _usual

    @classmethod
    def of(cls, program: Program) -> Pieces:
        found = [
            {dim: prod(program.mesh.size(a) for a, d, _ in cuts if d == dim) for _, dim, _ in cuts}
            for cuts in (program.dealt.get(name, ()) for name in program.inputs)
        ]
        first = [shape for shape, _ in program.inputs.values()]
        return cls(tuple(found) if any(found) else (), first, program.forward_batch.layouts)

    def whole(self, wanted: Wanted) -> Wanted:
        """The batch of all ranks, where each has one like this."""
        return self._times(wanted, lambda size, num: size * num)

    def mine(self, wanted: Wanted) -> Wanted:
        """The batch of one rank, of all ranks' batch."""
        return self._times(wanted, lambda size, num: size // num)

    def _times(self, wanted: Wanted, sized: Callable[[int, int], int]) -> Wanted:
        if not self.of_each or wanted.replicated:
            return wanted
        shapes = (
            tuple(sized(size, num.get(dim, 1)) for dim, size in enumerate(shape))
            for num, (shape, _) in zip(self.dims(wanted), wanted.inputs, strict=True)
        )
        pairs = zip(shapes, wanted.inputs, strict=True)
        return replace(wanted, inputs=tuple((shape, dtype) for shape, (_, dtype) in pairs))

    def dims(self, wanted: Wanted) -> Iterator[Mapping[int, int]]:
        """The pieces of each input; of a forward with arguments of its own those of the rows."""
        if wanted.kind != "forward" or (
            not wanted.form and len(self.of_each) == len(wanted.inputs)
        ):
            yield from with_more(of_rows(self.of_each, self.first, wanted), self.first, wanted)
            return
        most = max(num for dims in self.of_each for num in dims.values())
        layouts = self.forward(wanted)
        if layouts is not None:
            yield from ({} if each == R else {each.dim: most} for each in layouts)
            return
        first = max((shape[0] for shape, _ in wanted.inputs if shape), default=1)
        for shape, _ in wanted.inputs:
            yield {0: most} if shape and (shape[0] > 1 or first == 1) else {}


def of_rows(cuts: Sequence[Dims], first: Shapes, wanted: Wanted) -> list[Dims]:
    """The cuts of each input without those of what is one for all rows: ``bool[1,5,5]``."""
    if len(cuts) != len(wanted.inputs):
        return [*cuts]
    each = list(zip(cuts, first, (shape for shape, _ in wanted.inputs), strict=True))
    pairs = [(a[d], b[d]) for dims, a, b in each for d in dims if d < min(len(a), len(b))]
    return [
        {d: n for d, n in dims.items() if d >= len(b) or not is_for_all(b[d], a[d], pairs)}
        for dims, a, b in each
    ]


def with_more(cuts: Sequence[Dims], first: Shapes, wanted: Wanted) -> list[Dims]:
    """The cuts also of what was one for all rows, and has a row for each now."""
    shapes = [shape for shape, _ in wanted.inputs]
    rows = [(d, b[d]) for dims, b in zip(cuts, shapes, strict=True) for d in dims if d < len(b)]
    most = max((num for dims in cuts for num in dims.values()), default=1)
    found = (rows_now(b, a, rows) for a, b in zip(first, shapes, strict=True))
    pairs = zip(cuts, found, strict=True)
    return [{dim: most} if dim is not None and not dims else dims for dims, dim in pairs]


def _axes(table: Mapping[str, object]) -> list[str]:
    return [axis for axis in table if axis != MICROBATCH_AXIS]


def fill(inputs: Sequence[Tensor], to: Wanted, values: Sequence[float | None]) -> list[Tensor]:
    """The inputs, each filled up at the end of its dims to the shape that ``to`` has."""
    filled = []
    for x, (shape, _), value in zip(inputs, to.inputs, values, strict=True):
        missing = [want - has for want, has in zip(shape, x.shape, strict=True)]
        if any(missing):
            assert value is not None
            sides = [side for more in reversed(missing) for side in (0, more)]
            x = F.pad(x, sides, value=value)
        filled.append(x)
    return filled


def longest(each: Sequence[Wanted], rows: Rows) -> Wanted | None:
    """One batch that all ranks' batches fit into; None where they differ in more than lengths.

    Dims that data ranks cut have to be equal, and so have dtypes, kinds and modes.
    """
    first, *others = each
    cut = {(i, dim) for i, dim, _, _ in rows.sizes(first)}
    for other in others:
        if not _comparable(first, other):
            return None
        for i, ((one, _), (two, _)) in enumerate(zip(first.inputs, other.inputs, strict=True)):
            if any(one[d] != two[d] for d in range(len(one)) if (i, d) in cut):
                return None
    shapes = (
        tuple(map(max, *(wanted.inputs[i][0] for wanted in each))) if shape else ()
        for i, (shape, _) in enumerate(first.inputs)
    )
    pairs = zip(shapes, first.inputs, strict=True)
    return replace(first, inputs=tuple((shape, dtype) for shape, (_, dtype) in pairs))


def _comparable(one: Wanted, other: Wanted) -> bool:
    alike = one == replace(other, inputs=one.inputs) and len(one.inputs) == len(other.inputs)
    pairs = zip(one.inputs, other.inputs, strict=alike)
    return alike and all((len(a), d) == (len(b), e) for (a, d), (b, e) in pairs)


def uneven_error(
    wanted: Wanted, uneven: Sequence[tuple[int, int]], inputs: Inputs, *, in_turns: bool
) -> RunError:
    """The refusal of a batch that data ranks cannot share, where nothing says what to do.

    ``in_turns``: islands compute it in microbatches, which are of as many rows.
    """
    rows, num = uneven[0]
    ways = (
        'program.module(partial="replicate") computes the whole batch on every rank, "drop" leaves '
        f'the batch out; module(partial="pad", {pad_of(inputs)}) fills it up with rows that the '
        f"loss has to ignore: {IGNORED}"
    )
    if in_turns:
        ways = 'program.module(partial="drop") leaves the batch out'
    return RunError(
        where=str(wanted),
        what=f"a batch of {rows} cannot be shared by {num} data ranks",
        why=f"{rows} is not a multiple of {num}",
        do=f"Say what is meant: {ways}. Or give the data loader drop_last=True.",
    )
