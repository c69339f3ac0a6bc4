"""Which line of the program a bar of computing has: near, inside of an expression, behind noise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.cost.roofline import COMPUTE, Box
from partc.cost.sites import NOWHERE, Site
from partc.dryrun.program_trace import CALL, START, Done, ProgramTrace
from partc.program import Program
from partc.reports.linked import NO_LINE, linked_step
from partc.reports.pipeline_timeline import pipeline_timeline
from partc.reports.timeline import Timeline, timeline_of
from tests.reports.report_programs import compiled
from tests.surface.programs import golden_programs, other_programs

UP, NORM, DOWN = (Site(f"blocks.0.{name}", f"net.py:{i}") for i, name in enumerate("abc"))
NORM_INSIDE = Site(NORM.module, "net.py:7")


def call(name: str, site: Site, line: int, live: int = 0) -> Done:
    return Done(CALL, name, "", line, site, 0, live, 0, False)


def box(name: str, site: Site, begin: float) -> Box:
    return Box(COMPUTE, name, "", begin, 1.0, site)


def lines(boxes: list[Box], done: list[Done]) -> list[int]:
    trace = ProgramTrace(tuple(done), 0, 0, (), {})
    return [bar.line for bar in linked_step(boxes, [], trace).bars]


def test_hundreds_of_calls_for_one_line_lose_no_place() -> None:
    done = [call("prim.device", UP, 1)] * 300 + [call("aten.mm", NORM, 2), call("aten.mm", DOWN, 3)]
    boxes = [box("aten.mm", each, i) for i, each in enumerate((UP, NORM, DOWN))]
    assert lines(boxes, done) == [1, 2, 3]


def test_a_call_inside_of_an_expression_has_its_line() -> None:
    done = [call("aten.pow.Scalar", NORM, 5), call("aten.mul.Tensor", NORM, 5)]
    ops = (("aten.pow", NORM_INSIDE), ("aten.sum", NORM_INSIDE), ("aten.mul", NORM))
    boxes = [box(name, site, i) for i, (name, site) in enumerate(ops)]
    assert lines(boxes, done) == [5, 5, 5]


def test_a_call_that_no_statement_makes_has_no_line() -> None:
    boxes = [box("aten.exp", NORM_INSIDE, 0), box("aten.mm", UP, 1)]
    assert lines(boxes, [call("aten.mm.default", UP, 1), call("aten.pow.x", NORM, 5)]) == [0, 1]


def test_a_copy_without_a_line_of_the_user_leads_no_further() -> None:
    """A copy of a module's gathered weights stands long before the module is computed."""
    copies = Site("norm", "")
    done = [call("aten.mm", UP, 1), call("aten.mm", DOWN, 2), call("copy", copies, 9)]
    boxes = [box("copy", copies, 0), box("aten.mm", UP, 1), box("aten.mm", DOWN, 2)]
    assert lines(boxes, done) == [9, 1, 2]


def share(line: Timeline) -> float:
    bars = [bar for each in line.streams if each.kind == COMPUTE for bar in each.bars]
    return sum(bar.line != NO_LINE for bar in bars) / len(bars)


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", ["ddp", "zero1", "fsdp+megatron-sp"])
def test_nearly_all_bars_have_a_line(plan: str) -> None:
    assert share(timeline_of(compiled(plan), plan)) >= 0.95


# inside of a pipeline's actions ------------------------------------------------------------------
def test_transfers_in_another_order_have_their_lines() -> None:
    """Each start is paired once: by its layer where both are known, otherwise by its size."""
    one, two = Site("blocks.0.up", "net.py:1"), Site("blocks.1.up", "net.py:1")
    boxes = [Box("dp", "all_gather", "", i, 1.0, site, num_bytes=size)
             for i, (site, size) in enumerate([(one, 8), (two, 8), (UP, 16)])]  # fmt: skip
    starts = [(NOWHERE, 3, 16), (two, 7, 8), (one, 5, 8)]
    done = [Done(START, "all_gather", "dp", line, site, size, 0, i, False)
            for i, (site, line, size) in enumerate(starts)]  # fmt: skip
    linked = linked_step(boxes, [], ProgramTrace(tuple(done), 0, 0, (), {"dp": 2}))
    assert [bar.line for bar in linked.bars] == [5, 7, 3]
    assert not linked.orders_agree


