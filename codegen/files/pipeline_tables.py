"""The tables of a pipeline rank's file: the shards of its stages' parameters and buffers.

In a file that several pipeline ranks run, SHARDS and BUFFERS have a table for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partc.codegen.bodies.tables import input_meaning, input_rows, table
from partc.codegen.files.by_rank import RANK
from partc.codegen.files.rank_step import RankStep
from partc.codegen.files.stages import StageText
from partc.codegen.files.stored_tables import stored_tables
from partc.codegen.files.templates import MEANINGS
from partc.codegen.repeats.layers import FIRST
from partc.codegen.text import Line
from partc.program.role import RANKS
from partc.quoting import comment, literal

STORED = ("SHARDS", "BUFFERS")


def pipeline_tables(steps: Mapping[int, RankStep], declared: str) -> list[str]:
    """The tables of a file for the ranks in ``steps``.

    ``declared`` is the text that makes parameters and buffers, which reads some of the tables.
    """
    first = next(iter(steps.values()))
    shared = len(steps) > 1
    again = {(t.name, s) for t in first.shared_here() for s in first.mine(t)[1:]}
    blocks: dict[str, None] = {}
    own: dict[str, None] = {}
    entries: dict[str, list[Line]] = {name: [] for name in MEANINGS}
    for number, stage in first.stages.items():
        of_blocks, stored = stored_tables(stage, {name for name, s in again if s == number})
        blocks |= dict.fromkeys(of_blocks)
        for constant, rows in stored.items():
            name = stage.table(constant)
            if rows or (name in declared and stage.class_of is stage):
                alike = [s for s in first.stages.values() if s.class_of is stage.class_of]
                own.setdefault(_own_table(stage.class_of, constant, rows, alike, shared))
                read = f"{name}[{stage.first}]" if stage.varies(constant) else name
                every = f'**{{f"{stage.attribute}.{{name}}": row for name, row in {read}.items()}}'
                entries[constant].append(Line(every))
    entries["ALIASES"] = [Line(f"{literal(a)}: {literal(b)}") for a, b in _aliases(first)]
    entries["INPUTS"] = input_rows(first.graphs[0])
    said = {**MEANINGS, "INPUTS": input_meaning(first.graphs[0])}
    over = f"{RANK} in {RANKS}"
    whole = [
        _for_each(RANK, name, f"by pipeline rank; {said[name]}", entries[name], over)
        if shared and name in STORED
        else table(name, said[name], entries[name])
        for name in MEANINGS
    ]
    ranks = f"{RANKS} = {tuple(steps)}  # the pipeline ranks that run this file"
    return [*([ranks] if shared else []), *blocks, *own, *whole]


def _own_table(
    stage: StageText, constant: str, rows: Sequence[Line], alike: Sequence[StageText], shared: bool
) -> str:
    """The table of a stage's own parameters or buffers: ``STAGE1_SHARDS``.

    Stages that are ``alike`` share the table; where names depend on the layer's number, the table
    has one dict for each number ``n`` of a first layer.
    """
    name, remark = stage.table(constant), f"of {stage.title[0].lower()}{stage.title[1:]}"
    if not stage.varies(constant):
        return table(name, remark, rows)
    firsts = f"({', '.join(each.first for each in alike)}{'' if len(alike) > 1 else ','})"
    over = f"{RANK} in {RANKS} for {FIRST} in {firsts}" if shared else f"{FIRST} in {firsts}"
    path = comment(stage.layers.path) if stage.layers else ""
    remark += f", by {FIRST}, its first of {path or 'the layers'}"
    return _for_each(FIRST, name, remark, rows, over)


def _for_each(key: str, name: str, remark: str, entries: Sequence[Line], over: str) -> str:
    """A table with one dict for each ``key``: ``{n: {...} for n in (0, 8)}``.

    ``over`` is what follows ``for``: ``n in (0, 8)``.
    """
    rows = []
    for entry in entries:
        code = f"{entry.code}," + (f"  # {entry.remark}" if entry.remark else "")
        rows.append("        " + code.replace("\n", "\n    "))
    if not rows:
        return f"{name} = {{{key}: {{}} for {over}}}  # {remark}"
    inner = [f"    {key}: {{", *rows, "    }", f"    for {over}"]
    return "\n".join([f"{name} = {{  # {remark}", *inner, "}"])


def _aliases(step: RankStep) -> list[tuple[str, str]]:
    found = {a: b for stage in step.stages.values() for a, b in stage.graph.aliases.items()}
    return sorted(found.items())
