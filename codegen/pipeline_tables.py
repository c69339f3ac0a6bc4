"""The plain data of a pipeline rank's file: what its stages' parameters and buffers are.

A file that several ranks run has a table for each, by pipeline rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from partc.codegen.by_rank import RANK
from partc.codegen.emit import MEANINGS, dtype_name
from partc.codegen.layers import FIRST, Layers
from partc.codegen.rank_step import RankStep
from partc.codegen.stages import StageText
from partc.codegen.tables import table
from partc.codegen.text import Line, wrap
from partc.graph import value
from partc.quoting import comment, literal
from partc.role import RANKS

STORED = ("SHARDS", "BUFFERS")


def pipeline_tables(steps: Mapping[int, RankStep], declared: str) -> list[str]:
    """The tables of a file for the ranks in ``steps``; ``declared`` are the statements that make
    parameters, some of which read them.
    """
    first = next(iter(steps.values()))
    shared = len(steps) > 1
    again = {(t.name, s) for t in first.shared_here() for s in first.mine(t)[1:]}
    blocks: dict[str, None] = {}
    own: list[str] = []
    entries: dict[str, list[Line]] = {name: [] for name in MEANINGS}
    for number, stage in first.stages.items():
        of_blocks, stored = stage.stored_tables({name for name, s in again if s == number})
        blocks |= dict.fromkeys(of_blocks)
        for constant, rows in stored.items():
            name = stage.table(constant)
            if rows or name in declared:
                own.append(_own_table(stage, constant, rows))
                read = f"{name}[{RANK}]" if stage.varies(constant) else name
                every = f'**{{f"{stage.attribute}.{{name}}": row for name, row in {read}.items()}}'
                entries[constant].append(Line(every))
    entries["ALIASES"] = [Line(f"{literal(a)}: {literal(b)}") for a, b in _aliases(first)]
    entries["INPUTS"] = [
        Line(f"{literal(name)}: {literal((tuple(value(node).shape), dtype_name(node)))}")
        for name, node in first.graphs[0].inputs.items()
    ]
    whole = [
        _by_rank(name, f"by pipeline rank; {MEANINGS[name]}", entries[name], f"{RANK} in {RANKS}")
        if shared and name in STORED
        else table(name, MEANINGS[name], entries[name])
        for name in MEANINGS
    ]
    return [*(_ranks(steps) if shared else []), *blocks, *own, *whole]


def _own_table(stage: StageText, constant: str, rows: Sequence[Line]) -> str:
    """What one stage itself has: parameters and buffers that stand in no other table."""
    name, remark = stage.table(constant), f"of {stage.title[0].lower()}{stage.title[1:]}"
    if not stage.varies(constant):
        return table(name, remark, rows)
    over = f"{RANK}, {FIRST} in {_first(stage)}.items()"
    return _by_rank(name, f"{remark}, by {RANK}", rows, over)


def _by_rank(name: str, remark: str, entries: Sequence[Line], over: str) -> str:
    """A dict with a dict for each rank ``over`` which it goes."""
    rows = []
    for entry in entries:
        code = f"{entry.code}," + (f"  # {entry.remark}" if entry.remark else "")
        rows.append("        " + code.replace("\n", "\n    "))
    if not rows:
        return f"{name} = {{{RANK}: {{}} for {over}}}  # {remark}"
    inner = [f"    {RANK}: {{", *rows, "    }", f"    for {over}"]
    return "\n".join([f"{name} = {{  # {remark}", *inner, "}"])


def _ranks(steps: Mapping[int, RankStep]) -> Iterable[str]:
    """Which ranks run the file, and where the layers of their stages begin."""
    yield f"{RANKS} = {tuple(steps)}  # the pipeline ranks that run this file"
    first = next(iter(steps.values()))
    numbers = zip(*(step.stages for step in steps.values()), strict=True)
    for stage, own in zip(first.stages.values(), numbers, strict=True):
        layers = [Layers.of(first.graphs[number]) for number in own]
        firsts = {rank: each.first for rank, each in zip(steps, layers, strict=True) if each}
        path = comment(stage.layers.path) if stage.layers else ""
        remark = f"by {RANK}: {FIRST}, its first of {path or 'the layers'}"
        rows = wrap(f"{_first(stage)} = {firsts}", 0, len(remark) + 4)
        yield "\n".join([*rows[:-1], f"{rows[-1]}  # {remark}"])


def _first(stage: StageText) -> str:
    return f"STAGE{stage.label}_FIRST"


def _aliases(step: RankStep) -> list[tuple[str, str]]:
    found = {a: b for stage in step.stages.values() for a, b in stage.graph.aliases.items()}
    return sorted(found.items())
