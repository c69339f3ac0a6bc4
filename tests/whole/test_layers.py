"""Layers that torch has beside those of transformers, in microbatches on two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.verification.verification import verify

BATCH, STEPS, WIDTH, CLASSES = 8, 4, 6, 3


class Recurrent(nn.Module):
    """A recurrent layer over a sequence; its last output is classified."""

    def __init__(self, layer: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer(x)[0][:, -1])
        return scores


class Fourier(nn.Module):
    """A layer of a Fourier neural operator: a few frequencies are mixed, the rest is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 2, 2) / WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x, dim=1)
        kept = torch.einsum("bfi,iof->bfo", waves[:, :2], torch.view_as_complex(self.weight))
        mixed = torch.zeros_like(waves)
        mixed[:, :2] = kept
        back = torch.fft.irfft(mixed, n=x.shape[1], dim=1)
        scores: Tensor = self.head(F.gelu(x + back).mean(1))
        return scores


class TokenShift(nn.Module):
    """Each token is mixed with the one before, which padding in front and a cut behind bring here;
    the norm has no ``eps`` of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.mix = nn.Parameter(torch.rand(WIDTH))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(x * self.mix + self.shift(x) * (1 - self.mix)))
        return scores[:, -1]


class Placed(nn.Module):
    """A block that weighs places itself; they are given for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.place = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = x + F.gelu(self.own(F.layer_norm(x, (WIDTH,)))).cumsum(1)
        return x + torch.tanh(self.own(x)) * torch.einsum("tbi,ij->btj", places, self.place)


class Relative(nn.Module):
    """Blocks with places as an XLNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Placed() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.linspace(0, 1, STEPS * WIDTH).view(STEPS, 1, WIDTH)
        places = places.expand(-1, x.shape[0], -1)
        for block in self.blocks:
            x = block(x, places)
        scores: Tensor = self.head(x.mean(1))
        return scores


class Gaussian(nn.Module):
    """Scores under a normal distribution of which the covariance is made of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        covariance = x.transpose(1, 2) @ x + torch.eye(WIDTH)
        root = torch.linalg.cholesky(covariance)
        white = torch.linalg.solve_triangular(root, x.transpose(1, 2), upper=False)
        scores: Tensor = self.means(white.mean(2))
        return scores - torch.logdet(covariance)[:, None] * scores.square()


LAYERS = {
    "gru": lambda: Recurrent(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "lstm": lambda: Recurrent(
        nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True), 2 * WIDTH
    ),
    "fourier": Fourier,
    "gaussian": Gaussian,
    "relative places": Relative,
    "token shift": TokenShift,
}


def loss_of(model: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(model(x), classes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYERS)
def test_microbatches_compute_what_the_model_does(name: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = LAYERS[name]()
    batch = torch.randn(BATCH, STEPS, WIDTH), torch.randint(CLASSES, (BATCH,))
    program = partc.compile(model, "dp=2", batch, loss=loss_of, plan="ddp", microbatches=2)
    verify(program, model, batch, loss_of).check(1e-11)


class Counted(nn.Module):
    """Scores that grow with the number of steps."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        hidden = torch.tanh(self.body(x.mean(1))) * self.steps
        scores: Tensor = self.head(hidden) / (1 + self.steps)
        return scores


TWO_RANKS = [("dp=2", "ddp"), ("pp=2,dp=2", "fsdp")]


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "plan"), TWO_RANKS)
def test_a_step_counts_as_one(mesh: str, plan: str) -> None:
    """Both stages read the count."""
    torch.manual_seed(0)
    model = Counted()
    batch = torch.randn(BATCH, STEPS, WIDTH), torch.randint(CLASSES, (BATCH,))
    program = partc.compile(model, mesh, batch, loss=loss_of, plan=plan, microbatches=2)
    verify(program, model, batch, loss_of).check(1e-11)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "plan"), TWO_RANKS)
def test_what_weights_make_of_a_buffer_is_made_once(mesh: str, plan: str) -> None:
    """Not by every microbatch, of what the one before has left: the norm is estimated anew, and
    nobody reads the old first vector.
    """
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(nn.Flatten(), nn.Linear(STEPS * WIDTH, WIDTH), norm, nn.Linear(WIDTH, 3))
    batch = torch.randn(BATCH, STEPS, WIDTH), torch.randint(CLASSES, (BATCH,))
    program = partc.compile(model, mesh, batch, loss=loss_of, plan=plan, microbatches=2)
    verify(program, model, batch, loss_of).check(1e-11)


def test_what_the_batch_makes_of_a_buffer_is_made_where_it_comes_by() -> None:
    """One microbatch is the whole batch, and its statistics still follow from it."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(CLASSES)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norms[0], nn.Linear(WIDTH, CLASSES), norms[1])
    batch = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))
    program = partc.compile(model, "pp=2", batch, loss=loss_of, plan="ddp", microbatches=1)
    verify(program, model, batch, loss_of).check(1e-11)
