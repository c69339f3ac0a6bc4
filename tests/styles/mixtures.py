"""Mixtures of experts and recommenders."""
# mypy: disable-error-code="no-any-return, no-untyped-call, operator, index, arg-type, misc"
# (written as users write, who check no types)

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.styles import BATCH, Style, style


def mse(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(x), target)


def features(width: int = 16, out: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, width), torch.randn(BATCH, out)


class Sorted(nn.Module):
    """Tokens are sorted by expert, computed in equal slots, and scattered back."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        rows = self.experts[expert[order]]
        y = torch.einsum("bi,bij->bj", x[order], rows) * weight[order, None]
        out: Tensor = self.head(torch.zeros_like(x).index_copy(0, order, y))
        return out


@style
def mixture_by_sort() -> Style:
    return Style(Sorted(), features(), mse)


class Capacity(nn.Module):
    """Experts with room for a fixed number of tokens; what is beyond is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(-1)
        chosen = F.one_hot(gate.argmax(-1), 4)
        place = (chosen.cumsum(0) - 1) * chosen
        chosen = chosen * (place < 3)
        seats = F.one_hot(place.clamp(max=2), 3) * chosen[..., None]  # [batch, expert, seat]
        sent = torch.einsum("bes,bi->esi", seats.float(), x)
        done = torch.stack([expert(each) for expert, each in zip(self.experts, sent, strict=True)])
        return torch.einsum("bes,eso,be->bo", seats.float(), done, gate)


@style
def mixture_with_capacity() -> Style:
    return Style(Capacity(), features(), mse)


class Dense(nn.Module):
    """All experts compute; top-2 weights, with a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.w1 = nn.Parameter(torch.randn(4, 16, 32) / 4)
        self.w2 = nn.Parameter(torch.randn(4, 32, 8) / 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.router(x).softmax(-1)
        top, which = gate.topk(2)
        mask = torch.zeros_like(gate).scatter(-1, which, top / top.sum(-1, keepdim=True))
        each = torch.einsum("bi,eih->beh", x, self.w1).relu()
        balance = (gate.mean(0) * (mask > 0).float().mean(0)).sum() * 4
        return torch.einsum("beh,eho,be->bo", each, self.w2, mask), balance


@style
def mixture_of_all_with_balance() -> Style:
    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        y, balance = model(x)
        return F.mse_loss(y, target) + 0.01 * balance

    return Style(Dense(), features(), loss)


class Loop(nn.Module):
    """Each expert takes its tokens by a boolean mask: shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        which = self.router(x).argmax(-1)
        out = x.new_zeros(x.shape[0], 8)
        for i, expert in enumerate(self.experts):
            out[which == i] = expert(x[which == i])
        return out


@style
def mixture_by_mask() -> Style:
    return Style(Loop(), features(), mse)


class Dlrm(nn.Module):
    """Tables of different sizes, a tower, pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 8, mode="sum") for n in (12, 20, 6))
        self.bottom, self.top = nn.Linear(5, 8), nn.Linear(8 + 6, 1)
        rows, columns = torch.tril_indices(4, 4, -1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense).relu()
        each = [table(ids) for table, ids in zip(self.tables, sparse.unbind(1), strict=True)]
        stack = torch.stack([x, *each], 1)
        pairs = (stack @ stack.transpose(1, 2))[:, self.rows, self.columns]
        out: Tensor = self.top(torch.cat([x, pairs], 1)).squeeze(1)
        return out


def clicks(model: nn.Module, dense: Tensor, sparse: Tensor, label: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(dense, sparse), label)


@style
def recommender_of_tables() -> Style:
    batch = torch.randn(BATCH, 5), torch.randint(0, 6, (BATCH, 3, 4)), torch.rand(BATCH)
    return Style(Dlrm(), batch, clicks)


class Factors(nn.Module):
    """Matrix factorisation with biases, gradients scaled by frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(16, 8, scale_grad_by_freq=True)
        self.item = nn.Embedding(24, 8, padding_idx=0)
        self.user_bias, self.item_bias = nn.Embedding(16, 1), nn.Embedding(24, 1)

    def forward(self, pair: Tensor) -> Tensor:
        user, item = pair.unbind(1)
        bias = self.user_bias(user) + self.item_bias(item)
        return (self.user(user) * self.item(item)).sum(1) + bias.squeeze(1)


@style
def factorisation_by_frequency() -> Style:
    return Style(Factors(), (torch.randint(0, 16, (BATCH, 2)), torch.randn(BATCH)), mse)


class TwoTowers(nn.Module):
    """A loss over all pairs of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 8), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        return self.scale.exp() * a @ b.T


@style
def two_towers() -> Style:
    def loss(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        logits = model(a, b)
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return Style(TwoTowers(), (torch.randn(BATCH, 16), torch.randn(BATCH, 12)), loss)


class Cross(nn.Module):
    """A deep and cross network."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(2))
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.out = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for w, b in zip(self.cross, self.bias, strict=True):
            y = x * (y @ w)[:, None] + b + y
        out: Tensor = self.out(torch.cat([y, self.deep(x)], 1))
        return out


@style
def deep_and_cross() -> Style:
    return Style(Cross(), features(), mse)


class Exits(nn.Module):
    """Heads after every layer; each sample leaves at the first that is sure of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))
        self.sure = 0.3

    def forward(self, x: Tensor) -> Tensor:
        left = torch.zeros(len(x), dtype=torch.bool)
        total = x.new_zeros(len(x), 8)
        for layer, leave in zip(self.layers, self.exits, strict=True):
            x = x + torch.relu(layer(x))
            out = leave(x)
            now = (out.detach().softmax(-1).max(-1).values > self.sure) & ~left
            total = torch.where(now[:, None], out, total)
            left = left | now
        return torch.where(left[:, None], total, out)


@style
def exits_where_sure() -> Style:
    return Style(Exits(), features(), mse)


@style
def exits_of_sure_samples_alone() -> Style:
    class Leaving(Exits):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x).relu()
            out = self.exits[0](x)
            unsure = out.softmax(-1).amax(-1) < self.sure
            out[unsure] = self.exits[1](self.layers[1](x[unsure]).relu())
            return out

    return Style(Leaving(), features(), mse)
