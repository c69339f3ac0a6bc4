"""What follows from the inputs alone: every rank computes the piece it reads, once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import partc
from partc.given_plan import read_plan
from partc.graph import Graph, collectives, tensor_args, value
from partc.graph.input_only import input_only
from partc.lowering import begin, to_local_graph, trace
from partc.plan.mesh import Mesh
from partc.plan.sharding import R, cut

aten = torch.ops.aten


def local_graph(graph: Graph, mesh: str, plan: str, microbatches: int = 1) -> Graph:
    graph.mesh = Mesh.of(mesh)
    return to_local_graph(begin(graph, read_plan(plan).changed(microbatches=microbatches))).graph


def cut_too_late(local: Graph) -> list[fx.Node]:
    """Computed values that are whole though all that read them keep a piece."""
    known = input_only(local)
    computed = [n for n in local.calls() if n in known and tensor_args(n)]  # no factories
    return [
        node
        for node in computed
        if node.target is not collectives.keep_piece
        and all(user.target is collectives.keep_piece for user in node.users)
    ]


def mistral() -> nn.Module:
    """A model whose mask follows from positions, and is more than causal."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}
    config: Any = MistralConfig(use_cache=False, **sizes, **heads)
    model: nn.Module = MistralForCausalLM(config)
    return model.double()


def own_loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids, labels=ids).loss
    return loss


@cache
def masked_step() -> partc.Traced:
    return partc.Traced(mistral(), (torch.randint(24, (8, 16)),), own_loss)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "plan", "microbatches"),
    [("dp=2", "ddp", 1), ("dp=2,tp=2", "fsdp+megatron-sp", 1), ("dp=2", "fsdp", 2)],
)
def test_layers_share_one_mask_and_its_piece(mesh: str, plan: str, microbatches: int) -> None:
    local = local_graph(masked_step().graph(), mesh, plan, microbatches)
    assert not cut_too_late(local)
    (mask,) = [n for n in local.calls() if n.target is aten.where.self and n in input_only(local)]
    axes = ["dp"] + ["mb"] * (microbatches > 1)
    assert {a: value(mask).sharding.on(a) for a in axes} == dict.fromkeys(axes, cut(0))


class Masked(nn.Module):
    """Scores under a mask of positions that goes through most kinds of ops; ``also`` says whether
    something reads all of it."""

    def __init__(self, also: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 6)
        self.also = also

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        places = torch.arange(length).expand(batch, -1) * torch.arange(1, batch + 1)[:, None]
        parts = torch.cat([places[:, 1:], places[:, :1]], -1).flip(-1).cumsum(-1)
        picked = parts[torch.arange(batch)[:, None, None], torch.arange(length)[:, None]]
        best, where = torch.stack([picked.squeeze(-1), places]).transpose(0, 1).max(1)
        mask = torch.where((best + where)[:, :, None] % 3 == 0, 0.0, -1.5).double()
        x: Tensor = self.embed(ids) + mask
        return x + mask.flip(0) if self.also else x


def masked_loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids).square().mean()
    return loss


@pytest.mark.parametrize("also", [False, True])
def test_pieces_are_those_of_the_whole(also: bool) -> None:
    torch.manual_seed(0)
    model, ids = Masked(also).double(), torch.randint(24, (8, 12))
    local = local_graph(trace(model, (ids,), masked_loss), "dp=2", "ddp")
    assert [n.target for n in cut_too_late(local)] == [aten.flip.default] * also
    masks = {value(n).sharding.on("dp") for n in local.calls() if n.target is aten.where.self}
    assert masks == {R if also else cut(0)}
    program = partc.compile(model, "dp=2", (ids,), loss=masked_loss, plan="ddp")
    partc.verify(program, model, (ids,), masked_loss).check(1e-11)
