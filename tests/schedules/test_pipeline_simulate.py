"""The simulated step: its times, memory and trace, and what it says of programs that block."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partc.errors import CheckError
from partc.schedules import NAMES, make
from partc.schedules.actions import looped, v_shaped
from partc.schedules.check_programs import check_programs
from partc.schedules.lower import lower
from partc.schedules.programs import Collective, RankProgram, Sharing, parse_programs, wire
from partc.schedules.simulate import Simulated, simulate
from partc.schedules.step_costs import Link, StepCosts
from partc.schedules.step_trace import US_PER_S, chrome_trace
from partc.schedules.timing import Costs, timeline
from tests.schedules.orders import by_rank, random_order

Golden = Callable[..., None]
UNLIMITED = {"ahead": 99, "bound": 99}


def even(stages: int, **costs: float) -> StepCosts:
    return StepCosts.of(Costs.even(stages, **costs), message=(0.0,) * stages)


@pytest.mark.exhaustive
@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(st.data())
def test_agrees_with_the_time_line_of_the_schedule(data: st.DataObject) -> None:
    """Where messages take no time and their queues have no limit, both models are one."""
    ranks = data.draw(st.integers(2, 4))
    placement = data.draw(st.sampled_from([looped(ranks, 1), looped(ranks, 2), v_shaped(ranks)]))
    chance = data.draw(st.randoms(use_true_random=False))
    order = random_order(placement, 3, split=data.draw(st.booleans()), chance=chance)
    schedule = by_rank(order, placement, 3)
    times = st.lists(st.integers(1, 9), min_size=len(placement), max_size=len(placement))
    forward, inputs, weights, activation = (tuple(data.draw(times)) for _ in range(4))
    costs = Costs(
        forward, inputs, weights, (0,) * len(placement), activation, (1,) * len(placement)
    )
    expected = timeline(schedule, costs)
    found = simulate(lower(schedule, **UNLIMITED), StepCosts.of(costs))  # type: ignore[arg-type]
    assert found.makespan == expected.makespan
    assert tuple(found.busy) == expected.busy
    assert tuple(found.peaks) == expected.peaks
    slower = simulate(lower(schedule), StepCosts.of(costs))
    assert slower.makespan >= expected.makespan


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (5, 7)])
@pytest.mark.parametrize("transfer", [0, 0.125])
def test_bubble_of_1f1b(ranks: int, microbatches: int, transfer: float) -> None:
    """(p - 1) / (m + p - 1); the ends of a stage's own transfers are not computing either."""
    step = simulate(
        lower(make("1f1b", ranks=ranks, microbatches=microbatches)), even(ranks, transfer=transfer)
    )
    if not transfer:
        assert step.makespan == 3 * (microbatches + ranks - 1)
        assert step.bubbles == pytest.approx([(ranks - 1) / (microbatches + ranks - 1)] * ranks)
        assert step.exposed == [0] * ranks
    assert [sum(pair) for pair in zip(step.busy, idle(step), strict=True)] == pytest.approx(
        [step.makespan] * ranks
    )


def idle(step: Simulated) -> list[float]:
    return [bubble * step.makespan for bubble in step.bubbles]


@pytest.mark.parametrize("communicators", ["channel", "pair"])
@pytest.mark.parametrize("name", NAMES)
def test_lowering_loses_no_time(name: str, communicators: Literal["channel", "pair"]) -> None:
    """One receive ahead and few sends under way are as good as unlimited memory for messages."""
    for ranks, microbatches in ((1, 2), (2, 3), (4, 12), (3, 5), (4, 2)):
        schedule = make(name, ranks=ranks, microbatches=microbatches)
        programs = lower(schedule, communicators=communicators)
        check_programs(programs)
        for transfer in (0, 0.5):
            costs = even(schedule.stages, transfer=transfer)
            assert simulate(programs, costs).makespan == timeline(schedule, costs).makespan


@pytest.mark.parametrize("less", [{"ahead": 0}, {"bound": 0}])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-v"])
def test_without_queues_transfers_are_exposed(name: str, less: dict[str, int]) -> None:
    schedule = make(name, ranks=4, microbatches=8)
    costs = even(schedule.stages, transfer=0.5)
    slower = simulate(lower(schedule, **less), costs)  # type: ignore[arg-type]
    assert slower.makespan > simulate(lower(schedule), costs).makespan


