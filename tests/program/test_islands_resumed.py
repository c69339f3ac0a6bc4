"""A training of islands goes on: from checkpoints, on other meshes, with other tables and seeds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.api import compile
from partc.errors import RunError
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.program.island_runs import (
    DILOCO,
    MEAN,
    OVERLAPPED,
    PAIRS,
    STREAMING,
    Deep,
    Net,
    batch,
    begin,
    loss,
    made,
    train,
)

pytestmark = pytest.mark.gloo


def held(stage: Stage) -> dict[str, Tensor]:
    return {name: piece.detach().clone() for name, (_, piece) in stage.pieces().items()}


CUTS = range(2, 6)  # behind every step of a period


def resumes(folder: Path, mesh: str, preset: str, own: str, kind: type[nn.Module]) -> None:
    """Bit for bit, from checkpoints that one run saves as it goes."""
    whole, saving = begin(mesh, preset, own, kind), begin(mesh, preset, own, kind)
    losses = train(*whole, range(8))
    theirs, saved = held(whole[0]), []
    for step in range(max(CUTS)):
        saved += train(*saving, range(step, step + 1))
        if step + 1 in CUTS:
            saving[0].full_state_dict()  # reading changes nothing
            save_checkpoint(folder, *saving, step=step + 1)
    assert saved == losses[: len(saved)]
    for cut in CUTS:
        again = begin(mesh, preset, own, kind)
        assert load_checkpoint(folder / f"step-{cut:08d}", *again) == cut
        assert train(*again, range(cut, 8)) == losses[cut:]
        assert all(torch.equal(x, theirs[name]) for name, x in held(again[0]).items())


def mean_of(folder: Path) -> dict[str, Tensor]:
    stage, optimizer = begin("island=2,dp=2", "ddp", MEAN)
    load_checkpoint(folder, stage, optimizer)
    return stage.full_state_dict()


def on_one_island(folder: Path, mesh: str, own: str, wanted: dict[str, Tensor]) -> None:
    """Ranks without islands, or other islands, begin from the mean of what islands have saved."""
    if own:
        stage, optimizer = begin(mesh, "ddp", own)
    else:
        stage = compile(made(Net), mesh, batch(0, 0), loss=loss, plan="ddp").module()
        optimizer = torch.optim.AdamW([p for p in stage.parameters() if p.requires_grad], lr=1e-2)
    load_checkpoint(folder, stage, optimizer)
    for name, tensor in stage.full_state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-12, atol=1e-12)
    for name, (_, piece) in stage.pieces().items():
        if name.endswith("_outer@island"):
            param = stage.pieces()[name.removesuffix("_outer@island")][1]
            assert torch.equal(piece, param)
    stage.step(*batch(0, 0))


WIRE = STREAMING + '\nstart_step = 2\nwire = "fp8"\nblock = 16'


FSDP = "island=2,dp=2", "fsdp", Net
STAGES = "island=2,pp=2", "ddp;microbatches = 2", Deep
Layouts = list[tuple[str, str, Any]]
# Sums that are under way are kept by piece, and by stage.
RESUMED: dict[str, tuple[str, Layouts]] = {
    "overlapped": (OVERLAPPED, [FSDP, STAGES]), "mean": (MEAN, [STAGES]),
    "diloco": (DILOCO, [FSDP]), "streaming": (WIRE, [FSDP]), "pairs": (PAIRS, [STAGES]),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RESUMED)
def test_training_resumes_behind_any_step(world: Processes, tmp_path: Path, name: str) -> None:
    own, layouts = RESUMED[name]
    for number, (mesh, preset, kind) in enumerate(layouts):
        world.run(resumes, tmp_path / f"{number}", mesh, preset, own, kind)


def saves(folder: Path) -> None:
    """Behind a step at which islands have not met."""
    began = begin("island=2,dp=2", "ddp", MEAN)
    train(*began, range(5))
    assert not agree(began[0])
    save_checkpoint(folder, *began, step=5)


@pytest.mark.exhaustive
def test_other_meshes_begin_from_the_mean(world: Processes, tmp_path: Path) -> None:
    world.run(saves, tmp_path)
    [wanted, *_] = world.run(mean_of, tmp_path)
    world.run(on_one_island, tmp_path, "dp=2", "", wanted, num=2)
    world.run(on_one_island, tmp_path, "island=4", MEAN, wanted)
    world.run(on_one_island, tmp_path, "island=2,dp=2", DILOCO, wanted)


def agree(stage: Stage) -> bool:
    """Whether all islands have the same parameters, up to rounding."""
    mine = {
        n: p.detach().clone()
        for n, (_, p) in stage.pieces().items()
        if n in dict(stage.named_parameters())
    }
    whole = stage.full_state_dict()
    return all(torch.allclose(x, whole[n], rtol=1e-12, atol=1e-14) for n, x in mine.items())


class Told(logging.Handler):
    """What was logged."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def changed(folder: Path, first: str, then: str) -> None:
    """A training goes on with another table: its islands begin from their mean, and agree again."""
    began = begin("island=2,dp=2", "ddp", first)
    train(*began, range(4))
    save_checkpoint(folder, *began, step=4)
    again = begin("island=2,dp=2", "ddp", then)
    told = Told()
    logging.getLogger("partc").addHandler(told)
    load_checkpoint(folder, *again)
    dropped = "nesterov" in first and dist.get_rank() == 0
    assert dropped == ("that is dropped" in told.text)
    assert agree(again[0])
    for step in range(4, 14):
        losses = train(*again, range(step, step + 1))
        assert torch.tensor(losses).isfinite().all()
    again[0].seed(0, step=12)
    again[0].meet_islands()
    assert agree(again[0]) or "overlap" in then


