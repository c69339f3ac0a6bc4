"""Static checks of rank programs: no value is read early, and both ends mean the same message.

These checks do not find deadlocks; `simulate.py` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from partc.errors import CheckError
from partc.schedules.programs import (
    BACKWARD,
    COMPUTE,
    FINISHED,
    FORWARD,
    RECEIVE,
    RECEIVED,
    SEND,
    SENT,
    START,
    RankProgram,
    Wiring,
)

_STARTED_BY = {RECEIVED: RECEIVE, SENT: SEND, FINISHED: START}


def check_programs(programs: Sequence[RankProgram]) -> None:
    """CheckError unless every program, if it finishes, computes from the right values.

    Each rank reads a value only after an action of its own made the value or after a wait received
    it; sends only values that it has made; and starts and waits for each transfer once. The sender
    and the receiver of a communicator have the same messages in the same order.
    """
    for program in programs:
        _check_owner(program)
        _check_waits(program)
        _check_reads(program)
    if programs:
        _check_pairs(programs)


def _check_owner(program: RankProgram) -> None:
    """A rank computes only its own stages and takes part only in transfers that it is an end of."""
    wiring = program.wiring
    for index, (code, number) in enumerate(program.events):
        row = number // wiring.microbatches
        if code == COMPUTE:
            mine = wiring.rank_of[row // 4] == program.rank
        elif code in (START, FINISHED):
            mine = program.rank in wiring.collectives[number].members
        else:
            mine = wiring.route(number)[code in (RECEIVE, RECEIVED)] == program.rank
        if not mine:
            raise _wrong(
                program, index, "this belongs to another rank",
                f"pipeline rank {program.rank} runs stages {wiring.stages_of(program.rank)}",
            )  # fmt: skip


def _check_waits(program: RankProgram) -> None:
    """Every action and transfer occurs once, and every transfer's wait comes after its start."""
    at: dict[tuple[int, int], int] = {}
    for index, event in enumerate(program.events):
        if event in at:
            raise _wrong(program, index, "the event stands twice", f"first as event {at[event]}")
        start = _STARTED_BY.get(event[0])
        if start is not None and (start, event[1]) not in at:
            raise _wrong(
                program, index, "a wait for what was not started",
                f"{program.wiring.text((start, event[1]))} does not stand before it",
            )  # fmt: skip
        at[event] = index
    waits = {start: wait for wait, start in _STARTED_BY.items()}
    for event, index in at.items():
        if event[0] in waits and (waits[event[0]], event[1]) not in at:
            raise _wrong(
                program, index, "nothing waits for this transfer",
                f"without {program.wiring.text((waits[event[0]], event[1]))} its memory may be "
                "read or overwritten while it is under way",
            )  # fmt: skip


def _check_reads(program: RankProgram) -> None:
    """Every action comes after the actions and waits that give it its inputs."""
    wiring = program.wiring
    made = bytearray(wiring.num_actions)
    there = bytearray(wiring.num_messages)
    for index, (code, number) in enumerate(program.events):
        if code == RECEIVED:
            there[number] = 1
        elif code == SEND and not there[number]:
            raise _early(program, index, wiring.made(number))
        elif code == COMPUTE:
            missing = _missing(wiring, number, made, there)
            if missing:
                raise _early(program, index, missing)
            made[number] = 1
            row, microbatch = divmod(number, wiring.microbatches)
            if row % 4 != 3:  # all but weight gradients make a value for a neighbour
                there[(2 * (row // 4) + (row % 4 != 0)) * wiring.microbatches + microbatch] = 1


def _missing(wiring: Wiring, number: int, made: bytearray, there: bytearray) -> str:
    """The first value that the action needs and the rank does not have yet; '' if there is none."""
    count = wiring.microbatches
    row, microbatch = divmod(number, count)
    stage, kind = divmod(row, 4)
    if kind == 0:
        before = (2 * (stage - 1) + FORWARD) * count + microbatch
        return wiring.made(before) if stage > 0 and not there[before] else ""
    needed = number - (2 if kind == 2 else 1) * count  # B and I read what F saved, W what I saved
    if not made[needed]:
        return str(wiring.action(needed))
    behind = (2 * (stage + 1) + BACKWARD) * count + microbatch
    if kind != 3 and stage + 1 < wiring.stages and not there[behind]:
        return wiring.made(behind)
    return ""


def _check_pairs(programs: Sequence[RankProgram]) -> None:
    """The sends of one end are the receives of the other, in the same order."""
    wiring = programs[0].wiring
    routes = {
        row: (channel, *wiring.route(row * wiring.microbatches))
        for row, channel in enumerate(wiring.channels)
        if channel >= 0
    }
    sent: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    received: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for program in programs:
        for index, (code, number) in enumerate(program.events):
            if code in (SEND, RECEIVE):
                table = sent if code == SEND else received
                table[routes[number // wiring.microbatches]].append((number, index))
    for key in sorted({*sent, *received}):
        _check_pair(programs, key, sent[key], received[key])


def _check_pair(
    programs: Sequence[RankProgram],
    key: tuple[int, int, int],
    sent: list[tuple[int, int]],
    received: list[tuple[int, int]],
) -> None:
    channel, source, target = key
    wiring = programs[0].wiring
    name = wiring.communicators[channel].name
    for gives, (takes, index) in zip((number for number, _ in sent), received, strict=False):
        if gives != takes:
            raise _wrong(
                programs[target], index, f"it gets {wiring.made(gives)} instead",
                f"rank {source} sends that at this place of communicator {name}, and messages of "
                "one communicator arrive in the order in which they are sent",
            )  # fmt: skip
    if len(sent) != len(received):
        rank, rest = (source, sent) if len(sent) > len(received) else (target, received)
        _, index = rest[min(len(sent), len(received))]
        raise _wrong(
            programs[rank], index, f"rank {target if rank == source else source} has no part in it",
            f"communicator {name} carries {len(sent)} sends and {len(received)} receives",
        )  # fmt: skip


def _early(program: RankProgram, index: int, value: str) -> CheckError:
    return _wrong(
        program, index, f"{value} is not there yet",
        "no action before it makes the value, and no wait before it receives it",
    )  # fmt: skip


def _wrong(program: RankProgram, index: int, what: str, why: str) -> CheckError:
    return CheckError(
        where=f"pipeline rank {program.rank}, {program.at(index)}",
        what=what,
        why=why,
        do="Correct the order of this rank's actions, or take the program that partc makes of the "
        "schedule.",
    )
