"""Whether programs finish, proved against a second opinion.

Run as ``python -m tests.schedules.prove_orders``.
The second opinion knows nothing of the simulator. It reads the events as text and tries every
interleaving of everything that can happen, or one at random where there are too many.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from partc.errors import CheckError
from partc.schedules.actions import Schedule, looped, v_shaped
from partc.schedules.check_programs import check_programs
from partc.schedules.lower import lower
from partc.schedules.programs import COMPUTE, Collective, RankProgram, wire
from partc.schedules.simulate import simulate
from partc.schedules.step_costs import StepCosts
from partc.schedules.timing import Costs
from tests.schedules.orders import by_rank, random_order

MOST_STATES = 500  # of one case; beyond, one interleaving at random has to do
_TRANSFER = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


def verdict(programs: Sequence[RankProgram]) -> str:
    """'' if the simulator says that the step finishes, else its message."""
    wiring = programs[0].wiring
    try:
        simulate(programs, StepCosts.of(Costs.even(wiring.stages, transfer=0.5)))
    except CheckError as error:
        return str(error)
    return ""


def sound(programs: Sequence[RankProgram]) -> bool:
    """Whether every rank computes from the right values, by the static checks."""
    try:
        check_programs(programs)
    except CheckError:
        return False
    return True


State = tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]  # events done; queues, by rank and name


class Explorer:
    """Every interleaving of programs; ``finishes`` says how they end."""

    def __init__(self, programs: Sequence[RankProgram]) -> None:
        self.texts = [list(program.texts()) for program in programs]
        self.wiring = programs[0].wiring
        self.exhaustive = True  # whether ``finishes`` saw every interleaving
        self.places: dict[tuple[int, str], int] = {}
        self.groups = [
            (rank, channel)
            for channel, communicator in enumerate(self.wiring.communicators)
            for rank in communicator.members
        ]

    def finishes(self, chance: random.Random) -> bool:
        start: State = ((0,) * len(self.texts), ((),) * len(self.groups))
        seen, todo, ends = {start}, [start], set()
        while todo:
            state = todo.pop()
            following = self.following(state)
            if not following:
                ends.add(self.is_end(state))
            self.exhaustive = self.exhaustive and len(seen) < MOST_STATES
            if self.exhaustive:
                todo += [s for s in following if s not in seen]
                seen.update(following)
            else:
                todo = [chance.choice(following)] if following else []
        assert len(ends) == 1, "how a step ends depends on who is faster"
        return ends.pop()

    def is_end(self, state: State) -> bool:
        done, queues = state
        return not any(queues) and all(
            n == len(texts) for n, texts in zip(done, self.texts, strict=True)
        )

    def following(self, state: State) -> list[State]:
        """The states after one event of one rank, or after one transfer."""
        done, queues = state
        states = []
        for rank, texts in enumerate(self.texts):
            if done[rank] < len(texts):
                after = self.event(state, rank, texts[done[rank]])
                if after is not None:
                    stepped = (*done[:rank], done[rank] + 1, *done[rank + 1 :])
                    states.append((stepped, after))
        for i, (rank, channel) in enumerate(self.groups):
            if queues[i]:
                over = self.meeting(queues, rank, channel, queues[i][0])
                if i == min(over, default=-1):
                    cut = tuple(q[1:] if j in over else q for j, q in enumerate(queues))
                    states.append((done, cut))
        return states

    def event(self, state: State, rank: int, text: str) -> tuple[tuple[str, ...], ...] | None:
        """The queues after an event, None if it has to wait."""
        done, queues = state
        if "WAIT" in text:
            started = text.replace("WAIT_", "").replace("WAIT", "START")
            before = started in self.texts[rank][: done[rank]]
            return queues if before and started not in queues[self.queue(rank, started)] else None
        if "SEND" in text or "RECV" in text or "START" in text:
            i = self.queue(rank, text)
            return (*queues[:i], (*queues[i], text), *queues[i + 1 :])
        return queues

    def queue(self, rank: int, text: str) -> int:
        """The rank's queue that a transfer or collective goes through."""
        if (rank, text) not in self.places:
            wiring = self.wiring
            if text.startswith("START"):
                names = [collective.name for collective in wiring.collectives]
                channel = wiring.collective_channels[names.index(text[6:-1])]
            else:
                maker, way, _ = transfer(text)
                channel = wiring.channels[2 * maker + "FB".index(way)]
            self.places[rank, text] = self.groups.index((rank, channel))
        return self.places[rank, text]

    def meeting(
        self, queues: tuple[tuple[str, ...], ...], rank: int, channel: int, text: str
    ) -> list[int]:
        """The queues whose first transfers run together with this one; none if somebody lacks."""
        if text.startswith("START"):
            members = [i for i, (_, c) in enumerate(self.groups) if c == channel]
            return members if all(queues[i][:1] == (text,) for i in members) else []
        rank_of = self.wiring.rank_of
        peer = rank_of[transfer(text)[2]]
        i, j = self.groups.index((rank, channel)), self.groups.index((peer, channel))
        if not queues[j] or queues[j][0].startswith("START"):
            return []
        opposite = ("SEND" in queues[j][0]) != ("SEND" in text)
        return [i, j] if opposite and rank_of[transfer(queues[j][0])[2]] == rank else []


@cache
def transfer(text: str) -> tuple[int, str, int]:
    """The stage that makes a message, its way, and the stage at the other end."""
    found = _TRANSFER.fullmatch(text)
    assert found
    stage, verb, way = int(found[1]), found[2], found[3]
    step = 1 if way == "F" else -1
    return (stage, way, stage + step) if verb == "SEND" else (stage - step, way, stage - step)


