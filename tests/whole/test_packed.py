"""Several documents in one row are those documents one by one, under every layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.plan import Plan

WORDS, WIDTH, HEADS, ROW = 32, 16, 4, 16
LENGTHS = ((7, 5, 4), (16,), (3, 9, 4), (1, 15))  # of the documents of each row
ALONG_ROWS = """
preset = "ddp"
[inputs]
"*" = { dp = 0, cp = 1 }
"""
LAYOUTS = (
    ("dp=2,tp=2", "fsdp+megatron-sp", 1),
    ("dp=2,pp=2", "fsdp", 2),
    ("dp=2,cp=2", Plan.parse(ALONG_ROWS), 1),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in parts)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        added: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return x + added


class Packed(nn.Module):
    """A causal language model of rows with several documents each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(ROW, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, docs: Tensor) -> Tensor:
        before = (docs[:, :, None] == docs[:, None, :]).tril()  # of the same document
        x = self.words(ids) + self.places(before.sum(-1) - 1)
        for block in self.blocks:
            x = block(x, before)
        scores: Tensor = self.head(x)
        return scores


def loss_of(model: nn.Module, ids: Tensor, docs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids, docs).flatten(0, 1), labels.flatten(), ignore_index=-100)


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """ids, docs and labels, each i64[4,16]; the last word of a document has no label."""
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
    docs = torch.stack(numbers)
    ids = torch.randint(WORDS, docs.shape, generator=torch.Generator().manual_seed(0))
    ends = torch.ones_like(docs, dtype=torch.bool)
    ends[:, :-1] = docs[:, 1:] != docs[:, :-1]
    return ids, docs, ids.roll(-1, 1).masked_fill(ends, -100)


def one_by_one(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The mean over all labels, of documents that each are a row of their own."""
    total = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS):
        pairs = zip(ids[row].split(lengths), labels[row].split(lengths), strict=True)
        for words, wanted in pairs:
            scores = model(words[None], torch.zeros_like(words)[None])[0]
            total = total + F.cross_entropy(scores, wanted, ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Packed()


@pytest.fixture(scope="module")
def alone(model: nn.Module) -> dict[str, Tensor]:
    """The loss and the gradients of the documents one by one, in float64."""
    twin = copy.deepcopy(model).double()
    ids, _, labels = rows()
    loss = one_by_one(twin, ids, labels)
    loss.backward()
    grads = {name: param.grad for name, param in twin.named_parameters() if param.grad is not None}
    return {"loss": loss.detach(), **grads}


def test_a_packed_row_is_its_documents(model: nn.Module, alone: dict[str, Tensor]) -> None:
    twin = copy.deepcopy(model).double()
    loss_of(twin, *rows()).backward()
    found: dict[str, Any] = {name: param.grad for name, param in twin.named_parameters()}
    found["loss"] = loss_of(twin, *rows()).detach()
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "plan", "microbatches"), LAYOUTS, ids=["sp", "pp", "cp"])
def test_packed_rows_under_layouts(
    model: nn.Module, mesh: str, plan: str | Plan, microbatches: int
) -> None:
    program = partc.compile(model, mesh, rows(), loss=loss_of, plan=plan, microbatches=microbatches)
    partc.verify(program, model, rows(), loss=loss_of).check()
