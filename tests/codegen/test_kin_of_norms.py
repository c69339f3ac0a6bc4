"""Norms of the global batch in modules that differ share a class, and names in line are short."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.codegen.calls.path_names import LONG, short_names

IMAGES = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 4


class Unit(nn.Module):
    """A convolution and its norm; without ``acts`` no activation, whose gradient needs the norm's
    result again.
    """

    def __init__(self, width: int, out: int, acts: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, out, 3, padding=1, bias=False)
        self.normalization, self.acts = nn.BatchNorm2d(out), acts

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.normalization(self.convolution(x))
        return F.relu(y) if self.acts else y


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.projection = Unit(3, 8, True), Unit(8, 12, False)
        self.last = Unit(12, 16, True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.projection(self.embedding(x)))
        return y


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder_of_images = Encoder()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.encoder_of_images(x)
        return y


class Network(nn.Module):
    """Units one after the other, deep inside of modules with long names."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.backbone(x).mean((2, 3))), labels)


def loss_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(x, labels)
    return loss


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_norms_share_a_class_whatever_is_in_their_buckets(plan: str) -> None:
    model = Network()
    program = partc.compile(model, "dp=2", (IMAGES, LABELS), loss=loss_of, plan=plan)
    partc.verify(program, model, (IMAGES, LABELS), loss=loss_of).check()
    source = program.source()
    made = re.findall(r"self\.(\w+) = BatchNorm2d\(", source)
    assert made == ["embedding_normalization", "projection_normalization", "last_normalization"]
    assert source.count("\nclass BatchNorm2d") == 1


def test_attributes_have_the_end_of_a_long_name() -> None:
    program = partc.compile(Network(), "dp=2", (IMAGES, LABELS), loss=loss_of, plan="fsdp")
    source = program.source()
    assert "self.embedding_convolution_weight" in source
    assert '("backbone.encoder_of_images.embedding.convolution.weight"' in source
    assert "backbone_encoder_of_images_" not in source


def test_short_names_differ() -> None:
    long = [f"model.decoder_of_the_second_kind.{i}.attention.key.weight" for i in (1, 2)]
    assert short_names(long) == {name: name.removeprefix("model.") for name in long}, (
        "an end begins with a word, and no two are equal"
    )
    other = "model.encoder.of_the_first_kind.attention.value.weight"
    assert short_names([*long, other])[other] == "attention.value.weight"
    short = "model.embed_tokens.weight"
    assert len(short) <= LONG
    assert short_names([short])[short] == short
