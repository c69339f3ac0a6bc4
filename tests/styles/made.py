"""Models that are put together at random, each from a seed: lists in lists, loops, branches, parts
that run twice, odd names; with a loss, a mesh and a plan.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.styles import BATCH, Style

TOKENS = 4
NAMES = ("layers", "h", "net", "block", "blocks", "step", "fc", "inner", "x", "part_1", "seed", "0")
LAYOUTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp=2", {"plan": "ddp"}),
    ("dp=2", {"plan": "ddp", "microbatches": 2}),
    ("dp=2", {"plan": "ddp", "recompute": "block"}),
    ("dp=2", {"plan": "zero1", "microbatches": 2}),
    ("dp=2", {"plan": "zero2"}),
    ("dp=2", {"plan": "fsdp"}),
    ("dp=2", {"plan": "fsdp", "microbatches": 2}),
    ("tp=2", {"plan": "megatron"}),
    ("tp=2", {"plan": "megatron-sp"}),
    ("dp=2,tp=2", {"plan": "fsdp+megatron-sp"}),
    ("dp=2,tp=2", {"plan": "auto"}),
    ("pp=2", {"plan": "ddp", "microbatches": 2}),
    ("pp=2,dp=2", {"plan": "fsdp", "microbatches": 2}),
    ("pp=2,tp=2", {"plan": "megatron", "microbatches": 2}),
    ("pp=2", {"plan": "ddp", "microbatches": 4, "schedule": "zb-h1"}),
)


class Made(NamedTuple):
    """A model with batch and loss, and how it is compiled."""

    style: Style
    mesh: str
    how: dict[str, Any]


class Around(nn.Module):
    """Adds what its part makes of the normed input."""

    def __init__(self, part: nn.Module, width: int, *, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.part(self.norm(x))
        return out


class Loop(nn.Module):
    """Runs its parts in an order of their own; some run again."""

    def __init__(self, name: str, parts: Sequence[nn.Module], order: Sequence[int]) -> None:
        super().__init__()
        self.name, self.order = name, order
        self.add_module(name, nn.ModuleList(parts))

    def forward(self, x: Tensor) -> Tensor:
        parts: Any = self.get_submodule(self.name)
        for i in self.order:
            x = parts[i](x)
        return x


class Branches(nn.Module):
    """Takes the mean of its parts' results, or gates one by the other."""

    def __init__(self, parts: dict[str, nn.Module], *, gated: bool) -> None:
        super().__init__()
        self.parts, self.gated = nn.ModuleDict(parts), gated

    def forward(self, x: Tensor) -> Tensor:
        results = [part(x) for part in self.parts.values()]
        if self.gated:
            out: Tensor = results[0] * torch.sigmoid(results[-1])
            return out
        return torch.stack(results).mean(0)


class Attention(nn.Module):
    """Heads by hand."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        result: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return result


class Scaled(nn.Module):
    """Its part's result times a parameter of its own."""

    def __init__(self, part: nn.Module, width: int) -> None:
        super().__init__()
        self.part, self.scale = part, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x) * self.scale
        return out


class Maker:
    """Makes modules ``[batch, tokens, width] -> [batch, tokens, width]`` from a generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.width = rng, rng.choice((8, 16))

    def module(self, depth: int) -> nn.Module:
        """A module of at most this depth."""
        leaves: list[Callable[[], nn.Module]] = [
            self._linear, self._linear, self._mlp, self._attention, self._norm, self._activation,
        ]  # fmt: skip
        inner: list[Callable[[int], nn.Module]] = [
            self._list, self._equal, self._equal, self._around, self._loop, self._branches,
            self._scaled,
        ]  # fmt: skip
        if depth == 0:
            return self.rng.choice(leaves)()
        return self.rng.choice(inner)(depth - 1)

    def _linear(self) -> nn.Module:
        return nn.Linear(self.width, self.width, bias=self.rng.random() < 0.7)

    def _mlp(self) -> nn.Module:
        wide = self.width * self.rng.choice((2, 4))
        return nn.Sequential(nn.Linear(self.width, wide), nn.GELU(), nn.Linear(wide, self.width))

    def _attention(self) -> nn.Module:
        return Attention(self.width, self.rng.choice((2, 4)), causal=self.rng.random() < 0.5)

    def _norm(self) -> nn.Module:
        return self.rng.choice((nn.LayerNorm, nn.RMSNorm))(self.width)

    def _activation(self) -> nn.Module:
        return self.rng.choice((nn.ReLU, nn.Tanh, nn.SiLU))()

    def _list(self, depth: int) -> nn.Module:
        parts = [self.module(self.rng.randint(0, depth)) for _ in range(self.rng.randint(1, 4))]
        if self.rng.random() < 0.5:
            return nn.Sequential(*parts)
        names = self.rng.sample(NAMES, len(parts))
        return nn.Sequential(OrderedDict(zip(names, parts, strict=True)))

    def _equal(self, depth: int) -> nn.Module:
        """Equal parts, as many as a loop is printed for."""
        state = self.rng.getstate()
        parts = []
        for _ in range(self.rng.randint(2, 7)):
            self.rng.setstate(state)
            parts.append(self.module(depth))
        return nn.Sequential(*parts)

    def _around(self, depth: int) -> nn.Module:
        return Around(self.module(depth), self.width, norm=self.rng.random() < 0.5)

    def _loop(self, depth: int) -> nn.Module:
        parts = [self.module(self.rng.randint(0, depth)) for _ in range(self.rng.randint(1, 4))]
        order = [self.rng.randrange(len(parts)) for _ in range(len(parts) + self.rng.randint(0, 2))]
        return Loop(self.rng.choice(NAMES[:-1]), parts, order)

    def _branches(self, depth: int) -> nn.Module:
        parts = {
            name: self.module(depth) for name in self.rng.sample(NAMES, self.rng.randint(2, 3))
        }
        return Branches(parts, gated=self.rng.random() < 0.5)

    def _scaled(self, depth: int) -> nn.Module:
        return Scaled(self.module(depth), self.width)


def _means(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(model(x).mean(1), label)


def _tokens(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(out.flatten(0, 1), label.repeat_interleave(TOKENS))


def _squares(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    wanted = F.one_hot(label, x.shape[-1]).unsqueeze(1)
    found: Tensor = (model(x) - wanted).square().mean()
    return found


def _with_penalty(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    weights = torch.stack([p.square().sum() for p in model.parameters()])
    return _means(model, x, label) + 1e-2 * weights.sum()


def made(seed: int) -> Made:
    """The model, batch, loss, mesh and plan of a seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    maker = Maker(rng)
    model = maker.module(rng.randint(1, 4))
    while not any(p.requires_grad for p in model.parameters()):
        model = maker.module(rng.randint(1, 4))
    inputs = (torch.randn(BATCH, TOKENS, maker.width), torch.randint(0, maker.width, (BATCH,)))
    loss = rng.choice((_means, _tokens, _squares, _with_penalty))
    mesh, how = rng.choice(LAYOUTS)
    return Made(Style(model, inputs, loss), mesh, how)
