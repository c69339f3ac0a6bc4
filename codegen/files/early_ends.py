"""The lines that start sums of gradients beside the last backward, before a stage's step ends.

In: which gradients leave early (``partc/passes/stages/early_sums.py``). Out: for each loop over
blocks the lines before it and in it, which call the stage's method ``reduce``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

from partc.codegen.bodies.classes import BlockClass
from partc.codegen.repeats.own_names import name_in
from partc.codegen.repeats.runs import Run
from partc.codegen.text import Line
from partc.passes.stages.early_sums import Leaving


def early_sums(
    leaving: Leaving, first: Sequence[str], classes: Sequence[BlockClass], params: Collection[str]
) -> dict[Run, tuple[list[Line], list[Line]]]:
    """The lines that start early reductions, in the backward of the last microbatch.

    For each run of blocks they are the lines before its loop, and those at the end of each
    iteration. ``first`` has the paths of parameters whose gradients are final before the first
    loop. ``classes`` are the block classes in the order of their loops.
    """
    found: dict[Run, tuple[list[Line], list[Line]]] = {}
    for cls in classes:
        before = [] if found else [f"self.{path}" for path in first]
        behind = _leaving_behind(cls, {*leaving.blocks}, params)
        found[cls.run] = (
            _reduced_early(before, "beside the blocks", 0),
            _reduced_early(behind, "beside the blocks that are left", 1),
        )
    return found


def _leaving_behind(cls: BlockClass, early: Set[str], params: Collection[str]) -> list[str]:
    """The parameters of a block whose gradients are reduced early, as texts.

    Empty if the blocks of the class differ in this: one text serves all of them.
    """
    mine = [s for s in cls.suffixes if name_in(cls.run.layers[0], s) in params]
    here = [layer for layer in cls.run.layers if mine and name_in(layer, mine[0]) in params]
    leaves = [[s for s in mine if name_in(layer, s) in early] for layer in here]
    if not leaves or any(each != leaves[0] for each in leaves):
        return []
    if leaves[0] == mine:
        return ["*layer.parameters()"]
    return [f"layer.{cls.suffixes[suffix]}" for suffix in leaves[0]]


def _reduced_early(params: Sequence[str], remark: str, indent: int) -> list[Line]:
    """The lines that start to reduce gradients, if this is the last microbatch to add to them."""
    if not params:
        return []
    start = Line(f"self.reduce([{', '.join(params)}])", remark, indent=indent + 1)
    return [Line("if i == self.last:", indent=indent), start]
