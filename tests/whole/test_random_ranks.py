"""Random numbers on stages, in checkpointed regions, and on real processes that go on later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import partc
from partc.errors import CheckError
from partc.lowering import trace
from partc.program import Program
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.verification.processes import Processes
from partc.verification.threads import ThreadMesh, run_ranks
from partc.verification.verification import verify
from tests.patience import patience
from tests.texts import with_role
from tests.whole.test_random import WIDTH, batch, keys, loss_of


class Denoiser(nn.Module):
    """Each stage takes off some of the noise; the loss is 0 if all have the same noise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        noisy = x + noise
        for block in self.blocks:
            noisy = noisy + 0 * block(noisy) - noise / 3
        return (noisy - x).square().mean()


@pytest.mark.rows(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_all_stages_read_the_same_noise(schedule: str) -> None:
    x, _ = batch()
    program = partc.compile(
        Denoiser(), "pp=3,dp=2", (x,), plan="ddp", microbatches=4, schedule=schedule
    )
    found = verify(program, Denoiser(), (x,))
    assert found.ok()
    losses = run_losses(program, (x,))
    assert max(losses) < 1e-12
    drawn = keys(program, inputs=(x,))
    for rank in (0, 1):  # dp
        first = set(drawn[rank])
        assert len(first) == 4  # microbatches
        assert all(set(drawn[stage * 2 + rank]) == first for stage in range(3))
    assert set(drawn[0]).isdisjoint(drawn[1])


def run_losses(program: Program, inputs: tuple[Tensor, ...]) -> list[float]:
    def run(rank: int, dist: object) -> float:
        role = program.role(rank)
        role.module.dist = dist  # type: ignore[attr-defined]
        step: Any = role.build(ThreadMesh(program.mesh, rank))
        for param in step.parameters():
            param.data.fill_(0.01)
        return float(step.step(*inputs))

    return run_ranks(program.mesh.num_ranks, run)


class Checkpointed(nn.Module):
    """A gate whose chances are learned, in a checkpoint: its backward runs the block again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        def gated(block: nn.Module, x: Tensor) -> Tensor:
            p = torch.sigmoid(block(x))
            return x + p * torch.bernoulli(p.detach()) + F.dropout(p, 0.3)

        for block in self.blocks:
            x = checkpoint(gated, block, x, use_reentrant=False)
        return x


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), [("dp=2", "fsdp"), ("tp=2", "megatron")])
def test_a_checkpointed_region_draws_once(mesh: str, plan: str) -> None:
    model = Checkpointed()
    graph = trace(model, batch(), loss_of)
    assert len(graph.sites) == 4
    program = partc.compile(model, mesh, batch(), loss=loss_of, plan=plan)
    assert verify(program, model, batch(), loss_of).ok()


class Shared(nn.Module):
    """One dropout for all blocks, and noise that is made between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.dropout(block(x)) + torch.randn(WIDTH) / 8
        return x


@pytest.mark.exhaustive
def test_draws_between_blocks_belong_to_them_and_the_loop_stays() -> None:
    model = Shared()
    for mesh, plan, num in (("dp=2", "fsdp", 1), ("pp=2", "ddp", 2)):
        program = partc.compile(model, mesh, batch(), loss=loss_of, plan=plan, microbatches=num)
        assert verify(program, model, batch(), loss_of).ok()
    assert "blocks.5.dropout" in program.draws
    assert program.draws["blocks.5.dropout"].name == "dropout#5"
    assert program.source(0).count("dropout_mask(") < 5


def test_a_wrong_place_is_caught() -> None:
    x, y = batch()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    program = partc.compile(model, "dp=2", (x, y), loss=loss_of, plan="ddp")
    text, place = program.source(), 'self.rng("1.bernoulli", self.dp_rank)'
    assert text.count(place) == 1
    text = text.replace(place, place.replace("self.dp_rank", "0"))
    wrong = with_role(program, text)
    with pytest.raises(CheckError, match=r"0\.weight"):
        verify(wrong, model, (x, y), loss_of).check()


# real processes -----------------------------------------------------------------------------------
class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.rand_like(x)
        for block in self.blocks:
            x = x + F.dropout(torch.tanh(block(x)), 0.2)
        return x


def go_on(program: Program, folder: Path) -> tuple[list[float], list[float], float]:
    """Losses 3 and 4 without a break, and after a checkpoint; how far replicas are apart."""
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())  # what a process seeds does not matter
    losses: list[list[float]] = []
    for resumed in (False, True):
        stage = program.module()
        stage.load_full({name: torch.full(spec.shape, 0.02) for name, spec in shapes(program)})
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        stage.seed(5)
        if resumed:
            assert load_checkpoint(folder, stage, optimizer) == 2
            assert stage.seeded == (5, 2)
        found = []
        for number in range(2 if resumed else 0, 4):
            if number == 2 and not resumed:
                save_checkpoint(folder, stage, optimizer, step=2)
            optimizer.zero_grad()
            found.append(float(stage.step(*batch())))
            optimizer.step()
        losses.append(found[-2:])
    apart = 0.0
    for shard, piece in stage.pieces().values():
        if not shard.cuts:
            low, high = piece.detach().clone(), piece.detach().clone()
            group = stage.groups[stage.mesh.names[-1]]
            dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
            dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
            apart = max(apart, float((high - low).abs().max()))
    return losses[0], losses[1], apart


def shapes(program: Program) -> Any:
    return program.fingerprint.tensors.items()


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "plan", "options"),
    [("pp=2,dp=2", "ddp", {"microbatches": 2}), ("dp=2,tp=2", "ddp+megatron", {})],
)
def test_processes_draw_alike_and_go_on_from_a_checkpoint(
    world: Processes, mesh: str, plan: str, options: dict[str, Any], tmp_path: Path
) -> None:
    program = partc.compile(Small(), mesh, batch(), loss=loss_of, plan=plan, **options)
    for whole, resumed, apart in world.run(go_on, program, tmp_path):
        assert whole == resumed
        assert apart == 0.0
    if options:
        assert verify(program, Small(), batch(), loss_of, processes=True, timeout=patience()).ok()
