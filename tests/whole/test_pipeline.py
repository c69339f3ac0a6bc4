"""Pipelines: stage graphs and rank programs compute what the whole model does, under any
schedule.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.codegen.files.roll_schedule import parted, turn_lines, whole_backwards
from partc.codegen.helpers.needed import Helpers, sources
from partc.errors import PlanError
from partc.graph import value
from partc.graph.graph_parse import parse_graph
from partc.passes.stages.split_stages import split_stages
from partc.plan import Plan
from partc.program import Program
from partc.schedules import NAMES, make
from partc.verification import threads
from partc.verification.rendezvous import Done, Group
from partc.verification.threads import ThreadDist
from partc.verification.verification import verify
from tests.patience import patience
from tests.pipelines import (
    BATCH,
    POINTS,
    TOLERANCE,
    TRAINING,
    Cut,
    compiled,
    toy,
    toy_program,
    zoo_error,
)
from tests.printed_turns import done_by
from tests.texts import roles_of
from tests.zoo import FAMILIES, Case

LAYOUTS = {"data": ("dp=2", "ddp"), "sequence": ("dp=2,tp=2", "fsdp+megatron-sp")}


# stage graphs -------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", POINTS)
def test_stage_graphs_equal_eager(name: str) -> None:
    """Encoders, decoders, images, tied and shifted windows; dp, tp and sequence at once."""
    assert zoo_error(name, "dp=2,tp=2", "fsdp+megatron-sp", split_backward=True) < TOLERANCE


@pytest.mark.exhaustive
def test_stage_graphs_with_whole_backwards_equal_eager() -> None:
    assert zoo_error("gpt2", "dp=2", "ddp", split_backward=False) < TOLERANCE


def test_a_gradient_of_more_terms_than_the_stack_is_deep() -> None:
    """A split backward leaves all of them for later."""
    terms = 1200
    rows = "\n".join(f"  g{i} = add.Tensor(g{i - 1}, g0) : f32[4,6]" for i in range(1, terms))
    graph = parse_graph(f"""\
local graph Deep  mesh
param w : f32[4,6]
input x : f32[8,6]
forward
  y = linear(x, w) : f32[8,4]
  loss = sum(y)    : f32[]
backward
  g0 = weight_grad(y, x) : f32[4,6]
{rows}
outputs
  loss = loss
  grad w = g{terms - 1}
""")
    (stage,) = split_stages(graph, Plan(), split_backward=True)
    assert [value(n).phase for n in stage.calls()] == ["F"] * 2 + ["W"] * terms


# programs -----------------------------------------------------------------------------------------
def right(schedule: str, microbatches: int, **changed: object) -> None:
    case, program = toy_program(schedule, microbatches, **changed)  # type: ignore[arg-type]
    verify(program, case.model, case.inputs, case.loss).check(TOLERANCE)


FEW = [(name, num) for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-v") for num in (1, 4)]


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("schedule", "microbatches"), [*((name, num) for name in TRAINING for num in (3, 8)), *FEW]
)
def test_every_schedule(schedule: str, microbatches: int) -> None:
    """Also with fewer microbatches than stages, and with a number that the ranks do not divide."""
    right(schedule, microbatches, tied=microbatches % 2 == 1)


@pytest.mark.rows(1)
@pytest.mark.parametrize("microbatches", [3, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h2", "zb-v"])
def test_four_ranks(schedule: str, microbatches: int) -> None:
    right(schedule, microbatches, mesh="pp=4", tied=True)


@pytest.mark.rows(1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_with_data_and_tensor_parallelism(schedule: str) -> None:
    right(schedule, 3, mesh="pp=2,dp=2,tp=2", preset="fsdp+megatron-sp", tied=True)


@pytest.mark.exhaustive
def test_a_parameter_of_two_stages_of_a_rank_is_summed_once() -> None:
    right("zb-v", 3, mesh="pp=2,dp=2", preset="ddp", tied=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "preset"), [("pp=1", "ddp"), ("dp=2", "ddp"), ("dp=2", "fsdp")])
def test_one_stage_accumulates_gradients(mesh: str, preset: str) -> None:
    right("1f1b", 3, mesh=mesh, preset=preset)


class Gated(nn.Module):
    """What follows from its gate alone is computed once, outside of the block."""

    gate: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.3))
        self.mix = nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.w = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x.transpose(1, 2)).transpose(1, 2)
        y: Tensor = x + self.w(F.softplus(mixed)) * self.gate.sigmoid()
        return y


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "preset"), [("pp=2", "ddp"), ("pp=2,tp=2", "megatron")])
def test_weights_that_no_block_reads_have_gradients_there(mesh: str, preset: str) -> None:
    """And a gradient that ends whole, but is made in pieces, is gathered with each microbatch."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Gated() for _ in range(4)], nn.Linear(8, 2)).double()
    model.register_parameter("first", nn.Parameter(torch.randn(1, 1, 8, dtype=torch.float64)))
    model.register_parameter("spare", nn.Parameter(torch.zeros(3)))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        first: Tensor = model.first.expand(len(x), -1, -1)  # type: ignore[operator]
        return torch.as_tensor(model(torch.cat([first, x], 1))).square().mean()

    batch = (torch.randn(4, 5, 8, dtype=torch.float64),)
    program = partc.compile(model, mesh, batch, loss=loss, plan=preset, microbatches=2)
    assert "spare has no gradient" in program.plan
    verify(program, model, batch, loss).check(TOLERANCE)


