"""Losses over the whole batch, teachers, second derivatives."""
# mypy: disable-error-code="no-any-return, no-untyped-call, operator, index, arg-type, misc"
# (written as users write, who check no types)

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn import functional as F

from tests.styles import BATCH, Style, style
from tests.styles.mixtures import features, mse


def tower(into: int = 16, out: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(into, 16), nn.Tanh(), nn.Linear(16, out))


@style
def contrast_of_views() -> Style:
    def loss(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(model(torch.cat([a, b])), dim=-1)
        similar = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        pair = torch.arange(len(z)).roll(len(a))
        return F.cross_entropy(similar, pair)

    return Style(tower(), (torch.randn(BATCH, 16), torch.randn(BATCH, 16)), loss)


@style
def redundancy_of_views() -> Style:
    def loss(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        x, y = model(a), model(b)
        x, y = (x - x.mean(0)) / x.std(0), (y - y.mean(0)) / y.std(0)
        off = x.T @ y / len(x) - torch.eye(8)
        return off.square().sum()

    return Style(tower(), (torch.randn(BATCH, 16), torch.randn(BATCH, 16)), loss)


@style
def hardest_triplets() -> Style:
    def loss(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
        z = model(x)
        far = (z[:, None] - z[None]).square().sum(-1)
        same = label[:, None] == label[None]
        hardest = far.masked_fill(~same, 0).amax(1)
        nearest = far.masked_fill(same, 1e9).amin(1)
        return F.relu(hardest - nearest + 1).mean()

    return Style(tower(), (torch.randn(BATCH, 16), torch.arange(BATCH) % 3), loss)


@style
def ranking_in_lists() -> Style:
    def loss(model: nn.Module, x: Tensor, gain: Tensor) -> Tensor:
        order = gain.argsort(dim=1, descending=True)
        score = model(x).squeeze(-1).gather(1, order)
        return (score.flip(1).logcumsumexp(1).flip(1) - score).mean()

    return Style(tower(16, 1), (torch.randn(BATCH, 5, 16), torch.rand(BATCH, 5)), loss)


@style
def gradient_penalty() -> Style:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = model(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + y / len(x)

    return Style(tower(), (torch.randn(BATCH, 16),), loss)


@style
def physics_informed() -> Style:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        return (ddu + u).square().mean()

    return Style(tower(1, 1), (torch.randn(BATCH, 1),), loss)


@style
def inner_step_of_maml() -> Style:
    def loss(model: nn.Module, x: Tensor, y: Tensor, x2: Tensor, y2: Tensor) -> Tensor:
        params = dict(model.named_parameters())
        inner = F.mse_loss(functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(inner, [*params.values()], create_graph=True)
        stepped = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads, strict=True)}
        return F.mse_loss(functional_call(model, stepped, (x2,)), y2)

    return Style(tower(), (*features(), *features()), loss)


@style
def linearised_call() -> Style:
    start = {n: torch.randn(p.shape) / 4 for n, p in tower().named_parameters()}

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        now = dict(model.named_parameters())
        moved = {n: p - start[n] for n, p in now.items()}
        out, change = jvp(lambda p: functional_call(model, p, (x,)), (start,), (moved,))
        return F.mse_loss(out + change, y)

    return Style(tower(), features(), loss)


@style
def a_call_of_each_sample() -> Style:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return vmap(lambda a, b: F.mse_loss(model(a), b))(x, y).mean()

    return Style(tower(), features(), loss)


@style
def teacher_in_a_closure() -> Style:
    teacher = tower().eval()

    def loss(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
        with torch.no_grad():
            soft = teacher(x).div(2).softmax(-1)
        logits = model(x)
        apart = F.kl_div(logits.div(2).log_softmax(-1), soft, reduction="batchmean")
        return F.cross_entropy(logits, label) + 4 * apart

    return Style(tower(), (torch.randn(BATCH, 16), torch.randint(0, 8, (BATCH,))), loss)


class Momentum(nn.Module):
    """A frozen copy as a part of the model; the step reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predict = tower(), nn.Linear(8, 8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        p = F.normalize(self.predict(self.online(a)), dim=-1)
        z = F.normalize(self.target(b), dim=-1).detach()
        return 2 - 2 * (p * z).sum(-1).mean()


@style
def teacher_as_a_part() -> Style:
    return Style(Momentum(), (torch.randn(BATCH, 16), torch.randn(BATCH, 16)), None)


class Quantised(nn.Module):
    """A codebook with straight-through gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 4), nn.Linear(4, 16)
        self.codes = nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        apart = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return self.decode(z + (code - z).detach()), apart


@style
def codebook() -> Style:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y, apart = model(x)
        return F.mse_loss(y, x) + apart

    return Style(Quantised(), (torch.randn(BATCH, 16),), loss)


class Variational(nn.Module):
    """Two heads and noise that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encode(x).chunk(2, -1)
        return self.decode(mean + noise * (log / 2).exp()), mean, log


@style
def variational() -> Style:
    def loss(model: nn.Module, x: Tensor, noise: Tensor) -> dict[str, Any] | Tensor:
        y, mean, log = model(x, noise)
        kl = -0.5 * (1 + log - mean.square() - log.exp()).sum(1).mean()
        return F.mse_loss(y, x, reduction="sum") / len(x) + kl

    return Style(Variational(), (torch.randn(BATCH, 16), torch.randn(BATCH, 4)), loss)


@style
def adversary_of_one_loss() -> Style:
    parts = nn.ModuleDict({"make": tower(4, 16), "judge": tower(16, 1)})

    def loss(model: nn.Module, noise: Tensor, real: Tensor) -> Tensor:
        judge = model.get_submodule("judge")
        made = model.get_submodule("make")(noise)
        return F.softplus(-judge(real)).mean() + F.softplus(judge(made)).mean()

    return Style(parts, (torch.randn(BATCH, 4), torch.randn(BATCH, 16)), loss)


@style
def penalty_on_weights() -> Style:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse(model, x, y) + 1e-2 * sum(p.abs().sum() for p in model.parameters())

    return Style(tower(), features(), loss)


@style
def correlation_of_the_batch() -> Style:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        return 1 - F.cosine_similarity(z - z.mean(0), y - y.mean(0), dim=0).mean()

    return Style(tower(), features(), loss)
