"""Split the local graph of all stages into one graph per pipeline stage.

A stage receives activations from the stage before (forward) and gradients from the stage behind
(backward). A value that a later stage reads passes through all stages between. The calls of a stage
have phases: ``S`` once before all microbatches, ``F`` forward and ``B`` backward per microbatch,
``W`` the weight gradients that no other stage waits for (zero bubble), ``E`` once after all
microbatches.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from partc.errors import PlanError
from partc.graph import (
    ANYWHERE,
    Graph,
    Outputs,
    Phase,
    collectives,
    fake_of,
    is_weight,
    set_fake,
    set_like,
    set_value,
    stage_of,
    value,
)
from partc.graph.ancestors import ancestors
from partc.graph.draws import site_of
from partc.graph.folds import list_member
from partc.graph.input_only import input_only
from partc.graph.places import innermost_turn
from partc.passes.canonical.dedupe_layers import Unfolded
from partc.passes.stages.assign_stages import COPY
from partc.passes.stages.buffer_stages import Holders, holders, made_once, params_of
from partc.plan import Plan
from partc.plan.mesh import MICROBATCH_AXIS
from partc.plan.sharding import R

ORDER: tuple[Phase, ...] = ("S", "F", "B", "W", "E")
Crossing = dict[int, list[fx.Node]]  # by stage number: values sent between it and the next stage


def split_stages(graph: Graph, plan: Plan, *, split_backward: bool = False) -> list[Graph]:
    """The graphs of the stages in ``graph``, in order; ``split_backward`` makes the phase ``W``.

    Unfolded if a list of dropped blocks belongs to no stage; PlanError if a stage needs a value
    that another one computes for a buffer.
    """
    free = input_only(graph)
    once = made_once(graph)
    phases = _phases(graph, plan, free, once)
    everywhere = input_only(graph, draws=True) | {n for n in graph.calls() if is_weight(n)}
    everywhere |= {n for n in once if not params_of(n)}
    everywhere -= {*graph.outputs.results.values()}  # one stage gives each
    buffers = holders(graph, everywhere)
    ahead, back = _crossings(graph, phases, everywhere)
    stages = [
        _Stage(graph, number, phases, everywhere, buffers).graph(
            received=[*ahead.get(number - 1, ()), *back.get(number, ())],
            sent=[*ahead.get(number, ()), *back.get(number - 1, ())],
        )
        for number in range(len(graph.kept.points if graph.kept else plan.stages) + 1)
    ]
    given = [name for stage in stages for name in stage.outputs.results]
    assert sorted(given) == sorted(graph.outputs.results), "a result is of no stage, or of several"
    for fold in {*graph.folds} - {fold for stage in stages for fold in stage.folds}:
        raise Unfolded(f"{fold.like} stands in no stage")
    if split_backward:
        for stage in stages:
            _set_weights_apart(stage)
    return [_in_phase_order(_once(stage)) for stage in stages]


# phases -------------------------------------------------------------------------------------------
def _phases(
    local: Graph, plan: Plan, free: set[fx.Node], once: set[fx.Node]
) -> dict[fx.Node, Phase]:
    """The phase of every call: S, F, B or E; ``W`` is split off from ``B`` later."""
    phases: dict[fx.Node, Phase] = {}
    for node in local.calls():
        operands = [phases[o] for o in node.all_input_nodes if o in phases]
        if node.target in (collectives.accumulate, collectives.collect) or "E" in operands:
            phases[node] = "E"
        elif node in once or (_is_steady(node, plan, free) and {*operands} <= {"S"}):
            phases[node] = "S"
        else:
            phases[node] = value(node).phase
    return phases


def _is_steady(node: fx.Node, plan: Plan, free: set[fx.Node]) -> bool:
    """Whether a call's result is the same for all microbatches and is kept for the whole step."""
    if value(node).sharding.on(MICROBATCH_AXIS) != R:
        return False
    if node.target in collectives.COLLECTIVES and is_weight(node):
        return plan.gather.get(str(node.kwargs["axis"])) == "step"
    return (node in free or is_weight(node)) and not _of_a_block(node)


def _of_a_block(node: fx.Node) -> bool:
    """Whether a value depends on a parameter or buffer of one block in a list.

    The printed loop over blocks would need a list of such values, one per block; each block makes
    the view or cast anew instead.
    """
    held_by = (value(o) for o in ancestors(node) if o.op == "placeholder")
    return any(list_member(v.name)[0] for v in held_by if v.kind in ("param", "buffer"))


