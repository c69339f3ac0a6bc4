"""Ranks that do not hold alike what they must are named; what they are given keeps its contract."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import partc
from partc.errors import RunError
from partc.plan import Plan
from partc.program import Program
from partc.program.ranks.tensor_hash import hashes_of, joined, on_device, sketch_of
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.batches import tokens

pytestmark = pytest.mark.gloo
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": ("dp=2", "ddp", {}),
    "fsdp": ("dp=2", "fsdp", {}),
    "tp": ("tp=2", "megatron", {}),
    "fsdp+tp": ("dp=2,tp=2", "fsdp+megatron", {}),
    "pp": ("pp=2", "ddp", {"microbatches": 2, "stages": ["down"]}),
    "pp+dp": ("pp=2,dp=2", "ddp", {"microbatches": 2, "stages": ["down"]}),
    "pp+fsdp": ("pp=2,dp=2", "fsdp", {"microbatches": 2, "stages": ["down"]}),
}


@cache
def program(layout: str, contract: str) -> Program:
    mesh, plan, more = LAYOUTS[layout]
    model, batch, loss = tokens(dropout=0.1)
    preset = Plan(preset=plan, batch=contract)  # type: ignore[arg-type]
    return partc.compile(partc.Traced(model, batch, loss), mesh, plan=preset, **more)


def started(of: Program) -> tuple[Stage, list[Tensor]]:
    """This rank's stage with weights, and what it takes of the batch."""
    model, batch, _ = tokens()
    stage = of.module()
    stage.load_full(model)
    return stage, of.role(dist.get_rank()).pieces(batch, stage.coords)


def outcome(step: Callable[[], Any]) -> str:
    """The loss that a step gives, or the text of its error."""
    try:
        return str(float(step()))
    except RunError as error:
        return str(error)


# one rank differs --------------------------------------------------------------------------------
def step_with(of: Program, fault: str) -> str:
    """What a step gives where the last rank has another batch, weight or seed."""
    stage, batch = started(of)
    if dist.get_rank() == dist.get_world_size() - 1:
        if fault == "batch":
            batch[0] = batch[0].roll(1, 1)
        if fault == "seed":
            stage.seed(7)
        if fault in stage.pieces():
            _, piece = stage.pieces()[fault]
            piece.data.view(-1)[0] += 1e-3
        if fault == "frozen":
            next(stage.parameters()).requires_grad_(False)
    return outcome(lambda: stage.step(*batch))


