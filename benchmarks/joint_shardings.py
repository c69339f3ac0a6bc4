"""The search for shardings: a step and a mesh in, the fastest plan that fits in memory out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from partc.cost.collective_cost import collective_seconds
from partc.errors import PlanError
from partc.graph import Graph
from partc.passes.search.shardings.decided import Decided, Life
from partc.passes.search.shardings.decode import copy_graph, plan_of
from partc.passes.search.shardings.pins import Pins
from partc.passes.search.shardings.sharding_problem import MEMORY, ShardingProblem
from partc.passes.search.shardings.step_values import StepValues
from partc.passes.search.shardings.transfers import Transfers
from partc.passes.search.shardings.ways import CallWays
from partc.passes.search.solver.solve import How, Solution, solve
from partc.passes.shard.fuse_loss import fuse_loss
from partc.passes.shard.split_bias import split_bias
from partc.plan import Plan
from partc.plan.mesh import Mesh

_ROUNDS = 4  # over all axes, each decided anew given the others
_SLOWNESS_BYTES = 1e8
_ENOUGH = 1e-9  # relative: an axis that gains less has come to rest


@dataclass(frozen=True)
class Found:
    """``plan`` takes ``seconds`` by the model of ``sharding_problem.py`` (calls and collectives one
    after the other), and no plan takes less than ``bound``; ``how`` it was solved on each axis.
    """

    plan: Plan
    seconds: float
    bound: float
    memory_bytes: float
    how: tuple[How, ...]

    @property
    def gap(self) -> float:
        """By what part of its time the plan may be slower than the best one."""
        return (self.seconds - self.bound) / self.seconds if self.seconds > self.bound else 0.0

    def __str__(self) -> str:
        ways = ", ".join(dict.fromkeys(self.how))
        return (
            f"{1e3 * self.seconds:.3f} ms, at least {1e3 * self.bound:.3f} ms"
            f" (gap {100 * self.gap:.2f} %), {ways}; {self.memory_bytes / 1e9:.3g} GB"
        )


def search_shardings(
    graph: Graph,
    mesh: Mesh,
    *,
    memory_bytes: float | None = None,
    pins: Plan | None = None,
    tie: bool = True,
) -> Found:
    """How to lay out the step ``graph`` (a joint one, perhaps folded; it stays as it is) on a mesh.

    Axes are decided one after the other, the slowest links first, as if those behind divided all
    values; then each anew given the others until nothing gets better. The same is done the other
    way round, and the better of the two is taken. On one
    axis the result is the optimum. ``pins`` are entries of a plan to keep; ``memory_bytes`` of a
    rank hold parameters, gradients, the optimizer's states and what is kept for the backward, not
    what lives for a moment. ``tie`` gives equal blocks equal layouts. PlanError if nothing fits.
    """
    search = _Search(graph, mesh, memory_bytes, pins or Plan(), tie)
    best = search.best()
    if best.solution.violations:
        raise _does_not_fit(mesh, memory_bytes, best.solution)
    plan = plan_of(best.decided, search.ways, search.values, mesh, best.life)
    weight = best.problem.problem.weight(best.solution.assignment, MEMORY)
    bound = best.solution.bound if len(search.axes) == 1 else search.bound()
    seconds = best.solution.cost
    return Found(plan, seconds, min(bound, seconds), weight, tuple(search.how))


def joint_problem(graph: Graph, mesh: Mesh, life: Life = "use") -> ShardingProblem:
    """All axes of a mesh in one problem, blocks not tied: an oracle for small steps."""
    search = _Search(graph, mesh, None, Plan(), tie=False)
    axes = tuple(search.axes)
    return ShardingProblem(search.values, search.ways, search.filters, axes, Decided(), life, False)


@dataclass(frozen=True)
class _State:
    """After an axis was decided: all decisions so far, and the problem of that axis."""

    decided: Decided
    problem: ShardingProblem
    solution: Solution
    life: Life

    @property
    def gathers(self) -> bool:
        """Whether parameters are stored cut: only then it matters how long they live whole."""
        return any(layouts for layouts in self.decided.stored.values())

    @property
    def rank(self) -> tuple[bool, float]:
        """What fits before what does not, then the faster."""
        return bool(self.solution.violations), self.solution.cost


@dataclass
class _Search:
    graph: Graph
    mesh: Mesh
    memory_bytes: float | None
    pins: Plan
    tie: bool
    how: list[How] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph, _ = copy_graph(self.graph)
        self.graph.mesh = self.mesh.without_pipeline()
        split_bias(self.graph)
        fuse_loss(self.graph)
        self.axes = [name for name, size in self.graph.mesh.axes if size > 1]
        lies = Transfers(self.graph.mesh, self.mesh)
        self.values = StepValues(self.graph, self.pins)
        self.ways = CallWays(self.graph, lies, self.mesh.hardware.device, self.values.free)
        self.filters = Pins(self.pins, self.values, lies)

    def best(self) -> _State:
        """The best of both orders of axes and of both lifetimes of gathered parameters."""
        slow_first = sorted(self.axes, key=self._slowness, reverse=True)
        orders = [slow_first, slow_first[::-1]] if len(self.axes) > 1 else [slow_first]
        lives: list[Life] = list(dict.fromkeys(self.pins.gather.values())) or ["use"]
        states = [self._settle(order, Decided(), lives[0]) for order in orders]
        best = min(states, key=lambda state: state.rank)
        if not self.pins.gather and best.gathers:
            again = self._settle(slow_first, best.decided, "step")
            best = min(best, again, key=lambda state: state.rank)
        return best

    def bound(self) -> float:
        """No plan takes less: each axis's transfers at the smallest size that the others may leave,
        and an equal part of all calls' work, cut by the others as far as can be.
        """
        total = 0.0
        for axis in self.axes:
            others = math.prod(self.graph.mesh.size(a) for a in self.axes if a != axis)
            ways = self.ways.shrunk(1 / others, 1 / len(self.axes))
            problem = ShardingProblem(
                self.values, ways, self.filters, (axis,), Decided(), "step", self.tie, 1 / others
            )
            total += solve(problem.problem).bound
        return total

    def _slowness(self, axis: str) -> float:
        return collective_seconds("all_gather", _SLOWNESS_BYTES, self.mesh, axis)

    def _settle(self, order: Sequence[str], decided: Decided, life: Life) -> _State:
        """Decide axis after axis, then each anew given all others until none gets better."""
        best: _State | None = None
        started, since = bool(decided.choices), 0  # how many axes in a row gained nothing
        for step in range(_ROUNDS * len(order)):
            axis, undecided = order[step % len(order)], order[step + 1 :]
            if started:
                undecided = []
            state = self._decide(axis, decided, life, undecided)
            if undecided:
                decided = state.decided
                continue
            if best is None or _better(state, best):
                best, since = state, 0
            else:
                since += 1
            decided = best.decided
            if since >= len(order) - 1:
                break
        assert best is not None
        return best

    def _decide(self, axis: str, decided: Decided, life: Life, undecided: Sequence[str]) -> _State:
        """One axis, as if those that are still undecided divided all that there is."""
        share = 1 / math.prod(self.graph.mesh.size(a) for a in undecided)
        ways = self.ways.shrunk(share, 1.0) if undecided else self.ways
        problem = ShardingProblem(
            self.values, ways, self.filters, (axis,), decided, life, self.tie, share
        )
        limit = None if self.memory_bytes is None else {MEMORY: self.memory_bytes}
        solution = solve(problem.problem, limit)
        self.how.append(solution.how)
        return _State(problem.decode(solution.assignment), problem, solution, life)


def _better(one: _State, other: _State) -> bool:
    if one.rank[0] != other.rank[0]:
        return one.rank < other.rank
    return one.solution.cost < other.solution.cost * (1 - _ENOUGH)


def _does_not_fit(mesh: Mesh, memory_bytes: float | None, solution: Solution) -> PlanError:
    proven = "no plan does" if solution.infeasible else "none was found"
    return PlanError(
        where=f"mesh {mesh}",
        what="no sharding fits"
        + ("" if memory_bytes is None else f" into {memory_bytes / 1e9:.3g} GB"),
        why=f"{proven}; the nearest has {'; '.join(solution.violations[:3])}",
        do="Take more ranks, a smaller batch or more memory, or drop pins.",
    )
