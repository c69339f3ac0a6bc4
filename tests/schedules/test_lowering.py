"""Lowering of schedules: what ranks do, that it finishes, and that real processes run it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partc.errors import CheckError, PlanError
from partc.schedules import NAMES, make
from partc.schedules.actions import Action, Schedule, v_shaped
from partc.schedules.check_programs import check_programs
from partc.schedules.lower import lower
from partc.schedules.programs import (
    RECEIVE,
    SEND,
    START,
    Collective,
    RankProgram,
    parse_programs,
    wire,
)
from partc.verification.processes import Processes
from tests.patience import patience
from tests.schedules.orders import by_rank, random_order
from tests.schedules.prove_orders import (
    lowered,
    order_finishes,
    prove_one,
    random_schedule,
    sound,
    verdict,
)
from tests.schedules.run_events import expected, run_all

Golden = Callable[..., None]


def text(programs: tuple[RankProgram, ...]) -> str:
    return "\n".join(map(str, programs))


def of_text(*orders: str) -> Schedule:
    """Two ranks with two stages each, one line of actions for a rank."""
    actions = tuple(tuple(map(Action.parse, order.split())) for order in orders)
    microbatches = 1 + max(action.microbatch for order in actions for action in order)
    return Schedule("by hand", actions, (0, 1, 0, 1), microbatches)


def test_one_f_one_b(golden: Golden) -> None:
    """Receives stand before the computing they run beside, sends behind what makes the value."""
    golden(text(lower(make("1f1b", ranks=3, microbatches=4))))


def test_stages_of_one_rank_hand_over_without_a_message() -> None:
    order = [Action(s, "F", 0) for s in range(4)] + [Action(s, "B", 0) for s in (3, 2, 1, 0)]
    first, second = lower(by_rank(order, v_shaped(2), 1))
    assert str(second) == (
        "1RECV_F0 2RECV_B0 1WAIT_RECV_F0 1F0 2F0 2SEND_F0 2WAIT_RECV_B0 2B0 1B0 1SEND_B0 "
        "1WAIT_SEND_B0 2WAIT_SEND_F0"
    )
    assert "3F0 3B0 3SEND_B0" in str(first)


def test_ahead_and_bound() -> None:
    """``ahead`` receives are posted beyond the last one taken, ``bound`` sends are under way."""
    first, second = lower(make("gpipe", ranks=2, microbatches=4), ahead=2, bound=1)
    assert str(second).startswith("1RECV_F0 1RECV_F1 1WAIT_RECV_F0 1RECV_F2 1F0")
    assert "0SEND_F2 0WAIT_SEND_F1" in str(first)


def test_programs_read_back() -> None:
    loss = Collective("loss", stages=(3,), members=(0, 1), after="F")
    programs = lower(
        make("interleaved-1f1b", ranks=2, microbatches=4, chunks=2),
        communicators="pair",
        collectives=[loss],
    )
    assert parse_programs(text(programs), programs[0].wiring) == programs


@pytest.mark.parametrize("word", ["0X1", "4F0", "0F9", "3SEND_F0", "0RECV_F0", "START(x)", "F"])
def test_what_is_no_event_is_refused(word: str) -> None:
    with pytest.raises(PlanError, match=r"not an action|no such event"):
        parse_programs(word, wire((0, 1, 0, 1), 2))


def test_communicators() -> None:
    """Four for each stage in the middle of a rank, or four for a rank."""
    per_channel = wire((0, 1, 2, 0, 1, 2), 1)
    assert [c.name for c in per_channel.communicators][:3] == ["F 0-1", "F 1-2", "B 1-0"]
    assert sum(1 in c.members for c in per_channel.communicators) == 8
    per_pair = wire((0, 1, 2, 0, 1, 2), 1, communicators="pair")
    assert sum(1 in c.members for c in per_pair.communicators) == 4


@pytest.mark.parametrize("name", NAMES)
def test_channels_are_plain_queues(name: str) -> None:
    """What a channel brings is taken in the order in which it comes."""
    for microbatches in (1, 3, 9):
        schedule = make(name, ranks=4, microbatches=microbatches)
        assert all(program.in_order for program in lower(schedule))


def test_pairs_post_receives_in_the_senders_order() -> None:
    """Rank 1 needs the later message first, so it receives both before it goes on."""
    straight = of_text("0F0 2F0 0F1 2F1", "1F0 3F0 1F1 3F1")
    crossed = of_text("0F0 2F0 0F1 2F1", "1F0 1F1 3F0 3F1")
    for case in (straight, crossed):
        programs = lower(case, communicators="pair", ahead=0)
        assert sound(programs)
        assert not verdict(programs)
    assert "1F0 1SEND_F0 3RECV_F0 1RECV_F1 1WAIT_RECV_F1 1F1" in str(programs[1])
    assert not programs[1].in_order
    assert lower(straight, communicators="pair")[1].in_order


def test_queues_grow_where_a_sound_order_would_block() -> None:
    """Rank 0 has to start four sends before rank 1 takes the second."""
    schedule = of_text("0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3", "1F0 3F0 1F1 3F1 1F2 3F2 1F3 3F3")
    programs = lower(schedule)
    assert sound(programs)
    assert not verdict(programs)
    assert "0SEND_F3 0WAIT_SEND_F1" in str(programs[0]), "two remain under way, not one"


TIED = Collective("tied", stages=(0, 2), members=(0, 2), communicator="embeddings")
LOSS = Collective("loss", stages=(2,), members=(0, 1, 2), after="F")
REDUCE = [Collective(f"dp{s}", stages=(s,), members=(s,)) for s in range(3)]


def test_collectives_follow_what_they_need_and_end_with_the_step() -> None:
    programs = lower(make("zb-h1", ranks=3, microbatches=2), collectives=[LOSS, TIED, *REDUCE])
    check_programs(programs)
    assert not verdict(programs)
    last = str(programs[2])
    assert "2F1 START(loss)" in last
    assert last.index("2W1") < last.index("START(tied)") < last.index("START(dp2)")
    assert last.endswith("WAIT(loss) WAIT(tied) WAIT(dp2)")
    assert str(programs[1]).endswith("START(loss) WAIT(dp1) WAIT(loss)")


def test_collectives_of_one_communicator_have_one_order() -> None:
    """By itself rank 0 would start the tied gradient first, and the last rank the loss."""
    loss = Collective("loss", stages=(2,), members=(0, 2), after="F", communicator="embeddings")
    for collectives in ([loss, TIED], [TIED, loss]):
        programs = lower(make("1f1b", ranks=3, microbatches=2), collectives=collectives)
        wanted = [f"START({c.name})" for c in collectives]
        for rank in (0, 2):
            assert [word for word in programs[rank].texts() if "START" in word] == wanted
        assert not verdict(programs)


@pytest.mark.exhaustive
@settings(derandomize=True, deadline=None, max_examples=400, database=None)
@given(st.integers(0, 2**32))
def test_a_second_opinion_agrees(seed: int) -> None:
    prove_one(seed)


@pytest.mark.exhaustive
@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(st.data())
def test_what_can_run_finishes_with_any_queues(data: st.DataObject) -> None:
    """Lowering never makes an order block that would run with unlimited memory for messages."""
    placement = data.draw(st.permutations([0, 1, 2, 0, 1, 2][: data.draw(st.integers(3, 6))]))
    chance = data.draw(st.randoms(use_true_random=False))
    order = random_order(placement, 2, split=data.draw(st.booleans()), chance=chance)
    schedule = by_rank(order, placement, 2)
    assert order_finishes(schedule)
    programs = lowered(schedule, chance)
    check_programs(programs)
    assert not verdict(programs)


def spoil(programs: tuple[RankProgram, ...], rank: int, old: str, new: str) -> list[RankProgram]:
    lines = [str(program) for program in programs]
    assert old in lines[rank]
    lines[rank] = lines[rank].replace(old, new)
    return list(parse_programs("\n".join(lines), programs[0].wiring))


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (1, "1WAIT_RECV_F0 ", "", r"event \d+, 1RECV_F0: nothing waits for this transfer"),
        (0, " 0WAIT_SEND_F0", "", "0SEND_F0: nothing waits for this transfer"),
        (1, "1WAIT_RECV_F0 1RECV_F1 1F0", "1F0 1WAIT_RECV_F0 1RECV_F1", "0F0 is not there yet"),
        (0, "0F0 0SEND_F0", "0SEND_F0 0F0", "0F0 is not there yet"),
        (1, "1WAIT_RECV_B0 1RECV_B1 1I0", "1I0 1WAIT_RECV_B0 1RECV_B1", "2B0 is not there yet"),
        (2, "2F0 2I0", "2I0 2F0", "2F0 is not there yet"),
        (
            2,
            "2I3 2SEND_B3 2WAIT_SEND_B2 2W1 2W2 2W3",
            "2W3 2W1 2W2 2I3 2SEND_B3 2WAIT_SEND_B2",
            "2W3: 2I3 is not there yet",
        ),
        (1, "1WAIT_RECV_F0 1RECV_F1 1F0", "1WAIT_RECV_F1 1RECV_F1 1F0", "was not started"),
        (0, "0F0 0SEND_F0", "0F0 0SEND_F0 0SEND_F0", "the event stands twice"),
        (1, "1F0", "0F0", "this belongs to another rank"),
        (1, "1SEND_F0", "0SEND_F0", "this belongs to another rank"),
    ],
)
def test_static_checks_kill(rank: int, old: str, new: str, message: str) -> None:
    programs = lower(make("zb-h1", ranks=3, microbatches=4))
    with pytest.raises(CheckError, match=message):
        check_programs(spoil(programs, rank, old, new))


def test_swapped_messages_are_found() -> None:
    """They would arrive in each other's place: nothing blocks, the values are wrong."""
    programs = lower(make("gpipe", ranks=2, microbatches=2), ahead=2, bound=2)
    spoilt = spoil(programs, 1, "1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0")
    assert not verdict(spoilt)
    with pytest.raises(CheckError, match="1RECV_F1: it gets 0F0 instead"):
        check_programs(spoilt)


