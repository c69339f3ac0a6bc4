"""Recurrent networks, state spaces, complex numbers, spikes."""
# mypy: disable-error-code="no-any-return, no-untyped-call, operator, index, arg-type, misc"
# (written as users write, who check no types)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.styles import BATCH, Style, style
from tests.styles.mixtures import features, mse

STEPS = 5


def series(out: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, STEPS, 6), torch.randn(BATCH, out)


class Recurrent(nn.Module):
    """A recurrent layer of torch, and a head on its last state."""

    def __init__(self, kind: type[nn.Module], **changed: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 8, batch_first=True, **changed)
        self.head = nn.Linear(16 if changed.get("bidirectional") else 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0][:, -1])
        return out


@style
def lstm_both_ways() -> Style:
    return Style(Recurrent(nn.LSTM, bidirectional=True), series(), mse)


@style
def gru_of_two_layers() -> Style:
    return Style(Recurrent(nn.GRU, num_layers=2), series(), mse)


@style
def tanh_rnn() -> Style:
    return Style(Recurrent(nn.RNN), series(), mse)


class Cells(nn.Module):
    """A loop of cells whose state is a tuple, with teacher forcing."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(12, 8), nn.LSTMCell(8, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        state = (torch.zeros(len(ids), 8), torch.zeros(len(ids), 8))
        out = []
        for token in self.table(ids).unbind(1):
            state = self.cell(token, state)
            out.append(self.head(state[0]))
        return torch.stack(out, 1)


@style
def decoder_of_cells() -> Style:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:])

    return Style(Cells(), (torch.randint(0, 12, (BATCH, STEPS)),), loss)


@style
def connectionist_temporal() -> Style:
    def loss(model: nn.Module, x: Tensor, target: Tensor, length: Tensor) -> Tensor:
        log = model(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log, target, torch.full((len(x),), 9), length)

    batch = torch.randn(BATCH, 9, 6), torch.randint(1, 8, (BATCH, 3)), torch.full((BATCH,), 3)
    return Style(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8)), batch, loss)


class StateSpace(nn.Module):
    """A diagonal state space with complex eigenvalues, convolved by FFT."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.rand(8))
        self.turn = nn.Parameter(torch.rand(8))
        self.c = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.into, self.head = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        u, num = self.into(x), x.shape[1]
        a = torch.complex(-self.rate.exp(), self.turn)
        kernel = (self.c * torch.exp(a * torch.arange(num)[:, None])).real
        y = torch.fft.irfft(
            torch.fft.rfft(u, 2 * num, dim=1) * torch.fft.rfft(kernel, 2 * num, dim=0), dim=1
        )
        out: Tensor = self.head(y[:, num - 1])
        return out


@style
def state_space_by_fft() -> Style:
    return Style(StateSpace(), series(), mse)


class Selective(nn.Module):
    """A scan in which step sizes follow from the input, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.step, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 8)
        self.log_a = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        u, step = self.into(x), F.softplus(self.step(x))
        decay = torch.cumsum(-step * self.log_a.exp(), 1)
        h = (torch.exp(decay[:, -1:] - decay) * step * u).sum(1)
        out: Tensor = self.head(h)
        return out


@style
def selective_scan() -> Style:
    return Style(Selective(), series(), mse)


class Complex(nn.Module):
    """Complex weights throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16, dtype=torch.complex64)
        self.b = nn.Linear(16, 8, bias=False, dtype=torch.complex64)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x.to(torch.complex64))
        z = torch.polar(z.abs().tanh(), z.angle())
        out: Tensor = self.norm(self.b(z).abs())
        return out


@style
def complex_layers() -> Style:
    return Style(Complex(), features(), mse)


class Fourier(nn.Module):
    """A Fourier neural operator: weights on the lowest modes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.complex64) / 4)
        self.lift, self.head = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        u = self.lift(x[..., None])
        modes = torch.fft.rfft(u, dim=1)
        low = torch.einsum("bki,iok->bko", modes[:, :3], self.w)
        u = u + torch.fft.irfft(F.pad(low, (0, 0, 0, modes.shape[1] - 3)), n=x.shape[1], dim=1)
        out: Tensor = self.head(F.gelu(u)).squeeze(-1)
        return out


@style
def fourier_operator() -> Style:
    return Style(Fourier(), (torch.randn(BATCH, 8), torch.randn(BATCH, 8)), mse)


class Spike(torch.autograd.Function):
    """A step function whose gradient is that of a smooth one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] / (1 + 10 * x.abs()) ** 2


class Spiking(nn.Module):
    """Leaky neurons that fire, over several steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 8)
        self.leak = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        level, total = torch.zeros(len(x), 16), torch.zeros(len(x), 8)
        for _ in range(3):
            level = self.leak * level + self.a(x)
            fired = Spike.apply(level - 1)
            level, total = level - fired.detach(), total + self.b(fired)
        return total / 3


@style
def spiking() -> Style:
    return Style(Spiking(), features(), mse)


class Ode(nn.Module):
    """Runge-Kutta steps of a learned field."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            k1 = self.field(x)
            k2 = self.field(x + 0.25 * k1)
            x = x + 0.5 * k2
        out: Tensor = self.head(x)
        return out


@style
def neural_ode() -> Style:
    return Style(Ode(), features(), mse)


class Flow(nn.Module):
    """Couplings with their log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(len(x))
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, move = net(a).tanh().chunk(2, 1)
            x, total = torch.cat([b * scale.exp() + move, a], 1), total + scale.sum(1)
        return x, total


@style
def normalising_flow() -> Style:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        z, total = model(x)
        return (0.5 * z.square().sum(1) - total).mean()

    return Style(Flow(), (torch.randn(BATCH, 16),), loss)
