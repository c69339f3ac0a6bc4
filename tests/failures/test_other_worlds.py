"""A run that loses ranks and gets them back: the same global batches, whatever the world.

``python -m tests.failures.test_other_worlds STEPS`` makes a long run of it, and prints how far the
losses are from those of the run on 4 ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import partc
from partc.program import Program
from partc.program.stage.runtime import Stage
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
    return trained(compiled(num, plan).module(), folder, until)


def part_of_build(folder: Path, build: Path, until: int) -> list[float]:
    """The same by a saved program."""
    return trained(partc.load(build, model_of()).module(), folder, until)


@pytest.fixture(autouse=True)
def attention() -> Iterator[None]:
    """What ``compiled`` switches off is as it was behind a test."""
    before = torch.backends.mha.get_fastpath_enabled()
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def rows_of_data() -> TensorDataset:
    numbers = torch.randint(256, (40, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(numbers[:, :-1], numbers[:, 1:])


def compiled(num: int, plan: str) -> Program:
    from examples.train import loss_of

    torch.backends.mha.set_fastpath_enabled(False)
    example = tuple(x[:ROWS] for x in rows_of_data().tensors)
    return partc.compile(model_of(), f"dp={num}", example, loss=loss_of, plan=plan)


def trained(stage: Stage, folder: Path, until: int) -> list[float]:
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    loader = stage.loader(rows_of_data(), seed=3)
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


@pytest.mark.exhaustive
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


def replanned(folder: Path, plan: str) -> dict[int, Path]:
    """Saved programs by their number of ranks, each made of the one before: on 4, 3, 2, and 4."""
    from examples.train import loss_of

    builds = {4: folder / "build-4"}
    compiled(4, plan).save(builds[4])
    before = builds[4]
    for num in (3, 2, 4):
        model = model_of()
        made = partc.replan(partc.with_model(partc.load(before), model, loss_of), num)
        before = builds[num] = folder / f"build-{num}-of-{before.name}"
        made.save(before)
    return builds


def losses_by_builds(world: Processes, folder: Path, plan: str, every: int) -> tuple[Any, Any]:
    """The losses of a run on 4 ranks, and of one on 4, 3, 2, and 4 ranks, so many steps on each."""
    builds = replanned(folder, plan)
    whole = world.run(part_of_build, folder / "whole", folder / "build-4", 4 * every, num=4)[0]
    parts: list[float] = []
    for times, num in enumerate((4, 3, 2, 4), 1):
        build = folder / "build-4" if times == 1 else builds[num]
        parts += world.run(part_of_build, folder / "parts", build, times * every, num=num)[0]
    return whole, parts


def test_a_run_by_replanned_programs_has_the_losses_of_one_on_4(
    world: Processes, tmp_path: Path
) -> None:
    whole, parts = losses_by_builds(world, tmp_path, "fsdp", 3)
    assert whole[-1] < whole[0] - 0.2
    assert len(parts) == len(whole)
    assert parts == pytest.approx(whole, abs=1e-5)


def main(steps: int) -> None:
    """A run of about so many steps, a quarter of them on each world."""
    every = max(3, steps // 12 * 3)
    with Processes(4, timeout=60.0 * steps) as world, TemporaryDirectory() as folder:
        whole, parts = losses_by_builds(world, Path(folder), "fsdp", every)
    worst = max(abs(a - b) for a, b in zip(whole, parts, strict=True))
    print(f"{len(whole)} steps, loss {whole[0]:.4f} to {whole[-1]:.4f}, differs by {worst:.1e}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
