"""The gradient of a cross entropy in one call: as torch computes it, over the log-probabilities."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partc
from partc.codegen.helpers import printed
from partc.graph.ops import cross_entropy_grad

VOCAB, SAMPLES = 12, 8


class Classifier(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.head = nn.Linear(6, VOCAB, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x)
        return logits


def loss_of(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), target, ignore_index=3)


def batch(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(SAMPLES, 6, dtype=dtype), torch.tensor([0, 3, 10, 3, 5, 1, 1, 7])


@pytest.mark.parametrize("ignored", [-100, 3])
def test_it_is_what_torch_computes(ignored: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, VOCAB, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 3, ignored, 10, ignored])
    loss = F.cross_entropy(logits, target, reduction="sum", ignore_index=ignored)
    (loss * 1.7).backward()
    log_p = logits.detach().log_softmax(1)
    d_loss = torch.tensor(1.7, dtype=torch.float64)
    for found in (
        cross_entropy_grad(d_loss, log_p, target, target, ignored),
        printed.cross_entropy_grad(d_loss, log_p.exp(), target, target, ignored),
    ):
        torch.testing.assert_close(found, logits.grad, rtol=1e-14, atol=1e-15)


def test_a_loss_per_sample_is_left_alone() -> None:
    def loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(model(x), target, ignore_index=3, reduction="none")
        likely = F.binary_cross_entropy(each.sigmoid(), torch.ones_like(each) / 2)
        return (each * x[:, 0]).sum() + likely

    model = Classifier()
    program = partc.compile(model, "dp=2", batch(), loss=loss, plan="fsdp")
    partc.verify(program, model, batch(), loss=loss).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("mesh", "plan"),
    [("dp=2", "fsdp"), ("tp=2", "megatron"), ("dp=2,tp=3", "fsdp+megatron"), ("dp=1", "ddp")],
)
def test_programs_with_targets_that_do_not_count(mesh: str, plan: str, reduction: str) -> None:
    def loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), target, ignore_index=3, reduction=reduction)

    model = Classifier()
    program = partc.compile(model, mesh, batch(), loss=loss, plan=plan)
    assert "cross_entropy_grad" in program.source()
    partc.verify(program, model, batch(), loss=loss).check()


@pytest.mark.parametrize("ignored", [-100, 3])
def test_a_rank_s_columns_of_a_cut_vocabulary_are_those_of_the_whole(ignored: int) -> None:
    """Each rank knows its columns by itself, where it has some targets, none, or rows that do not
    count.
    """
    torch.manual_seed(2)
    logits = torch.randn(6, VOCAB, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 11, ignored, 10, ignored, 9])  # none of rank 1
    F.cross_entropy(logits, target, reduction="sum", ignore_index=ignored).backward()
    p, d_loss = logits.detach().softmax(1), torch.ones((), dtype=torch.float64)
    mine = [printed.window(target, rank, VOCAB // 3, outside=-100) for rank in range(3)]
    found = [
        printed.cross_entropy_grad(d_loss, columns.clone(), target, place, ignored)
        for columns, place in zip(p.chunk(3, 1), mine, strict=True)
    ]
    torch.testing.assert_close(torch.cat(found, 1), logits.grad, rtol=1e-14, atol=1e-15)


@pytest.mark.rows(2)
@pytest.mark.parametrize("ignored", [-100, -1, 3])
@pytest.mark.parametrize(("mesh", "plan"), [("tp=2", "megatron"), ("dp=2,tp=2", "ddp+megatron")])
def test_targets_of_a_cut_vocabulary_are_counted_whatever_is_ignored(
    mesh: str, plan: str, ignored: int
) -> None:
    def loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), target, ignore_index=ignored)

    x, target = batch()
    given = (x, torch.where(target == 3, ignored, target))
    program = partc.compile(Classifier(), mesh, given, loss=loss, plan=plan)
    partc.verify(program, Classifier(), given, loss=loss).check()


@pytest.mark.exhaustive
def test_a_rank_whose_targets_do_not_count_at_all() -> None:
    x, target = batch()
    target[: SAMPLES // 2] = 3  # those of the first data rank
    for mesh in ("dp=2,tp=2", "dp=2,tp=4"):
        program = partc.compile(Classifier(), mesh, (x, target), loss=loss_of, plan="fsdp+megatron")
        partc.verify(program, Classifier(), (x, target), loss=loss_of).check()


def test_a_cut_vocabulary_needs_no_sums_of_gradients_or_counts() -> None:
    program = partc.compile(Classifier(), "tp=2", batch(), loss=loss_of, plan="megatron")
    assert program.source().count("dist.all_reduce") == 3  # of the maximum, the sum and the loss


def test_the_log_probabilities_are_overwritten_where_nobody_needs_them() -> None:
    once = partc.compile(Classifier(), "dp=1", batch(), loss=loss_of, plan="ddp")
    assert re.search(r"cross_entropy_grad\(\w+, \w+\.exp_\(\)", once.source())
    turns = partc.compile(Classifier(), "dp=1", batch(), loss=loss_of, plan="ddp", microbatches=2)
    assert re.search(r"cross_entropy_grad\(\w+, \w+\.exp\(\)", turns.source())
    partc.verify(turns, Classifier(), batch(), loss=loss_of).check()


def test_logits_of_another_precision() -> None:
    def loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        log_p = F.log_softmax(model(x), 1, dtype=torch.float32)
        return F.nll_loss(log_p, target, ignore_index=3)

    model = Classifier(torch.bfloat16)
    program = partc.compile(model, "dp=1", batch(torch.bfloat16), loss=loss, plan="ddp")
    partc.verify(program, model, batch(torch.bfloat16), loss=loss).check()


@pytest.mark.parametrize(("mesh", "plan"), [("dp=2", "ddp"), ("tp=2", "megatron")])
def test_weighted_classes_keep_the_two_calls(mesh: str, plan: str) -> None:
    weight = torch.rand(VOCAB, dtype=torch.float64)

    def loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), target, weight=weight)

    model = Classifier()
    program = partc.compile(model, mesh, batch(), loss=loss, plan=plan)
    assert "cross_entropy_grad" not in program.source()
    partc.verify(program, model, batch(), loss=loss).check()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), [("dp=2", "ddp"), ("tp=2", "megatron")])
def test_smoothed_labels_keep_the_two_calls(mesh: str, plan: str) -> None:
    def loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), target, label_smoothing=0.1, ignore_index=3)

    model = Classifier()
    program = partc.compile(model, mesh, batch(), loss=loss, plan=plan)
    assert "cross_entropy_grad" not in program.source()
    partc.verify(program, model, batch(), loss=loss).check()