# stages -------------------------------------------------------------------------------------------
def _crossings(
    local: Graph, phases: dict[fx.Node, Phase], everywhere: set[fx.Node]
) -> tuple[Crossing, Crossing]:
    """The values sent ahead (forward) and back (backward), by the number of the stage before the
    boundary.

    PlanError for a value of phase S that another stage reads: nothing is sent before microbatches.
    """
    ahead: Crossing = {}
    back: Crossing = {}
    for node in local.calls():
        readers = [stage_of(u) for u in node.users if u.op == "call_function"]
        if not readers or node in everywhere:
            continue
        others = [stage for stage in readers if stage not in (ANYWHERE, stage_of(node))]
        if phases[node] == "S" and others:
            raise _read_elsewhere(node, others[0])
        if phases[node] == "F":
            # Ranks send to their neighbours alone: the stages in between pass a value on.
            for number in range(stage_of(node), max(readers)):
                ahead.setdefault(number, []).append(node)
        elif phases[node] == "B" and min(readers) >= 0:
            for number in range(min(readers), stage_of(node)):
                back.setdefault(number, []).append(node)
    return ahead, back


@dataclass
class _Stage:
    """Copies the calls of one stage into a graph of their own.

    ``copies`` maps a node to its copy. Calls in ``everywhere`` are copied to each stage that reads
    them.
    """

    local: Graph
    number: int
    phases: dict[fx.Node, Phase]
    everywhere: set[fx.Node]
    buffers: Holders
    out: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def graph(self, received: Sequence[fx.Node], sent: Sequence[fx.Node]) -> Graph:
        """The stage's graph, with placeholders for ``received`` and outputs for ``sent``."""
        calls = self._calls()
        wanted = {o for node in calls for o in node.all_input_nodes}
        # a buffer is placed where it is written, read or not
        wanted |= {self.local.buffers[name] for name in self._news()}
        # Inputs that the stage does not read are placed too: every rank's `step` takes the batch.
        for node in self.local.fx.nodes:
            if node.op == "placeholder" and (node in wanted or value(node).kind == "input"):
                self._place(node)
        for node in received:
            self._receive(node)
        for node in calls:
            copy = self.out.node_copy(node, lambda n: self.copies[n])
            set_like(copy, node)
            set_value(copy, replace(value(node), phase=self.phases[node], stage=self.number))
            self.copies[node] = copy
        self.out.output(self._outputs(sent).as_dict())
        names = {value(n).name for n in self.out.nodes if n.op == "placeholder"}
        aliases = {a: b for a, b in self.local.aliases.items() if b in names}
        constants = {n: t for n, t in self.local.constants.items() if n in names}
        folds = tuple(fold for fold in self.local.folds if self._runs(fold.like))
        stage = replace(
            self.local, fx=self.out, aliases=aliases, constants=constants, folds=folds, kept=None
        )
        trained = {name.partition(COPY)[0] for name in self.local.grads} & names
        return replace(stage, trained_elsewhere=frozenset(trained - stage.grads.keys()))

    def _runs(self, block: str) -> bool:
        return any(
            f"{value(n).module}.".startswith(f"{block}.") and stage_of(n) == self.number
            for n in self.local.calls()
        )

    def _calls(self) -> list[fx.Node]:
        """The stage's own calls and the calls of ``everywhere`` that they need, in order."""
        calls = list(self.local.calls())
        own = {n for n in calls if n not in self.everywhere and stage_of(n) == self.number}
        needed = own | {*self._news().values()}
        for node in reversed(calls):
            if node in self.everywhere and any(u in needed for u in node.users):
                needed.add(node)
        return [n for n in calls if n in needed]

    def _news(self) -> dict[str, fx.Node]:
        """The new values of buffers that this stage has."""
        news = self.local.outputs.buffers
        return {name: new for name, new in news.items() if self.number in self.buffers[name]}

    def _place(self, node: fx.Node) -> None:
        copy = self.out.create_node("placeholder", str(node.target), name=node.name)
        known = value(node)
        set_value(copy, replace(known, name=known.name.partition(COPY)[0]))
        set_fake(copy, fake_of(node))
        self.copies[node] = copy

    def _receive(self, node: fx.Node) -> None:
        copy = self.out.placeholder(node.name)
        known = value(node)
        set_value(copy, replace(known, kind="received", name=node.name, phase=self.phases[node]))
        set_fake(copy, fake_of(node))
        self.copies[node] = copy

    def _outputs(self, sent: Sequence[fx.Node]) -> Outputs:
        """The step's results that this stage computes, and the values that it sends."""
        whole, copies = self.local.outputs, self.copies
        here = {n for n in copies if n.op == "call_function" and stage_of(n) == self.number}
        return Outputs(
            loss=copies[whole.loss] if whole.loss in here else None,
            grads={n.partition(COPY)[0]: copies[g] for n, g in whole.grads.items() if g in here},
            buffers={name: copies[new] for name, new in self._news().items()},
            results={n: copies[r] for n, r in whole.results.items() if r in here},
            sent={node.name: copies[node] for node in sent},
        )


