"""A run that loses ranks and gets them back: the same global batches, whatever the world."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import partc
from partc.verification.processes import Processes

pytestmark = pytest.mark.gloo
ROWS = 12  # of a step, of all ranks together: 2, 3 and 4 divide it
LENGTH = 8


def model_of() -> nn.Module:
    """The example's transformer, without dropout."""
    from examples.train import Model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model(layers=1, width=16, length=LENGTH)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def part(folder: Path, plan: str, num: int, until: int) -> list[float]:
    """The losses of the steps up to one, on as many ranks, from the newest checkpoint on."""
    from examples.train import loss_of

    torch.backends.mha.set_fastpath_enabled(False)
    numbers = torch.randint(256, (40, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(numbers[:, :-1], numbers[:, 1:])
    example = tuple(x[:ROWS] for x in rows.tensors)
    mesh = f"dp={num}"
    stage = partc.compile(model_of(), mesh, example, loss=loss_of, plan=plan).module()
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    loader = stage.loader(rows, seed=3)
    losses = []
    with partc.Checkpoints(folder, interval=3) as checkpoints:
        states = {"scheduler": scheduler}
        start = checkpoints.load_latest(stage, optimizer, loader=loader, states=states)
        batches = chain.from_iterable(repeat(loader))
        for step, batch in zip(range(start + 1, until + 1), batches, strict=False):
            losses.append(stage.step(*batch).item())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            checkpoints.save(step, stage, optimizer, loader=loader, states=states)
    return losses


@pytest.mark.rows(1)
@pytest.mark.parametrize("plan", ["fsdp", "zero1"])
def test_a_run_on_4_3_2_and_4_ranks_has_the_losses_of_one_on_4(
    plan: str, world: Processes, tmp_path: Path
) -> None:
    whole = world.run(part, tmp_path / "whole", plan, 4, 12, num=4)[0]
    assert whole[-1] < whole[0] - 0.2
    parts = []
    for num, until in ((4, 3), (3, 6), (2, 9), (4, 12)):
        parts += world.run(part, tmp_path / "parts", plan, num, until, num=num)[0]
    assert len(parts) == len(whole)
    assert parts == pytest.approx(whole, abs=1e-5)
