"""Buffers that a step updates: old values before the update, new ones behind it, in every part."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PlanError
from partc.plan import Plan

BATCH = torch.randn(16, 8), torch.randn(16, 8)


class Net(nn.Module):
    """Updates its buffers in all the ways that do not need activations of the whole batch."""

    layers: Any
    scale: Tensor
    decay: Tensor
    count: Tensor
    inputs: Tensor
    weights: Tensor
    now: Tensor
    before: Tensor
    twin: Tensor
    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("decay", torch.ones(8))
        self.register_buffer("count", torch.zeros(8))
        self.register_buffer("inputs", torch.ones(8))
        self.register_buffer("weights", torch.ones(8))
        self.register_buffer("now", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("before", torch.linspace(-1, 1, 8))
        self.register_buffer("twin", torch.ones(8))
        self.register_buffer("queue", torch.randn(16, 8) / 4)
        self.register_buffer("place", torch.tensor(14))

    def forward(self, x: Tensor) -> Tensor:
        given = x
        x = self.norm(x) * (self.scale + self.now)  # read by the first stage too
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        factor = torch.exp(-self.decay)
        x = x * self.scale * factor + self.before.sin() * self.inputs
        self.scale = self.scale * 0.7
        self.decay.mul_(0.9)
        self.count.add_(x.new_ones(8))
        self.inputs = self.inputs * 0.5 + given.mean(0)
        self.weights = self.weights * 0.5 + self.layers[2].weight.detach().mean(0)
        self.before.copy_(self.now)
        self.now = self.now * 0.9
        self.twin = self.now
        x = x * self.decay + x * self.count + x @ self.queue.clone().t() @ self.queue.clone()
        rows = (self.place + torch.arange(4)) % 16
        self.queue.index_copy_(0, rows, given[:4].tanh())
        self.place.copy_((self.place + 4) % 16)
        result: Tensor = x * self.weights + self.twin
        return result


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "plan", "how"),
    [
        ("dp=1", "ddp", {"microbatches": 2}),
        ("dp=2", "fsdp", {"microbatches": 2, "recompute": "block"}),
        ("pp=2", "ddp", {"microbatches": 2}),
    ],
)
def test_reads_before_and_behind_the_update(mesh: str, plan: str, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net()
    program = partc.compile(model, mesh, BATCH, loss=loss_of, plan=plan, **how)
    partc.verify(program, model, BATCH, loss_of).check()
    if mesh == "dp=1":
        alone = copy.deepcopy(model)
        stage = program.module()
        stage.load_full(model)
        for _ in range(3):
            assert stage.step(*BATCH).item() == pytest.approx(loss_of(alone, *BATCH).item(), 1e-4)
        whole = stage.full_state_dict()
        for name, buffer in alone.named_buffers():
            torch.testing.assert_close(whole[name], buffer, rtol=1e-4, atol=1e-5)


class Averages(nn.Module):
    """Blocks that read a buffer and then add an average of activations to it."""

    layers: Any

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Average() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Average(nn.Module):
    mean: Tensor
    norm: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("norm", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) * self.mean.clone() * self.norm.clone()
        self.mean.mul_(0.9).add_(y.detach().mean(0))
        self.norm.copy_(self.linear.weight.detach().norm(dim=0))
        return x + y


def test_averages_of_activations_in_a_pipeline() -> None:
    model = Averages()
    program = partc.compile(model, "pp=2", BATCH, loss=loss_of, plan="ddp")
    partc.verify(program, model, BATCH, loss_of).check()


def test_averages_of_microbatches_are_refused_by_their_buffer() -> None:
    with pytest.raises(
        PlanError, match=r"new value of buffer layers\.\d\.\w+ needs the whole batch"
    ):
        partc.compile(Averages(), "dp=2", BATCH, loss=loss_of, plan="ddp", microbatches=2)


@pytest.mark.exhaustive
def test_what_has_no_one_value_is_refused() -> None:
    class First(Averages):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.layers[3].mean.clone())

    with pytest.raises(PlanError, match=r"layers.3.mean.*stage 0 reads the buffer, and st"):
        partc.compile(First(), "pp=2", BATCH, loss=loss_of, plan="ddp")

    class Read(nn.Sequential):
        def forward(self, x: Any) -> Any:
            linear, norm = cast(Any, self)
            return norm(linear(x)) * norm.running_var.clone()

    model = Read(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with pytest.raises(PlanError, match="reads what a batch norm keeps"):
        partc.compile(model, "dp=2", BATCH, loss=loss_of, plan="ddp", microbatches=2)
    program = partc.compile(model, "dp=2", BATCH, loss=loss_of, plan="ddp", batch_norm="local")
    partc.verify(program, model, BATCH, loss_of).check()


class Twice(nn.Sequential):
    def forward(self, x: Any) -> Any:
        once: Any = super().forward
        return once(once(x))


def test_a_norm_that_runs_on_two_stages_is_refused_by_its_buffer() -> None:
    model = Twice(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    with pytest.raises(PlanError, match=r"1.running_mean.*stage 0 reads the buffer, and stage 1"):
        partc.compile(
            model, "pp=2", BATCH, loss=loss_of, plan="ddp", batch_norm="local", stages=["2"]
        )


@pytest.mark.rows(1)
@pytest.mark.parametrize("how", [{}, {"microbatches": 2, "batch_norm": "local"}])
def test_chosen_stages_do_not_part_the_runs_of_a_norm(how: dict[str, Any]) -> None:
    model = Twice(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    program = partc.compile(model, "pp=2", BATCH, loss=loss_of, plan="ddp", **how)
    assert Plan.parse(program.plan).stages == ("1",)
    partc.verify(program, model, BATCH, loss_of).check()


def test_nor_what_reads_a_buffer_from_what_updates_it() -> None:
    class Back(nn.Sequential):
        """What the last of the middle layers gave is added to what goes into the first of them."""

        last: Tensor

        def forward(self, x: Any) -> Any:
            first, *middle, head = cast(Any, self)
            x = first(x) + 0.1 * self.last.clone()
            for layer in middle:
                x = torch.tanh(layer(x))
            self.last.copy_(x.detach().mean(0))
            return head(x)

    model = Back(*(nn.Linear(8, 8) for _ in range(4)))
    model.register_buffer("last", torch.ones(8))
    program = partc.compile(model, "pp=2", BATCH, loss=loss_of, plan="ddp")
    assert Plan.parse(program.plan).stages == ("3",)
    partc.verify(program, model, BATCH, loss_of).check()
