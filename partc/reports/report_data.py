"""All that a report of a program shows, as plain data: ``partc report --json``.

Every number of the page is taken from here, so that page and data cannot differ. Seconds and bytes
are as predicted; nothing is measured.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from partc.amounts import time_text
from partc.cost.cost_parts import waterfall
from partc.cost.memory_limit import usable
from partc.cost.prediction import Prediction
from partc.errors import UsageError
from partc.plan.mesh import Mesh
from partc.plan.plan_keys import MEANINGS
from partc.program import Program
from partc.reports.explanation import Explanation, explain_program
from partc.reports.pipeline_timeline import pipeline_timeline
from partc.reports.stamps import stamps_of
from partc.reports.timeline import Timeline, timeline_of

SCHEMA = 1
Json = dict[str, Any]


def report_data(program: Program, where: str = "program") -> Json:
    """The report of a program as plain data; UsageError where nothing of its step was saved."""
    why = explain_program(program)
    if why.prediction is None or not program.basis.tapes:
        raise UsageError(
            where=where, what="there is no report of this program",
            why="no prediction of its step was saved with it",
            do="Compile the model again with partc.compile, and save the program.",
        )  # fmt: skip
    mesh = Mesh(program.mesh.axes, program.basis.topology())
    pipeline = bool(program.schedule)
    line = pipeline_timeline(program) if pipeline else timeline_of(program, where)
    bounds = waterfall(why.prediction)
    alternatives = why.estimated.as_json() if why.estimated else None
    stamps, measured = stamps_of(program)
    return {
        "schema": SCHEMA,
        "kind": "predicted, and measured" if measured else "predicted, not measured",
        "model": program.model,
        "machine": why.prediction.hardware,
        "numbers": _numbers(program, mesh, why, why.prediction),
        "verdict": verdict(bounds, why.prediction, alternatives),
        "stamps": stamps,
        "measured": measured,
        "waterfall": bounds,
        "timeline": line.as_json(),
        "holders": _holders(why, line),
        "sources": dict(program.sources),
        "places": _places(program),
        "roles": [list(role) for role in program.roles],
        "alternatives": alternatives,
        "mesh": _mesh(mesh, line, why.prediction),
        "plan": list(_plan(program.plan)),
    }


def _numbers(program: Program, mesh: Mesh, why: Explanation, step: Prediction) -> Json:
    """The numbers on top of the page, each once."""
    exposed = sum(each.exposed_s for each in step.axes)
    bubble = sum(phase.parts.get("bubble", 0.0) for phase in step.phases)
    found = why.estimated
    limit = found.search.limit if found else None
    cost = program.cost.as_json()
    return {
        "step_s": step.seconds,
        "tokens_per_s": step.tokens_per_s,
        "samples_per_s": step.samples_per_s,
        "mfu": step.model_share,
        "peak_bytes": why.peak_bytes,
        "limit_bytes": limit or usable(mesh.hardware.memory_bytes),
        "exposed_s": exposed,
        "exposed_share": exposed / step.seconds if step.seconds else 0.0,
        "bubble_s": bubble,
        "idle_share": cost.get("bubble"),
        "programs": len({name for _, name in program.roles}),
        "ranks": program.mesh.num_ranks,
        "lines": sum(text.count("\n") for text in program.sources.values()),
    }


def verdict(bounds: Sequence[Json], step: Prediction, alternatives: Json | None) -> str:
    """One sentence: what the step spends its time on, the most first, and what would be faster."""
    spent = sorted(_spent(bounds, step), reverse=True)
    said = [f"{seconds / step.seconds:.0%} {words}" for seconds, words in spent]
    first = said[0].replace("% ", "% of the step ", 1)
    return "; ".join([first, *said[1:], *_faster(alternatives)]) + "."


def _spent(bounds: Sequence[Json], step: Prediction) -> Iterator[tuple[float, str]]:
    """Seconds of the largest part of computing, of waiting, and of a pipeline's bubble."""
    parts = {row["part"]: row["seconds"] for row in bounds}
    words = {
        "arithmetic": "is arithmetic",
        "memory": "is bound by memory",
        "launches": "launches kernels",
    }
    largest = max(words, key=lambda part: parts.get(part, 0))
    yield parts.get(largest, 0), words[largest]
    waits = {each.axis: each.exposed_s for each in step.axes if each.exposed_s > 0}
    if waits:
        most = max(waits, key=waits.__getitem__)
        most_of = "most over" if len(waits) > 1 else "over"
        longest = time_text(float(f"{waits[most]:.4g}"))
        yield sum(waits.values()), f"waits for transfers, {most_of} {most} ({longest})"
    if bubble := parts.get("bubble"):
        yield bubble, "is the pipeline's bubble"


def _faster(alternatives: Json | None) -> Iterator[str]:
    """What the search says of other plans, if it can express this one."""
    if alternatives is None:
        return
    choices = [each for each in alternatives["choices"] if each["fits"] and each["step_s"]]
    best = min(choices, key=lambda each: each["step_s"], default=None)
    own = alternatives["step_s"]
    if best and best["step_s"] < 0.98 * own:
        less = 1 - best["step_s"] / own
        yield f"a faster plan that fits, by estimate: {best['plan']} (-{less:.0%})"
    elif choices:
        yield "no plan that differs in one choice and fits is faster by 2 % or more"


def _holders(why: Explanation, line: Timeline) -> list[Json]:
    """Who holds memory at the peak: what stays through all steps, then the lines of the step."""
    lines = {each.line for each in line.holders}
    kept = [
        {"what": who, "bytes": size, "line": 0, "module": "", "source": ""}
        for who, size in why.holders
        if not lines or not who.startswith("line ")
    ]
    live = [
        {"what": each.text, "bytes": each.num_bytes, "line": each.line, "module": each.module,
         "source": each.source}
        for each in line.holders
    ]  # fmt: skip
    return sorted((*kept, *live), key=lambda each: -each["bytes"])


def _places(program: Program) -> Json:
    """For each file its lines with the module and the line of the model for which they stand."""
    first = {name: rank for rank, name in reversed([*_first_ranks(program)])}
    return {name: program.role(rank).lines.as_json() for name, rank in sorted(first.items())}


def _first_ranks(program: Program) -> Iterator[tuple[int, str]]:
    """The first rank of each run of ranks that have one file."""
    rank = 0
    for num, name in program.roles:
        yield rank, name
        rank += num


def _mesh(mesh: Mesh, line: Timeline, step: Prediction) -> Json:
    """The axes with what crosses them in a step, and the levels of links under them."""
    levels = mesh.hardware.levels
    axes, exposed = [], {each.axis: each.exposed_s for each in step.axes}
    for name, size in mesh.axes:
        spread = mesh.crosses(name)
        over = [each.name for each, units in zip(levels, spread, strict=True) if units > 1]
        waits = {"exposed_s": exposed.get(name, 0.0)}
        axes.append({"axis": name, "ranks": size, "over": over, **line.traffic(name), **waits})
    return {
        "axes": axes,
        "levels": [
            {"level": each.name, "joins": each.size, "bytes_per_s": each.bytes_per_s,
             "latency_s": each.latency_s}
            for each in levels
        ],
        "devices": [{"device": d.name, "count": n} for d, n in mesh.hardware.groups],
    }  # fmt: skip


def _plan(text: str) -> Iterator[Json]:
    """Every key of the plan, with its value as TOML reads it and what the key decides."""
    for key, value in tomllib.loads(text).items():
        shown = dict(value) if isinstance(value, Mapping) else value
        yield {"key": key, "value": shown, "decides": MEANINGS.get(key, "")}
