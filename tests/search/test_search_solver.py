"""The solvers of partc.passes.search against brute force and against HiGHS."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partc.passes.search.solver.bound import lower_bound
from partc.passes.search.solver.condition import condition
from partc.passes.search.solver.dead_ends import drop_dead_ends
from partc.passes.search.solver.eliminate import MAX_TABLE, TooWide, eliminate, run_order
from partc.passes.search.solver.milp import milp
from partc.passes.search.solver.network import network
from partc.passes.search.solver.order import choose_order
from partc.passes.search.solver.problem import Costs, Factor, Problem, Variable
from partc.passes.search.solver.solve import solve

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


def random_problem(
    graph: str, num: int, seed: int, forbid: float = 0.0, ties: bool = False
) -> Problem:
    """Up to 4 choices each; ``forbid`` is the share of forbidden choices and combinations."""
    random = np.random.default_rng(seed)

    def costs(*shape: int) -> Costs:
        table = random.integers(-2, 3, shape) * 1.0 if ties else random.normal(size=shape)
        return np.where(random.random(shape) < forbid, np.inf, table)

    def variable(v: int, size: int) -> Variable:
        return Variable(f"v{v}", tuple(f"c{c}" for c in range(size)), costs(size))

    sizes = [int(random.integers(1, 5)) for _ in range(num)]
    variables = tuple(variable(v, size) for v, size in enumerate(sizes))
    factors = [
        Factor(scope, costs(*[sizes[v] for v in scope])) for scope in scopes(graph, num, random)
    ]
    return Problem(variables, tuple(factors))


def brute_force(problem: Problem) -> float:
    """The least cost over all assignments, from one table of them all."""
    sizes = problem.sizes
    parts: list[tuple[tuple[int, ...], Costs]]
    parts = [((v,), each.costs) for v, each in enumerate(problem.variables)]
    parts += [(factor.variables, factor.table) for factor in problem.factors]
    total = np.zeros(sizes)
    for scope, table in parts:
        inner = table.transpose(np.argsort(scope))
        total += inner.reshape([size if v in scope else 1 for v, size in enumerate(sizes)])
    return float(total.min())


small_problems = st.builds(
    random_problem,
    st.sampled_from(GRAPHS),
    st.integers(1, 7),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.booleans(),
)


def same(found: float, optimum: float) -> bool:
    return found == optimum or abs(found - optimum) <= CLOSE * max(1.0, abs(optimum))


@pytest.mark.exhaustive
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
    assignment, _, _ = run_order(fewer, choose_order(fewer).variables)
    assert same(problem.cost(assignment), brute_force(problem))


@settings(max_examples=100, deadline=None)
@given(small_problems, st.sampled_from([4, 20]))
def test_conditioning_is_bounded_from_both_sides(problem: Problem, max_table: int) -> None:
    """With tables so small that variables must be fixed, the bound holds, and what is found too."""
    optimum = brute_force(problem)
    net = network(problem)
    if optimum < np.inf:
        bound, _ = lower_bound(net, choose_order(net).variables, max_table)
        assert bound <= optimum + CLOSE * max(1.0, abs(optimum))
    found = condition(problem, max_table=max_table)
    assert found.cost == problem.cost(found.assignment)
    assert found.bound <= found.cost or same(found.bound, found.cost)
    assert optimum <= found.cost or same(found.cost, optimum)


def grid(side: int, choices: int) -> Problem:
    random, num = np.random.default_rng(0), side * side
    names = tuple(f"c{c}" for c in range(choices))
    variables = tuple(Variable(f"v{v}", names, random.normal(size=choices)) for v in range(num))
    pairs = [(v, v + 1) for v in range(num) if (v + 1) % side]
    pairs += [(v, v + side) for v in range(num - side)]
    tables = random.normal(size=(len(pairs), choices, choices))
    return Problem(variables, tuple(map(Factor, pairs, tables)))


def test_conditioning_finds_the_optimum_of_a_grid() -> None:
    """Width 8: too wide for tables of 256 cells, and yet exact elimination can check it."""
    problem = grid(8, 4)
    exact, found = eliminate(problem), condition(problem, max_table=256)
    assert not isinstance(exact, TooWide)
    assert found.fixed > 0
    assert same(found.cost, exact.cost)
    net = network(problem)
    bound, _ = lower_bound(net, choose_order(net).variables, 256)
    assert bound > exact.cost - 0.06 * abs(exact.cost)  # 0.21 if groups did not agree
    solution = solve(problem, max_table=256)
    assert (solution.how, solution.assignment) == ("conditioned", exact.assignment)


def test_equal_layers_are_eliminated_once() -> None:
    """100 layers of 5 variables in a ring, joined in a chain: at least 3 of 5 tables are shared."""
    random = np.random.default_rng(0)
    ring, joint = random.normal(size=(4, 4)), random.normal(size=(4, 4))
    own = random.normal(size=4)
    variables = tuple(Variable(f"v{v}", ("a", "b", "c", "d"), own) for v in range(500))
    starts = range(0, 500, 5)
    factors = [Factor((s + i, s + (i + 1) % 5), ring) for s in starts for i in range(5)]
    factors += [Factor((s, s + 5), joint) for s in starts[:-1]]
    found = eliminate(Problem(variables, tuple(factors)))
    assert not isinstance(found, TooWide)
    assert found.computed < 0.2 * found.cells


def test_what_is_impossible_is_named() -> None:
    """A forbidden combination that cannot be avoided."""
    pair = tuple(Variable(name, ("r", "s"), np.zeros(2)) for name in "ab")
    clash = solve(Problem(pair, (Factor((0, 1), np.full((2, 2), np.inf)),)))
    assert (clash.infeasible, clash.violations) == (True, ("forbidden: a, b",))


@pytest.mark.parametrize("graph", ["chain", "ladder", "n-ary"])
def test_highs_agrees(graph: str) -> None:
    problem = random_problem(graph, 14, 5, forbid=0.1)
    oracle, found = milp(problem), solve(problem)
    assert found == replace(solve(problem), stats=found.stats)  # repeatable
    assert oracle.bound == pytest.approx(oracle.cost)  # proven
    assert found.bound <= oracle.cost + 1e-9
    assert found.cost == pytest.approx(oracle.cost)


@settings(max_examples=150, deadline=None)
@given(small_problems, st.sampled_from([16.0, MAX_TABLE]))
def test_bounds_are_true(problem: Problem, table: float) -> None:
    """bound <= optimum <= found; what is proven infeasible is."""
    optimum, found = brute_force(problem), solve(problem, max_table=table)
    assert found.bound <= optimum + 1e-6 * max(1.0, abs(optimum))
    assert optimum <= found.cost or same(found.cost, optimum)
    if found.cost < np.inf:
        assert problem.cost(found.assignment) == found.cost
        assert not found.violations
    else:
        assert found.violations
        assert found.infeasible == (optimum == np.inf)
