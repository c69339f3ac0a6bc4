"""Networks that read, mend and make pictures."""
# mypy: disable-error-code="no-any-return, no-untyped-call, operator, index, arg-type, misc"
# mypy: disable-error-code="return-value, assignment"
# (written as users write, who check no types)

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.styles import BATCH, Style, style
from tests.styles.mixtures import mse


def pictures(size: int = 8, out: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, size, size), torch.randn(BATCH, out)


def likeness(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The error of a model that makes a picture."""
    return F.l1_loss(model(x), y)


class UNet(nn.Module):
    """Down with poolings, up with transposed convolutions, and skips between."""

    def __init__(self, depth: int, width: int = 4) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(depth + 1)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        pairs = list(pairwise(sizes))
        self.downs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairs[::-1])
        self.mixes = nn.ModuleList(nn.Conv2d(2 * a, a, 3, padding=1) for a, _ in pairs[::-1])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for down in self.downs:
            skips.append(x)
            x = F.max_pool2d(F.relu(down(x)), 2)
        for up, mix in zip(self.ups, self.mixes, strict=True):
            x = F.relu(mix(torch.cat([up(x), skips.pop()], dim=1)))
        return self.head(x)


@style
def unet_of_two_depths() -> Style:
    return Style(UNet(2), (torch.randn(BATCH, 3, 8, 8), torch.randn(BATCH, 3, 8, 8)), likeness)


@style
def unet_of_three_depths() -> Style:
    return Style(UNet(3, 2), (torch.randn(BATCH, 3, 8, 8), torch.randn(BATCH, 3, 8, 8)), likeness)


class DenseNet(nn.Module):
    """Every layer reads all layers before it; batch norms over ever more channels."""

    def __init__(self, num: int = 3, growth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        width = 3
        for _ in range(num):
            self.layers.append(
                nn.Sequential(
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(width, growth, 3, padding=1, bias=False),
                )
            )
            width += growth
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(F.adaptive_avg_pool2d(torch.cat(features, 1), 1).flatten(1))


@style
def dense_net() -> Style:
    return Style(DenseNet(), pictures(), mse)


class Inception(nn.Module):
    """Branches of several kernels, joined; a squeeze-and-excite gate and depthwise calls behind."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(3, 4, 1))
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, 4, 1), nn.Hardswish(), nn.Conv2d(4, 12, 1)
        )
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)
        self.norm, self.head = nn.BatchNorm2d(12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.one(x), self.three(x), self.pool(x)], 1)
        x = x * F.hardsigmoid(self.gate(x))
        x = F.relu6(self.norm(self.depth(x))) + x
        return self.head(x.mean([2, 3]))


@style
def inception_with_squeeze() -> Style:
    return Style(Inception(), pictures(), mse)


