"""The header of a role's file: which ranks run it, what the plan decided, what a step moves."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence

from partc.codegen.calls.storage import num_bytes
from partc.cost.bytes import put_in_bytes
from partc.graph import Graph, collectives, fake_of, layout_on
from partc.graph.moves import code_of, kind_in_words, moved, wire_of
from partc.plan import Plan
from partc.plan.mesh import layout_mesh
from partc.quoting import comment
from partc.schedules import Schedule
from partc.version import __version__

_KEY, _WIDTH = 10, 100
FEW = 4  # up to so many stages have a row each
MANY = 6  # so many parameters are named in a row


def header(graph: Graph, plan: Plan) -> str:
    """The text of a file's docstring, for a step without pipeline stages."""
    mesh = plan.mesh
    assert mesh is not None
    lines = [
        f"One rank of {mesh.num_ranks}.  Written by partc {__version__} for {comment(graph.model)};"
        " change the plan, not this file.",
        "",
    ]
    rows = [("mesh", str(mesh) or "one device"), ("plan", plan.preset or "by hand")]
    rows += [("inputs", f"{comment(n)} {_cuts(n, plan.inputs, plan)}") for n in graph.inputs]
    rows += [("gathered", _gathered(axis, life)) for axis, life in plan.gather.items()]
    rows += [
        ("sequence", f"unfinished activations are scattered over {a} along dim {d}")
        for a, d in plan.scatter.items()
    ]
    rows += [("whole", row) for row in _whole([graph], plan)]
    rows += [("moves", row) for row in _moves(graph)]
    rows += [("note", comment(note, 400)) for note in plan.notes]
    return "\n".join([*lines, *_wrapped(rows)])


def stage_header(
    graphs: Sequence[Graph], schedule: Schedule, ranks: Sequence[int], plan: Plan
) -> str:
    """The text of a file's docstring, for the pipeline ``ranks`` that run it."""
    mesh = plan.mesh
    assert mesh is not None
    stages = [stage for rank in ranks for stage in schedule.stages_of(rank)]
    word = "rank" if len(ranks) == 1 else "ranks"
    lines = [
        f"Pipeline {word} {_enumerated(ranks)} of {schedule.ranks}.  "
        f"Written by partc {__version__} for "
        f"{comment(graphs[0].model)}; change the plan, not this file.",
        "",
    ]
    rows = [("mesh", str(mesh)), ("plan", plan.preset or "by hand")]
    rows += [("schedule", f"{comment(schedule.name)}, {plan.microbatches} microbatches")]
    rows += [("stage", row) for row in _stages(sorted(s for s in stages if s), plan.stages)]
    rows += [("inputs", f"{comment(n)} {_cuts(n, plan.inputs, plan)}") for n in graphs[0].inputs]
    rows += [("gathered", _gathered(axis, life)) for axis, life in plan.gather.items()]
    rows += [("whole", row) for row in _whole([graphs[s] for s in stages if s is not None], plan)]
    rows += [("note", comment(note, 400)) for note in plan.notes]
    return "\n".join([*lines, *_wrapped(rows)])


def _whole(graphs: Sequence[Graph], plan: Plan) -> list[str]:
    """Which matrices every rank of an axis holds whole, though the axis cuts others."""
    found = []
    params = {name: node for graph in graphs for name, node in graph.params.items()}
    matrices = {name: node for name, node in params.items() if fake_of(node).ndim > 1}
    times = {node: graph.times(node) for graph in graphs for node in graph.params.values()}
    for axis in graphs[0].mesh.names if graphs else ():
        whole = {n: p for n, p in matrices.items() if layout_on(p, axis).kind != "cut"}
        noted = any(note.startswith(f"{axis}=") for note in plan.notes)  # which says more
        if whole and len(whole) < len(matrices) and not noted:
            names = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in whole))
            more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
            size = _bytes(sum(times[p] * num_bytes(p) for p in whole.values()))
            who = f"plan {comment(plan.preset)}" if plan.preset else "the plan"
            found.append(
                f"over {axis}: {', '.join(map(comment, names[:MANY]))}{more}; {size} on each rank, "
                f"as {who} does not cut them"
            )
    return found


