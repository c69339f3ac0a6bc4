"""Attention written by hand, and what stands in its place: memories, latents, decays, pointers."""
# mypy: disable-error-code="no-any-return, no-untyped-call, operator, index, arg-type, misc"
# (written as users write, who check no types)

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.styles import BATCH, Style, style

WORDS, WIDTH, HEADS, TIMES = 20, 16, 4, 6


def tokens(num: int = TIMES) -> tuple[Tensor, ...]:
    return (torch.randint(0, WORDS, (BATCH, num)),)


def next_word(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


class Language(nn.Module):
    """A table, equal layers with residuals outside of them, and a head."""

    def __init__(self, layer: Callable[[], nn.Module], depth: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


class Slopes(nn.Module):
    """ALiBi: a slope of distance for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        slopes = torch.tensor([2 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)])
        self.register_buffer("slopes", slopes)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        far = torch.arange(t)[None, :] - torch.arange(t)[:, None]
        score = q @ k.mT / math.sqrt(c // HEADS) + self.slopes[:, None, None] * far
        score = score.masked_fill(far > 0, float("-inf"))
        return self.out((score.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


@style
def slopes_of_distance() -> Style:
    return Style(Language(Slopes), tokens(), next_word)


class Buckets(nn.Module):
    """A table of biases by relative position, shared by all layers, and windows of three."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.bias = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * TIMES - 1, HEADS)
        self.qkvs = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, at = self.emb(ids), torch.arange(ids.shape[1])
        far = at[:, None] - at[None]
        bias = self.bias(far + TIMES - 1).permute(2, 0, 1)
        bias = bias.masked_fill((far < 0) | (far >= 3), -1e9)
        for qkv, out in zip(self.qkvs, self.outs, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            x = x + out(y.transpose(1, 2).flatten(2))
        return x @ self.emb.weight.T


@style
def table_of_relative_positions() -> Style:
    return Style(Buckets(), tokens(), next_word)


class Grouped(nn.Module):
    """Heads in groups that share keys and values, by einsum."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q = nn.Parameter(torch.randn(WIDTH, groups, HEADS // groups, size) / 4)
        self.k = nn.Parameter(torch.randn(WIDTH, groups, size) / 4)
        self.v = nn.Parameter(torch.randn(WIDTH, groups, size) / 4)
        self.o = nn.Parameter(torch.randn(groups, HEADS // groups, size, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("btc,cgnd->btgnd", x, self.q)
        k, v = torch.einsum("btc,cgd->btgd", x, self.k), torch.einsum("btc,cgd->btgd", x, self.v)
        score = torch.einsum("btgnd,bsgd->bgnts", q, k) * self.k.shape[-1] ** -0.5
        mask = torch.tril(torch.ones(x.shape[1], x.shape[1])).bool()
        probs = torch.where(mask, score, torch.finfo(score.dtype).min).softmax(-1)
        return torch.einsum("bgnts,bsgd,gndc->btc", probs, v, self.o)


@style
def one_key_for_all_heads() -> Style:
    return Style(Language(lambda: Grouped(1)), tokens(), next_word)


@style
def heads_in_groups() -> Style:
    return Style(Language(lambda: Grouped(2)), tokens(), next_word)


class Shared(nn.Module):
    """The first layer's keys and values serve all layers; blocks run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.kv = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.qs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        k, v = self.kv(x).unflatten(-1, (2 * HEADS, -1)).transpose(1, 2).chunk(2, 1)
        for _ in range(2):
            for q in self.qs:
                heads = q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                y = F.scaled_dot_product_attention(heads, k, v, is_causal=True)
                x = F.rms_norm(x + y.transpose(1, 2).flatten(2), (WIDTH,))
        return self.head(x)


@style
def keys_of_the_first_layer() -> Style:
    return Style(Shared(), tokens(), next_word)


class Depths(nn.Module):
    """Mixture of depths: a layer sees only the tokens that its router likes most."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight, at = self.router(x).squeeze(-1).topk(2, dim=1, sorted=False)
        at = at.sort(dim=1).values
        weight = self.router(x).squeeze(-1).gather(1, at).sigmoid()
        rows = at[..., None].expand(-1, -1, x.shape[-1])
        y = self.mlp(x.gather(1, rows)) * weight[..., None]
        return torch.zeros_like(x).scatter_add(1, rows, y)


@style
def mixture_of_depths() -> Style:
    return Style(Language(Depths), tokens(), next_word)


class Halting(nn.Module):
    """A universal transformer: one block, over and over, until every token has halted."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.halt = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 1)
        self.block, self.head = Slopes(), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.emb(ids)
        left, total, ponder = torch.ones(ids.shape), torch.zeros_like(x), torch.zeros(ids.shape)
        for step in range(3):
            p = torch.sigmoid(self.halt(x)).squeeze(-1)
            p = torch.where(left - p < 0.05, left, p * left) if step < 2 else left
            x = x + self.block(x)
            total, left, ponder = total + p.unsqueeze(-1) * x, left - p, ponder + left
        return self.head(total), ponder


@style
def universal_with_halting() -> Style:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits, ponder = model(ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + (
            0.01 * ponder.mean()
        )

    return Style(Halting(), tokens(), loss)


class Latents(nn.Module):
    """Perceiver: a few latents look at many inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, WIDTH))
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.inner = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor) -> Tensor:
        z = self.latents.unsqueeze(0).repeat(ids.size(0), 1, 1)
        x = self.emb(ids)
        for layer in self.inner:
            z = z + self.cross(z, x, x, need_weights=False)[0]
            z = layer(z)
        return self.head(z.mean(1))


@style
def latents_that_look() -> Style:
    def loss(model: nn.Module, ids: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(ids), label)

    return Style(Latents(), (*tokens(), torch.randint(0, 5, (BATCH,))), loss)


class Linear(nn.Module):
    """Linear attention: running sums of keys times values, with random features if asked."""

    def __init__(self, features: int = 0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("omega", torch.randn(4, features) if features else None)

    def map(self, x: Tensor) -> Tensor:
        if self.omega is None:
            return F.elu(x) + 1
        return torch.exp(x @ self.omega - x.square().sum(-1, keepdim=True) / 2) / 2

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).unbind(2)
        q, k = self.map(q), self.map(k)
        sums = torch.einsum("bthf,bthd->bthfd", k, v).cumsum(1)
        y = torch.einsum("bthf,bthfd->bthd", q, sums)
        y = y / (torch.einsum("bthf,bthf->bth", q, k.cumsum(1))[..., None] + 1e-4)
        return self.out(y.reshape(b, t, -1))


@style
def linear_attention() -> Style:
    return Style(Language(Linear), tokens(), next_word)


@style
def random_features() -> Style:
    return Style(Language(lambda: Linear(6)), tokens(), next_word)


class Prefix(nn.Module):
    """A prefix is seen in both directions; masks follow from lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(TIMES, WIDTH))
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, prefix: Tensor, length: Tensor) -> Tensor:
        x, at = self.emb(ids) + self.pos, torch.arange(ids.shape[1])
        seen = (at[None, :, None] >= at[None, None]) | (at < prefix[:, None])[:, None]
        seen = seen & (at < length[:, None])[:, None]
        hidden = (~seen).repeat_interleave(HEADS, 0)
        return self.head(x + self.attn(x, x, x, attn_mask=hidden)[0])


@style
def prefix_from_lengths() -> Style:
    def loss(model: nn.Module, ids: Tensor, prefix: Tensor, length: Tensor) -> Tensor:
        at = torch.arange(1, ids.shape[1])
        counted = (at >= prefix[:, None]) & (at < length[:, None])
        each = F.cross_entropy(model(ids, prefix, length)[:, :-1].mT, ids[:, 1:], reduction="none")
        return (each * counted).sum() / counted.sum()

    prefix, length = torch.randint(1, 3, (BATCH,)), torch.randint(4, TIMES + 1, (BATCH,))
    return Style(Prefix(), (*tokens(), prefix, length), loss)
