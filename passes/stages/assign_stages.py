"""Assign every call to a pipeline stage, and give each stage its own copy of a tied parameter.

Stages split the forward in the order in which the model runs. A backward call is on the stage of
its forward call, and gradients go to earlier stages only. Input-only values (masks, positions,
noise), and casts and transposes of parameters, have no stage: each stage that reads them computes
them, and draws the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from partc.errors import PlanError
from partc.graph import (
    ANYWHERE,
    Graph,
    Outputs,
    fake_of,
    is_weight,
    set_fake,
    set_value,
    stage_of,
    update,
    value,
)
from partc.graph.ancestors import ancestors
from partc.graph.graph_edits import Writer
from partc.graph.input_only import input_only
from partc.passes.shard.zeros import is_zero
from partc.wrong_calls import did_you_mean

aten = torch.ops.aten
COPY = "#"  # between a tied parameter's name and the stage of a copy


def assign_stages(
    graph: Graph, points: Sequence[str], homes: Mapping[str, int] | None = None
) -> Graph:
    """Set ``stage`` of every call; ``points`` are the module paths at which stages 1, 2, ... begin.

    ``homes`` has the stages of parameters by another step of the model: where this one does not
    run a module of ``points``, the stage begins with the first call that reads one of its own, or
    with the last call of all, if that reads none.

    PlanError if a path names no module that runs, if the points are out of order, or if a backward
    call would need values of stages that cannot send them.
    """
    starts = [_start(graph, n, point, homes or {}) for n, point in enumerate(points, start=1)]
    if starts and not homes:
        _check_first(graph, points[0], starts[0])
    free = input_only(graph, draws=True)
    for node in (n for n in graph.fx.nodes if n.op == "placeholder"):
        update(node, stage=ANYWHERE)
    stage = 0
    named = {value(node).name or node.name: node for node in graph.calls()}
    lines: dict[tuple[str, str], int] = {}  # by module and source: where its forward runs
    for node in graph.calls():
        line = value(node).module, value(node).source
        stage += sum(node is start for start in starts)
        if node in free or is_weight(node):
            update(node, stage=ANYWHERE)
        elif value(node).phase == "F":
            update(node, stage=stage)
            lines[line] = stage
        else:
            forward = named.get(value(node).forward)
            wish = stage_of(forward) if forward is not None else lines.get(line, ANYWHERE)
            update(node, stage=_backward_stage(node, wish, len(points)))
    _check_order(points, starts, homes)
    _give_results(graph, len(points), homes or {})
    return untie(graph)


def _give_results(graph: Graph, last: int, homes: Mapping[str, int]) -> None:
    """Let one stage give each result that every stage could compute, in place.

    For what follows from a parameter it is the first stage that reads the parameter. Else it is the
    stage that has the parameters and buffers in another program (``homes``), else the last.
    """
    results = dict(graph.outputs.results)
    for name, node in results.items():
        if node.op == "placeholder" or stage_of(node) == ANYWHERE:
            params = (o for o in ancestors(node) if value(o).kind == "param")
            stored = (o for o in (node, *ancestors(node)) if value(o).kind in ("param", "buffer"))
            home = min((homes[n] for o in stored if (n := value(o).name) in homes), default=last)
            stage = min((s for param in params for s in _stages_reading(param)), default=home)
            if all(user.op == "output" for user in node.users):
                update(node, stage=stage)
                continue
            behind = max([node, *(o for o in graph.fx.nodes if o.op == "placeholder")])
            write = Writer(graph.fx, behind.next, replace(value(node), stage=stage, kind="op"))
            results[name] = write(aten.clone.default, node)
    graph.set_outputs(replace(graph.outputs, results=results))


def _start(graph: Graph, number: int, point: str, homes: Mapping[str, int]) -> fx.Node | None:
    """The call with which a stage begins; None for one without any."""
    calls = _staged_calls(graph)
    for node in calls:
        if _lies_in(node, point):
            return node
    if homes:
        at = [max((_home(o, homes) for o in n.all_input_nodes), default=-1) for n in calls]
        own = next((n for n, home in zip(calls, at, strict=True) if home >= number), None)
        return own or (calls[-1] if calls and at[-1] < 0 else None)
    raise PlanError(
        where=f"stages, {point!r}",
        what="no such module runs",
        why="a stage begins at the first call of a module's forward",
        do=_instead(graph, calls, point),
    )


def _instead(graph: Graph, calls: Sequence[fx.Node], point: str) -> str:
    """What to write for a name that no module has: names that were not parted by commas, or one
    that is misspelt.
    """
    names = re.split(r"[\s;|+]+", point.strip())
    if len(names) > 1 and all(any(_lies_in(n, each) for n in calls) for each in names):
        return f"Join names by commas, --stages {','.join(names)}; in a list each has its own text."
    blocks = _blocks(graph)
    found = f"Name one of {', '.join(blocks) or 'the modules that the model runs'}."
    return did_you_mean(point, blocks, 0.9) or found


def _staged_calls(graph: Graph) -> list[fx.Node]:
    """The forward's calls of which a single stage computes each."""
    free = input_only(graph, draws=True)
    return [
        node for node in graph.calls()
        if value(node).phase == "F" and node not in free and not is_weight(node)
    ]  # fmt: skip


