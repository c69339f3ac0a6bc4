"""Samplers of all ranks: each row of an epoch is read once, over ends, resumes and other meshes."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest

from partc.data.order import Last, Order
from partc.data.sampler import RowSampler
from partc.data.share import Division
from partc.data.shuffle import shuffled
from partc.errors import LoadError, UsageError
from partc.plan import Plan
from partc.plan.mesh import Mesh
from tests.data.readers import BATCH, at, program_of, sampler_of


def epoch_of(samplers: list[RowSampler]) -> list[list[int]]:
    """The rows of each step of an epoch, of all samplers together, in order."""
    steps = zip(*samplers, strict=True)  # strict: all take equally many steps
    return [sorted(row for piece in step for row in piece) for step in steps]


def flat(steps: list[list[int]]) -> list[int]:
    return [row for step in steps for row in step]


# the order -----------------------------------------------------------------------------------
@pytest.mark.parametrize("num", [1, 2, 3, 5, 16, 17, 1000, 65_537])
def test_an_order_has_every_row_once(num: int) -> None:
    orders = [shuffled(np.arange(num), num, 0, epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(num)) for order in orders)
    assert num < 16 or len({tuple(order) for order in orders}) == 3


def test_a_place_of_an_order_is_computed_alone() -> None:
    num = 1_000_003
    whole = shuffled(np.arange(num), num, 5, 2)
    assert len(np.unique(whole)) == num
    places = np.array([num - 1, 0, 77_777])
    assert shuffled(places, num, 5, 2).tolist() == whole[places].tolist()
    assert abs(np.corrcoef(np.arange(num), whole)[0, 1]) < 0.01  # 1e-3 is a standard deviation
    assert abs(np.corrcoef(whole[:-1], whole[1:])[0, 1]) < 0.01


@pytest.mark.exhaustive
def test_every_order_of_few_rows_comes_about_equally_often() -> None:
    found = Counter(tuple(shuffled(np.arange(4), 4, seed, 0).tolist()) for seed in range(2400))
    assert len(found) == 24
    assert min(found.values()) > 60  # 100 on average, 10 is a standard deviation
    assert max(found.values()) < 140


def test_an_order_is_the_same_everywhere() -> None:
    """Positions are saved: the numbers must not change with versions or machines."""
    assert shuffled(np.arange(8), 8, 0, 0).tolist() == ORDER_OF_8
    assert shuffled(np.arange(4), 10**12, 1, 3).tolist() == ROWS_OF_1E12


ORDER_OF_8 = [6, 5, 1, 0, 4, 3, 2, 7]
ROWS_OF_1E12 = [457617710244, 271756993583, 120798664064, 312352783292]


# which rows ----------------------------------------------------------------------------------
@pytest.mark.parametrize("microbatches", [1, 2])
def test_ranks_of_a_program_read_the_pieces_of_its_plan(microbatches: int) -> None:
    program = program_of("dp=4,tp=2", "fsdp+megatron", microbatches)
    assert program.data_world == 4
    assert [program.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    samplers = [program.sampler(100, rank, batch="local") for rank in range(8)]
    steps = list(zip(*samplers, strict=True))
    assert len(steps) == len(samplers[0]) == 100 // BATCH
    for step in steps:
        assert [step[rank] for rank in range(0, 8, 2)] == [step[rank] for rank in range(1, 8, 2)]
        assert len({row for piece in step for row in piece}) == BATCH
        assert {len(piece) for piece in step} == {4}
    whole = program.sampler(100, 5, batch="global")
    assert [sorted(step) for step in whole] == [
        sorted(row for piece in step[::2] for row in piece) for step in steps
    ]


def test_pieces_of_two_data_axes_are_those_that_the_plan_cuts() -> None:
    program = program_of("dp_replicate=2,dp_shard=2,tp=2", "hsdp+megatron")
    assert [program.data_rank(rank) for rank in range(8)] == [0, 0, 2, 2, 1, 1, 3, 3]
    rows = [next(iter(program.sampler(64, r, shuffle=False, batch="local"))) for r in range(8)]
    assert [piece[0] // 4 for piece in rows] == [0, 0, 2, 2, 1, 1, 3, 3]


def test_pipeline_ranks_read_the_same_rows() -> None:
    program = program_of("pp=2,dp=2", "ddp", 2)
    assert [program.data_rank(rank) for rank in range(4)] == [0, 1, 0, 1]


def test_a_sequence_that_is_cut_is_no_cut_of_rows() -> None:
    plan = Plan.parse('[inputs]\n"ids" = { dp = 0, cp = 1 }\n"mask" = {}\n')
    division = Division.of(plan, Mesh.of("dp=2,cp=2"))
    assert [division.rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    time_first = Plan.parse('[inputs]\n"data" = { dp = 1 }\n"labels" = { dp = 0 }\n')
    assert Division.of(time_first, Mesh.of("dp=2,cp=2")).world == 2
    halves = Plan.parse('[inputs]\n"views" = { dp = [0, 2] }\n')  # both views of a sample
    share = Division.of(halves, Mesh.of("dp=2")).share(1, 8, "local")
    assert share.places.tolist() == [2, 3, 6, 7]


def test_inputs_that_are_cut_differently_are_refused() -> None:
    plan = Plan.parse('[inputs]\n"x" = { dp = 0 }\n"y" = { fsdp = 0 }\n')
    with pytest.raises(UsageError, match="x and y are cut over different axes"):
        Division.of(plan, Mesh.of("dp=2,fsdp=2"))


def test_rows_that_no_mesh_can_divide_are_refused() -> None:
    program = program_of("dp=4,tp=2", "fsdp+megatron")
    with pytest.raises(UsageError, match="cannot be divided among 4 data ranks"):
        program.sampler(100, 0, batch="local", rows_per_step=18)
    with pytest.raises(UsageError, match="no such batch"):
        program.sampler(100, 0, batch="mine")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is no such rank"):
        program.sampler(100, 8)
    with pytest.raises(UsageError, match="has no rank"):
        program.sampler(100)
    with pytest.raises(UsageError, match="does not fill one step of 16 rows") as few:
        program.sampler(15, 0)
    assert few.match('Compile for a step of at most 15 rows; or pass last="next"')


# ends of epochs ------------------------------------------------------------------------------
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_rows_that_fill_no_step_are_left_out(dp: int) -> None:
    samplers = [sampler_of(101, rank, dp) for rank in range(dp)]
    for _ in range(3):
        steps = epoch_of(samplers)
        assert [len(step) for step in steps] == [BATCH] * 6 == [BATCH] * len(samplers[0])
        assert len(set(flat(steps))) == 96


def test_the_last_step_may_be_smaller() -> None:
    samplers = [sampler_of(101, rank, 4, last="partial") for rank in range(4)]
    pieces = [list(sampler) for sampler in samplers]
    assert [len(steps[-1]) for steps in pieces] == [1, 1, 1, 2]
    assert sorted(row for steps in pieces for piece in steps for row in piece) == [*range(101)]
    assert {len(steps) for steps in pieces} == {7}
    few = sampler_of(99, 0, 4, last="partial")
    with pytest.raises(UsageError, match="has 3 rows for 4 data ranks"):
        next(iter(few))


@pytest.mark.parametrize("num_rows", [3, 16, 37, 101])
def test_rows_left_over_begin_the_next_epoch(num_rows: int) -> None:
    samplers = [sampler_of(num_rows, rank, 2, last="next") for rank in range(2)]
    num_steps, taken = 0, []
    for epoch in range(16):
        expected, steps = len(samplers[0]), epoch_of(samplers)
        assert len(steps) == expected
        num_steps += len(steps)
        assert num_steps == num_rows * (epoch + 1) // BATCH
        taken += flat(steps)
        for sampler in samplers:
            sampler.set_epoch(epoch + 1)  # as scripts do; what is left over stays
    assert Counter(taken) == Counter(dict.fromkeys(range(num_rows), 16))


# resuming ------------------------------------------------------------------------------------
ENDS: tuple[Last, ...] = ("drop", "partial", "next")


@pytest.mark.parametrize("last", ENDS)
def test_a_run_resumes_at_any_step_on_any_number_of_ranks(last: Last) -> None:
    straight = [sampler_of(54, rank, 2, last=last) for rank in range(2)]
    expected = [row for _ in range(3) for row in epoch_of(straight)]
    for stop in range(1, len(expected)):
        saving = [sampler_of(54, rank, 4, last=last) for rank in range(4)]
        found = taken_by(saving, stop)
        (state,) = {str(sampler.state_dict()): sampler.state_dict() for sampler in saving}.values()
        resumed = [sampler_of(54, 0, 1, last=last, seed=0)]
        resumed[0].load_state_dict(state)
        while len(found) < len(expected):
            found += epoch_of(resumed)
        assert found == expected, stop


def taken_by(samplers: list[RowSampler], num_steps: int) -> list[list[int]]:
    """The rows of the first steps; iterations are left right behind the last of them."""
    found: list[list[int]] = []
    while len(found) < num_steps:
        left = num_steps - len(found)
        pieces = [list(islice(sampler, min(left, len(sampler)))) for sampler in samplers]
        found += [sorted(chain.from_iterable(step)) for step in zip(*pieces, strict=True)]
    return found


def test_a_run_resumes_with_other_rows_per_step_at_any_row() -> None:
    expected = flat(list(sampler_of(64, 0, 1)))
    for index in range(1, 64):
        rest = at(sampler_of(64, 0, 1, per_step=1), 0, index)
        assert flat(list(rest)) == expected[index:]
    pieces = [at(sampler_of(64, rank, 2, per_step=4), 0, 16) for rank in range(2)]
    assert epoch_of(pieces) == [sorted(expected[i : i + 4]) for i in range(16, 64, 4)]


def test_an_iteration_that_was_left_is_followed_by_the_next_epoch() -> None:
    sampler = sampler_of(64, 0, 1)
    first = next(iter(sampler))
    assert sampler.position.epoch == 0
    again = next(iter(sampler))
    assert (sampler.position.epoch, sampler.position.index) == (1, BATCH)
    assert first != again
    sampler.set_epoch(0)
    assert next(iter(sampler)) == first
    sampler.set_epoch(0)  # begun, and left: from the first row once more
    assert next(iter(sampler)) == first


def test_setting_the_epoch_that_was_loaded_keeps_the_place() -> None:
    sampler = sampler_of(64, 0, 1)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "index": 32})
    sampler.set_epoch(3)
    assert (len(list(sampler)), len(sampler)) == (2, 4)
    assert (sampler.position.epoch, sampler.position.index) == (4, 0)


def test_positions_of_other_rows_are_refused() -> None:
    sampler = sampler_of(64, 0, 1)
    state = sampler.state_dict()
    assert state == {"seed": 7, "epoch": 0, "index": 0, "num_rows": 64, "shuffle": True}
    with pytest.raises(LoadError, match="saved with num_rows=65, here it is 64"):
        sampler.load_state_dict({**state, "num_rows": 65})
    with pytest.raises(LoadError, match="saved with shuffle=False, here it is True"):
        sampler.load_state_dict({**state, "shuffle": False})
    with pytest.raises(LoadError, match="saved with data_world=4, here it is None"):
        sampler.load_state_dict({**state, "data_world": 4})
    with pytest.raises(LoadError, match="no position in the rows"):
        sampler.load_state_dict({"epoch": 1})


def test_an_end_of_epochs_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="drop, partial, next"):
        Order(10, 2, last="pad")  # type: ignore[arg-type]
