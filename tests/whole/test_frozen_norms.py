"""A residual network whose batch norms are frozen, as one that is trained further: on real ranks.

Its norms are in eval mode and not trained, while the rest is in train mode. In float64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.verification.processes import Processes
from tests.compile_once import each_compiles
from tests.program.families import begun, close, compare_step

pytestmark = pytest.mark.gloo
LAYOUTS = [("tp=2", "megatron"), ("dp=2,tp=2", "fsdp+megatron"), ("dp=2,tp=2", "ddp+megatron")]


class Block(nn.Module):
    """Two convolutions with norms beside a shortcut, which may make fewer pixels."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.down = nn.Sequential()
        if stride > 1:
            shrink = nn.Conv2d(before, width, 1, stride, bias=False)
            self.down = nn.Sequential(shrink, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.down(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(F.relu(self.norm(self.stem(x))))
        y: Tensor = self.head(self.drop(h.mean((2, 3))))
        return y


def frozen() -> Residual:
    """With statistics and scales other than those of a new network."""
    torch.manual_seed(0)
    model = Residual().double()
    for norm in norms(model):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    for _ in range(3):
        model(torch.randn(8, 3, 8, 8, dtype=torch.float64) + 1)
    for norm in norms(model):
        norm.eval().requires_grad_(False)
    assert model.training
    return model


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]


def images(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (8,), generator=generator)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def train(mesh: str, plan: str) -> int:
    """Three steps beside one process, then an evaluation; how many elements of norms are cut."""
    model, reference = frozen(), frozen()
    before = copy.deepcopy(reference.state_dict())
    stage = begun(partc.compile(model, mesh, images(0), loss=loss_of, plan=plan), model)
    trained: Any = [p for p in stage.parameters() if p.requires_grad]
    ours = torch.optim.AdamW(trained, lr=1e-2)
    theirs = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2)
    for seed in range(3):
        batch = images(seed)
        compare_step(stage, reference, stage.step(*batch), loss_of(reference, *batch))
        stage.step(*batch)
        loss_of(reference, *batch).backward()
        ours.step()
        theirs.step()
        stage.zero_grad()
        reference.zero_grad()
    for name, tensor in stage.full_state_dict().items():
        torch.testing.assert_close(tensor, reference.state_dict()[name], rtol=1e-9, atol=1e-11)
        kept = ".bn" in name or name.startswith("norm") or ".down.1." in name
        assert torch.equal(tensor, before[name]) == kept, name
    close(stage.eval()(batch[0]), reference.eval()(batch[0]), "results")
    return sum(bool(shard.cuts) for name, (shard, _) in stage.pieces().items() if "conv" in name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS)
def test_a_network_with_frozen_norms_trains_as_in_one_process(
    world: Processes, mesh: str, plan: str
) -> None:
    num = 2 if mesh == "tp=2" else 4
    for num_cut in world.run(train, mesh, plan, num=num):
        assert num_cut == 4  # tp cuts the convolutions


def thawed() -> str:
    """What a script forgets: ``train()`` of the whole puts the norms into train mode too."""
    model = frozen()
    with each_compiles():  # each rank sees that the mode is another one
        program = partc.compile(model, "tp=2", images(0), loss=loss_of, plan="megatron")
    stage = begun(program, model)
    stage.step(*images(0))
    stage.train()
    try:
        stage.step(*images(0))
    except partc.errors.RunError as error:
        return str(error)
    return ""


def test_norms_that_are_in_train_mode_again_are_named(world: Processes) -> None:
    for said in world.run(thawed, num=2):
        assert "norm: it is in train mode, and the program has it in eval mode" in said
