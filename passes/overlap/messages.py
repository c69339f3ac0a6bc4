"""Whether a program sends messages in place of gloo's gathers and scattered sums.

What gloo's collectives bring they copy once more, in threads that take the time of processors;
messages arrive where they are needed (``codegen/helpers/messages.py``). A program that sends them
has more lines: it does so where the copies take a part of the step that can be measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partc.cost.step_events import LAST, START, Move, StepEvents
from partc.cost.step_walk import walk_phases
from partc.plan import Plan
from partc.plan.mesh import Mesh

LEAST = 0.01  # of the step: steps of one program differ by more from run to run


def with_messages(plan: Plan, tapes: Sequence[StepEvents], mesh: Mesh) -> Plan:
    """The plan, which says that messages are sent if they are, or that it was asked for."""
    if plan.messages is not None or mesh.hardware.library != "gloo":
        return plan
    copied_bytes = sum(_copied_bytes(move, mesh) for tape in tapes for move in _moves(tape))
    copied_s = mesh.hardware.device.memory_seconds(2 * copied_bytes)  # read and written
    spent = [spent for tape in tapes for spent in walk_phases(tape, mesh).values()]
    worth = copied_s > LEAST * sum(each.seconds for each in spent)
    return plan.changed(messages=True) if worth else plan


def _copied_bytes(move: Move, mesh: Mesh) -> int:
    """What a collective copies and messages do not: of a sum, this rank's own piece."""
    num = dict(mesh.axes)[move.axis]
    copied = {"all_gather": move.put_in_bytes * num, "reduce_scatter": move.put_in_bytes // num}
    return copied.get(move.kind, 0)


def _moves(tape: StepEvents) -> Iterator[Move]:
    """All transfers of a step, or of one microbatch in a stage."""
    for _, run in tape.unrolled():
        for event in (*run.gathers, *run.events):
            if event.code in (START, LAST):
                yield tape.moves[event.number]
