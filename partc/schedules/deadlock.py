"""Explain a deadlock of rank programs: which rank waits for which other rank, at which event.

Every waiting rank or queue waits for exactly one other, so following the waits until a waiter comes
up again finds the cycle. networkx's find_cycle would need a graph of all waits first, and does not
report a chain of waits that ends without a cycle (a transfer that the other rank never starts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from partc.errors import CheckError
from partc.schedules.programs import RECEIVE, SEND, START, RankProgram
from partc.schedules.queues import NOTHING, RECEIVING, SENDING, TOGETHER, Queue, Queues


class Stuck(NamedTuple):
    """A simulated run in which no rank can go on; ``done[rank]`` events of each rank have run."""

    programs: Sequence[RankProgram]
    done: Sequence[int]
    queues: Queues


# A waiter is (rank, None), a rank's computing, or (rank, i), its queue of communicator i.
Waiter = tuple[int, int | None]


class Reason(NamedTuple):
    """Why a waiter waits, and for whom; None: what it waits for never comes."""

    text: str
    because_of: Waiter | None


class Chain(NamedTuple):
    """Waiters of which each waits for the next one; the last for the first if it is a circle."""

    waiters: list[Waiter]
    texts: list[str]
    is_circle: bool


def chain_of(first: Waiter, reason_of: Callable[[Waiter], Reason]) -> Chain:
    """The circle to which the waits from ``first`` on lead, or all of them if they end."""
    waiter: Waiter | None = first
    reasons: dict[Waiter, str] = {}
    while waiter is not None and waiter not in reasons:
        reason = reason_of(waiter)
        reasons[waiter] = reason.text
        waiter = reason.because_of
    chain = list(reasons)
    if waiter is not None:
        chain = chain[chain.index(waiter) :]
    return Chain(chain, [reasons[each] for each in chain], waiter is not None)


def explain(stuck: Stuck) -> CheckError:
    """The error that names the cycle of waits, or the chain of waits for a transfer that never
    comes; found by following the waits from the first stuck rank."""
    chain = chain_of(_first(stuck), partial(_reason, stuck))
    rank = chain.waiters[0][0]
    return CheckError(
        where=f"pipeline rank {rank}, {_place(stuck, rank)}",
        what="the step never finishes: "
        + (_circle(chain.waiters) if chain.is_circle else "what is waited for never comes"),
        why="; ".join(chain.texts),
        do=_advice(chain.waiters, comes=chain.is_circle),
    )


def _advice(chain: list[Waiter], *, comes: bool) -> str:
    if not comes:
        return "Add the missing start on the rank that is waited for, or drop the wait."
    if all(channel is not None for _, channel in chain):
        return (
            "Start these transfers in one order on both ranks, or give each direction a "
            "communicator of its own."
        )
    return (
        "Compute and send what is waited for earlier, on one of these ranks, or let partc lower "
        "a schedule that finishes."
    )


def _circle(circle: list[Waiter]) -> str:
    ranks = sorted({rank for rank, _ in circle})
    return f"ranks {', '.join(map(str, ranks))} wait for each other in a circle"


def _first(stuck: Stuck) -> Waiter:
    for program in stuck.programs:
        if stuck.done[program.rank] < len(program.events):
            return program.rank, None
    queue = next(q for q in stuck.queues.everyone() if q.first != NOTHING)
    return queue.rank, queue.channel


def _reason(stuck: Stuck, waiter: Waiter) -> Reason:
    """Why a waiter waits, and the waiter that it waits for."""
    rank, channel = waiter
    if channel is not None:
        return _why_queued(stuck, stuck.queues.of[channel][rank])
    place = f"rank {rank} waits at {_place(stuck, rank)}"
    awaited = stuck.queues.awaited[rank]
    queue = next(q for q in stuck.queues.parties(awaited) if q.rank == rank)
    if awaited not in queue.started[queue.head :]:
        return Reason(f"{place}, for a transfer that it has not started", None)
    text = f"{place}, until {_name(stuck, rank, awaited)} is over"
    if awaited != queue.first:
        text += f", which stands behind {_name(stuck, rank, queue.first)}{_on(stuck, queue)}"
    return Reason(text, (rank, queue.channel))


def _why_queued(stuck: Stuck, queue: Queue) -> Reason:
    """Why the first transfer of a queue does not run: another rank is not ready for it."""
    operation, queues = queue.first, stuck.queues
    missing = next(
        other for other in queues.parties(operation)
        if other is not queue and not queues.answers(operation, other.first)
    )  # fmt: skip
    peer = missing.rank
    needs = f"{_name(stuck, queue.rank, operation)} needs rank {peer}"
    if any(queues.answers(operation, o) for o in missing.started[missing.head :]):
        blocker = f"{_name(stuck, peer, missing.first)}{_on(stuck, missing)}"
        return Reason(f"{needs}, whose part stands behind {blocker}", (peer, queue.channel))
    if stuck.done[peer] == len(stuck.programs[peer].events):
        return Reason(f"{needs}, which ends its step without taking part", None)
    return Reason(f"{needs}, which has not started its part", (peer, None))


def _name(stuck: Stuck, rank: int, operation: int) -> str:
    """A transfer, named by its start in its rank's program: ``rank 0's 0SEND_F1 (event 3)``."""
    number, role = divmod(operation, 3)
    code = {SENDING: SEND, RECEIVING: RECEIVE, TOGETHER: START}[role]
    program = stuck.programs[rank]
    index = program.events.index((code, number))
    return (
        f"rank {rank}'s {program.wiring.text((code, number))} (event {index}{program.line(index)})"
    )


def _on(stuck: Stuck, queue: Queue) -> str:
    return f" on communicator {stuck.queues.wiring.communicators[queue.channel].name!r}"


def _place(stuck: Stuck, rank: int) -> str:
    program, done = stuck.programs[rank], stuck.done[rank]
    return program.at(done) if done < len(program.events) else "end of its step"
