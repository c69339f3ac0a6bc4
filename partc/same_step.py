"""Whether a model and a loss compute the step of a program that was saved before.

The shapes and modes that a loaded program compiles later are of the loss that it is given. Another
one than that of its first step would train one shape by one loss and the next by another.
"""

from __future__ import annotations

from collections.abc import Callable

from partc.errors import TraceError, UsageError
from partc.graph import Graph
from partc.program import Program
from partc.verification.expected_step import differing


def check_same_step(program: Program, graph: Callable[[], Graph]) -> None:
    """UsageError where the graph's step gives other numbers than those that the program has of its
    own; a program of a large step has none. ``graph``: of the same inputs, with all equal blocks.
    """
    known = program.expected.numbers
    if known is None:
        return
    try:
        other = differing(graph(), known, program.draws, program.constants)
    except TraceError:  # what is compiled by it will say so
        return
    if other:
        raise UsageError(
            where="with_model",
            what=f"the model with this loss computes another step than the program: {other} has "
            "other numbers for the same weights and batch",
            why="other shapes, eval_step and forwards would be of this loss, and the first shape's "
            "step of the one that was compiled",
            do="Pass the loss that was compiled, in its own words; for another one compile again, "
            "or add it to the program, program.also(*batch, loss=...).",
        )
