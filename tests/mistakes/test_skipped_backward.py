"""A rank that leaves out, or repeats, a half of a step whose loss the script computes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import partc
from partc.errors import RunError
from partc.verification.processes import Processes
from tests.mistakes.things import Net

pytestmark = pytest.mark.gloo
AT = 3  # the step at which a rank does something else


def trained(mesh: str, plan: str, how: str) -> str:
    """What five steps end with, and one more behind them."""
    torch.manual_seed(0)
    model = partc.parallelize(Net(), mesh, plan=plan, batch="global")
    optimizer, other = torch.optim.SGD(model.parameters(), 0.1), dist.get_rank() == 1

    def loss() -> torch.Tensor:
        x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
        return nn.functional.mse_loss(model(x), y)

    said = "no error"
    try:
        for step in range(5):
            found, odd = loss(), other and step == AT
            if odd and how == "skips":
                continue
            if odd and how == "repeats":
                loss()
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
    except RunError as error:
        said = f"{step}: {error}"
    loss().backward()  # all ranks are where they were
    return said


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("mesh", "plan"), [("dp=2", "ddp"), ("dp=2", "fsdp"), ("tp=2", "megatron")]
)
@pytest.mark.parametrize("how", ["skips", "repeats"])
def test_all_ranks_name_who_does_something_else(
    world: Processes, mesh: str, plan: str, how: str
) -> None:
    for rank, said in enumerate(world.run(trained, mesh, plan, how, num=2)):
        at = AT + (rank == 1 and how == "skips")
        assert f"{at}: a call of all ranks: ranks differ in what they run" in said
        assert "ranks 0: loss.backward(); ranks 1: step in train mode" in said
        assert "by which it leaves the loop or skips a batch" in said


def test_ranks_that_do_the_same_are_left_alone(world: Processes) -> None:
    assert world.run(trained, "dp=2", "fsdp", "as all", num=2) == ["no error"] * 2