def _lies_in(node: fx.Node, point: str) -> bool:
    path = value(node).module
    return path == point or path.startswith(f"{point}.")


def _check_first(graph: Graph, point: str, start: fx.Node | None) -> None:
    """PlanError if stage 1 begins with the model's first call, so that stage 0 has none."""
    calls = [n for n in graph.calls() if value(n).phase == "F" and not is_weight(n)]
    if not calls or start is None or not _lies_in(calls[0], point):
        return
    behind = [p for node in calls for p in _blocks(graph) if _lies_in(node, p)]
    later = [p for p in dict.fromkeys(behind) if not _lies_in(calls[0], p)]
    raise PlanError(
        where=f"stages, {point!r}",
        what="stage 0 would have nothing to compute",
        why="the forward begins with this module, and stages names where stage 1 and those behind "
        "it begin",
        do=f"Name a module that runs later: {', '.join(later)}." if later
        else "Name a module that runs later.",
    )  # fmt: skip


def _home(node: fx.Node, homes: Mapping[str, int]) -> int:
    """The last stage of the parameters of which an operand is computed alone; -1 without any."""
    params = [o for o in (node, *ancestors(node)) if value(o).kind == "param"]
    alone = node.op == "placeholder" or is_weight(node)
    return max((homes.get(value(o).name, -1) for o in params), default=-1) if alone else -1


def _blocks(graph: Graph) -> list[str]:
    """Up to 8 module paths for an error message: blocks, or any modules if there are none."""
    paths = dict.fromkeys(value(n).module for n in graph.calls() if value(n).phase == "F")
    numbered = [p for p in paths if p.rpartition(".")[2].isdigit()]
    return (numbered or [p for p in paths if p])[:8]


def _check_order(
    points: Sequence[str], starts: Sequence[fx.Node | None], homes: Mapping[str, int] | None
) -> None:
    for (a, first), (b, second) in zip(
        zip(points, starts, strict=True), zip(points[1:], starts[1:], strict=True), strict=False
    ):
        if second is None or (homes and first is second):
            continue
        if first is None or not first < second:
            raise PlanError(
                where=f"stages, {b!r}",
                what=f"it does not run after {a!r}",
                why="stages cut the forward in the order in which it runs",
                do="List the points in that order, each once.",
            )


def _backward_stage(node: fx.Node, wish: int, last: int) -> int:
    """The stage of a backward call: that of its forward (``wish``) if its operands allow it.

    Saved values can only be sent to later stages, gradients only to earlier ones. PlanError if no
    stage can have all operands.
    """
    placed = [o for o in node.all_input_nodes if o.op == "call_function" and stage_of(o) >= 0]
    saved = max((stage_of(o) for o in placed if value(o).phase == "F"), default=None)
    flowing = min((stage_of(o) for o in placed if value(o).phase == "B"), default=last)
    if not placed and wish == ANYWHERE:  # of weights alone: where the forward reads them last
        weights = [o for o in ancestors(node) if value(o).kind == "param"]
        return max((s for weight in weights for s in _stages_reading(weight)), default=last)
    lowest = 0 if saved is None else saved
    if lowest <= wish <= flowing:
        return wish
    if lowest > flowing:
        raise _apart(node, lowest, flowing)
    # The forward's stage is unknown or cannot have all operands. `lowest` to `flowing` can.
    # At `lowest` no saved value has to be sent for it; gradients go to earlier stages anyway.
    return flowing if saved is None else saved


def _apart(node: fx.Node, saved: int, flowing: int) -> PlanError:
    known = value(node)
    return PlanError(
        where=" ".join(filter(None, [known.module, f"({known.source})"])),
        what=f"its backward reads what stage {saved} saved and a gradient of stage {flowing}",
        why="values are sent to later stages, gradients to earlier ones",
        do="Let the stages begin elsewhere, so that what belongs together is in one of them.",
    )