def order_finishes(schedule: Schedule) -> bool:
    """Whether ranks that never wait to be rid of a value come to the end of their orders."""
    done: set[str] = set()
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            if at[rank] < len(order) and _needs(*order[at[rank]], schedule.stages) <= done:
                stage, kind, microbatch = order[at[rank]]
                done.add(f"{stage}{kind}{microbatch}")
                if kind == "I" or kind == "B":
                    done.add(f"{stage}back{microbatch}")
                at[rank] += 1
                moved = True
    return all(n == len(order) for n, order in zip(at, schedule.orders, strict=True))


def _needs(stage: int, kind: str, microbatch: int, stages: int) -> set[str]:
    if kind == "F":
        return {f"{stage - 1}F{microbatch}"} if stage else set()
    if kind == "W":
        return {f"{stage}I{microbatch}"}
    behind = {f"{stage + 1}back{microbatch}"} if stage + 1 < stages else set()
    return {f"{stage}F{microbatch}", *behind}


def random_schedule(chance: random.Random) -> Schedule:
    """2 to 4 ranks, 1 or 2 stages each, 1 to 4 microbatches; about half can finish."""
    ranks, microbatches = chance.randint(2, 4), chance.randint(1, 4)
    placement = chance.choice([looped(ranks, 1), looped(ranks, 2), v_shaped(ranks)])
    if len(placement) > 4:
        microbatches = min(microbatches, 2)
    order = random_order(placement, microbatches, split=chance.random() < 0.4, chance=chance)
    schedule = by_rank(order, placement, microbatches)
    orders = [list(order) for order in schedule.orders]
    for _ in range(chance.choice([0, 0, 1, 2])):
        own = chance.choice(orders)
        i, j = chance.randrange(len(own)), chance.randrange(len(own))
        own[i], own[j] = own[j], own[i]
    return replace(schedule, orders=tuple(map(tuple, orders)))


def lowered(schedule: Schedule, chance: random.Random) -> tuple[RankProgram, ...]:
    """Any form of lowering, with a loss for all ranks and a gradient of the first and the last."""
    last = schedule.stages - 1
    ends = tuple(sorted({schedule.rank_of[0], schedule.rank_of[last]}))
    both = len(ends) == schedule.ranks and chance.random() < 0.5
    shared = "pp" if both else None
    everyone = tuple(range(schedule.ranks))
    collectives = [
        Collective("loss", stages=(last,), members=everyone, after="F", communicator=shared),
        Collective("tied", stages=(0, last), members=ends, communicator=shared),
    ]
    return lower(
        schedule,
        collectives=chance.choice([(), collectives, collectives[::-1]]),
        communicators=chance.choice(["channel", "pair"]),
        ahead=chance.choice([0, 1, 1, 2]),
        bound=chance.choice([None, None, 0, 1, 2]),
    )


def mutated(programs: Sequence[RankProgram], chance: random.Random) -> tuple[RankProgram, ...]:
    """Events dropped, moved or swapped, or one communicator for both directions of two ranks."""
    wiring = programs[0].wiring
    events = [list(program.events) for program in programs]
    for _ in range(chance.choice([0, 1, 1, 2, 3])):
        own = chance.choice(events)
        i, j = (chance.randrange(len(own)) for _ in range(2))
        match chance.choice(["swap", "next", "move", "drop", "forget"]):
            case "swap":
                own[i], own[j] = own[j], own[i]
            case "next":
                own[i : i + 2] = reversed(own[i : i + 2])
            case "move":
                own.insert(j, own.pop(i))
            case "drop":
                waits = [k for k, event in enumerate(own) if "WAIT" in wiring.text(event)]
                if waits:
                    del own[chance.choice(waits)]
            case "forget":  # a transfer, with its start and its wait
                number = own[i][1]
                own[:] = [e for e in own if e[1] != number or e[0] == COMPUTE]
    if chance.random() < 0.3:
        wiring = wire(
            wiring.rank_of,
            wiring.microbatches,
            communicators="both",
            collectives=wiring.collectives,
        )
    return tuple(RankProgram(rank, tuple(own), wiring) for rank, own in enumerate(events))


def prove_one(seed: int) -> tuple[bool, bool, bool]:
    """Compare opinions on a random order and on spoiled programs of it.

    Says how the two end, and whether every interleaving of the programs was tried.
    """
    chance = random.Random(seed)
    schedule = random_schedule(chance)
    programs = lowered(schedule, chance)
    expected = order_finishes(schedule)
    message = verdict(programs)
    assert (sound(programs) and not message) == expected, (
        f"seed {seed}: the order {'finishes' if expected else 'blocks'}\n{schedule}\n{message}"
    )
    spoiled = mutated(programs, chance)
    explorer = Explorer(spoiled)
    finishes = explorer.finishes(chance)
    message = verdict(spoiled)
    assert (not message) == finishes, f"seed {seed}, spoiled: {finishes}\n{message}"
    return expected, finishes, explorer.exhaustive


def main(cases: int) -> None:
    """Prove many cases and print how many of each ending there were."""
    ends = [prove_one(seed) for seed in range(cases)]
    orders, programs, exhaustive = (sum(column) for column in zip(*ends, strict=True))
    print(f"{cases} random orders, of which {orders} finish: all agree")
    print(f"{cases} spoiled programs, of which {programs} finish: all agree")
    print(f"every interleaving of {exhaustive} of these, a random one of the others")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