@pytest.mark.exhaustive
def test_gradients_share_a_transfer_up_to_the_plans_limit() -> None:
    case, plan = toy(), Plan(preset="ddp", bucket_mb=0.002)
    program = compiled(case, "dp=2", plan, "1f1b", 3)
    assert re.findall(r"partials\.buckets\(.*, (\S+)\):", program.source()) == ["2_000"]
    verify(program, case.model, case.inputs, case.loss).check(TOLERANCE)


class Embedded(nn.Module):
    """So many words that their gradient is cheaper to move than what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(256, 32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "preset"), [("tp=4", "megatron-sp"), ("dp=2,tp=4", "ddp+megatron-sp")]
)
def test_a_gradient_changes_its_cut_once_per_step(mesh: str, preset: str) -> None:
    torch.manual_seed(0)
    model, ids = Embedded().double(), torch.randint(256, (8, 32))
    program = partc.compile(model, mesh, (ids,), plan=preset, microbatches=2)
    assert re.search(r"move_grads\(.+, 4, self.tp, 1, 0\)", program.source())
    verify(program, model, (ids,)).check(TOLERANCE)


@pytest.mark.exhaustive
def test_gpt2() -> None:
    """A tied model of transformers' own."""
    case = FAMILIES["gpt2"].case("gpt2", batch=BATCH, n_layer=4)
    points = [f"transformer.h.{i}" for i in range(1, 4)]
    plan = Plan(preset="ddp", stages=tuple(points))
    program = compiled(case, "pp=2", plan, "zb-v", 3)
    verify(program, case.model, case.inputs, case.loss).check(TOLERANCE)


def test_ignored_tokens_do_not_weigh() -> None:
    """The loss is the mean over all tokens that count, not over microbatches' means."""
    case = toy()
    plan = Plan(preset="ddp", stages=("blocks.1",), microbatches=4)
    cut = Cut.of(case, "dp=2", plan)
    assert cut.error() < TOLERANCE
    pieces = zip(*(x.chunk(4) for x in case.inputs), strict=True)
    means = torch.stack([case.loss(case.model, *piece) for piece in pieces])
    assert cut.reference.loss is not None
    assert abs(means.mean() - cut.reference.loss) > 1e-3  # the inputs can tell


class OneAfterTheOther(ThreadDist):
    """Transfers between two ranks as NCCL runs them: none begins before the last one is done."""

    def isend(self, tensor: Tensor, *args: Any, **named: Any) -> Done:
        return _waited(super().isend(tensor, *args, **named))

    def irecv(self, tensor: Tensor, *args: Any, **named: Any) -> Done:
        return _waited(super().irecv(tensor, *args, **named))


def _waited(done: Done) -> Done:
    done.wait()
    return done


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_tied_gradients_do_not_wait_for_each_other(
    order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ranks hold the parameter, and in whatever order of stages."""
    monkeypatch.setattr(threads, "ThreadDist", OneAfterTheOther)
    helpers = Helpers()
    helpers.use("sum_tied")

    def run(rank: int, dist: ThreadDist) -> list[float]:
        printed: dict[str, Any] = {"torch": torch, "dist": dist, "nn": nn, "Tensor": Tensor}
        exec(sources(helpers.shared()), printed)
        param = nn.Parameter(torch.zeros(2))
        param.grad = torch.full((2,), 10.0**rank)
        printed["sum_tied"](param, None, order, Group((0, 1, 2), "pp", rank))
        return param.grad.tolist()

    assert threads.run_ranks(3, run, timeout=patience()) == [[111.0, 111.0]] * 3


# stages that lack something -----------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("points", "frozen"),
    [(("1", "2"), []), (("2",), [0]), (("2",), [2]), (("1", "2"), [0])],
    ids=["no parameters", "frozen first", "frozen last", "frozen and no parameters"],
)
def test_stages_without_gradients(
    schedule: str, points: tuple[str, ...], frozen: list[int]
) -> None:
    """They send nothing back, or have no gradients of weights, or no backward at all."""
    case = small()
    for number in frozen:
        case.model.get_submodule(str(number)).requires_grad_(False)
    plan = Plan(preset="ddp", stages=points)
    program = compiled(case, f"pp={len(points) + 1}", plan, schedule, 3)
    verify(program, case.model, case.inputs, case.loss).check(TOLERANCE)
    for text in program.sources.values():  # a place for what is saved, where anything is
        assert ("self.saved = {}" in text) == ("self.saved[i]" in text)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_running_statistics_follow_the_microbatches(schedule: str) -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)]
    case = Case(nn.Sequential(*blocks).double(), (torch.randn(12, 8).double(),), square_loss)
    program = compiled(case, "pp=2", Plan(preset="ddp", stages=("1",)), schedule, 3)
    report = verify(program, case.model, case.inputs, case.loss)  # in turns too
    assert {row.name for row in report.kinds()["buffer"]} >= {"1.1.running_var"}
    report.check(TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "preset"), [("dp=2", "fsdp"), ("pp=2,tp=2", "megatron")])
def test_a_penalty_of_weights_counts_once(mesh: str, preset: str) -> None:
    """All microbatches have it in common; the first one adds it to its loss and gradients."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return square_loss(model, x) + torch.stack([p.norm() for p in model.parameters()]).sum()

    case = replace(small(), loss=loss)
    plan = Plan(preset=preset, stages=("1",) if "pp" in mesh else ())
    program = compiled(case, mesh, plan, "1f1b", 3)
    verify(program, case.model, case.inputs, case.loss).check(TOLERANCE)


def small() -> Case:
    model = nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 6)).double()
    return Case(model, (torch.randn(12, 8).double(),), square_loss)


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


