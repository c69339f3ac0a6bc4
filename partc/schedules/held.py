"""The memory that a pipeline rank holds over time: activations and messages.

Tensors are allocated and freed in program order, as torch's caching allocator does. So the order of
a rank's events alone decides the peak; the times of the events decide only when the peak occurs.
"""

from __future__ import annotations

from collections.abc import Sequence

from partc.schedules.programs import COMPUTE, RECEIVE, SEND, SENT, RankProgram
from partc.schedules.step_costs import StepCosts

Curve = list[tuple[float, float]]  # (time, held from then on)


def memory_curve(program: RankProgram, costs: StepCosts, ends: Sequence[float]) -> Curve:
    """The memory of a rank's activations, received messages and pending sends, at every change.

    A received message counts from the posting of its receive to the end of the action that reads
    the message (from then on a stage's input is part of its ``activation``). A sent message counts
    from the end of the action that makes it to the wait for its send. An activation counts from
    the start of ``F`` to the end of ``B`` or ``I``; after ``I``, ``waiting`` counts until ``W``
    ends.
    """
    wiring, count = program.wiring, program.wiring.microbatches
    sizes = costs.of_messages(wiring, costs.message) if costs.message else []
    read = _messages_read(program)
    posted: set[int] = set()
    curve: Curve = []
    held = 0.0
    for index, (code, number) in enumerate(program.events):
        if code == COMPUTE:
            row, microbatch = divmod(number, count)
            stage, kind = divmod(row, 4)
            if kind == 0:
                held += costs.activation[stage]
                curve.append((ends[index - 1] if index else 0.0, held))
            held -= _freed(costs, stage, kind)
            source = read[row]
            # A value from a stage on the same rank is no message: no receive was posted for it.
            if source >= 0 and source * count + microbatch in posted:
                held -= sizes[source]
            curve.append((ends[index], held))
        elif sizes and code in (RECEIVE, SEND, SENT):
            if code == RECEIVE:
                posted.add(number)
            held += -sizes[number // count] if code == SENT else sizes[number // count]
            curve.append((ends[index], held))
    return curve


def _freed(costs: StepCosts, stage: int, kind: int) -> float:
    """The memory that an action frees at its end; ``I`` leaves what the stage's ``W`` reads."""
    activation, waiting = costs.activation[stage], costs.waiting[stage]
    return (0.0, activation, activation - waiting, waiting)[kind]


def _messages_read(program: RankProgram) -> list[int]:
    """Per ``4 * stage + kind``, the row (``2 * stage + way``) of the message that the action reads.

    -1 where the action reads no message.
    """
    stages = program.wiring.stages
    rows = []
    for stage in range(stages):
        forward = 2 * (stage - 1) if stage > 0 else -1
        backward = 2 * (stage + 1) + 1 if stage + 1 < stages else -1
        rows += [forward, backward, backward, -1]
    return rows
