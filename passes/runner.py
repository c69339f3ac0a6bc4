"""What a pass is, and the one runner of all passes.

A pass is a plain function. It asks for what it needs by the names of its parameters (``graph``,
``plan``, ``mesh``, or what an earlier pass made) and gives back what it changed: a Graph, a Plan,
the graphs of all stages, or a dict of things by name; None where it changed its graph in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from time import perf_counter
from typing import Any

from partc.errors import CheckError, PartcError, UsageError
from partc.graph import Graph
from partc.graph.graph_edits import copied
from partc.passes.given_back import Step, wrong_return
from partc.passes.sound import Reads, no_step, other_form, reads, unfit_note, unsound
from partc.passes.suspects import blaming
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.running import running
from partc.users_line import failed_at
from partc.wrong_calls import did_you_mean, quoted


@dataclass(frozen=True)
class When:
    """Which steps take a pass: in words, and as a test of the state."""

    word: str
    holds: Callable[[State], bool] = field(compare=False)


ALWAYS = When("", lambda state: True)
OTHERS = "other_passes"  # of what passes made: users' passes that ran, with their modules


@dataclass(frozen=True)
class Pass:
    """One row of the table: a function, the state that it leaves behind, and why it is there.

    ``optional``: a program comes out without it too, slower or larger. ``on_graph``: it rewrites a
    graph or notes something on one, so that the graph's text after it is worth reading.
    ``decides``: the field of the plan that it writes. Such a row is a choice: it may look at the
    machines, and does nothing where the plan has the field. All others apply the plan, and are
    given the mesh without machines; but for those with ``machines``, which search for whole plans
    or report what the machines take.
    """

    run: Callable[..., Any]
    out: str
    why: str
    when: When = ALWAYS
    optional: bool = False
    on_graph: bool = True
    name: str = ""
    own: bool = True  # partc's, not one of a user's package
    decides: str = ""
    machines: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.run.__name__.lstrip("_"))

    @property
    def sees_machines(self) -> bool:
        return bool(self.decides) or self.machines

    def is_decided(self, plan: Plan) -> bool:
        """Whether this is a choice that the plan has made already."""
        return bool(self.decides) and plan.says(self.decides)

    @property
    def where(self) -> str:
        """The file of the function that does the work, ``passes/shard/propagate.py``; of a user's
        pass its module.
        """
        module = str(inspect.unwrap(self.run).__module__)
        if not self.own:
            return module
        linked = module.startswith(("partc.passes.", "partc.codegen."))
        path = module.removeprefix("partc.") if linked else module
        return f"{path.replace('.', '/')}.py"


@dataclass(frozen=True)
class Ran:
    """One run of a pass, for a dump: how long, the calls of each graph before and after, texts."""

    name: str
    seconds: float
    calls_before: tuple[int, ...]
    calls_after: tuple[int, ...]
    texts: tuple[str, ...] = ()

    def header(self, stage: int, unchanged: bool = False) -> str:
        """``# after insert_collectives (4.1 ms; 210 -> 254 calls)``; the calls are those of a stage
        alone, where there were stages before the pass too. ``unchanged``: so is the text.
        """
        same = len(self.calls_before) == len(self.calls_after)
        before = self.calls_before[stage] if same else sum(self.calls_before)
        counts = f"{before} -> {self.calls_after[stage]} calls"
        counts += "; text unchanged" if unchanged else ""
        return f"# after {self.name} ({1e3 * self.seconds:.1f} ms; {counts})"


@dataclass(frozen=True)
class Table:
    """The passes of a compile in order, those that are left out, and whether texts are kept."""

    passes: tuple[Pass, ...]
    left_out: frozenset[str] = frozenset()
    keep_texts: bool = False

    def without(self, *names: str) -> Table:
        """The same without some passes; UsageError if one does not exist or is needed."""
        for name in names:
            rows = self.named(name)
            if not all(self.passes[row].optional for row in rows):
                raise UsageError(
                    where=f"pass {name}",
                    what="it cannot be left out",
                    why="no program comes out without it",
                    do=f"Any of these may be: {', '.join(self.optional)}.",
                )
        return replace(self, left_out=self.left_out | {*names})

    @property
    def optional(self) -> list[str]:
        """The names of passes that may be left out."""
        return [*dict.fromkeys(each.name for each in self.passes if each.optional)]

    def named(self, name: str) -> list[int]:
        """The rows of this name, in order; UsageError if there is none."""
        rows = [row for row, each in enumerate(self.passes) if each.name == name]
        if not rows:
            raise UsageError(
                where=f"pass {name!r}",
                what="there is no such pass",
                why="passes are known by the names of their functions",
                do=did_you_mean(name, dict.fromkeys(each.name for each in self.passes))
                or "`partc passes` lists them.",
            )
        return rows

    def between(self, first: str, last: str) -> Iterator[tuple[int, Pass]]:
        """The rows from the first one of a name to the last one of another, and the passes of a
        user's package that follow that.
        """
        end = self.named(last)[-1]
        while end + 1 < len(self.passes) and not self.passes[end + 1].own:
            end += 1
        for row in range(self.named(first)[0], end + 1):
            if self.passes[row].name not in self.left_out:
                yield row, self.passes[row]


@dataclass
class State:
    """What passes read and write: a step on its way from a model to programs.

    ``stages`` are the graphs of a pipeline's stages, once there are any; ``made`` has what else
    passes made, by the name under which others ask for it.
    """

    graph: Graph
    plan: Plan
    mesh: Mesh  # all ranks, with the machines under them; the graph's has the axes of one stage
    table: Table
    stages: list[Graph] = field(default_factory=list)
    made: dict[str, Any] = field(default_factory=dict)
    ran: dict[int, Ran] = field(default_factory=dict)  # by row of the table; the latest run counts

    def copied(self, **made: Any) -> State:
        """The same state over a graph of its own, to try something on."""
        return replace(self.beside(**made), graph=copied(self.graph))

    def beside(self, **made: Any) -> State:
        """The same state over the same graph, for passes that leave it as it is."""
        return replace(self, stages=[*self.stages], made={**self.made, **made}, ran=dict(self.ran))

    def asked(
        self, names: Iterator[str] | tuple[str, ...], machines: bool = True
    ) -> dict[str, Any]:
        """What a function's parameters of these names are given; those with defaults may miss.

        Without ``machines`` the mesh has its axes alone.
        """
        mesh = self.mesh if machines else Mesh(self.mesh.axes)
        known = {
            "graph": self.graph, "plan": self.plan, "mesh": mesh, "stages": self.stages,
            "table": self.table, **self.made,
        }  # fmt: skip
        return {name: known[name] for name in names if name in known}


def run(state: State, first: str, last: str = "") -> State:
    """Run the passes from one name to another (or that one alone) on a state, in place."""
    for row, each in state.table.between(first, last or first):
        if each.when.holds(state) and not each.is_decided(state.plan):
            blames = blaming(each.name, state.made.get(OTHERS, {})) if each.own else nullcontext()
            with blames, running(each.name):
                _run_one(state, row, each)
    return state


def _run_one(state: State, row: int, each: Pass) -> None:
    noted = state.table.keep_texts and each.on_graph  # a dump alone reads counts, times and texts
    begun, before = perf_counter(), _num_calls(state) if noted else ()
    names = _parameters(each.run)
    read = [] if each.own else [reads(graph) for graph in _graphs(state)]
    if state.stages and "graph" in names and "stages" not in names:
        whole = state.graph
        for number, stage in enumerate(state.stages):
            state.graph = stage
            _apply(state, each, names)
            state.stages[number] = state.graph
        state.graph = whole
    else:
        _apply(state, each, names)
    seconds = perf_counter() - begun
    if not each.own:
        state.made[OTHERS] = {**state.made.get(OTHERS, {}), each.name: each.where}
    if each.on_graph:
        _check_sound(state, each, read)
    if noted:
        texts = tuple(map(str, _graphs(state)))
        state.ran[row] = Ran(each.name, seconds, before, _num_calls(state), texts)


def _apply(state: State, each: Pass, names: tuple[str, ...]) -> None:
    """Call a pass and take over what it gives."""
    asked = state.asked(names, each.sees_machines)
    missing = "" if each.own else _missing(each.run, asked)
    if missing:
        raise _failed(each, f"it asks for {missing!r}: a pass is given graph, plan, mesh or stages")
    try:
        given = each.run(**asked)
    except PartcError as error:
        if each.own:
            raise
        where = f"pass {each.name} ({each.where}), {error.where}"
        raise type(error)(where=where, what=error.what, why=error.why, do=error.do) from error
    except Exception as error:
        if each.own:
            raise
        raise _failed(each, failed_at(error, each.run)) from error
    if not each.own:
        step = Step(names, len(state.stages), bool(state.mesh.axes))
        if wrong := wrong_return(given, step):
            raise _failed(each, wrong)
    changes = given if isinstance(given, Mapping) else {_kind(each, given): given}
    for name, change in changes.items():
        if name in ("graph", "plan", "stages"):
            setattr(state, name, change)
        elif name:
            state.made[name] = change


def _kind(each: Pass, given: object) -> str:
    """What of the state a pass gave back; "" for nothing."""
    if given is None:
        return ""
    for kind, name in ((Graph, "graph"), (Plan, "plan"), (list, "stages")):
        if isinstance(given, kind):
            return name
    raise _failed(each, f"it gives {quoted(given)}")  # of a user's pass more is told before


def _missing(function: Callable[..., Any], asked: Mapping[str, Any]) -> str:
    """The first parameter that must be given and is not; "" if there is none."""
    each = inspect.signature(function, follow_wrapped=False).parameters.values()
    named = (p for p in each if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return next((p.name for p in named if p.default is p.empty and p.name not in asked), "")


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function, follow_wrapped=False).parameters)


def _graphs(state: State) -> list[Graph]:
    """The graphs that passes rewrite now: of all stages, once there are any."""
    return state.stages or [state.graph]


def _num_calls(state: State) -> tuple[int, ...]:
    """The number of calls of each graph."""
    return tuple(
        sum(node.op == "call_function" for node in graph.fx.nodes) for graph in _graphs(state)
    )


def _check_sound(state: State, each: Pass, before: Sequence[Reads]) -> None:
    """CheckError unless later passes can read the graphs, and calls read what they read before;
    the latter is asked of users' passes alone.
    """
    try:
        why = _unsound(_graphs(state), before)
    except Exception as error:
        if each.own:
            raise
        why = f"partc cannot read the graph that it leaves: {type(error).__name__}: {error}"
    if why:
        raise _failed(each, why)


def _unsound(graphs: Sequence[Graph], before: Sequence[Reads]) -> str:
    for graph in graphs:
        if why := unsound(graph):
            return why
    for graph, read in zip(graphs, before, strict=False):
        if why := other_form(graph, read):
            return f"{why}: what replaces a call has its shape and dtype"
        if why := no_step(graph, read) or unfit_note(graph, read):
            return why
    return ""


def _failed(each: Pass, why: str) -> CheckError:
    return CheckError(
        where=f"pass {each.name} ({each.where})",
        what="the graph is not sound behind it" if each.own else "this pass failed",
        why=why,
        do="This is a fault of partc: report it with the model." if each.own
        else "Mend the pass, or compile without it: disable=[...], --disable.",
    )  # fmt: skip
