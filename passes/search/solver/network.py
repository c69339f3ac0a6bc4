"""A problem in the form that the solvers work on.

Tables are finite, equal tables are stored once, and variables with one choice are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from partc.passes.search.solver.problem import Assignment, Costs, Problem

Scope = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Network:
    """Tables over the variables that still have several choices; own costs are tables of one dim.

    ``store`` has each distinct table once; ``tables[i]`` is the index in ``store`` of the table
    over ``scopes[i]``. ``kept[v]`` are the problem's choices that variable v still has; a variable
    with one choice is in no scope. A forbidden cell costs ``forbidden`` instead of inf, more than
    the difference of any two allowed assignments. So all sums are finite, and an optimum uses a
    forbidden cell only if every assignment does. No allowed assignment costs more than ``most``.
    """

    kept: list[tuple[int, ...]]
    scopes: list[Scope]
    tables: list[int]
    store: list[Costs]
    constant: float
    forbidden: float
    most: float

    @property
    def sizes(self) -> list[int]:
        """The number of choices left of every variable."""
        return [len(choices) for choices in self.kept]

    def undecided(self) -> list[int]:
        """The variables that still have several choices."""
        return [v for v, choices in enumerate(self.kept) if len(choices) > 1]

    def sharing(self) -> float:
        """The mean number of equal tables: about as often the same elimination is asked for."""
        return len(self.tables) / max(1, len(self.store))

    def assignment(self, chosen: Mapping[int, int]) -> Assignment:
        """The problem's assignment, given per undecided variable an index into ``kept``."""
        return tuple(choices[chosen.get(v, 0)] for v, choices in enumerate(self.kept))


class Tables:
    """Numbers distinct tables; two arrays with the same shape and bytes have one number."""

    def __init__(self) -> None:
        self.arrays: list[Costs] = []
        self._numbers: dict[tuple[tuple[int, ...], bytes], int] = {}

    def number(self, table: Costs) -> int:
        """The number of a table, a new one if no equal table was seen."""
        key = (table.shape, table.tobytes())
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.arrays)
            self.arrays.append(np.ascontiguousarray(table))
        return found


def network(problem: Problem) -> Network:
    """The network of a problem in which every choice is still open."""
    own = [each.costs for each in problem.variables]
    arrays = own + [factor.table for factor in problem.factors]
    scopes: list[Scope] = [(v,) for v in range(len(own))]
    scopes += [factor.variables for factor in problem.factors]
    times = Counter(map(id, arrays))
    distinct = list({id(array): array for array in arrays}.values())
    allowed, forbidden, most = _finite(distinct, [times[id(array)] for array in distinct])
    tables = Tables()
    pairs = zip(distinct, allowed, strict=True)
    number = {id(array): tables.number(finite) for array, finite in pairs}
    whole = Network(
        kept=[tuple(range(size)) for size in problem.sizes],
        scopes=scopes,
        tables=[number[id(array)] for array in arrays],
        store=tables.arrays,
        constant=0.0,
        forbidden=forbidden,
        most=most,
    )
    single = [v for v, size in enumerate(whole.sizes) if size == 1]
    return restrict(whole, dict.fromkeys(single, (0,)))


def restrict(before: Network, keep: Mapping[int, Sequence[int]]) -> Network:
    """The network in which each variable in ``keep`` has only the choices listed there, as indices
    into ``before.kept``.

    Variables with one choice left are decided and leave every scope.
    """
    tables = Tables()
    made: dict[tuple[object, ...], tuple[int, Costs]] = {}
    kept = list(before.kept)
    for v, places in keep.items():
        kept[v] = tuple(before.kept[v][place] for place in places)
    constant, scopes, numbers = [before.constant], [], []
    for scope, number in zip(before.scopes, before.tables, strict=True):
        cuts = tuple([tuple(keep[v]) if v in keep else None for v in scope])
        if (number, cuts) not in made:
            table = _cut(before.store[number], cuts)
            made[number, cuts] = tables.number(table), table
        after, table = made[number, cuts]
        left = tuple([v for v in scope if len(kept[v]) > 1]) if any(cuts) else scope
        if left:
            scopes.append(left)
            numbers.append(after)
        else:
            constant.append(float(table))
    return replace(
        before,
        kept=kept,
        scopes=scopes,
        tables=numbers,
        store=tables.arrays,
        constant=math.fsum(constant),
    )


def neighbours(scopes: Iterable[Scope], num_variables: int) -> list[dict[int, None]]:
    """Per variable the variables that share a table with it, in order of the tables."""
    near: list[dict[int, None]] = [{} for _ in range(num_variables)]
    for scope in dict.fromkeys(scopes):
        for v in scope:
            near[v].update(dict.fromkeys(scope))
    for v, others in enumerate(near):
        others.pop(v, None)
    return near


def _cut(table: Costs, cuts: Sequence[Sequence[int] | None]) -> Costs:
    """The table with the kept choices along each dim; a dim with one choice is removed."""
    for dim in reversed(range(table.ndim)):
        places = cuts[dim]
        if places is not None:
            table = table.take(places[0] if len(places) == 1 else places, axis=dim)
    return np.asarray(table)


def _finite(tables: list[Costs], times: list[int]) -> tuple[list[Costs], float, float]:
    """The tables with a finite cost for inf, and the numbers ``forbidden`` and ``most``.

    ``times`` is how often each table is used. All tables are joined to one array of cells: most
    are so small that a numpy call takes longer to begin than to compute.
    """
    if not tables:
        return [], 1.0, 0.0
    cells = np.concatenate([table.ravel() for table in tables])
    ends = np.cumsum([table.size for table in tables])
    starts = np.concatenate(([0], ends[:-1]))
    barred = np.isinf(cells)
    low = np.minimum.reduceat(cells, starts)
    high = np.maximum.reduceat(np.where(barred, -np.inf, cells), starts)
    some = np.isfinite(low)  # tables in which not all is forbidden
    low, high, used = low[some], high[some], np.array(times, np.float64)[some]
    forbidden = 1.0 + float(np.abs(low).max(initial=0.0) + 2.0 * (high - low) @ used)
    cells[barred] = forbidden
    most = float(high @ used)
    places = zip(tables, starts.tolist(), ends.tolist(), strict=True)
    finite = [cells[start:end].reshape(table.shape) for table, start, end in places]
    return finite, forbidden, most
