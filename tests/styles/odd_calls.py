"""Odd names, inputs and parts."""
# mypy: disable-error-code="no-any-return, no-untyped-call, operator, index, arg-type, misc"
# (written as users write, who check no types)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

from tests.styles import BATCH, Style, style
from tests.styles.losses import tower
from tests.styles.mixtures import features, mse


class Named(nn.Module):
    """Parameters, buffers and parts with names that programs have too."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.stages = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
        self.register_buffer("dp_rank", torch.ones(16))
        self.add_module("seed", nn.Linear(16, 16))
        self.add_module("loss", nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.get_submodule("seed")(x * self.step * self.dp_rank) * self.stages
        out: Tensor = self.get_submodule("loss")(x)
        return out


@style
def names_of_programs() -> Style:
    return Style(Named(), features(), mse)


@style
def old_weight_norm() -> Style:
    model = nn.Sequential(weight_norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 8))
    return Style(model, features(), mse)


@style
def orthogonal_weights() -> Style:
    layer = parametrizations.orthogonal(nn.Linear(16, 16))
    return Style(nn.Sequential(layer, nn.Tanh(), nn.Linear(16, 8)), features(), mse)


@style
def lazy() -> Style:
    return Style(nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 8)), features(), mse)


@style
def lazy_that_ran() -> Style:
    batch = features()
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 8))
    model(batch[0])
    return Style(model, batch, mse)


@style
def frozen_body() -> Style:
    model = tower()
    model[0].requires_grad_(False)
    return Style(model, features(), mse)


@style
def all_frozen() -> Style:
    return Style(tower().requires_grad_(False), features(), mse)


@style
def sparse_gradients() -> Style:
    model = nn.Sequential(nn.Embedding(12, 8, sparse=True), nn.Flatten(), nn.Linear(24, 8))
    return Style(model, (torch.randint(0, 12, (BATCH, 3)), torch.randn(BATCH, 8)), mse)


@style
def equal_blocks_and_a_head() -> Style:
    blocks = (nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4))
    return Style(nn.Sequential(*blocks, nn.Linear(16, 8)), features(), mse)


@style
def a_number_as_input() -> Style:
    def loss(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return weight * mse(model, x, y)

    return Style(tower(), (*features(), torch.tensor(0.5)), loss)


@style
def one_tensor_as_batch() -> Style:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = model(x).square().mean()
        return result

    return Style(tower(), torch.randn(BATCH, 16), loss)


class Pair(NamedTuple):
    """A sample."""

    x: Tensor
    y: Tensor


@style
def named_tuples() -> Style:
    def loss(model: nn.Module, pair: Pair, scale: float = 1.0) -> Tensor:
        return scale * mse(model, *pair)

    return Style(tower(), {"pair": Pair(*features()), "scale": 2.0}, loss)


@style
def two_dtypes() -> Style:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.exact, self.head = nn.Linear(16, 16).double(), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.exact(x.double()).tanh().float())
            return out

    return Style(Mixed(), features(), mse)


class Tied(nn.Module):
    """One matrix used both ways, and one module called at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.table(ids)).relu()
        out: Tensor = self.head(self.mix(x))
        return out


@style
def tied_and_shared() -> Style:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).mT, ids)

    return Style(Tied(), (torch.randint(0, 12, (BATCH, 4)),), loss)


class Hyper(nn.Module):
    """A network whose weights another network makes, for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(4, 16 * 8)

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        return torch.bmm(x[:, None], self.make(code).view(-1, 16, 8)).squeeze(1)


@style
def hypernetwork() -> Style:
    def loss(model: nn.Module, x: Tensor, y: Tensor, code: Tensor) -> Tensor:
        return F.mse_loss(model(x, code), y)

    return Style(Hyper(), (*features(), torch.randn(BATCH, 4)), loss)


@style
def branch_on_a_value() -> Style:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        error = mse(model, x, y)
        return error if error > 1 else error.square()

    return Style(tower(), features(), loss)


@style
def early_exits() -> Style:
    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.heads = nn.ModuleDict({str(i): nn.Linear(16, 8) for i in range(3)})

        def forward(self, x: Tensor) -> list[Tensor]:
            out = []
            for i, layer in enumerate(self.body):
                x = layer(x).relu()
                out.append(self.heads[str(i)](x))
            return out

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        each = [F.mse_loss(out, y) for out in model(x)]
        return torch.stack(each).sum(), {"last": each[-1]}

    return Style(Exits(), features(), loss)


@style
def low_rank_beside_frozen() -> Style:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 8).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.zeros(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + x @ self.a.T @ self.b.T
            return out

    return Style(Lora(), features(), mse)


@style
def equal_layers_without_a_word() -> Style:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    return Style(model, features(out=16), mse)


@style
def lists_of_equal_layers_in_a_list() -> Style:
    lists = (nn.Sequential(*(nn.Linear(16, 16) for _ in range(5))) for _ in range(2))
    return Style(nn.Sequential(*lists), features(out=16), mse)