def test_a_message_without_receiver_is_found() -> None:
    programs = lower(make("gpipe", ranks=2, microbatches=1))
    spoilt = spoil(programs, 1, "1RECV_F0 1WAIT_RECV_F0 1F0", "")
    spoilt = spoil(tuple(spoilt), 1, "1B0 1SEND_B0", "")
    with pytest.raises(CheckError, match="rank 1 has no part in it"):
        check_programs([spoilt[0], RankProgram(1, (), programs[1].wiring)])


_SHARINGS: tuple[Literal["channel", "pair"], ...] = ("channel", "pair")


def accepted() -> list[tuple[RankProgram, ...]]:
    """50 steps that the simulator says finish: known orders, random ones, every lowering."""
    found = [
        lower(schedule, communicators=communicators, collectives=_all_kinds(schedule))
        for ranks, name in ((2, "interleaved-1f1b"), (3, "gpipe"), (4, "zb-h1"), (4, "zb-v"))
        for schedule in [make(name, ranks=ranks, microbatches=5)]
        for communicators in _SHARINGS
    ]
    chance = random.Random(0)
    while len(found) < 50:
        programs = lowered(random_schedule(chance), chance)
        if sound(programs) and not verdict(programs):
            found.append(programs)
    return found


def _all_kinds(schedule: Schedule) -> list[Collective]:
    last = schedule.stages - 1
    ends = tuple(sorted({schedule.rank_of[0], schedule.rank_of[last]}))
    everyone = tuple(range(schedule.ranks))
    return [
        Collective("loss", stages=(last,), members=everyone, after="F"),
        Collective("tied", stages=(0, last), members=ends),
    ]


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_real_processes_finish_with_the_right_numbers() -> None:
    steps = accepted()
    with Processes(4, timeout=patience()) as world:
        ranks = world.run(run_all, steps)
    for number, programs in enumerate(steps):
        wiring = programs[0].wiring
        loss, gradients = expected(wiring.stages, wiring.microbatches)
        found = [of_rank[number] for of_rank in ranks[: len(programs)]]
        assert {s: g for one in found for s, g in one["gradients"].items()} == gradients
        for one in found if wiring.collectives else []:
            assert one["reduced"]["loss"] == loss
            assert one["reduced"].get("tied", gradients[0] + gradients[wiring.stages - 1]) == (
                gradients[0] + gradients[wiring.stages - 1]
            )


def test_events_of_the_tests_are_all_there() -> None:
    """The random steps do send, receive and reduce; otherwise the tests above would show little."""
    events = [event for programs in accepted() for p in programs for event in p.events]
    assert all(sum(code == wanted for code, _ in events) > 10 for wanted in (SEND, RECEIVE, START))
