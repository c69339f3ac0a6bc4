"""Say why ranks wait for each other for ever: the circle of waits, with the lines of programs.

A waiter is a rank and the number of one of its transfers, or None: the rank itself.
"""

from __future__ import annotations

from functools import partial

from partc.dryrun.nccl_rules import Queued, Run
from partc.dryrun.recording import MakeGroup, Start, Wait
from partc.errors import CheckError
from partc.schedules.deadlock import Reason, Waiter, chain_of


def explain(run: Run) -> CheckError:
    """The error that names the circle of waits, or the chain to something that never comes."""
    chain = chain_of(_first(run), partial(_reason, run))
    ranks = ", ".join(map(str, sorted({rank for rank, _ in chain.waiters})))
    return CheckError(
        where=f"ranks {ranks}",
        what="they wait for each other for ever"
        if chain.is_circle
        else "what they wait for never comes",
        why="; ".join(chain.texts),
        do="Make groups and start transfers in one order on all ranks, and let the ends of every "
        "link meet before the first step.",
    )


def _first(run: Run) -> Waiter:
    """A rank that is held up, else a transfer that nobody takes part in."""
    for rank, waits in run.waits.items():
        if run.event(rank) is not None or run.waited[rank] < len(waits):
            return rank, None
    firsts = (q[0] for queues in run.queues.values() for q in queues.values() if q)
    queued = next(firsts)
    return queued.rank, queued.start.number


def _reason(run: Run, waiter: Waiter) -> Reason:
    rank, number = waiter
    if number is not None:
        return _why_queued(run, rank, number)
    event = run.event(rank)
    if event is None or isinstance(event, Wait):
        return _why_waiting(run, rank, event)
    gate, members = next(g for g in run.gates(rank, event) if not run.is_open(*g))
    missing = next(m for m in members if m in run.recorded and m not in run.arrived[gate])
    asks = str(event) if isinstance(event, MakeGroup) else f"begins {event}"
    text = f"rank {rank} {asks} and is held up there until rank {missing} {_joins(event)}"
    return Reason(text, _host(run, missing))


def _joins(event: MakeGroup | Start) -> str:
    return "makes it too" if isinstance(event, MakeGroup) else f"uses {event.group} too"


def _why_waiting(run: Run, rank: int, event: Wait | None) -> Reason:
    number = run.waits[rank][run.waited[rank]] if event is None else event.number
    where = f"at {event.place}" if event else "at its end"
    if (rank, number) not in run.started:
        return Reason(f"rank {rank} waits {where} for what it has not started", None)
    return Reason(f"rank {rank} waits {where} for {_name(run, rank, number)}", (rank, number))


def _why_queued(run: Run, rank: int, number: int) -> Reason:
    """Why a transfer does not run: it is not the first, or one of its ranks is not ready."""
    channel, queued = run.started[rank, number]
    first = run.first(rank, channel)
    assert first is not None
    name = _name(run, rank, number)
    if first is not queued:
        return Reason(f"{name} stands behind {_of(run, first)}", (rank, first.start.number))
    for party in run.parties(queued):
        part = run.first(party, channel)
        if part is not None and run.is_ready(queued, part):
            continue
        return _why_not_ready(run, queued, party)
    raise AssertionError(f"{name} can run")


def _why_not_ready(run: Run, queued: Queued, party: int) -> Reason:
    channel, _ = run.started[queued.rank, queued.start.number]
    name, first = _of(run, queued), run.first(party, channel)
    if first is not None and (first is queued or queued.is_met_by(first)):
        awaited = run.waits[party][run.waited[party]]
        text = f"{name} begins after rank {party}'s wait for {_name(run, party, awaited)}"
        return Reason(text, (party, awaited))
    if first is not None and any(queued.is_met_by(q) for q in run.queues[party][channel]):
        text = f"{name} needs rank {party}, whose part stands behind {_of(run, first)}"
        return Reason(text, (party, first.start.number))
    if _host(run, party) is None:
        return Reason(f"{name} needs rank {party}, which ends without taking part", None)
    return Reason(f"{name} needs rank {party}, which has not come to it", (party, None))


def _host(run: Run, rank: int) -> Waiter | None:
    """The rank as what others wait for; None if it has nothing left to do."""
    over = run.event(rank) is None and run.waited[rank] == len(run.waits[rank])
    return None if over else (rank, None)


def _of(run: Run, queued: Queued) -> str:
    return _name(run, queued.rank, queued.start.number)


def _name(run: Run, rank: int, number: int) -> str:
    _, queued = run.started[rank, number]
    return f"rank {rank}'s {queued.start}"
