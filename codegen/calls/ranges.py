"""Ranges for torch.profiler around blocks and transfers, where the plan says ``profiler_ranges``.

They have the names of the predicted step's boxes: ``partc::forward::layers.3`` of a block,
``partc::dp::all_gather`` where a transfer starts. ``partc::wait::all_gather``, where computing
waits for one, is a name of measured steps (``partc bench``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby

from torch import fx

from partc.codegen.text import Line, Range
from partc.graph import Phase, collectives, value
from partc.graph.blocks import outermost_block
from partc.graph.moves import kind_of
from partc.quoting import literal

RANGE = "record_function"  # of torch.profiler
IMPORT = f"from torch.profiler import {RANGE}"
PHASES: dict[Phase, str] = {"F": "forward", "B": "backward", "W": "weights"}
OF_LAYER = "{layer.name}"  # in the loop over blocks
_NUMBERED = re.compile(r'f"(partc::[^"{]*)\{(\d+)\}"')
LOSS = Range(literal("partc::collective::loss"))
WAIT_FOR_GRADS = literal("partc::wait::gradients")
WAIT_FOR_WEIGHTS = literal("partc::wait::all_gather")


def in_ranges(lines: Iterable[Line]) -> list[Line]:
    """The lines, those that share a range inside of one ``with``; first what is around blocks."""
    found: list[Line] = []
    for around, alike in groupby(lines, key=lambda line: line.around):
        inner: list[Line] = []
        for (range_, _), same in groupby(alike, key=lambda line: (line.range, line.indent)):
            inner += _inside(range_.name if range_ else "", list(same))
        found += _inside(around, inner)
    return found


def _inside(range_: str, lines: list[Line]) -> list[Line]:
    if not range_:
        return lines
    head = Line(f"with {RANGE}({range_}):", indent=lines[0].indent)
    inside = (replace(line, indent=line.indent + 1, range=None, around="") for line in lines)
    return [head, *inside]


def numbered(text: str, number: int) -> Range:
    """A range with a number that may turn out as an expression: ``f"gradients of stage {1}"``."""
    return Range("f" + literal(f"partc::collective::{text} {{{number}}}"))


def plain_ranges(lines: Iterable[Line]) -> list[Line]:
    """The lines, ranges of ``numbered`` without braces where the number stayed one."""
    return [replace(x, code=_NUMBERED.sub(r'"\1\2"', x.code)) for x in lines]


def finished(code: str, remark: str = "", *, ranges: bool) -> list[Line]:
    """The statement that waits for all gradients that are being reduced."""
    return in_ranges([Line(code, remark, range=Range(WAIT_FOR_GRADS) if ranges else None)])


def of_transfer(node: fx.Node) -> Range:
    """The range of the start of a transfer, or of the wait for one."""
    if node.target is collectives.wait:
        return Range(literal(f"partc::wait::{kind_of(node.all_input_nodes[0])}"))
    return Range(literal(f"partc::{node.kwargs['axis']}::{kind_of(node)}"))


def of_loop(phase: Phase) -> Range:
    """The range of one block's method, in the loop over blocks."""
    return Range("f" + literal(f"partc::{PHASES[phase]}::{OF_LAYER}"))


def of_call(calls: Iterable[fx.Node], name_of: Callable[[str], str]) -> str:
    """The range of a block's calls that stand in line; "" outside of blocks.

    ``name_of`` gives the expression of a path.
    """
    for node in calls:
        block, phase = outermost_block(node), value(node).phase
        if block and phase in PHASES:
            opened, quote, rest = name_of(block).partition('"')
            return f"{opened}{quote}partc::{PHASES[phase]}::{rest}"
    return ""
