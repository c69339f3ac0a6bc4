"""What the shapes of another batch say of its inputs, beside those of a stage's first program.

Of each input the first program knows along which dim it has the batch. A mask ``bool[1,5,5]`` for
all rows has none, where another batch had ``bool[8,5,5]``; and flat targets ``i64[32]`` of 4 steps
have other blocks than those ``i64[48]`` of 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partc.plan.sharding import Layout, R

Shape = Sequence[int]
Layouts = Mapping[str, Layout]
Shapes = Mapping[str, Shape]


def is_for_all(size: int, before: int, others: Sequence[tuple[int, int]]) -> bool:
    """Whether a dim of one element is no row of a batch: what was as long before is longer now.

    ``others``: of dims along which inputs have the batch, the sizes before and now.

    >>> is_for_all(1, 8, [(8, 8), (8, 1)])  # a mask bool[1,5,5], and x f32[8,5,4]
    True
    >>> is_for_all(1, 8, [(8, 1), (40, 5)])  # a batch of one row, with flat targets i64[5]
    False
    """
    return size == 1 < before and any(was == before and now > 1 for was, now in others)


def rows_now(shape: Shape, before: Shape, others: Sequence[tuple[int, int]]) -> int | None:
    """The dim along which an input has the batch now, where it had one element for all rows.

    ``others``: of inputs that are cut along the batch, the dim and its size now.
    """
    if len(shape) != len(before):
        return None
    for dim, rows in [*others, *((0, rows) for _, rows in others)]:
        if dim < len(shape) and before[dim] == 1 < shape[dim] == rows:
            return dim
    return None


def other_blocks(layouts: Layouts, before: Shapes, now: Shapes) -> list[str]:
    """The inputs whose cut has to be found anew: they have more or fewer elements along it for
    each row of the batch than before, as flat targets of another number of steps have.
    """
    dims = {n: each.dim for n, each in layouts.items() if each != R}
    gone = [n for n, dim in dims.items() if dim >= len(now[n])]
    sizes = {n: (before[n][dim], now[n][dim]) for n, dim in dims.items() if n not in gone}
    plain = [pair for n, pair in sizes.items() if layouts[n].outer == 1]
    if not plain:
        return [n for n in dims if layouts[n].outer > 1 and tuple(before[n]) != tuple(now[n])]
    had, has = (min((n for n in each if n > 1), default=1) for each in zip(*plain, strict=True))
    return gone + [n for n, (a, b) in sizes.items() if b > 1 and a * has != b * had]
