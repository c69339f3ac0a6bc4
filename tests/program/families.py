"""A small language model and a small network of images, and their stages beside one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import partc
from partc.program import Program
from partc.program.stage.runtime import Stage

VOCAB, HIDDEN, ROWS = 12, 8, 8
Batch = tuple[Tensor, Tensor]


class Language(nn.Module):
    """Residual layers, the second outside of any list, whose rows of the past are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN)])
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        past = torch.tril(torch.ones(ids.shape[1], ids.shape[1], dtype=x.dtype))
        x = x + 0.1 * self.mix(past @ x)
        y: Tensor = self.head(x)
        return y


def language() -> Language:
    torch.manual_seed(0)
    return Language().double()


def language_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def tokens(rows: int, length: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Pictures(nn.Module):
    """A convolution with batch norm and dropout, which train and eval tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.conv(x))).mean((2, 3))
        y: Tensor = self.head(self.drop(h))
        return y


def pictures() -> Pictures:
    torch.manual_seed(1)
    return Pictures().double()


def picture_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def images(rows: int, size: int = 5, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, size, size, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (rows,), generator=generator)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(found: Tensor, expected: Tensor, what: str) -> None:
    """Equal but for rounding in float64."""
    torch.testing.assert_close(
        whole(found.detach()), expected.detach(), rtol=1e-10, atol=1e-13,
        msg=lambda told: f"{what}: {told}",
    )  # fmt: skip


def compare_step(stage: Stage, model: nn.Module, loss: Tensor | None, expected: Tensor) -> None:
    """A step's loss, and every gradient that this rank holds; both start without gradients."""
    assert loss is not None
    close(loss, expected, "loss")
    expected.backward()
    theirs = dict(model.named_parameters())
    for name, param in stage.named_parameters():
        grad = theirs[name].grad
        assert (param.grad is None) == (grad is None), name
        if param.grad is not None and grad is not None:
            close(param.grad, grad, f"gradient of {name}")
    stage.zero_grad()
    model.zero_grad()


def bytes_of_model(stage: Stage) -> int:
    """The bytes of all memory in which a stage and its programs hold tensors of the model."""
    held = {}
    for _, tensor in stage.pieces().values():
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for family in stage._families:
        for member in family.members.values():
            for name, tensor in member.role.tensors(member.run).items():
                assert not tensor.is_meta, name
                if name in stage.shards and name in member.program.fingerprint.tensors:
                    memory = tensor.untyped_storage()
                    held[memory.data_ptr()] = memory.nbytes()
    return sum(held.values())


class Gan(nn.Module):
    """A generator and a critic, each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def gan() -> Gan:
    torch.manual_seed(2)
    return Gan().double()


def critic_loss(model: Gan, real: Tensor, noise: Tensor) -> Tensor:
    found, made = model.critic(real), model.critic(model.maker(noise).detach())
    ones, zeros = torch.ones_like(found), torch.zeros_like(made)
    with_logits = F.binary_cross_entropy_with_logits
    return with_logits(found, ones) + with_logits(made, zeros)


def maker_loss(model: Gan, noise: Tensor) -> Tensor:
    made = model.critic(model.maker(noise))
    return F.binary_cross_entropy_with_logits(made, torch.ones_like(made))


# layouts ------------------------------------------------------------------------------------
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": ("dp=2", "ddp", {}),
    "fsdp": ("dp=2", "fsdp", {}),
    "tp": ("tp=2", "megatron", {}),
    "pp": ("pp=2", "ddp", {"microbatches": 2}),
}


def compiled(layout: str, batch: Batch, model: nn.Module | None = None) -> Program:
    mesh, plan, options = LAYOUTS[layout]
    return partc.compile(model or language(), mesh, batch, loss=language_loss, plan=plan, **options)


def begun(program: Program, model: nn.Module, **choices: Any) -> Stage:
    stage = program.module(**choices)
    stage.load_full(model)
    return stage
