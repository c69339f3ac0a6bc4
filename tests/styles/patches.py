"""Pictures as patches, rays, coordinates and codes."""
# mypy: disable-error-code="no-any-return, no-untyped-call, operator, index, arg-type, misc"
# (written as users write, who check no types)

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.styles import BATCH, Style, style
from tests.styles.images import pictures
from tests.styles.mixtures import mse


class Mixer(nn.Module):
    """MLPs over patches, then over channels."""

    def __init__(self, num: int = 4, dim: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(4))
        self.tokens = nn.ModuleList(
            nn.Sequential(nn.Linear(num, 6), nn.GELU(), nn.Linear(6, num)) for _ in range(2)
        )
        self.channels = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 12), nn.GELU(), nn.Linear(12, dim)) for _ in range(2)
        )
        self.head = nn.Linear(dim, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for i in range(2):
            x = x + self.tokens[i](self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[i](self.norms[2 * i + 1](x))
        return self.head(x.mean(dim=1))


@style
def mixer_of_patches() -> Style:
    return Style(Mixer(), pictures(), mse)


class Window(nn.Module):
    """Attention in windows, shifted by a roll, with a table of relative places."""

    def __init__(self, dim: int = 8, window: int = 2, shift: int = 0) -> None:
        super().__init__()
        self.window, self.shift, self.heads = window, shift, 2
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, 2))
        coords = torch.stack(torch.meshgrid([torch.arange(window)] * 2, indexing="ij")).flatten(1)
        apart = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window - 1
        index = apart[..., 0] * (2 * window - 1) + apart[..., 1]
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("mask", self.masked(4) if shift else None, persistent=False)

    def masked(self, size: int) -> Tensor:
        img, count = torch.zeros(1, size, size, 1), 0
        parts = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        for h in parts:
            for w in parts:
                img[:, h, w, :] = count
                count += 1
        each = self.split(img).squeeze(-1)
        return (each[:, None] - each[:, :, None]).ne(0).float() * -100.0

    def split(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = self.norm(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = self.split(y)
        q, k, v = self.qkv(y).reshape(len(y), -1, 3, self.heads, c // 2).permute(2, 0, 3, 1, 4)
        score = (q * (c // 2) ** -0.5) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.index.view(-1)]
        score = score + bias.view(*self.index.shape, -1).permute(2, 0, 1).unsqueeze(0)
        if self.mask is not None:
            num = self.mask.shape[0]
            score = score.view(b, num, self.heads, *self.index.shape) + self.mask[None, :, None]
            score = score.view(-1, self.heads, *self.index.shape)
        y = self.proj((score.softmax(-1) @ v).transpose(1, 2).reshape(len(y), -1, c))
        y = y.view(b, h // self.window, w // self.window, self.window, self.window, c)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + y


class Swin(nn.Module):
    """Patches, shifted windows, and a merge of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.blocks = nn.ModuleList([Window(shift=0), Window(shift=1)])
        self.merge, self.head = nn.Linear(32, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        corners = x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]
        return self.head(self.merge(torch.cat(corners, -1)).mean((1, 2)))


@style
def windows_shifted_by_roll() -> Style:
    return Style(Swin(), pictures(), mse)


class Vit(nn.Module):
    """A class token, and positions that are interpolated from a finer grid."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + 9, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 2, 16, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 8)

    def positions(self, size: int) -> Tensor:
        first, rest = self.pos_embed[:, :1], self.pos_embed[:, 1:]
        side = int(math.sqrt(rest.shape[1]))
        grid = rest.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(size, size), mode="bicubic", align_corners=False)
        return torch.cat([first, grid.permute(0, 2, 3, 1).flatten(1, 2)], 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        size = x.shape[-1]
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x.flatten(2).mT], dim=1)
        return self.head(self.encoder(x + self.positions(size))[:, 0])


@style
def class_token_and_finer_grid() -> Style:
    return Style(Vit(), pictures(), mse)


class Field(nn.Module):
    """Density and colour at points of space, after sines and cosines of each coordinate."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(15, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.sigma, self.rgb = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        waves = [points] + [f(2.0**i * points) for i in range(2) for f in (torch.sin, torch.cos)]
        h = self.body(torch.cat(waves, -1))
        return F.relu(self.sigma(h)).squeeze(-1), torch.sigmoid(self.rgb(h))


@style
def rays_through_a_field() -> Style:
    def loss(model: nn.Module, origin: Tensor, way: Tensor, seen: Tensor) -> Tensor:
        t = torch.linspace(0.5, 2.0, 5)
        sigma, rgb = model(origin[:, None] + way[:, None] * t[:, None])
        apart = torch.cat([t[1:] - t[:-1], torch.tensor([1e10])])
        alpha = 1 - torch.exp(-sigma * apart * way.norm(dim=-1, keepdim=True))
        clear = torch.cumprod(torch.cat([torch.ones(len(t := alpha), 1), 1 - t + 1e-10], -1), -1)
        weights = alpha * clear[:, :-1]
        return ((weights[..., None] * rgb).sum(-2) - seen).pow(2).mean()

    return Style(Field(), tuple(torch.rand(BATCH, 3) for _ in range(3)), loss)


class Sine(nn.Module):
    """A sine layer with its own first weights."""

    def __init__(self, into: int, out: int, omega: float = 3.0) -> None:
        super().__init__()
        self.omega, self.linear = omega, nn.Linear(into, out)
        with torch.no_grad():
            self.linear.weight.uniform_(-math.sqrt(6 / into) / omega, math.sqrt(6 / into) / omega)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.omega * self.linear(x))


@style
def sines_and_their_slopes() -> Style:
    def loss(model: nn.Module, place: Tensor, slope: Tensor) -> Tensor:
        place = place.clone().detach().requires_grad_(True)
        out = model(place)
        (grad,) = torch.autograd.grad(out, place, torch.ones_like(out), create_graph=True)
        return (grad - slope).square().sum(-1).mean()

    model = nn.Sequential(Sine(2, 16), Sine(16, 16), nn.Linear(16, 1))
    return Style(model, (torch.rand(BATCH, 2), torch.randn(BATCH, 2)), loss)


class Codes(nn.Module):
    """Nearest codes, with a straight-through gradient and moving counts in the forward."""

    def __init__(self, num: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num, dim)
        self.table.weight.data.uniform_(-1.0, 1.0)
        self.register_buffer("usage", torch.zeros(num))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.permute(0, 2, 3, 1).contiguous()
        far = flat.pow(2).sum(-1, keepdim=True) - 2 * flat @ self.table.weight.t()
        index = (far + self.table.weight.pow(2).sum(1)).argmin(-1)
        code = self.table(index)
        if self.training:
            used = F.one_hot(index, self.table.num_embeddings).to(x.dtype).mean((0, 1, 2))
            self.usage.mul_(0.9).add_(used, alpha=0.1)
        loss = F.mse_loss(code, flat.detach()) + 0.25 * F.mse_loss(flat, code.detach())
        return (flat + (code - flat).detach()).permute(0, 3, 1, 2), loss


class TwoLevels(nn.Module):
    """Codes of a coarse and of a fine map, as in VQ-VAE 2."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = nn.Conv2d(3, 4, 4, 2, 1), nn.Conv2d(4, 4, 4, 2, 1)
        self.code_t, self.code_b = Codes(6, 4), Codes(6, 4)
        self.up, self.out = nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = self.bottom(x)
        top, loss = self.code_t(self.top(low.relu()))
        top = self.up(top)
        low, more = self.code_b(low + top)
        return self.out(torch.cat([top, low], 1)), loss + more


@style
def codes_of_two_levels() -> Style:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        made, extra = model(x)
        return F.mse_loss(made, x) + extra

    return Style(TwoLevels(), (torch.randn(BATCH, 3, 8, 8),), loss)


class Perceptual(nn.Module):
    """A generator, a critic, and a frozen net whose features are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.Dropout2d(0.0), nn.Tanh())
        self.gen.append(nn.Conv2d(4, 3, 3, 1, 1))
        self.critic = nn.Sequential(nn.Conv2d(6, 4, 4, 2, 1), nn.LeakyReLU(0.2, True))
        self.critic.append(nn.Conv2d(4, 1, 4, 1, 1))
        self.vgg = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2))
        self.vgg.eval()
        for p in self.vgg.parameters():
            p.requires_grad = False

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        fake = self.gen(x)
        real, made = (
            self.critic(torch.cat([x, y], 1)),
            self.critic(torch.cat([x, fake.detach()], 1)),
        )
        judged = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        judged = judged + F.binary_cross_entropy_with_logits(made, torch.zeros_like(made))
        with torch.no_grad():
            wanted = [m.clone() for m in self.features(y)]
        felt = sum(F.l1_loss(a, b) for a, b in zip(self.features(fake), wanted, strict=True))
        return {"d": judged * 0.5, "g": felt + 10 * F.l1_loss(fake, y)}

    def features(self, x: Tensor) -> list[Tensor]:
        kept = []
        for layer in self.vgg:
            x = layer(x)
            if isinstance(layer, nn.Conv2d):
                kept.append(x)
        return kept


@style
def perceptual_and_adversary() -> Style:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        parts = model(x, y)
        return parts["d"] + parts["g"]

    batch = torch.randn(BATCH, 3, 8, 8), torch.randn(BATCH, 3, 8, 8)
    return Style(Perceptual(), batch, loss)
