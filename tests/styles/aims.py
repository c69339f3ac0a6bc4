"""What models are trained for: densities, energies, rewards, several tasks, agreement of calls."""
# mypy: disable-error-code="no-any-return, no-untyped-call, operator, index, arg-type, misc"
# mypy: disable-error-code="union-attr"
# (written as users write, who check no types)

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.styles import BATCH, Style, style
from tests.styles.losses import tower
from tests.styles.mixtures import features, mse


def labelled(num: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 16), torch.randint(0, num, (BATCH,))


class Chain(nn.Module):
    """A conditional random field over tags: the forward algorithm in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.emit = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
        self.moves, self.start = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        emit = self.emit(x)
        alpha = self.start + emit[:, 0]
        score = self.start[tags[:, 0]] + emit[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, x.shape[1]):
            step = torch.logsumexp(alpha[:, :, None] + self.moves, dim=1) + emit[:, t]
            alpha = torch.where(mask[:, t, None], step, alpha)
            move = self.moves[tags[:, t - 1], tags[:, t]]
            score = score + (move + emit[:, t].gather(1, tags[:, t : t + 1])[:, 0]) * mask[:, t]
        return (torch.logsumexp(alpha, 1) - score).mean()


@style
def random_field() -> Style:
    mask = torch.arange(5) < torch.randint(2, 6, (BATCH, 1))
    return Style(Chain(), (torch.randn(BATCH, 5, 6), torch.randint(0, 5, (BATCH, 5)), mask), None)


@style
def mixture_of_densities() -> Style:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weight, mean, log_std = model(x).chunk(3, -1)
        density = torch.distributions.Normal(mean, log_std.exp())
        mixed = weight.log_softmax(-1) + density.log_prob(y.unsqueeze(-1))
        return -torch.logsumexp(mixed, -1).mean()

    return Style(tower(16, 12), (torch.randn(BATCH, 16), torch.randn(BATCH)), loss)


@style
def quantiles() -> Style:
    at = torch.tensor([0.1, 0.25, 0.5, 0.9])

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        error = y[:, None] - model(x)
        return torch.max(at * error, (at - 1) * error).sum(1).mean()

    return Style(tower(16, 4), (torch.randn(BATCH, 16), torch.randn(BATCH)), loss)


@style
def focal() -> Style:
    def loss(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
        each = F.cross_entropy(model(x), label, reduction="none")
        return (0.25 * (1 - torch.exp(-each)) ** 2 * each).mean()

    return Style(tower(), labelled(), loss)


@style
def several_positives() -> Style:
    def loss(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
        z = F.normalize(model(x), dim=1)
        alone = ~torch.eye(len(z), dtype=torch.bool)
        same = (label[:, None] == label) & alone
        logits = z @ z.T / 0.1
        logits = logits - logits.max(dim=1, keepdim=True).values.detach()
        log = logits - torch.log((torch.exp(logits) * alone).sum(1, keepdim=True))
        return -((same * log).sum(1) / same.sum(1).clamp(min=1)).mean()

    return Style(tower(), (torch.randn(BATCH, 16), torch.arange(BATCH) % 3), loss)


class TwoTowers(nn.Module):
    """Pictures and words, and a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = tower(), tower(12)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a, b = self.image(image), self.text(text)
        a, b = a / a.norm(dim=-1, keepdim=True), b / b.norm(dim=-1, keepdim=True)
        return self.scale.exp().clamp(max=100) * a @ b.t()


@style
def pictures_and_words() -> Style:
    def loss(model: nn.Module, image: Tensor, text: Tensor) -> Tensor:
        logits, at = model(image, text), torch.arange(len(image))
        return (F.cross_entropy(logits, at) + F.cross_entropy(logits.t(), at)) / 2

    return Style(TwoTowers(), (torch.randn(BATCH, 16), torch.randn(BATCH, 12)), loss)


class Choice(nn.Module):
    """Straight-through Gumbel softmax whose noise is an input; then a Hopfield look-up."""

    def __init__(self) -> None:
        super().__init__()
        self.pick, self.codes = nn.Linear(16, 6), nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        soft = F.softmax((self.pick(x) - torch.log(-torch.log(noise))) / 0.7, -1)
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        y = (hard - soft.detach() + soft) @ self.codes
        for _ in range(2):
            y = torch.softmax(2 * y @ self.codes.T, -1) @ self.codes
        return y


@style
def straight_through_choice() -> Style:
    def loss(model: nn.Module, x: Tensor, noise: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x, noise), y)

    noise = torch.rand(BATCH, 6).clamp(0.01, 0.99)
    return Style(Choice(), (torch.randn(BATCH, 16), noise, torch.randn(BATCH, 8)), loss)


@style
def energy_with_inner_steps() -> Style:
    def loss(model: nn.Module, x: Tensor, start: Tensor) -> Tensor:
        y = start.detach()
        for _ in range(2):
            y.requires_grad_(True)
            (slope,) = torch.autograd.grad(model(y).sum(), y)
            y = (y - 0.5 * slope).detach()
        good, bad = model(x), model(y)
        return good.mean() - bad.mean() + 0.1 * (good**2 + bad**2).mean()

    return Style(tower(16, 1), (torch.randn(BATCH, 16), torch.randn(BATCH, 16)), loss)