@pytest.mark.rows(2)
@pytest.mark.parametrize("contract", ["global", "local"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_batch_or_seed(world: Processes, layout: str, contract: str) -> None:
    of = program(layout, contract)
    num, last = of.mesh.num_ranks, of.mesh.num_ranks - 1
    alone = contract == "local" and layout in ("ddp", "fsdp")  # every rank has samples of its own
    for fault, name in [("seed", "seed"), *([] if alone else [("batch", "ids")])]:
        for said in world.run(step_with, of, fault, num=num):
            assert f"rank {last}: another {name}" in said, (fault, said)


@pytest.mark.rows(2)
@pytest.mark.parametrize("layout", ["ddp", "tp", "fsdp+tp", "pp+dp"])
def test_another_weight(world: Processes, layout: str) -> None:
    """Of a weight that is whole on several ranks, and of one of which ranks of tp have copies; and
    what ranks freeze.
    """
    of = program(layout, "local")
    num, last = of.mesh.num_ranks, of.mesh.num_ranks - 1
    for said in world.run(step_with, of, "frozen", num=num):
        assert re.search(rf"rank {last}: another requires_grad of [\w.]+ \(False, not True\)", said)
        assert "Freeze and unfreeze the same parameters on all ranks" in said
        assert "Load the same weights" not in said
    for name in ("head.weight", "down.bias"):
        (shard,) = (x for x in of.role(last).params if x.name == name)
        alone = {axis for axis, *_ in shard.cuts} == {*of.mesh.names}  # nobody else has this piece
        for said in world.run(step_with, of, name, num=num):
            assert (f"rank {last}: another {name}" in said) != alone, said


class Tied(nn.Module):
    """The first layer and the last one have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.mid(self.embed(ids)).tanh())
        return out


def copies_of_a_tied_weight(fault: bool) -> str:
    model, ids = Tied(), torch.arange(8).view(4, 2)
    options: Any = {"plan": "ddp", "microbatches": 2, "stages": ["head"]}
    of = partc.compile(model, "pp=2", (ids,), loss=lambda m, x: m(x).square().mean(), **options)
    stage = of.module()
    if dist.get_rank() == 1 and fault:
        stage.pieces()["embed.weight"][1].data += 1e-3
    return outcome(lambda: stage.step(ids))


@pytest.mark.exhaustive
def test_another_weight_of_two_stages(world: Processes) -> None:
    for said in world.run(copies_of_a_tied_weight, True, num=2):
        assert "rank 1: another embed.weight than rank 0" in said
    assert len({*map(float, world.run(copies_of_a_tied_weight, False, num=2))}) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("contract", ["global", "local"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_ranks_agree(world: Processes, layout: str, contract: str) -> None:
    of = program(layout, contract)
    assert len({*map(float, world.run(step_with, of, "", num=of.mesh.num_ranks))}) == 1


# later steps and other ways to run ---------------------------------------------------------------
def later(of: Program) -> list[str]:
    stage, batch = started(of)
    stage.agreement.every = 3
    said = []
    for number in range(4):
        if dist.get_rank() == 1 and number == 2:  # behind the first two steps; compared at step 3
            stage.pieces()["head.bias"][1].data += 0.1
            stage.pieces()["head.weight"][1].data.mul_(1 + 1e-7)  # as rounding would
        said.append(outcome(lambda: stage.step(*batch)))
    return said


def test_every_nth_step(world: Processes) -> None:
    for said in world.run(later, program("ddp", "local"), num=2):
        assert all(map(float, said[:3]))
        assert "rank 1: another head.bias" in said[3]
        assert "head.weight" not in said[3]


def backwards(of: Program) -> str:
    stage, batch = started(of)
    if dist.get_rank() == 1:
        batch[0] = batch[0].roll(1, 1)
    return outcome(lambda: stage(*batch))


def test_loss_backward_style(world: Processes) -> None:
    assert all(
        "another ids" in said for said in world.run(backwards, program("tp", "local"), num=2)
    )


def refused(of: Program) -> str:
    stage, batch = started(of)
    batch = [x[:1] for x in batch] if dist.get_rank() == 1 else batch
    return outcome(lambda: stage.step(*batch))


def test_a_rank_that_refuses_tells_the_others(world: Processes) -> None:
    first, second = world.run(refused, program("ddp", "local"), num=2)
    assert "rank 1 refused to begin" in first
    assert 'each rank\'s piece of the batch, along dp=2 (batch="local")' in second
    assert "drop_last" in second
    _, second = world.run(refused, program("ddp", "global"), num=2)
    assert 'batch="global"' in second


def pieces_for_wholes(contract: str, given: str, most_programs: int = 32) -> str:
    model, batch, _ = tokens()
    stage = program("ddp", contract).module(most_programs=most_programs)
    stage.load_full(model)
    pieces = program("ddp", "local").role(0).pieces(batch, stage.coords)
    return outcome(lambda: stage.step(*(pieces if given == "pieces" else batch)))


@pytest.mark.exhaustive
def test_the_other_contract_is_named(world: Processes) -> None:
    for said in world.run(pieces_for_wholes, "global", "pieces", num=2):
        assert 'compile with batch="local"' in said
    for said in world.run(pieces_for_wholes, "local", "wholes", 1, num=2):
        assert 'compile with batch="global"' in said
    for said in world.run(pieces_for_wholes, "global", "pieces", 1, num=2):
        assert 'compile with batch="local"' in said


def same_pieces(of: Program) -> list[str]:
    stage, _ = started(of)
    batch = of.role(0).pieces(tokens()[1], dict.fromkeys(of.mesh.names, 0))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        stage.step(*batch)
    return [str(each.message) for each in seen if "DistributedSampler" in str(each.message)]


@pytest.mark.exhaustive
def test_a_missing_sampler_is_named(world: Processes) -> None:
    for said in world.run(same_pieces, program("fsdp+tp", "local")):
        assert len(said) == 1
        assert "ranks 0, 1, 2, 3 were given the same samples" in said[0]


def near(model: nn.Module, x: Tensor, table: Tensor) -> Tensor:
    """The distances of samples from a table that has as many rows as a rank has samples."""
    mean: Tensor = torch.cdist(model(x), table).softmax(1).square().sum(1).mean()
    return mean


def with_table(plan: str, table: str) -> tuple[list[str], float]:
    torch.manual_seed(0)
    model: Any = partc.parallelize(nn.Linear(8, 4).double(), "dp=2", loss=near, plan=plan)
    x, rows = torch.randn(8, 8).double(), torch.randn(4, 4).double()
    given = {"table": rows, "ones": torch.ones_like(rows), "own": rows + dist.get_rank()}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss = model.step(x.chunk(2)[dist.get_rank()], given[table])
    return [
        str(each.message) for each in seen if "given the same" in str(each.message)
    ], loss.item()


@pytest.mark.exhaustive
def test_a_table_that_is_taken_for_samples_is_named(world: Processes) -> None:
    (said, wrong), _ = world.run(with_table, "ddp", "table", num=2)
    assert len(said) == 1
    assert "given the same table" in said[0]
    advised = 'preset = "ddp"\n[inputs]\n"table" = {}'
    assert repr(advised)[1:-1] in said[0]
    (said, right), _ = world.run(with_table, advised, "table", num=2)
    assert not said
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()
    x, rows = torch.randn(8, 8).double(), torch.randn(4, 4).double()
    assert right == pytest.approx(near(model, x, rows).item(), rel=1e-12)
    assert right != pytest.approx(wrong, rel=1e-3)
    for given in ("ones", "own"):
        assert not any(said for said, _ in world.run(with_table, "ddp", given, num=2))


# DTensors and DDP --------------------------------------------------------------------------------
def of_dtensors(of: Program, placements: Sequence[Any]) -> tuple[str, str]:
    stage, batch = started(of)
    plain = outcome(lambda: stage.step(*batch))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    stage.zero_grad()
    stage.seed(0)
    given = [DTensor.from_local(x, mesh, placements) for x in batch]
    return plain, outcome(lambda: stage.step(*given))


def test_dtensors(world: Processes) -> None:
    of = program("fsdp+tp", "local")
    for plain, given in world.run(of_dtensors, of, (Shard(0), Replicate())):
        assert float(plain) == float(given)
    for _, said in world.run(of_dtensors, of, (Replicate(), Replicate())):
        assert "it is a DTensor with placements" in said


def whole(x: Any) -> Tensor:
    full: Tensor = x.full_tensor()
    return full


def beside_ddp(of: Program) -> tuple[float, float, float]:
    """The mean of DDP's losses, the program's loss, and the largest difference of a gradient."""
    model, batch, loss = tokens(8)
    pieces = [x.clamp(min=4) for x in of.role(0).pieces(batch, {"dp": dist.get_rank()})]
    usual = DistributedDataParallel(model)
    mine = loss(usual, *pieces)
    mine.backward()
    dist.all_reduce(mean := mine.detach().clone())
    stage = of.module()
    stage.load_full(model)
    ours = stage.step(*pieces)
    grads = {n: p.grad for n, p in model.named_parameters()}
    found = {n: whole(p.grad) for n, p in stage.named_parameters()}
    worst = max(float((found[n] - g).abs().max()) for n, g in grads.items() if g is not None)
    return float(mean) / 2, float(ours), worst


def test_ddps_contract(world: Processes) -> None:
    model, batch, loss = tokens()
    mine = tuple(x.chunk(2)[0] for x in batch)
    of = partc.compile(model, "dp=2", mine, loss=loss, plan="ddp", batch="local")
    for usual, ours, worst in world.run(beside_ddp, of, num=2):
        assert abs(usual - ours) < 1e-5
        assert worst < 1e-6


# numbers of tensors ------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [lambda x: hashes_of([x])[0], lambda x: int(on_device(x))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_numbers_of_tensors(number: Callable[[Tensor], int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (
        torch.randn(7, 5).to(dtype)
        if dtype.is_floating_point
        else torch.randint(2, (7, 5)).to(dtype)
    )
    assert number(x) == number(x.clone())
    assert number(x) == number(x.t().contiguous().t())
    others = [x.flatten().flip(0).view(7, 5), x.roll(1, 0), x.roll(1, 1), x[:-1]]
    swapped = x.clone()
    first, other = 0, int((x.flatten() != x[0, 0]).nonzero()[0])
    swapped.view(-1)[[first, other]] = x.flatten()[[other, first]]
    assert number(x) not in [number(each) for each in (*others, swapped)]


def test_bits_show() -> None:
    zero, minus = torch.zeros(3), -torch.zeros(3)
    quiet = torch.tensor([float("nan")])
    other = (quiet.view(torch.int32) + 1).view(torch.float32)
    numbers: list[Callable[[Tensor], int]] = [
        lambda x: hashes_of([x])[0],
        lambda x: int(on_device(x)),
    ]
    for number in numbers:
        assert number(zero) != number(minus)
        assert number(quiet) == number(quiet.clone())
        assert number(quiet) != number(other)
    assert joined([1, 2]) != joined([2, 1])
    assert hashes_of([torch.empty(0)]) == hashes_of([torch.empty(0)])


def test_sketches_tell_rounding_from_training() -> None:
    x = torch.randn(1000)
    (product, norm), (near, _), (far, _) = map(sketch_of, (x, x * (1 + 1e-7), x + 0.01))
    assert abs(product - near) < 3e-4 * norm
    assert abs(product - far) > 3e-4 * norm


def test_a_comparison_is_cheap() -> None:
    x = torch.randn(1_000_000)
    hashes_of([x])
    start = time.process_time()
    hashes_of([x])
    assert time.process_time() - start < 0.1  # 4 MB; reading them once takes a millisecond


def pieces_of_two_models(layout: str, same: bool) -> str:
    """The loss where the last rank loads a model that it has seeded otherwise."""
    stage, batch = started(program(layout, "local"))
    state = tokens()[0].state_dict()  # which seeds as well
    last = dist.get_rank() == dist.get_world_size() - 1
    torch.manual_seed(int(last and not same))
    stage.load_full({n: torch.randn_like(x) for n, x in state.items()})
    return outcome(lambda: stage.step(*batch))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["fsdp", "tp", "fsdp+tp", "pp", "pp+dp", "pp+fsdp"])
def test_pieces_of_different_models_are_not_joined(world: Processes, layout: str) -> None:
    num = program(layout, "local").mesh.num_ranks
    for said in world.run(pieces_of_two_models, layout, False, num=num):
        assert "Load the same weights on all ranks" in said, said
        assert {*re.findall(r"(ranks? [0-9, ]+): another", said)} == {f"rank {num - 1}"}, said
    right = world.run(pieces_of_two_models, layout, True, num=num)
    assert float(right[0]) == float(right[-1])


def head_of_one_rank(of: Program) -> str:
    """The last rank alone loads other weights into its own stage, as for another task."""
    stage, batch = started(of)
    if dist.get_rank() == dist.get_world_size() - 1:
        stage.load_state_dict({"head.bias": torch.ones(32)}, strict=False)
    return outcome(lambda: stage.step(*batch))


def test_a_stage_may_load_weights_of_its_own(world: Processes) -> None:
    """No other rank trains them, and what those were given before says nothing of them."""
    both = world.run(head_of_one_rank, program("pp", "local"), num=2)
    assert len({*map(float, both)}) == 1