# tied parameters ----------------------------------------------------------------------------------
def untie(graph: Graph) -> Graph:
    """Give each further stage that reads a tied parameter a placeholder of its own, in place.

    ``wte.weight`` on stages 0 and 3 becomes ``wte.weight`` and ``wte.weight#3``. The gradient of a
    copy is the summand that its stage makes. A stage without a copy sends its summand to one before
    it that has one; PlanError if there is none.
    """
    for name, node in graph.params.items():
        stages = sorted(set(_stages_reading(node)))
        for stage in stages[1:]:
            _move_readers(node, _copy_placeholder(graph, node, f"{name}{COPY}{stage}"), stage)
        if name in graph.grads and (len(stages) > 1 or _is_made_elsewhere(graph, name, stages)):
            _share_gradient(graph, name, stages)
    return graph


def _stages_reading(node: fx.Node) -> Iterator[int]:
    """The stages that read a parameter, or a cast or transpose of it."""
    for user in node.users:
        if user.op == "call_function":
            if stage_of(user) == ANYWHERE:
                yield from _stages_reading(user)
            else:
                yield stage_of(user)


def _copy_placeholder(graph: Graph, node: fx.Node, name: str) -> fx.Node:
    *_, last = graph.params.values()
    with graph.fx.inserting_after(last):
        copy = graph.fx.placeholder(name.replace(".", "_").replace(COPY, "_"))
    set_value(copy, replace(value(node), name=name))
    set_fake(copy, fake_of(node))
    return copy


def _move_readers(old: fx.Node, new: fx.Node, stage: int) -> None:
    """Let the readers on ``stage`` read ``new`` for ``old``; casts and transposes are copied."""
    for user in list(old.users):
        if user.op != "call_function":
            continue
        if stage_of(user) == stage:
            user.replace_input_with(old, new)
        elif stage_of(user) == ANYWHERE and stage in _stages_reading(user):
            with user.graph.inserting_after(user):
                copy = user.graph.node_copy(user, lambda n: new if n is old else n)
            set_value(copy, value(user))
            set_fake(copy, fake_of(user))
            _move_readers(user, copy, stage)


def _share_gradient(graph: Graph, name: str, stages: Sequence[int]) -> None:
    """Give each stage's copy of a tied parameter its stage's summand of the gradient."""
    outputs = graph.outputs
    parts = _parts(graph, outputs.grads[name])
    for stage in [each for each in parts if each >= 0 and each not in stages]:
        part, home = parts.pop(stage), max((s for s in stages if s < stage), default=None)
        if home is None:
            raise _made_before(name, stage, stages)
        parts[home] = _brought(graph, part, home, parts.get(home))
    grads = {n: g for n, g in outputs.grads.items() if n != name}
    for stage, part in parts.items():
        grads[name if stage == stages[0] else f"{name}{COPY}{stage}"] = part
    graph.set_outputs(Outputs(outputs.loss, grads, outputs.buffers, outputs.results))
    for node in reversed(list(graph.calls())):
        if not node.users:
            graph.fx.erase_node(node)


def _is_made_elsewhere(graph: Graph, name: str, stages: Sequence[int]) -> bool:
    """Whether no op of the one stage that reads a parameter makes its gradient, as where the model
    only adds something to the parameter there.
    """
    return bool(stages) and stage_of(graph.grads[name]) not in (*stages, ANYWHERE)


def _brought(graph: Graph, part: fx.Node, home: int, beside: fx.Node | None) -> fx.Node:
    """A summand of a gradient on the stage where it belongs, added to that stage's own."""
    behind = max([part, *([] if beside is None else [beside])])
    write = Writer(graph.fx, behind.next, replace(value(part), stage=home))
    here = write(aten.clone.default, part)
    return here if beside is None else write(aten.add.Tensor, beside, here)


def _made_before(name: str, stage: int, stages: Sequence[int]) -> PlanError:
    return PlanError(
        where=name, what=f"its gradient is made on stage {stage}, which does not read it",
        why=f"stages {', '.join(map(str, stages))} do, and gradients are sent to earlier ones",
        do="Move a stage's beginning, so that these stand together.",
    )  # fmt: skip


def _parts(graph: Graph, node: fx.Node) -> dict[int, fx.Node]:
    """The summands of a gradient by stage; several summands of one stage are added up.

    Zeros that a sum begins with are no summand: they are added to where they are.
    """
    if stage_of(node) == ANYWHERE and is_zero(node):
        return {}
    if node.target is aten.add.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs:
        first, second = (_parts(graph, operand) for operand in node.all_input_nodes)
        if {*first, *second} == {stage_of(node)}:
            return {stage_of(node): node}
        write = Writer(graph.fx, node, value(node))
        joined = {**first, **second}
        for stage in first:
            if stage in second:
                joined[stage] = write(aten.add.Tensor, first[stage], second[stage])
                update(joined[stage], stage=stage)
        return dict(sorted(joined.items()))
    return {stage_of(node): node}