def _read_elsewhere(node: fx.Node, stage: int) -> PlanError:
    known = value(node)
    return PlanError(
        where=f"{known.module or 'the model'} ({known.source})",
        what=f"stage {stage} reads what stage {stage_of(node)} makes of its weights for a buffer",
        why="it is made once per step, and nothing is sent but what microbatches compute",
        do="Begin the stages elsewhere, so that one has both.",
    )


# weight gradients apart ---------------------------------------------------------------------------
def _set_weights_apart(graph: Graph) -> None:
    """Move to phase ``W`` the calls that only parameter gradients need.

    These are a gradient's last matrix product or sum, the calls behind it, and the cheap calls that
    feed it alone. See zero bubble pipeline parallelism (Qi et al. 2023, arXiv 2401.10241).
    """
    apart: set[fx.Node] = set()
    works: set[fx.Node] = set()  # those of ``apart`` that are a product, or lead to one
    sent = {*graph.outputs.sent.values()}
    for node in reversed(list(graph.calls())):
        if value(node).phase != "B" or node in sent:
            continue
        readers = [u for u in node.users if u.op == "call_function"]
        if not all(u in apart or value(u).phase == "E" for u in readers):
            continue
        # what follows is at most the finished gradient's way to its parameter
        is_last = not any(u in works or _is_heavy(u) for u in readers)
        if is_last or (not _is_heavy(node) and _stands_with(node, readers)):
            apart.add(node)
            if not is_last or _is_heavy(node):
                works.add(node)
    for node in graph.calls():
        picks = node.target is operator.getitem  # stays in the phase of the call that it picks from
        if node in apart and not (picks and node.all_input_nodes[0] not in apart):
            set_value(node, replace(value(node), phase="W"))
    for node in graph.calls():  # and the other way round: a moved call takes its getitem along
        if node.target is operator.getitem and node in apart:
            made = value(node.all_input_nodes[0]).phase
            set_value(node, replace(value(node), phase=made))


def _stands_with(node: fx.Node, readers: Sequence[fx.Node]) -> bool:
    """Whether all readers are in the block of ``node``.

    Calls between blocks stay in ``B``, so that the first block's graph equals the others'.
    """
    return all(innermost_turn(reader) == innermost_turn(node) for reader in readers)


def _is_heavy(node: fx.Node) -> bool:
    """Whether a call is a matrix product or another costly op: not pointwise, no view, no sum."""
    tags = getattr(node.target, "tags", ())
    name = getattr(node.target, "__name__", "")
    views = getattr(node.target, "is_view", False)
    light = ("sum", "reshape", "permute", "getitem", "wait", "cat", "clone", "to_copy", "expand")
    return not (
        torch.Tag.pointwise in tags
        or views
        or any(word in name for word in light)
        or node.target in (*collectives.COLLECTIVES, *collectives.LOCAL)
    )


def _once(graph: Graph) -> Graph:
    """Merge equal calls of phase S, which several blocks compute alike, in place."""
    known: dict[object, fx.Node] = {}
    for node in list(graph.calls()):
        if value(node).phase == "S" and node.target not in collectives.COLLECTIVES:
            given = repr(node.args), repr(sorted(node.kwargs.items()))
            key = (node.target, *given, site_of(node))
            first = known.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.fx.erase_node(node)
    return graph


def _in_phase_order(graph: Graph) -> Graph:
    """Sort the calls by phase in place; within a phase the order stays."""
    anchor = next(n for n in reversed(list(graph.fx.nodes)) if n.op == "placeholder")
    for node in sorted(graph.calls(), key=lambda n: ORDER.index(value(n).phase)):
        anchor.append(node)
        anchor = node
    graph.fx.lint()
    return graph
