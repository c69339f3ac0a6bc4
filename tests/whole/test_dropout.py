"""Dropout on several ranks: pieces get masks of their own, copies equal ones, and the share is
right.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.verification.threads import ThreadMesh, run_ranks

MESH = Mesh.of("dp=2,tp=2")
ROWS, WIDTH, P = 8, 512, 0.25


class Net(nn.Module):
    """Dropout on what tp cuts (hidden) and on what it does not (the result)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = nn.functional.dropout(self.up(x), P)
        return hidden, nn.functional.dropout(self.down(hidden), P)


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.no_grad():
        return partc.compile(Net(), MESH, (torch.ones(ROWS, WIDTH),), plan="ddp+megatron")


def results(program: Program, seed: int) -> list[dict[str, Tensor]]:
    """What each rank returns for weights under which nothing but a mask is zero."""

    def run(rank: int, dist: object) -> dict[str, Tensor]:
        role = program.role(rank)
        role.module.dist = dist  # type: ignore[attr-defined]
        step = role.module.Step(ThreadMesh(MESH, rank))
        with torch.no_grad():
            for param in step.parameters():
                param.fill_(1.0)
            step.seed(seed)
            found: dict[str, Tensor] = step(torch.ones(ROWS, WIDTH))
        return found

    return run_ranks(MESH.num_ranks, run)


def test_copies_are_equal_and_pieces_differ(program: Program) -> None:
    ranks = results(program, seed=1)
    for name in ranks[0]:
        assert all(torch.equal(r[name], ranks[0][name]) for r in ranks), name
    hidden, out = (mask != 0 for mask in ranks[0].values())
    half = ROWS // 2, WIDTH // 2
    assert not torch.equal(hidden[: half[0]], hidden[half[0] :])  # pieces over dp
    assert not torch.equal(hidden[:, : half[1]], hidden[:, half[1] :])  # pieces over tp
    assert not torch.equal(out[: half[0]], out[half[0] :])


def test_the_share_and_the_scale_are_right(program: Program) -> None:
    hidden, _ = results(program, seed=2)[0].values()
    kept = (hidden != 0).double().mean().item()
    deviation = (P * (1 - P) / hidden.numel()) ** 0.5
    assert abs(kept - (1 - P)) < 5 * deviation
    scaled = hidden[hidden != 0]
    torch.testing.assert_close(scaled, torch.full_like(scaled, WIDTH / (1 - P)))


def test_seeds_decide(program: Program) -> None:
    one, same, other = (results(program, seed)[0] for seed in (3, 3, 4))
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not any(torch.equal(one[n], other[n]) for n in one)


# pipelines ----------------------------------------------------------------------------------------
MICROBATCHES = 4
PIPELINE = Mesh.of("pp=2,dp=2,tp=2")


class Stack(nn.Module):
    """Two blocks without biases or norms: the loss is linear in every weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Block(nn.Module):
    """Dropout on what dp and microbatches cut, and tp does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.down(self.up(x)), P)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_pipelines(schedule: str) -> None:
    """Every microbatch, stage and piece over dp has a mask of its own, copies over tp the same,
    and the backward of a microbatch reads the masks of its forward.
    """
    x = torch.ones(ROWS * MICROBATCHES, WIDTH, dtype=torch.float64)
    program = partc.compile(
        Stack().double(),
        PIPELINE,
        (x,),
        loss=lambda model, x: model(x),
        plan=Plan(preset="ddp+megatron", stages=("blocks.1",)),
        microbatches=MICROBATCHES,
        schedule=schedule,
    )

    def run(rank: int, dist: object) -> tuple[list[Tensor], float, list[float]]:
        role = program.role(rank)
        module: Any = role.module
        module.dist = dist
        masks: list[Tensor] = []
        drawn = module.dropout_mask

        def noted(*args: Any) -> Tensor:
            masks.append(drawn(*args))
            return masks[-1].clone()

        module.dropout_mask = noted
        step = module.Step(ThreadMesh(PIPELINE, rank))
        with torch.no_grad():
            for param in step.parameters():
                param.fill_(1 / WIDTH)
        step.seed(1)
        loss = float(step.step(x))
        shares = [float((p.detach() * p.grad).sum()) for p in step.parameters()]
        return masks, loss, shares

    ranks = run_ranks(PIPELINE.num_ranks, run)
    for first, twin in zip(ranks[::2], ranks[1::2], strict=True):  # tp is the last axis
        assert all(map(torch.equal, first[0], twin[0]))
    different = [mask for masks, *_ in ranks[::2] for mask in masks]
    assert len(different) == 4 * MICROBATCHES  # pp x dp x microbatches
    assert not any(torch.equal(a, b) for a, b in combinations(different, 2))
    for first, twin in zip(ranks[::2], ranks[1::2], strict=True):
        for one, other in zip(first[2], twin[2], strict=True):  # the halves of a weight
            assert abs(one + other - first[1]) < 1e-9 * first[1]


class DroppedWeight(nn.Module):
    """A parametrization that drops elements of a weight, or adds noise to it."""

    def __init__(self, noise: bool) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, weight: Tensor) -> Tensor:
        noise = torch.randn_like(weight) if self.noise else nn.functional.dropout(weight, P)
        return weight + noise


class Listed(nn.Module):
    """Layers in a list, of which one has a random weight."""

    def __init__(self, noise: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        drops = DroppedWeight(noise)
        nn.utils.parametrize.register_parametrization(self.layers[2], "weight", drops)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.exhaustive
@pytest.mark.parametrize("noise", [False, True])
def test_a_random_weight_is_made_again_on_its_stage(noise: bool) -> None:
    model, batch = Listed(noise), (torch.randn(8, 8),)
    options: Any = {"plan": "ddp", "microbatches": 2, "recompute": "block"}
    program = partc.compile(model, "pp=2", batch, loss=lambda m, x: m(x).sum(), **options)
    partc.verify(program, model, batch, loss=lambda m, x: m(x).sum()).check()
