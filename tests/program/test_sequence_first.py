"""What stages of sequence-first models return in eval mode: the batch of their inputs is dim 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.verification.processes import Processes
from tests.program.families import begun, close

pytestmark = pytest.mark.gloo


class Recurrent(nn.Module):
    """An LSTM in torch's usual layout, ``f64[7,8,3]`` for 8 sequences of 7 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0])
        return y


class Encoder(nn.Module):
    """An encoder with a mask of the steps that are padding, ``bool[8,7]``, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(self.first(x), src_key_padding_mask=padded))
        return y


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    return Recurrent().double()


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder().double()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def by_another_name(model: nn.Module, seqs: Tensor, labels: Tensor) -> Tensor:
    return loss_of(model, seqs, labels)


def masked(model: nn.Module, x: Tensor, padded: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x, padded).flatten(0, 1), y.flatten())


def sequences(rows: int, steps: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(steps, rows, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (steps, rows), generator=generator)


def own(x: Tensor, batch: str, sizes: tuple[int, ...] = (), dim: int = 1) -> Tensor:
    """This rank's samples of two ranks', or all."""
    parts = x.split(sizes, dim) if sizes else x.chunk(2, dim)
    return parts[dist.get_rank()].contiguous() if batch == "local" else x


def evaluated(batch: str, plan: str, loss: Any) -> None:
    model, reference = recurrent(), recurrent().eval()
    x, y = sequences(8)
    given = own(x, batch), own(y, batch)
    program = partc.compile(model, "dp=2", given, loss=loss, plan=plan, batch=batch)
    stage = program.module(partial="replicate")
    stage.load_full(reference)
    close(stage.step(*given), loss(reference, x, y), "loss")
    stage.eval()
    for rows, steps, sizes in (
        (8, 7, ()),
        (8, 4, ()),
        (8, 1, ()),
        (2, 7, ()),
        (5, 7, (3, 2)),
        (1, 7, (1, 0)),
    ):
        z, _ = sequences(rows, steps)
        found = stage(own(z, batch, sizes))
        close(found, own(reference(z), batch, sizes), f"{rows} rows of {steps} steps")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("batch", "loss"), [("local", by_another_name), ("global", loss_of)])
def test_the_batch_of_a_forward_is_found(world: Processes, batch: str, loss: Any) -> None:
    world.run(evaluated, batch, "fsdp", loss, num=2)


def masks_evaluated(batch: str) -> None:
    """A mask has its batch along another dim than the samples."""
    model, reference = encoder(), encoder().eval()
    x, y = sequences(8)
    padded = torch.arange(7) >= torch.tensor([7, 5, 6, 7, 3, 4, 7, 6])[:, None]
    given = own(x, batch), own(padded, batch, dim=0), own(y, batch)
    stage = partc.compile(model, "dp=2", given, loss=masked, plan="ddp", batch=batch).module()
    close(stage.step(*given), masked(reference, x, padded, y), "loss")
    stage.eval()
    close(stage(*given[:2]), own(reference(x, padded), batch), "results")


@pytest.mark.rows(1)
@pytest.mark.parametrize("batch", ["global", "local"])
def test_each_input_has_its_own(world: Processes, batch: str) -> None:
    world.run(masks_evaluated, batch, num=2)


def loaded(folder: Path) -> None:
    reference, (x, _) = recurrent().eval(), sequences(8)
    stage = begun(partc.load(folder), reference)
    stage.eval()
    close(stage(own(x, "local")), own(reference(x), "local"), "results")


@pytest.mark.exhaustive
def test_a_saved_forward_knows_it(world: Processes, tmp_path: Path) -> None:
    model, given = recurrent(), sequences(4)
    program = partc.compile(model, "dp=2", given, loss=loss_of, plan="ddp", batch="local")
    program.for_shapes(given[:1], modes=("forward",)).save(tmp_path / "made")
    world.run(loaded, tmp_path / "made", num=2)