def test_as_many_sends_under_way_as_lose_no_time() -> None:
    """Rank 0 takes the last rank's forwards only after twelve of its own: eight have to wait."""
    schedule = make("looped-bfs", ranks=4, microbatches=12)
    programs = lower(schedule)
    wiring = programs[0].wiring
    bounds = {c.name: b for c, b in zip(wiring.communicators, wiring.bounds, strict=True)}
    assert bounds["F 3-4"] == 7
    assert bounds["F 0-1"] == 1
    costs = even(8)
    assert simulate(lower(schedule, bound=1), costs).makespan > simulate(programs, costs).makespan


def test_exposed_is_the_transfer_alone() -> None:
    """Rank 1 waits 3 for the forward to arrive and, at its end, 3 for its gradient to leave; the
    time in which the other rank computes is not communication."""
    costs = even(2, forward=2, input_grad=1, weight_grad=1, transfer=3)
    step = simulate(lower(make("gpipe", ranks=2, microbatches=1)), costs)
    assert step.exposed == [3, 6]
    assert step.makespan == 2 + 3 + 2 + 2 + 3 + 2
    assert step.busy == [4, 4]


def test_transfers_of_one_communicator_go_one_after_the_other() -> None:
    """Forwards leave at 1, 2 and 3 and arrive at 6, 11 and 16; gradients at 24, 29 and 34."""
    programs = lower(make("gpipe", ranks=2, microbatches=3), ahead=3, bound=3)
    assert simulate(programs, even(2, transfer=5)).makespan == 34 + 2


def test_a_collective_begins_when_all_members_have() -> None:
    tied = Collective("tied", stages=(0, 1), members=(0, 1))
    own = Collective("own", stages=(1,), members=(1,))
    costs = StepCosts.of(Costs.even(2), collectives={"tied": 5, "own": 4})
    step = simulate(lower(make("gpipe", ranks=2, microbatches=1), collectives=[tied, own]), costs)
    assert [ends[-1] for ends in step.ends] == [11, 11]  # last backward at 6, and 5 together
    assert step.exposed == [5, 5], "rank 1 waits two for rank 0 first, and its own ends at 8"


def test_peak_memory_counts_messages() -> None:
    """After its forwards a rank holds four activations, a posted receive and what it sends."""
    costs = StepCosts.of(Costs.even(3, activation=100), message=(7, 9))
    step = simulate(lower(make("gpipe", ranks=3, microbatches=4)), costs)
    # rank 0: two sends of 7, before the older is waited for, and one posted gradient of 7
    assert step.peaks[0] == 4 * 100 + 2 * 7 + 7
    # rank 1: two sends of 9 and one posted gradient of 9; inputs belong to the activations by then
    assert step.peaks[1] == 4 * 100 + 2 * 9 + 9
    for rank in range(3):
        times, held = zip(*step.memory(rank), strict=True)
        assert list(times) == sorted(times)
        assert held[-1] == 0
        assert min(held) >= 0


def test_table(golden: Golden) -> None:
    costs = StepCosts.of(Costs.even(3, transfer=0.5, activation=10), message=(1, 1))
    golden(str(simulate(lower(make("1f1b", ranks=3, microbatches=4)), costs)))


def test_links_and_messages_give_transfer_times() -> None:
    costs = StepCosts.of(
        Costs.even(3), message=(1e6, 2e6, 0), links=[Link(1e-3, 1e9), Link(0, 1e8), Link(0, 1)]
    )
    assert costs.transfer == pytest.approx((2e-3, 2e-2, 0))


def test_trace(golden: Golden) -> None:
    tied = Collective("tied", stages=(0, 1), members=(0, 1))
    costs = StepCosts.of(Costs.even(2, transfer=0.25), collectives={"tied": 1.5})
    trace = chrome_trace(
        simulate(lower(make("gpipe", ranks=2, microbatches=2), collectives=[tied]), costs)
    )
    events = json.loads(trace)["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X"]
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for box in boxes:
        rows[box["pid"], box["tid"]].append((box["ts"], box["ts"] + box["dur"]))
    for times in rows.values():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(times)))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    golden("\n".join(_row(box, names[box["pid"], box["tid"]]) for box in boxes))


def _row(box: dict[str, Any], row: str) -> str:
    begin, length = box["ts"] / US_PER_S, box["dur"] / US_PER_S
    return f"rank {box['pid']}  {row:8}  {begin:5} +{length:<4}  {box['name']}"


