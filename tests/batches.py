"""Small models whose batches lie in different ways, for tests of what a rank is given of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Case = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Any]]


class Tokens(nn.Module):
    """Batch first, with a dropout and a residual; ``up`` and ``down`` are cut by megatron."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))
        out: Tensor = self.head(x)
        return out


class Words(nn.Module):
    """Sequence first: data i64[T,B], scores f32[T*B,V]; the state of an LSTM may come in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cells, self.head = nn.Embedding(50, 16), nn.LSTM(16, 16), nn.Linear(16, 50)

    def forward(self, data: Tensor, h: Tensor | None = None, c: Tensor | None = None) -> Tensor:
        state = None if h is None else (h, c)
        out, _ = self.cells(self.embed(data), state)
        scores: Tensor = self.head(out).view(-1, 50)
        return scores


class Bag(nn.Module):
    """Sequence first, and time is averaged away."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, data: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embed(data).mean(0))
        return scores


class Nodes(nn.Module):
    """A graph's nodes f32[N,6] and edges i64[2,E]."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.one(x)
        out: Tensor = self.two(F.relu(torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])))
        return out


class Views(nn.Module):
    """Two views of each image, batch norm, and a loss over all pairs of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16)
        )

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.net(a)), F.normalize(self.net(b))


def token_loss(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=3)


def word_loss(model: nn.Module, data: Tensor, target: Tensor, *state: Tensor) -> Tensor:
    return F.cross_entropy(model(data, *state), target)


def weighted_loss(model: nn.Module, data: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(model(data), target, weight=weight)


def edge_loss(model: nn.Module, x: Tensor, edges: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(x, edges), target)


def pair_loss(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    x, y = model(a, b)
    scores = x @ y.T / 0.1
    return F.cross_entropy(scores, torch.arange(len(scores)))


def tokens(samples: int = 8, dropout: float = 0.0) -> Case:
    torch.manual_seed(0)
    ids, targets = (torch.randint(32, (samples, 6)) for _ in range(2))
    return Tokens(dropout), (ids, targets), token_loss


def words(samples: int = 10, steps: int = 7, state: bool = False) -> Case:
    torch.manual_seed(0)
    batch = [torch.randint(50, (steps, samples)), torch.randint(50, (steps * samples,))]
    batch += [torch.randn(1, samples, 16) for _ in range(2 * state)]
    return Words(), tuple(batch), word_loss


def bag(samples: int = 4) -> Case:
    torch.manual_seed(0)
    batch = torch.randint(50, (7, samples)), torch.randint(5, (samples,)), torch.rand(5)
    return Bag(), batch, weighted_loss


def nodes() -> Case:
    torch.manual_seed(0)
    batch = torch.randn(10, 6), torch.randint(10, (2, 24)), torch.randint(3, (10,))
    return Nodes(), batch, edge_loss


def views(samples: int = 6) -> Case:
    torch.manual_seed(0)
    return Views(), tuple(torch.randn(samples, 3, 8, 8) for _ in range(2)), pair_loss
