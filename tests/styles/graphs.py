"""Graph networks, sets, detection, images."""
# mypy: disable-error-code="no-any-return, no-untyped-call, operator, index, arg-type, misc"
# (written as users write, who check no types)

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.styles import BATCH, Style, style
from tests.styles.mixtures import features, mse

NODES, EDGES = 16, 40


class Convolution(nn.Module):
    """A graph convolution by index_add over edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        for layer in self.layers:
            messages = layer(x)[start]
            x = (x + torch.zeros_like(x).index_add(0, end, messages)).relu()
        out: Tensor = self.head(x)
        return out


def nodes(model: nn.Module, x: Tensor, edges: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(model(x, edges), label)


def graph() -> tuple[Tensor, ...]:
    edges = torch.randint(0, NODES, (2, EDGES))
    return torch.randn(NODES, 8), edges, torch.randint(0, 3, (NODES,))


@style
def graph_convolution() -> Style:
    return Style(Convolution(), graph(), nodes)


class Attention(nn.Module):
    """Graph attention: a softmax over the edges of each node, by scatter_reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Linear(8, 8, bias=False), nn.Parameter(torch.randn(16))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        h = self.w(x)
        score = F.leaky_relu(torch.cat([h[start], h[end]], 1) @ self.a)
        most = score.new_full((len(x),), -1e9).scatter_reduce(0, end, score.detach(), "amax")
        weight = (score - most[end]).exp()
        total = torch.zeros_like(most).scatter_add(0, end, weight)
        summed = torch.zeros_like(h).index_add(0, end, h[start] * weight[:, None])
        out: Tensor = self.head(summed / (total[:, None] + 1e-6))
        return out


@style
def graph_attention() -> Style:
    return Style(Attention(), graph(), nodes)


class Dense(nn.Module):
    """Message passing by dense adjacency, one graph a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(8, 8), nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, near = batch["x"], batch["near"]
        for _ in range(2):
            m = near @ self.message(x)
            x = self.update(m.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        out: Tensor = self.head(x).mean(1)
        return out


@style
def graphs_of_a_dict() -> Style:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch), batch["y"])

    near = (torch.rand(BATCH, 5, 5) > 0.5).float()
    batch = {"x": torch.randn(BATCH, 5, 8), "near": near, "y": torch.randn(BATCH, 8)}
    return Style(Dense(), (batch,), loss)


class Points(nn.Module):
    """PointNet: a shared tower, the maximum over points, a learned transform."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Linear(3, 9)
        self.tower = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        turn = self.transform(x.amax(1)).view(-1, 3, 3) + torch.eye(3)
        out: Tensor = self.head(self.tower((x @ turn).mT).amax(-1))
        return out


@style
def points() -> Style:
    def loss(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(x), label)

    return Style(Points(), (torch.randn(BATCH, 10, 3), torch.randint(0, 4, (BATCH,))), loss)


class Detector(nn.Module):
    """A grid of boxes: objectness, offsets, classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.head = nn.Conv2d(8, 1 + 4 + 3, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found, box, kind = self.head(self.body(image)).split([1, 4, 3], 1)
        return found.squeeze(1), box, kind


@style
def detection_on_a_grid() -> Style:
    def loss(model: nn.Module, image: Tensor, here: Tensor, box: Tensor, kind: Tensor) -> Tensor:
        found, where, what = model(image)
        boxes = (F.smooth_l1_loss(where, box, reduction="none").sum(1) * here).sum()
        kinds = (F.cross_entropy(what, kind, reduction="none") * here).sum()
        seen = F.binary_cross_entropy_with_logits(found, here)
        return seen + (boxes + kinds) / here.sum().clamp(min=1)

    here, kind = (torch.rand(BATCH, 4, 4) > 0.7).float(), torch.randint(0, 3, (BATCH, 4, 4))
    batch = torch.randn(BATCH, 3, 8, 8), here, torch.randn(BATCH, 4, 4, 4), kind
    return Style(Detector(), batch, loss)


class Queries(nn.Module):
    """Learned queries attend to an image, as in DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 16, 4, 4)
        self.queries = nn.Parameter(torch.randn(5, 16))
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, image: Tensor) -> Tensor:
        memory = self.body(image).flatten(2).mT
        out: Tensor = self.head(self.decoder(self.queries.expand(len(image), -1, -1), memory))
        return out.sigmoid()


@style
def boxes_by_nearest_query() -> Style:
    def loss(model: nn.Module, image: Tensor, boxes: Tensor) -> Tensor:
        found = model(image)
        distance = torch.cdist(found.detach(), boxes, p=1.0)
        nearest = distance.argmin(1, keepdim=True).mT.expand(-1, -1, 4)
        return F.l1_loss(found.gather(1, nearest), boxes)

    return Style(Queries(), (torch.randn(BATCH, 3, 8, 8), torch.rand(BATCH, 3, 4)), loss)


class Unet(nn.Module):
    """Down, up, and a skip between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1)
        self.up, self.out = nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(5, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.middle(self.down(x).relu()).relu())
        out: Tensor = self.out(torch.cat([x, F.interpolate(y, scale_factor=1.0)], 1))
        return out


@style
def dice_of_segments() -> Style:
    def loss(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        p = model(x).sigmoid()
        return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)

    batch = torch.randn(BATCH, 1, 8, 8), (torch.rand(BATCH, 1, 8, 8) > 0.5).float()
    return Style(Unet(), batch, loss)


class Warp(nn.Module):
    """A spatial transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.locate, self.head = nn.Linear(36, 6), nn.Linear(36, 8)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.locate(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3)
        grid = F.affine_grid(theta, [len(x), 1, 6, 6], align_corners=False)
        out: Tensor = self.head(F.grid_sample(x, grid, align_corners=False).flatten(1))
        return out


@style
def spatial_transformer() -> Style:
    return Style(Warp(), (torch.randn(BATCH, 1, 6, 6), torch.randn(BATCH, 8)), mse)


class Capsules(nn.Module):
    """Routing by agreement, in which couplings are detached."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, 4, 2) / 2)  # [in, width, out, width]

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("biw,iwov->biov", x.view(-1, 4, 4), self.w)
        logit = torch.zeros(votes.shape[:3])
        for _ in range(2):
            out = (logit.softmax(-1)[..., None] * votes).sum(1)
            logit = logit + (votes.detach() * out.detach()[:, None]).sum(-1)
        return out.flatten(1)


@style
def capsules() -> Style:
    return Style(Capsules(), features(), mse)