class ConvNext(nn.Module):
    """A block with its norm over channels-last, and layer scale."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-1 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


@style
def convnext_and_pixel_shuffle() -> Style:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        ConvNext(8),
        ConvNext(8),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )
    return Style(model, (torch.randn(BATCH, 3, 4, 4), torch.randn(BATCH, 3, 8, 8)), likeness)


class Pyramid(nn.Module):
    """Maps of several sizes from the top down, each with a prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)
        self.inner = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1)])
        self.out = nn.Conv2d(4, 2 * 7, 3, padding=1)
        self.register_buffer("anchors", torch.tensor([[1.0, 2.0], [2.0, 1.0]]))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.c1(x).relu()
        high = self.c2(low).relu()
        top = self.inner[1](high)
        mid = self.inner[0](low) + F.interpolate(top, size=low.shape[-2:], mode="nearest")
        return {"p3": self.out(mid), "p4": self.out(top)}

    def boxes(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Centres on the grid, sizes of the anchors, and the classes' scores."""
        num, _, high, wide = out.shape
        out = out.view(num, 2, 7, high, wide).permute(0, 1, 3, 4, 2).contiguous()
        rows, cols = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
        centre = out[..., :2].sigmoid() * 2 - 0.5 + torch.stack([cols, rows], -1)
        size = (out[..., 2:4].sigmoid() * 2) ** 2 * self.anchors.view(1, 2, 1, 1, 2)
        return torch.cat([centre, size], -1), out[..., 4:]


@style
def pyramid_with_anchors() -> Style:
    def loss(model: nn.Module, x: Tensor, box: Tensor, label: Tensor) -> Tensor:
        losses = []
        for out in model(x).values():
            boxes, scores = model.boxes(out)
            losses.append(F.smooth_l1_loss(boxes, box[:, None, None, None].expand_as(boxes)))
            losses.append(
                F.binary_cross_entropy_with_logits(
                    scores, F.one_hot(label, 3).to(scores)[:, None, None, None].expand_as(scores)
                )
            )
        return sum(losses)

    batch = torch.randn(BATCH, 3, 8, 8), torch.rand(BATCH, 4), torch.randint(0, 3, (BATCH,))
    return Style(Pyramid(), batch, loss)


class Fusion(nn.Module):
    """Two resolutions side by side that tell each other what they see, as in HRNet."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 8, 3, 2, 1)
        self.fuse = nn.ModuleDict(
            {"up": nn.Conv2d(8, 4, 1), "down": nn.Conv2d(4, 8, 3, stride=2, padding=1)}
        )
        self.norms = nn.ModuleList([nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(4, 8)])
        self.head = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fine(x), self.coarse(x)
        up = F.interpolate(self.fuse["up"](b), scale_factor=2, mode="bilinear", align_corners=False)
        a, b = self.norms[0](a + up).relu(), self.norms[1](b + self.fuse["down"](a)).relu()
        return self.head(torch.cat([a.amax((-2, -1)), b.mean((-2, -1))], -1))


@style
def fusion_of_resolutions() -> Style:
    return Style(Fusion(), pictures(), mse)


class StandardConv(nn.Conv2d):
    """A convolution whose weight is standardised before each call."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        var, mean = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
        w = (w - mean) / torch.sqrt(var + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


@style
def standardised_weights() -> Style:
    model = nn.Sequential(
        StandardConv(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        StandardConv(8, 8, 3, stride=2, padding=1, bias=False),
        nn.InstanceNorm2d(8),
        nn.PReLU(8),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8, affine=False),
    )
    return Style(model, pictures(), mse)


def ssim(x: Tensor, y: Tensor, window: Tensor) -> Tensor:
    """How alike two pictures are, by means and variances under a fixed window."""
    channels = x.shape[1]

    def blur(z: Tensor) -> Tensor:
        return F.conv2d(z, window.expand(channels, 1, -1, -1), padding=1, groups=channels)

    mx, my = blur(x), blur(y)
    vx, vy, vxy = blur(x * x) - mx * mx, blur(y * y) - my * my, blur(x * y) - mx * my
    likeness = (2 * mx * my + 0.01) * (2 * vxy + 0.03)
    return (likeness / ((mx**2 + my**2 + 0.01) * (vx + vy + 0.03))).mean()


@style
def likeness_by_fixed_windows() -> Style:
    line = torch.tensor([0.25, 0.5, 0.25])

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return 1 - ssim(model(x), y, torch.outer(line, line).to(x))

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.ELU())
    model.append(nn.Conv2d(8, 3, 3, padding=1, padding_mode="circular"))
    return Style(model, (torch.rand(BATCH, 3, 8, 8), torch.rand(BATCH, 3, 8, 8)), loss)


@style
def mixup_of_pictures() -> Style:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        others, share = torch.arange(len(x)).flip(0), 0.3
        out = model(share * x + (1 - share) * x[others])
        return share * F.mse_loss(out, y) + (1 - share) * F.mse_loss(out, y[others])

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(4, 8))
    return Style(model, pictures(), loss)
