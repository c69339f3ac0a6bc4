"""Choose whether a program on gloo sends messages instead of all-gathers and reduce-scatters.

gloo's collectives copy what arrives once more, in threads that compete with the computing for
processors. A message (send and receive) arrives where it is needed
(``codegen/helpers/messages.py``). A program with messages has more lines, so it uses them only
where the copies take a measurable share of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partc.cost.step_events import LAST, START, Move, StepEvents
from partc.cost.step_walk import walk_phases
from partc.plan import Plan
from partc.plan.decided import GLOO, check_messages
from partc.plan.mesh import Mesh

LEAST = 0.01  # of the step's time: less is lost in the noise between two runs of one program


def with_backend(plan: Plan, mesh: Mesh) -> Plan:
    """The plan with ``backend`` set to the library of the machines, if there are several ranks.

    PlanError if the plan asks for messages, and the machines have another library than gloo.
    """
    if mesh.num_ranks == 1:
        return plan
    plan = plan.changed(backend=mesh.hardware.library)
    check_messages(plan)
    return plan


def with_messages(plan: Plan, steps: Sequence[StepEvents], mesh: Mesh) -> Plan:
    """The plan with ``messages`` set to whether gloo's copies take long enough.

    Another backend leaves the plan unchanged, and so does a step in which gloo copies nothing. A
    transfer over an axis of one rank has nobody to send to: then there are no messages.
    """
    moves = [move for step in steps for move in _moves(step)]
    copied_bytes = sum(_copied_bytes(move, mesh) for move in moves)
    if plan.backend != GLOO or not copied_bytes:
        return plan
    if any(dict(mesh.axes)[move.axis] == 1 for move in moves):
        return plan.changed(messages=False)
    copied_s = mesh.hardware.device.memory_seconds(2 * copied_bytes)  # read and written
    spent = [spent for step in steps for spent in walk_phases(step, mesh).values()]
    return plan.changed(messages=copied_s > LEAST * sum(each.seconds for each in spent))


def _copied_bytes(move: Move, mesh: Mesh) -> int:
    """Bytes that gloo copies and messages do not: all that an all-gather brings, or this rank's
    shard of a reduce-scatter.
    """
    num = dict(mesh.axes)[move.axis]
    copied = {"all_gather": move.put_in_bytes * num, "reduce_scatter": move.put_in_bytes // num}
    return copied.get(move.kind, 0)


def _moves(step: StepEvents) -> Iterator[Move]:
    """All transfers of a step, or of one microbatch on one stage."""
    for _, run, _ in step.unrolled():
        for event in (*run.gathers, *run.events):
            if event.code in (START, LAST):
                yield step.moves[event.number]
