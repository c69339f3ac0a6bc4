"""Check that ranks never wait for each other for ever on NCCL, from what each of them asks.

In: the recorded groups, transfers and waits of ranks (``recording.py``). Out: nothing, or a
CheckError with the circle of waits. Whatever can go on goes on (``nccl_rules.py``), and nothing
that has happened stops another thing from happening, so any order of the ranks ends in the same
place. Each event is looked at a bounded number of times.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from partc.dryrun.nccl_deadlock import explain
from partc.dryrun.nccl_rules import Rules, Run
from partc.dryrun.recording import Event, record
from partc.program.role import Role

LAZY = Rules()
ALL_RULES = tuple(Rules(bound, blocking) for bound in (False, True) for blocking in (False, True))


def check_roles(roles: Mapping[int, Role]) -> None:
    """Check the programs of some ranks, by global rank, as their texts stand; all rules apply.

    Each program runs once on tensors without data. The first ranks of all pipeline stages are
    enough where the ranks beside them run the same files.

    Raises:
        CheckError: ranks wait for each other for ever, or do not ask for the same.
    """
    recorded = {rank: record(role, rank) for rank, role in roles.items()}
    for rules in ALL_RULES:
        check_order(recorded, rules)


def check_order(
    recorded: Mapping[int, Sequence[Event]],
    rules: Rules = LAZY,
    chance: random.Random | None = None,
) -> None:
    """Let ranks go on by NCCL's rules until all are done.

    Args:
        recorded: what each rank asks, by its global rank. Ranks left out count as ready at once, so
            one pipeline of several can be checked alone.
        chance: draws which rank or queue goes on next; in order without it.

    Raises:
        CheckError: ranks wait for each other for ever, or do not ask for the same.
    """
    run = Run(recorded, rules)
    while run.todo:
        at = 0 if chance is None else chance.randrange(len(run.todo))
        run.todo[0], run.todo[at] = run.todo[at], run.todo[0]
        rank, channel = run.todo.popleft()
        if channel is None:
            run.go_on(rank)
        else:
            run.transfer(rank, channel)
    if not run.is_over():
        raise explain(run)