def test_statistics_of_one_value_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    with pytest.raises(PlanError, match=r"1 .*one value per channel.*4 microbatches of \[4, 6\]"):
        partc.compile(
            model, "pp=2", (torch.randn(4, 4),), loss=lambda m, x: m(x).sum(), plan="ddp",
            microbatches=4,
        )  # fmt: skip


@pytest.mark.rows(1)
@pytest.mark.parametrize("mesh", ["dp_replicate=2,dp_shard=2", "pp=2,dp_replicate=2,dp_shard=2"])
def test_replicas_add_up_once_per_step(mesh: str) -> None:
    """Shards of gradients are scattered every microbatch, and summed over replicas at the end."""
    case = small()
    plan = Plan(preset="hsdp", stages=("1",) if "pp" in mesh else ())
    program = compiled(case, mesh, plan, "1f1b", 3)
    verify(program, case.model, case.inputs, case.loss).check(TOLERANCE)
    for source in roles_of(program).values():
        turns, _, ends = source.rpartition("def finish(self)")
        assert "group=self.dp_shard" in turns or "self.dp_shard)" in turns
        assert "sum_grads(self.partials.take(bucket), self.dp_replicate)" in ends
        assert "sum_grads(self.partials.take(bucket), self.dp_replicate)" not in turns


def test_inputs_may_be_called_as_the_program_calls_its_own() -> None:
    def loss_of(
        model: nn.Module, i: Tensor, stage: Tensor, loss: Tensor, self_: Tensor, x_in: Tensor
    ) -> Tensor:
        return square_loss(model, i + 2 * stage + 3 * loss + 4 * self_ + 5 * x_in)

    inputs = tuple(torch.randn(5, 12, 8).double())
    case = replace(small(), inputs=inputs, loss=loss_of)
    program = compiled(case, "pp=2", Plan(preset="ddp", stages=("1",)), "1f1b", 3)
    verify(program, case.model, case.inputs, case.loss).check(TOLERANCE)


# inference ----------------------------------------------------------------------------------------
def outputs(case: Case, **wanted: Any) -> Program:
    """A toy's results in a pipeline of two ranks."""
    with torch.no_grad():
        return partc.compile(case.model, "pp=2", case.inputs, plan="ddp", microbatches=3, **wanted)


def test_inference_runs_forwards_only() -> None:
    case = small()
    program = outputs(case)
    assert Plan.parse(program.plan).schedule == "forward-only"
    assert outputs(case, schedule="forward-only").sources == program.sources
    verify(program, case.model, case.inputs).check(TOLERANCE)


def test_a_schedule_that_is_named_is_not_replaced() -> None:
    with pytest.raises(PlanError, match="it has backwards, and this graph has none"):
        outputs(small(), schedule="1f1b")


# text ---------------------------------------------------------------------------------------------
def test_length_does_not_grow_with_microbatches() -> None:
    few, many = (toy_program("1f1b", num)[1].sources for num in (8, 24))
    for role, text in few.items():
        assert len(text.splitlines()) == len(many[role].splitlines())


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", NAMES)
def test_loops_do_not_grow_with_microbatches(schedule: str, ranks: int) -> None:
    """The loops of every rank say the schedule's order, in as many lines for any number."""
    few, many = (make(schedule, ranks=ranks, microbatches=num * ranks) for num in (6, 12))
    for rank, order in enumerate(few.orders):
        lines = list(turn_lines(order))
        assert len(lines) == len(list(turn_lines(many.orders[rank]))) < 50
        assert done_by(lines) == list(order)


def test_split_backwards_without_a_gap_are_one() -> None:
    order = make("zb-v", ranks=2, microbatches=4).orders[0]
    assert list(parted(whole_backwards(order))) == list(order)


@pytest.mark.parametrize("schedule", TRAINING)
def test_golden(golden: Callable[..., None], schedule: str) -> None:
    """The first rank's program; where it has two stages, the embedding or the head is one."""
    two = NAMES[schedule].usual_chunks == 2
    points = ("blocks.0", "blocks.1", "head") if two else ("blocks.1",)
    case = toy()
    program = compiled(case, "pp=2", Plan(preset="ddp", stages=points), schedule, 8)
    golden(program.sources["pipeline0.py"], ".py")
