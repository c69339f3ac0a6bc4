"""The search for shardings on all axes of a mesh: a step and a mesh in, the fastest plan out."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from partc.cost.collective_cost import collective_seconds
from partc.graph import Graph, results_of, tensor_args, value
from partc.passes.search.shardings.call_choices import CallWays
from partc.passes.search.shardings.decided import Decided, Life
from partc.passes.search.shardings.decode import copy_graph, shortest_plan
from partc.passes.search.shardings.pins import Pins
from partc.passes.search.shardings.sharding_problem import ShardingProblem
from partc.passes.search.shardings.step_values import StepValues
from partc.passes.search.shardings.transfers import Transfers
from partc.passes.search.solver.solve import How, Solution, solve
from partc.passes.shard.fuse_loss import fuse_loss
from partc.passes.shard.price import Choices
from partc.passes.shard.propagate import whole_strategy
from partc.passes.shard.split_bias import split_bias
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, R
from partc.rules import Strategy

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
    how: tuple[How, ...]

    @property
    def gap(self) -> float:
        """By what part of its time the plan may be slower than the best one."""
        return (self.seconds - self.bound) / self.seconds if self.seconds > self.bound else 0.0

    def __str__(self) -> str:
        ways = ", ".join(dict.fromkeys(self.how))
        return (
            f"{1e3 * self.seconds:.3f} ms, at least {1e3 * self.bound:.3f} ms"
            f" (gap {100 * self.gap:.2f} %), {ways}"
        )


def search_shardings(graph: Graph, mesh: Mesh, *, tie: bool = True) -> Found:
    """How to lay out the step ``graph`` (a joint one, perhaps folded; it stays as it is) on a mesh.

    Axes are decided one after the other, the slowest links first, as if those behind divided all
    values; then each anew given the others until nothing gets better. The same is done the other
    way round, and the better of the two is taken. On one
    axis the result is the optimum. ``tie`` gives equal blocks equal layouts.
    """
    search = _Search(graph, mesh, tie)
    best = search.best()
    assert not best.solution.violations, best.solution.violations
    plan = plan_of(best.decided, search.ways, search.values, mesh, best.life)
    bound = best.solution.bound if len(search.axes) == 1 else search.bound()
    seconds = best.solution.cost
    return Found(plan, seconds, min(bound, seconds), tuple(search.how))


def joint_problem(graph: Graph, mesh: Mesh, life: Life = "use") -> ShardingProblem:
    """All axes of a mesh in one problem, blocks not tied: an oracle for small steps."""
    search = _Search(graph, mesh, tie=False)
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
        """What is allowed before what is not, then the faster."""
        return bool(self.solution.violations), self.solution.cost


@dataclass
class _Search:
    graph: Graph
    mesh: Mesh
    tie: bool
    how: list[How] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph, _ = copy_graph(self.graph)
        self.graph.mesh = self.mesh.cutting_axes()
        split_bias(self.graph)
        fuse_loss(self.graph)
        self.axes = [name for name, size in self.graph.mesh.axes if size > 1]
        transfers = Transfers(self.graph.mesh, self.mesh)
        self.values = StepValues(self.graph, Plan())
        self.ways = CallWays(self.graph, transfers, self.mesh.hardware.device, self.values.free)
        self.filters = Pins(Plan(), self.values, transfers)

    def best(self) -> _State:
        """The best of both orders of axes and of both lifetimes of gathered parameters."""
        slow_first = sorted(self.axes, key=self._slowness, reverse=True)
        orders = [slow_first, slow_first[::-1]] if len(self.axes) > 1 else [slow_first]
        states = [self._settle(order, Decided(), "use") for order in orders]
        best = min(states, key=lambda state: state.rank)
        if best.gathers:
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
        solution = solve(problem.problem)
        self.how.append(solution.how)
        return _State(problem.decode(solution.assignment), problem, solution, life)


def _better(one: _State, other: _State) -> bool:
    if one.rank[0] != other.rank[0]:
        return one.rank < other.rank
    return one.solution.cost < other.solution.cost * (1 - _ENOUGH)


# decisions as a plan ------------------------------------------------------------------------------
def plan_of(decided: Decided, ways: CallWays, values: StepValues, mesh: Mesh, life: Life) -> Plan:
    """The shortest plan that propagates to these decisions; ``values.graph`` stays as it is."""
    choices = {**decided.choices, **_sink_cuts(decided.choices, ways, values)}
    axes = values.graph.mesh.names
    base = values.pins.changed(mesh=mesh, preset="", values={}, inputs=_cut_inputs(choices, values))
    return shortest_plan(base, Decided(choices, decided.stored), axes, values, life)


def _sink_cuts(choices: Choices, ways: CallWays, values: StepValues) -> Choices:
    """How what follows from the inputs alone is computed: cut where all readers want it so, such
    as masks of this rank's piece of the batch; else whole.
    """
    found: Choices = {}
    for node in reversed(list(values.graph.fx.nodes)):
        if node in values.free and node.op == "call_function":
            found[node] = {}
            for axis in ways.transfers.mesh.names:
                wanted = _wanted(node, axis, {**choices, **found}, values)
                found[node][axis] = _making(node, axis, wanted, ways)
    return found


def _wanted(node: fx.Node, axis: str, choices: Choices, values: StepValues) -> Layout:
    """The cut that all readers of a value want, R if there is none."""
    wants: set[Layout] = set()
    for reader in values.readers.get(node, ()):
        made = choices.get(reader.node, {}).get(axis) if reader.node is not None else None
        wants.add(R if made is None or reader.is_final else made.ins[reader.operand])
    if len(wants) == 1 and (only := wants.pop()).kind == "cut":
        return only
    return R


def _making(node: fx.Node, axis: str, wanted: Layout, ways: CallWays) -> Strategy:
    """A strategy that makes the wanted cut of whole operands or of pieces of them."""
    if wanted != R and len(results_of(node)) == 1 and node.target is not operator.getitem:
        shapes = [value(o).shape for o in tensor_args(node)]
        for strategy in ways.strategies(node, axis, ((len(shapes), wanted),)):
            numbers = (ways.transfers.number({axis: layout}) for layout in strategy.ins)
            pairs = zip(shapes, numbers, strict=True)
            whole = all(layout.kind in ("R", "cut") for layout in strategy.ins)
            fits = all(ways.transfers.fits(shape, number) for shape, number in pairs)
            if strategy.outs == (wanted,) and whole and fits:
                return strategy
    return whole_strategy(node)


def _cut_inputs(choices: Choices, values: StepValues) -> dict[str, dict[str, Layout]]:
    """Inputs cut as all readers want them, or as is pinned."""
    pins, found = values.pins, {}
    for name, node in values.graph.inputs.items():
        cuts = {a: _wanted(node, a, choices, values) for a in values.graph.mesh.names}
        found[name] = {a: layout for a, layout in cuts.items() if layout != R}
        if node not in values.free:
            found[name] = dict(pins.stored(name, pins.inputs))
    return found
