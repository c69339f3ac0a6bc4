"""Attention that swaps batch and sequence, or merges samples and heads, under sequence parallelism:
ranks keep their own samples, and the sequence is what is scattered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.graph import Graph, collectives
from partc.graph.moves import gathers_param
from partc.lowering import partition
from partc.plan import Plan
from partc.plan.mesh import Mesh

SAMPLES, LENGTH, WIDTH, HEADS = 8, 6, 32, 4
PRESETS = ("ddp+megatron-sp", "fsdp+megatron-sp")
Case = tuple[nn.Module, tuple[Tensor, ...]]


def _drawn(batch_first: bool, length: int = LENGTH) -> Tensor:
    sizes = (SAMPLES, length) if batch_first else (length, SAMPLES)
    return torch.randn(*sizes, WIDTH, generator=torch.Generator().manual_seed(length))


def encoder(batch_first: bool) -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (_drawn(batch_first),)


def decoder(batch_first: bool) -> Case:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=batch_first)
    return nn.TransformerDecoder(layer, 2), (_drawn(batch_first), _drawn(batch_first, 10))


class Attention(nn.Module):
    """``nn.MultiheadAttention`` of one tensor to itself; ``weighs``: it also computes the weights,
    by matrix products instead of a fused call.
    """

    def __init__(self, batch_first: bool, weighs: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        self.weighs = weighs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=self.weighs)[0]
        return x + y


class Merged(nn.Module):
    """Attention by ``bmm`` over samples and heads in one dim, the samples the outer part of it, or
    the inner one.
    """

    def __init__(self, batch_first: bool, inner: bool) -> None:
        super().__init__()
        self.batch_first, self.inner = batch_first, inner
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def merged(self, x: Tensor) -> Tensor:
        """``[length, samples, width] -> [(samples heads), length, width / heads]``."""
        length, samples, _ = x.shape
        if self.inner:
            x = x.unflatten(2, (HEADS, -1)).transpose(1, 2)
        return x.reshape(length, samples * HEADS, -1).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        turned = x.transpose(0, 1) if self.batch_first else x
        length, samples, _ = turned.shape
        q, k, v = (self.merged(each(turned)) for each in (self.q, self.k, self.v))
        y = (q @ k.transpose(1, 2)).softmax(-1) @ v
        if self.inner:
            split = y.transpose(0, 1).unflatten(1, (HEADS, samples)).transpose(1, 2)
        else:
            split = y.transpose(0, 1).unflatten(1, (samples, HEADS))
        y = self.o(split.reshape(length, samples, WIDTH))
        back: Tensor = x + (y.transpose(0, 1) if self.batch_first else y)
        return back


def _module(made: Callable[[bool], nn.Module], batch_first: bool) -> Case:
    return made(batch_first), (_drawn(batch_first),)


CASES: dict[str, Callable[[bool], Case]] = {
    "encoder": encoder,
    "decoder": decoder,
    "attention": partial(_module, partial(Attention, weighs=False)),
    "with its weights": partial(_module, partial(Attention, weighs=True)),
    "samples outside": partial(_module, partial(Merged, inner=False)),
    "samples inside": partial(_module, partial(Merged, inner=True)),
}


def squares(model: nn.Module, *given: Tensor) -> Tensor:
    y: Tensor = model(*given)
    return F.mse_loss(y, torch.zeros_like(y))


def _plan(preset: str, graph: Graph, batch_first: bool) -> Plan:
    """The preset, and which dim of every input has the samples."""
    dims = "" if batch_first else "".join(f"{n} = {{ batch = 1 }}\n" for n in graph.inputs)
    return Plan.parse(f'preset = "{preset}"\n[inputs]\n{dims}')


def _travels_over_dp(graph: Graph) -> list[str]:
    """The transfers over ``dp`` of anything but weights, their gradients and finished sums."""
    moving = (collectives.all_gather, collectives.all_to_all)
    return [
        str(node) for node in graph.calls()
        if node.target in moving and node.kwargs["axis"] == "dp" and not gathers_param(node)
    ]  # fmt: skip


@cache
def _step(name: str, batch_first: bool) -> partc.Traced:
    torch.manual_seed(0)
    return partc.Traced(*CASES[name](batch_first), squares)


def _right(name: str, batch_first: bool, preset: str, mesh: str, **asked: Any) -> None:
    """The program computes what the model does."""
    step = _step(name, batch_first)
    plan = _plan(preset, step.graph(), batch_first)
    program = partc.compile(step, mesh, plan=plan, **asked)
    _, batch = CASES[name](batch_first)
    partc.verify(program, step.model, batch, loss=squares).check()


@pytest.mark.rows(2)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("preset", PRESETS)
def test_each_rank_keeps_its_samples(preset: str, name: str, batch_first: bool) -> None:
    whole = _step(name, batch_first).graph()
    mesh = Mesh.of("dp=2,tp=2")
    plan = _plan(preset, whole, batch_first).changed(mesh=mesh)
    local = partition(replace(whole, mesh=mesh), plan)[1]
    assert _travels_over_dp(local) == []
    assert any(node.target is collectives.reduce_scatter for node in local.calls())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "batch_first"),
    [*((name, False) for name in CASES), ("decoder", True), ("samples inside", True)],
)
def test_the_step_is_that_of_the_model(name: str, batch_first: bool) -> None:
    _right(name, batch_first, "fsdp+megatron-sp", "dp=2,tp=2")


@pytest.mark.exhaustive
def test_microbatches_of_samples_too() -> None:
    _right("encoder", False, "ddp+megatron-sp", "dp=2,tp=2", microbatches=2)


@pytest.mark.exhaustive
def test_axes_in_another_order() -> None:
    _right("encoder", True, "ddp+megatron-sp", "tp=2,dp=2")