def _stages(numbers: Sequence[int], begins: Sequence[str]) -> list[str]:
    """At which module each stage begins; one row for many stages whose first layers count up.

    >>> _stages([2, 4], [f"layers.{i}" for i in range(8)])
    ['2 begins at layers.1', '4 begins at layers.3']
    >>> _stages([2, 3, 4, 6, 7], [f"layers.{i}" for i in range(8)])
    ['s of 2 to 4, 6 to 7 begins at layers.(s - 1)']
    """
    parts = [begins[number - 1].rpartition(".") for number in numbers]
    ahead = {
        number - int(k) if k.isdigit() else None
        for number, (_, _, k) in zip(numbers, parts, strict=True)
    }
    paths = {path for path, _, _ in parts}
    if len(numbers) <= FEW or len(ahead) > 1 or len(paths) > 1 or None in ahead:
        return [f"{s} begins at {comment(begins[s - 1])}" for s in numbers]
    firsts = [s for s in numbers if s - 1 not in numbers]
    spans = [
        f"{first} to {last}" if last > first else str(first)
        for first, last in zip(firsts, [s for s in numbers if s + 1 not in numbers], strict=True)
    ]
    behind = ahead.pop()
    first = f"(s - {behind})" if behind else "s"
    return [f"s of {', '.join(spans)} begins at {comment(paths.pop())}.{first}"]


def _enumerated(numbers: Sequence[int]) -> str:
    """Numbers as words of a sentence.

    >>> _enumerated([1]), _enumerated([1, 2]), _enumerated([1, 2, 3]), _enumerated([1, 3, 4])
    ('1', '1 and 2', '1 to 3', '1, 3 and 4')
    """
    *before, last = numbers
    if len(before) > 1 and last - before[0] == len(before):
        return f"{before[0]} to {last}"
    return " and ".join(filter(None, (", ".join(map(str, before)), str(last))))


def _wrapped(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Rows of a keyword and a text as wrapped lines; a keyword that repeats is written once."""
    lines: list[str] = []
    last = ""
    for key, text in rows:
        first = "" if key == last else key
        blank = " " * _KEY
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=f"{first:<{_KEY}}", subsequent_indent=blank,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        last = key
    return lines


def _cuts(name: str, table: object, plan: Plan) -> str:
    """How an input is sharded: ``dim 0 over dp``, or ``whole``."""
    assert plan.mesh is not None
    axes = layout_mesh(plan.mesh, plan.microbatches).names
    cuts = plan.stored(name, table).items()  # type: ignore[arg-type]
    return (
        ", ".join(f"dim {lies.dim} over {axis}" for axis, lies in cuts if axis in axes) or "whole"
    )


def _gathered(axis: str, life: str) -> str:
    """How often weights are gathered over an axis: the ZeRO level as a lifetime."""
    if life == "use":
        return f"over {axis} before each use, forward and backward (ZeRO-3)"
    return f"over {axis} once per step (ZeRO-1, ZeRO-2)"


def _moves(graph: Graph) -> list[str]:
    """How often each collective runs in a step, and the bytes of this rank's operands, by axis."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for node in graph.calls():
        if node.target in collectives.COLLECTIVES:
            key = (str(node.kwargs["axis"]), kind_in_words(node))
            whole = sum(map(num_bytes, moved(node)))
            fewer = wire_of(node) or code_of(node)
            counts[key] += graph.times(node)
            sizes[key] += graph.times(node) * (put_in_bytes(node) if fewer else whole)
    return [
        f"{kind} over {axis} x{counts[axis, kind]}, {_bytes(sizes[axis, kind])}"
        for axis, kind in sorted(counts)
    ]


def _bytes(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