OTHERS = [
    (MEAN, 'period = 2\nouter = "nesterov"'),
    ('period = 3\nouter = "nesterov"\nstart_step = 9', 'period = 3\nouter = "nesterov"'),
    ('period = 3\nouter = "nesterov"', 'period = 3\nouter = "nesterov"\nstart_step = 6'),
    ('period = 4\nouter = "nesterov"', 'period = 4\nouter = "nesterov"\noverlap = 1'),
    ('period = 4\nouter = "nesterov"\noverlap = 3', 'period = 4\nouter = "nesterov"'),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_another_table_begins_from_the_mean(world: Processes, tmp_path: Path, number: int) -> None:
    world.run(changed, tmp_path, *OTHERS[number])


def reseeded(own: str) -> None:
    """A seed in the middle counts anew: islands meet at its first step."""
    stage, optimizer = begin("island=2,dp=2", "ddp", own)
    train(stage, optimizer, range(5))
    assert not agree(stage)
    for epoch in range(2):
        stage.seed(epoch)
        stage.meet_islands()
        assert agree(stage)
        train(stage, optimizer, range(2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("own", ["period = 4", 'period = 4\nouter = "nesterov"'])
def test_islands_meet_where_the_count_begins(world: Processes, own: str) -> None:
    world.run(reseeded, own)


def other_weights() -> str:
    stage, _ = begin("island=2,dp=2", "ddp", MEAN)
    torch.manual_seed(stage.coords["island"])
    stage.load_full(Net().double())
    try:
        stage.step(*batch(0, 0))
    except RunError as error:
        return str(error)
    return ""


def test_islands_begin_with_equal_weights(world: Processes) -> None:
    assert all("another" in said for said in world.run(other_weights))


def begun_again() -> dict[str, Tensor]:
    """Islands that have met behind step 4, and begin anew with steps before the first meeting."""
    stage, optimizer = begin("island=2,dp=2", "ddp", "period = 2\nstart_step = 4", Deep)
    train(stage, optimizer, range(5))
    stage.seed(1)
    train(stage, optimizer, range(4))
    stage.meet_islands()
    return held(stage)


@pytest.mark.exhaustive
def test_islands_that_begin_anew_meet_anew(world: Processes) -> None:
    first, *others = world.run(begun_again, num=4)
    for other in others:
        for name, tensor in first.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-12, atol=1e-12)