# Both directions of two ranks in one communicator, as torch's pipelining has them, and two chunks
# on each rank: both ranks send first.
BOTH_SEND_FIRST = """\
0F0 0SEND_F0 0WAIT_SEND_F0 0F1 0SEND_F1 2RECV_F0 2WAIT_RECV_F0 2F0 0WAIT_SEND_F1
1RECV_F0 1WAIT_RECV_F0 1F0 1SEND_F0 1RECV_F1 1WAIT_RECV_F1 1F1 1WAIT_SEND_F0
"""
# Every action in an order that one microbatch allows and the other does not.
CROSSED_ACTIONS = """\
0RECV_B0 0F0 0SEND_F0 0WAIT_SEND_F0 0WAIT_RECV_B0 0B0 0F1 0SEND_F1 0WAIT_SEND_F1
1RECV_F0 1WAIT_RECV_F0 1F0 1RECV_F1 1WAIT_RECV_F1 1F1 1B0 1SEND_B0 1WAIT_SEND_B0
"""


def parsed(text: str, rank_of: Sequence[int], communicators: Sharing) -> tuple[RankProgram, ...]:
    return parse_programs(text, wire(rank_of, 2, communicators=communicators))


def refusal(programs: Sequence[RankProgram]) -> str:
    with pytest.raises(CheckError) as caught:
        simulate(programs, even(programs[0].wiring.stages))
    error = caught.value
    why = [f"why    {part}" for part in error.why.split("; ")]
    return "\n".join([f"where  {error.where}", f"what   {error.what}", *why, f"do     {error.do}"])


def test_both_ranks_send_first(golden: Golden) -> None:
    """Blocked in one communicator for both directions; with one for each it finishes."""
    programs = parsed(BOTH_SEND_FIRST, (0, 1, 0, 1), "both")
    lines = {4: "    dist.isend(y1, 1)", 5: "    dist.irecv(x0, 1)"}, {3: "    dist.isend(y0, 0)"}
    golden(refusal([RankProgram(p.rank, p.events, p.wiring, lines[p.rank]) for p in programs]))
    for apart in ("pair", "channel"):
        simulate(parsed(BOTH_SEND_FIRST, (0, 1, 0, 1), apart), even(4))


def test_ranks_that_compute_in_crossed_orders(golden: Golden) -> None:
    golden(refusal(parsed(CROSSED_ACTIONS, (0, 1), "channel")))


def test_a_transfer_without_other_end(golden: Golden) -> None:
    golden(refusal(parsed("0F0 0SEND_F0 0WAIT_SEND_F0\n1RECV_B0", (0, 1, 2), "channel")))


def test_collectives_in_two_orders(golden: Golden) -> None:
    """Each rank starts another one first, in one communicator."""
    pair = [Collective(n, (0, 1), (0, 1), communicator="pp") for n in ("loss", "tied")]
    wiring = wire((0, 1), 1, collectives=pair)
    text = "START(loss) START(tied) WAIT(loss) WAIT(tied)\nSTART(tied) START(loss) WAIT(tied)"
    golden(refusal(parse_programs(text, wiring)))


def test_no_wait_is_reported_where_nobody_waits() -> None:
    """A send that nobody waits for and nobody receives still leaves the step unfinished."""
    with pytest.raises(CheckError, match=r"rank 0's 0SEND_F0 \(event 1\) needs rank 1, which ends"):
        simulate(parsed("0F0 0SEND_F0\n\n", (0, 1), "channel"), even(2))


def test_a_cycle_of_many_ranks_is_shown_once() -> None:
    """Each rank wants its gradient before it sends its forward on: all wait, nobody twice."""
    wants = "{0}RECV_F0 {0}WAIT_RECV_F0 {0}RECV_B0 {0}WAIT_RECV_B0 {0}F0 {0}SEND_F0\n"
    text = "0F0 0SEND_F0 0RECV_B0 0WAIT_RECV_B0\n" + wants.format(1) + wants.format(2)
    said = refusal(parsed(text + "3RECV_F0 3WAIT_RECV_F0", (0, 1, 2, 3), "channel"))
    assert "ranks 1, 2 wait for each other in a circle" in said
    assert said.count("rank 1 waits at") == 1


@pytest.mark.exhaustive
def test_work_is_linear() -> None:
    """33,000 actions of 64 ranks in well under a second of a free core; quadratic would show."""
    schedule = make("interleaved-1f1b", ranks=64, microbatches=64, chunks=4)
    began = time.process_time()
    programs = lower(schedule)
    check_programs(programs)
    step = simulate(programs, StepCosts.of(Costs.even(256), message=(1.0,) * 256))
    assert len(step.peaks) == 64
    assert time.process_time() - began < 5