@style
def score_by_slices() -> Style:
    def loss(model: nn.Module, x: Tensor, v: Tensor) -> Tensor:
        x = x.requires_grad_()
        score = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        turn = torch.autograd.grad((score * v).sum(), x, create_graph=True)[0]
        return ((v * turn).sum(-1) + 0.5 * (v * score).sum(-1) ** 2).mean()

    return Style(tower(16, 1), (torch.randn(BATCH, 16), torch.randn(BATCH, 16)), loss)


@style
def matching_of_flows() -> Style:
    def loss(model: nn.Module, x0: Tensor, x1: Tensor, t: Tensor) -> Tensor:
        xt = (1 - t[:, None]) * x0 + t[:, None] * x1
        wave = t[:, None] * torch.exp(torch.linspace(0, 3, 4))
        v = model(torch.cat([xt, wave.sin(), wave.cos()], dim=-1))
        return ((v - (x1 - x0)) ** 2).mean()

    pair = torch.randn(BATCH, 8), torch.randn(BATCH, 8)
    return Style(tower(16, 8), (*pair, torch.rand(BATCH)), loss)


@style
def advantages_of_the_batch() -> Style:
    def loss(model: nn.Module, x: Tensor, act: Tensor, old: Tensor, gain: Tensor) -> Tensor:
        better = (gain - gain.mean()) / (gain.std() + 1e-8)
        policy = torch.distributions.Categorical(logits=model(x))
        ratio = torch.exp(policy.log_prob(act) - old)
        kept = torch.min(ratio * better, ratio.clamp(0.8, 1.2) * better)
        return -kept.mean() - 0.01 * policy.entropy().mean()

    rest = -torch.rand(BATCH) - 1, torch.randn(BATCH)
    return Style(tower(), (*labelled(), *rest), loss)


@style
def smoothed_by_hand() -> Style:
    def loss(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
        log, valid = model(x).log_softmax(-1), label != -100
        with torch.no_grad():
            soft = torch.full_like(log, 0.1 / 7)
            soft.scatter_(-1, label.clamp(min=0).unsqueeze(-1), 0.9)
        each = -(soft * log).sum(-1)
        return each.masked_fill(~valid, 0).sum() / valid.sum()

    x, label = torch.randn(BATCH, 5, 16), torch.randint(0, 8, (BATCH, 5))
    return Style(tower(), (x, label.masked_fill(torch.rand(BATCH, 5) < 0.3, -100)), loss)


@style
def mean_of_what_counts() -> Style:
    def loss(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label, reduction="none")[label > 0].mean()

    return Style(tower(), labelled(), loss)


@style
def weights_of_samples() -> Style:
    def loss(model: nn.Module, x: Tensor, label: Tensor, weight: Tensor) -> Tensor:
        each = F.cross_entropy(model(x), label, reduction="none")
        return (weight * each).sum() / weight.sum()

    return Style(tower(), (*labelled(), torch.rand(BATCH)), loss)


class Tasks(nn.Module):
    """Two tasks weighed by learned variances; the model notes its activations in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.classes, self.value = nn.Linear(16, 8), nn.Linear(16, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.clear()
        for layer in self.body:
            x = F.relu(layer(x))
            self.seen.append(x)
        return self.classes(x), self.value(x).squeeze(-1)


@style
def tasks_and_noted_activations() -> Style:
    def loss(model: nn.Module, x: Tensor, label: Tensor, y: Tensor) -> Tensor:
        logits, value = model(x)
        both = torch.stack([F.cross_entropy(logits, label), F.mse_loss(value, y)])
        sparse = sum(a.abs().mean() for a in model.seen)
        return (torch.exp(-model.log_vars) * both + model.log_vars).sum() + 1e-2 * sparse

    return Style(Tasks(), (*labelled(), torch.randn(BATCH)), loss)


@style
def agreement_of_two_calls() -> Style:
    def loss(model: nn.Module, x: Tensor, moved: Tensor, label: Tensor) -> Tensor:
        p, q = F.log_softmax(model(x), -1), F.log_softmax(model(moved), -1)
        both = F.kl_div(p, q, reduction="none", log_target=True)
        both = both + F.kl_div(q, p, reduction="none", log_target=True)
        return F.nll_loss(p, label) + F.nll_loss(q, label) + both.sum() / len(x)

    return Style(tower(), (torch.randn(BATCH, 16), *labelled()), loss)


@style
def mean_teacher() -> Style:
    parts = nn.ModuleDict({"student": tower()})
    parts["teacher"] = copy.deepcopy(parts["student"]).requires_grad_(False)

    def loss(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
        with torch.no_grad():
            soft = torch.softmax(model["teacher"](x) / 2, -1)
        logits = model["student"](x)
        apart = -(soft * F.log_softmax(logits / 2, -1)).sum(-1).mean()
        return F.cross_entropy(logits, label) + 4 * apart

    return Style(parts, labelled(), loss)


@style
def mixed_with_others() -> Style:
    def loss(model: nn.Module, x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        order = torch.arange(len(x)).flip(0)
        share = share[:, None]
        return mse(model, share * x + (1 - share) * x[order], share * y + (1 - share) * y[order])

    return Style(tower(), (*features(), torch.rand(BATCH)), loss)