class Hourglass(nn.Module):
    """Weights stand before, between and behind two lists of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(32, 64), nn.Linear(64, 64)
        self.downs, self.ups = (
            nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for down in self.downs:
            x = x + down(x)
        x = self.middle(x)
        for up in self.ups:
            x = x + up(x)
        found: Tensor = self.head(self.norm(x))
        return found.logsumexp(-1).mean()


def hourglass() -> Program:
    return partc.compile(Hourglass(), "dp=2", torch.zeros(8, 4, dtype=torch.long), plan="fsdp")


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    "make",
    [
        hourglass,
        lambda: other_programs()["distilbert dp=2 fsdp"](),
        lambda: other_programs()["opt dp=4 fsdp"](),
        lambda: other_programs()["gpt2 dp=2 zero1"](),
    ],
    ids=["hourglass", "distilbert", "opt", "gpt2"],
)
def test_gathers_between_loops_are_predicted_where_lines_start_them(
    make: Callable[[], Program],
) -> None:
    assert timeline_of(make(), "gathers").orders_agree


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_messages_of_several_stages_on_a_rank_have_lines(schedule: str) -> None:
    """A rank greets a neighbour once for each link, and has several with it."""
    line = pipeline_timeline(golden_programs()[f"pipeline {schedule}"]())
    messages = [bar for each in line.streams if each.name == "messages" for bar in each.bars]
    assert messages
    assert all(bar.line for bar in messages)
    assert line.orders_agree


@pytest.mark.exhaustive
@pytest.mark.parametrize(("plan", "mesh"), [("ddp", "pp=2,dp=2"), ("megatron", "pp=2,tp=2")])
def test_the_time_line_of_a_pipeline_is_as_long_as_its_step(plan: str, mesh: str) -> None:
    """With what all microbatches share, as the sum of the labels' weights over dp."""
    program = compiled(plan, mesh, 4)
    seconds = program.cost.as_json()["prediction"]["seconds"]
    assert pipeline_timeline(program).end_s == pytest.approx(seconds, rel=1e-5)


@pytest.mark.exhaustive
def test_messages_that_sum_a_tied_weight_are_none_between_stages() -> None:
    line = pipeline_timeline(other_programs()["gemma2 pp=2,tp=2 megatron"]())
    messages = [bar for each in line.streams if each.name == "messages" for bar in each.bars]
    assert all(bar.line for bar in messages)
    assert line.orders_agree


def pipeline() -> Program:
    return compiled("megatron", "pp=2,tp=2", 4)


def test_calls_stand_inside_of_the_actions_of_the_fullest_rank() -> None:
    line = pipeline_timeline(pipeline())
    assert line.orders_agree
    number = int(line.memory_of.removeprefix("pipeline rank "))
    (rank,) = [each for each in line.streams if each.name == f"rank {number}"]
    names = (f"calls of {number}", "over tp")
    calls, moved = ([x for x in line.streams if x.name == name] for name in names)
    actions = [bar for bar in rank.bars if bar.box.name in "FBIW"]
    for bar in (*calls[0].bars, *moved[0].bars):
        assert any(
            a.box.begin_s - 1e-9 <= bar.box.begin_s and bar.end_s <= a.end_s + 1e-9 for a in actions
        )
    for each in actions:  # none is empty
        assert any(each.box.begin_s <= bar.box.begin_s < each.end_s for bar in calls[0].bars)
    assert share(line) > 0.95
    assert all(bar.line for bar in moved[0].bars)


def test_messages_that_do_not_pair_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pipeline_timeline(compiled("ddp", "pp=2", 4)).orders_agree
    where = "partc.reports.pipeline_timeline._are_greetings"
    monkeypatch.setattr(where, lambda first, rest: not first)  # the first ones are of the step
    assert not pipeline_timeline(compiled("ddp", "pp=2", 4)).orders_agree
