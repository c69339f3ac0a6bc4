"""The solvers of partc.passes.search against brute force and against HiGHS."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from partc.passes.search.dead_ends import drop_dead_ends
from partc.passes.search.eliminate import TooWide, eliminate, run_order
from partc.passes.search.network import network
from partc.passes.search.order import choose_order
from partc.passes.search.problem import Factor, Problem, Variable

GRAPHS = ("chain", "ladder", "random", "n-ary")
CLOSE = 1e-12  # relative: sums of the same numbers in another order


def scopes(graph: str, num: int, random: np.random.Generator) -> list[tuple[int, ...]]:
    """Which variables each factor is over."""
    pairs: list[tuple[int, ...]] = list(itertools.combinations(range(num), 2))
    if graph == "chain":
        return [(v + 1, v) for v in range(num - 1)]
    if graph == "ladder":  # forward and backward, with rungs
        return [(v, w) for v, w in pairs if w - v == 2 or (w - v == 1 and v % 2 == 0)]
    chosen = [pair for pair in pairs if random.random() < 0.5]
    if graph == "n-ary" and num > 2:
        chosen = chosen[::2] + [tuple(random.permutation(num)[:3].tolist()) for _ in range(2)]
    return chosen


def small_problem(graph: str, num: int, seed: int, forbid: float, ties: bool) -> Problem:
    """Up to 4 choices each; ``forbid`` is the share of forbidden choices and combinations."""
    random = np.random.default_rng(seed)

    def costs(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        table = random.integers(-2, 3, shape) * 1.0 if ties else random.normal(size=shape)
        return np.where(random.random(shape) < forbid, np.inf, table)

    sizes = [int(random.integers(1, 5)) for _ in range(num)]
    variables = [
        Variable(f"v{v}", tuple(f"c{c}" for c in range(size)), costs(size))
        for v, size in enumerate(sizes)
    ]
    factors = [
        Factor(scope, costs(*[sizes[v] for v in scope])) for scope in scopes(graph, num, random)
    ]
    return Problem(tuple(variables), tuple(factors))


def brute_force(problem: Problem) -> float:
    """The least cost over all assignments, from one table of them all."""
    num = len(problem.variables)
    total = np.zeros(problem.sizes)
    parts = [((v,), each.costs) for v, each in enumerate(problem.variables)]
    for scope, table in parts + [(factor.variables, factor.table) for factor in problem.factors]:
        inner = table.transpose(np.argsort(scope))
        total += inner.reshape([problem.sizes[v] if v in scope else 1 for v in range(num)])
    return float(total.min())


small_problems = st.builds(
    small_problem,
    st.sampled_from(GRAPHS),
    st.integers(1, 7),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.booleans(),
)


def same(found: float, optimum: float) -> bool:
    return found == optimum or abs(found - optimum) <= CLOSE * max(1.0, abs(optimum))


@settings(max_examples=300, deadline=None)
@given(small_problems)
def test_elimination_finds_the_optimum(problem: Problem) -> None:
    found = eliminate(problem)
    assert not isinstance(found, TooWide)
    assert same(found.cost, brute_force(problem))
    assert problem.cost(found.assignment) == found.cost


@settings(max_examples=100, deadline=None)
@given(small_problems)
def test_dead_ends_keep_the_optimum(problem: Problem) -> None:
    fewer = drop_dead_ends(network(problem))
    assignment, _ = run_order(fewer, choose_order(fewer).variables)
    assert same(problem.cost(assignment), brute_force(problem))
