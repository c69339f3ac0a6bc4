"""Every pass that is called optional can be left out: the program is another one, and right."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PlanError, UsageError
from partc.lowering import PASSES
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.verification.verification import verify
from tests.pairs import FAST, SLOW, in_pairs

WIDTH, WORDS = 16, 24
IDS = torch.arange(8 * 6).view(8, 6) % WORDS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


class Words(nn.Module):
    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.last = nn.BatchNorm1d(WIDTH) if normed else nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.last(x.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids)
    return loss


@cache
def step(normed: bool = False) -> partc.Traced:
    torch.manual_seed(0)
    return partc.Traced(Words(normed).double(), (IDS,), loss_of)


ONE_STAGE = ("dp=2,tp=2", "fsdp+megatron", 1)
PAIRS = ("dp_replicate=2,dp_shard=2", "ddp", 1)
PIPELINE = ("pp=2,dp_replicate=2,dp_shard=2", "ddp", 2)
WHERE = {  # each pass where it does something: mesh, plan, microbatches
    "fuse_loss": ONE_STAGE,
    "fuse_bias": ONE_STAGE,
    "stack_sums": ONE_STAGE,
    "recompute": ONE_STAGE,
    "share_gathers": ONE_STAGE,
    "bucket_collectives": ONE_STAGE,
    "overlap_collectives": ONE_STAGE,
    "hierarchical_all_reduce": PAIRS,
    "hierarchical_per_stage": PIPELINE,
}
NORMED = {"stack_sums"}  # passes that need the last batch norm
ALL = {each.name for each in PASSES if each.optional}


@cache
def compiled(where: tuple[str, str, int], *disable: str, normed: bool = False) -> Program:
    axes, plan, microbatches = where
    mesh = in_pairs(axes, FAST, SLOW) if "replicate" in axes else Mesh.parse(axes)
    return partc.compile(step(normed), mesh, plan=plan, microbatches=microbatches, disable=disable)


def check(program: Program, normed: bool = False) -> None:
    verify(program, step(normed).model, (IDS,), loss_of).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(ALL))
def test_without_one(name: str) -> None:
    normed = name in NORMED
    program = compiled(WHERE[name], name, normed=normed)
    assert program.sources != compiled(WHERE[name], normed=normed).sources
    check(program, normed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", [ONE_STAGE, PIPELINE], ids=lambda where: str(where[0]))
def test_without_all(where: tuple[str, str, int]) -> None:
    check(compiled(where, *sorted(ALL)))


def test_the_plan_says_what_was_left_out() -> None:
    left_out = ["fuse_bias", "hierarchical_per_stage"]  # the second is for pipelines alone
    program = compiled(ONE_STAGE, *left_out)
    assert program.plan.startswith("# left out: fuse_bias\n")
    again = partc.compile(step(), ONE_STAGE[0], plan=program.plan, disable=left_out)
    assert (again.plan, again.sources) == (program.plan, program.sources)
    with pytest.raises(PlanError, match="made without the pass fuse_bias"):
        partc.compile(step(), ONE_STAGE[0], plan=program.plan)
    assert not compiled(ONE_STAGE).plan.startswith("#")


def test_what_is_needed_stays() -> None:
    needed = [each.name for each in PASSES if each.own and not each.optional]
    for name in needed:
        with pytest.raises(UsageError, match=f"pass {name}: it cannot be left out"):
            compiled(ONE_STAGE, name)
