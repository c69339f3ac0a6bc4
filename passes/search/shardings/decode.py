"""Write the decisions of a search as a short plan from which `propagate` chooses the same again.

The layouts of parameters and inputs decide most calls. A call for which propagation would choose
another strategy is named in the plan's ``[values]``, with the equal calls of the other blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import fx

from partc.graph import Graph, value
from partc.passes.search.shardings.decided import Decided, Life
from partc.passes.search.shardings.decompositions import DECOMPOSED
from partc.passes.search.shardings.step_values import StepValues
from partc.passes.shard.decompose_ops import decomposes
from partc.passes.shard.price import Choices
from partc.passes.shard.propagate import AxisWalk, Pins, pinned, propagate, whole_strategy
from partc.plan import Plan, widest_pattern
from partc.plan.plan_values import PlannedLayout
from partc.plan.sharding import Layout, R, Sharding
from partc.rules import Strategy

_WALKS = 4  # most rounds: a new entry may change what propagation chooses for later calls


def entries_on(axis: str, decided: Decided, values: StepValues, base: Plan, life: Life) -> Plan:
    """``base`` with few entries that make propagation choose what was decided on ``axis``.

    ``base`` is a complete plan without layouts on ``axis``. Input-only values (masks) need no
    entries, as they take the layouts of their readers.
    """
    return shortest_plan(base, decided, (axis,), values, life)


def shortest_plan(
    base: Plan, decided: Decided, axes: tuple[str, ...], values: StepValues, life: Life
) -> Plan:
    """``base`` with few entries that make propagation choose what was decided on several axes.

    The plan is tried with and without ``Plan.scatter`` (sequence parallelism), which may replace
    many entries; the shorter one is taken.
    """
    plan = _stated(base, decided, axes, values, life)
    choices = {node: on for node, made in decided.choices.items() if (on := _on_axes(made, axes))}
    plans = list(_with_scatters(plan, choices, axes, values))
    found = [_pinned(each, choices, axes, values) for each in plans]
    best = min(found, key=lambda each: len(each.values))
    best = Plan.parse(str(best))  # the check is of what the text says, patterns included
    _check(best, choices, values.graph)
    return best


def _on_axes(made: Mapping[str, Strategy], axes: tuple[str, ...]) -> dict[str, Strategy]:
    """The strategies of a call on ``axes``; none if another axis decomposes the call, which then
    does not exist.
    """
    if any(s.variant == DECOMPOSED for axis, s in made.items() if axis not in axes):
        return {}
    return {axis: strategy for axis, strategy in made.items() if axis in axes}


def copy_graph(graph: Graph) -> tuple[Graph, dict[fx.Node, fx.Node]]:
    """A copy of the graph that may be changed, and the copy of each node."""
    new, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    new.output(new.graph_copy(graph.fx, twins))
    return replace(graph, fx=new), twins


# parameters --------------------------------------------------------------------------------------
def _stated(
    base: Plan, decided: Decided, axes: tuple[str, ...], values: StepValues, life: Life
) -> Plan:
    """The plan with the decided stored and used layouts of parameters on these axes."""
    stored = {
        name: {a: known[a] for a in axes if known.get(a, R) != R}
        for name, known in decided.stored.items()
    }
    params = values.graph.params
    whole = partial(_gathered, decided=decided, values=values)
    used: dict[str, dict[str, Layout]] = {
        name: {a: R if whole(name, params[name], a) else known.get(a, R) for a in axes}
        for name, known in stored.items()
    }
    gathered = [a for name, known in stored.items() for a in known if used[name][a] == R]
    gather = {axis: life for axis in axes if axis in gathered}
    plan = base.changed(params=stored, gather={**gather, **base.gather})
    # Only parameters that are used otherwise than their storage and `gather` say need an entry.
    odd = [n for n, planned in used.items() if Sharding.of(planned, values.graph.mesh)
           != Sharding.of(plan.used(n), values.graph.mesh)]  # fmt: skip
    # A printed entry is a pattern that fits all equal blocks: the others then need their own.
    patterns = dict.fromkeys(map(widest_pattern, odd))
    planned = {n: {a: PlannedLayout(x) for a, x in u.items()} for n, u in used.items()}
    return plan.changed(values={n: u for n, u in planned.items() if widest_pattern(n) in patterns})


def _gathered(name: str, node: fx.Node, axis: str, decided: Decided, values: StepValues) -> bool:
    """Whether a sharded parameter is all-gathered: readers in every phase want it whole, and none
    wants the shard.
    """
    stored = decided.stored[name].get(axis, R)
    phases: dict[bool, set[Layout]] = {}
    for reader in values.readers[node]:
        made = decided.choices.get(reader.node, {}).get(axis) if reader.node else None
        wants = R if made is None or reader.is_final else made.ins[reader.operand]
        phases.setdefault(reader.backward, set()).add(wants)
    return stored != R and all(R in w and stored not in w for w in phases.values())


# calls --------------------------------------------------------------------------------------------
def _with_scatters(
    plan: Plan, choices: Choices, axes: tuple[str, ...], values: StepValues
) -> Iterator[Plan]:
    """The plan, and the plan with ``scatter`` set to the dim of most reduce-scatters per axis."""
    yield plan
    scatter: dict[str, int] = {}
    for axis in axes:
        dims = [d for d in _scattered(axis, choices, values) if axis not in plan.scatter]
        if dims:
            scatter[axis] = max(sorted(set(dims)), key=dims.count)
    if scatter:
        yield plan.changed(scatter={**scatter, **plan.scatter})


def _scattered(axis: str, choices: Choices, values: StepValues) -> Iterator[int]:
    """The dims on which readers want partial sums of activations sharded, one per reader."""
    for node in values.values():
        made = choices.get(node, {}).get(axis)
        if made is not None and made.outs[0].kind == "U" and len(value(node).shape) > 2:
            for reader in values.readers[node]:
                read = choices.get(reader.node, {}).get(axis) if reader.node else None
                if read is not None and read.ins[reader.operand].kind == "cut":
                    yield read.ins[reader.operand].dim


def _pinned(plan: Plan, choices: Choices, axes: tuple[str, ...], values: StepValues) -> Plan:
    """The plan with an entry for every call whose strategy propagation would choose otherwise."""
    graph, twins = copy_graph(values.graph)
    wanted = {twins[node]: each for node, each in choices.items()}
    names = {twins[node]: name for node, name in values.names.items()}
    pins: Pins = {}
    for _ in range(_WALKS):
        before = dict(pins)
        _walk(graph, plan, wanted, pins, axes)
        if pins == before:
            break
        patterns = dict.fromkeys(widest_pattern(names[node]) for node in pins)
        for node, name in names.items():
            if widest_pattern(name) in patterns and node not in pins and _stays(node, wanted):
                pins[node] = _entry(wanted[node])
    kept = {names[node]: planned for node, planned in pins.items()}
    in_order = {name: kept[name] for name in names.values() if name in kept}
    return plan.changed(values={**plan.values, **in_order})


def _stays(node: fx.Node, wanted: Choices) -> bool:
    """Whether a call was decided and is not decomposed."""
    return node in wanted and all(s.variant != DECOMPOSED for s in wanted[node].values())


def _entry(wanted: Mapping[str, Strategy]) -> dict[str, PlannedLayout]:
    return {axis: PlannedLayout(s.outs[0] if s.outs else R) for axis, s in wanted.items()}


def _walk(graph: Graph, plan: Plan, wanted: Choices, pins: Pins, axes: tuple[str, ...]) -> None:
    """One propagation that takes the ``wanted`` strategies on ``axes``, and adds to ``pins`` the
    calls for which it would have chosen others.
    """
    decomposed = True
    while decomposed:
        choices: Choices = {}
        decomposed = False
        for axis in graph.mesh.names:
            given = (graph, plan, axis, choices, False, None)
            if axis in axes:
                decomposed |= _Recorder(*given, pins, wanted=wanted).run()
            else:
                decomposed |= AxisWalk(*given, pinned(graph, plan)).run()


@dataclass
class _Recorder(AxisWalk):
    """A walk that takes the ``wanted`` strategies, and adds to ``pins`` where it would not have."""

    wanted: Choices = field(default_factory=dict)

    def choose(self, node: fx.Node) -> Strategy:
        """The wanted strategy; a pin of the result's layout is tried before one of all operands."""
        best = super().choose(node)
        if node not in self.wanted:
            return best  # a call of a decomposition
        want = self._want(node)
        if want.variant == DECOMPOSED:
            return best
        stays = decomposes(node) and self._pin(node) is None and self._gathers(node, want)
        if best != want or stays:
            self._add_pin(node, want)
        return want

    def run(self) -> bool:
        """As of every walk. Behind its choices some calls are cut as all of their readers are
        (`PiecesFirst`): those that were wanted whole are pinned, too.
        """
        decomposed = super().run()
        for node in () if decomposed else self.wanted:
            want, made = self._want(node), self.choices.get(node, {})
            if want.variant != DECOMPOSED and made.get(self.axis, whole_strategy(node)) != want:
                self._add_pin(node, want)
        return decomposed

    def _want(self, node: fx.Node) -> Strategy:
        return self.wanted[node].get(self.axis, whole_strategy(node))

    def _add_pin(self, node: fx.Node, want: Strategy) -> None:
        entry = dict(self.pins.get(node, _entry(self.wanted[node])))
        if self.as_pinned(node, entry.get(self.axis, PlannedLayout())) != want:
            entry[self.axis] = PlannedLayout(want.outs[0], want.ins)
            assert self.as_pinned(node, entry[self.axis]) == want, f"{node}: {want}"
        self.pins[node] = entry


def _check(plan: Plan, choices: Choices, graph: Graph) -> None:
    """Assert that propagation of the plan, once written and read, chooses what was decided."""
    twin, twins = copy_graph(graph)
    made = propagate(twin, plan)
    for node, wanted in choices.items():
        if any(s.variant == DECOMPOSED for s in wanted.values()):
            continue
        for axis, strategy in wanted.items():
            got = made.get(twins[node], {}).get(axis, whole_strategy(node))
            assert got == strategy, f"{node.name} on {axis}: {got}, not {strategy}"
