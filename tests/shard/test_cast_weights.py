"""Weights that the forward casts: shards are cast before they are gathered, presets see through
casts, and no layout changes a bit of what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.cost.flops import node_flops
from partc.cost.memory import memory_curve
from partc.graph import Graph, collectives, fake_of, value
from partc.graph.moves import gathers_param, kind_of
from partc.lowering import partition, table, trace
from partc.passes.search.plans.read_scaling_model import scaling_models
from partc.plan import Plan
from partc.plan.mesh import Mesh

WIDTH, FFN, VOCAB = 32, 64, 48
BF16, F32 = torch.bfloat16, torch.float32
SCATTERS = (collectives.reduce_scatter, collectives.reduce_scatter_joined)
Loss = Callable[..., Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


class Tower(nn.Module):
    """Tokens, equal blocks, logits; ``tied``: the table is read in float32, and cast"""

    def __init__(self, tied: bool = False, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Weights that are cast by hand: chunks of a fused one, a transposed one, and one upwards."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 6)
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.mix = nn.Parameter((torch.randn(WIDTH, WIDTH) / 6).to(BF16))

    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(x, (WIDTH,)).to(BF16)
        q, k, v = (h @ w.to(BF16).t() for w in self.qkv.chunk(3))
        y = F.softmax(q @ k.transpose(-2, -1), -1) @ v
        y = y @ self.out.t().to(BF16)
        return x + y.float() @ self.mix.float().t()


class ByHand(Tower):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(layers))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Autocast as training scripts write it: forward and loss, with a cache of cast weights."""
    with torch.autocast("cpu", dtype=BF16):
        return own_loss(model, ids)


def uncached(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
        return own_loss(model, ids)


def own_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (8, 6), generator=torch.Generator().manual_seed(1))


def local(mesh: str, plan: str, model: nn.Module, loss: Loss = loss_of) -> Graph:
    graph = trace(model, (tokens(),), loss)
    graph.mesh = Mesh.parse(mesh)
    _, found = partition(graph, Plan(preset=plan, mesh=graph.mesh))
    return found


def gathers(graph: Graph) -> dict[str, dict[str, list[torch.dtype]]]:
    """Per parameter and phase the dtypes in which it is gathered."""
    found: dict[str, dict[str, list[torch.dtype]]] = {}
    for node in graph.calls():
        if gathers_param(node):
            fakes = fake_of(node) if isinstance(fake_of(node), tuple) else [fake_of(node)]
            for operand, fake in zip(node.all_input_nodes, fakes, strict=True):
                phases = found.setdefault(value(operand).name, {})
                phases.setdefault(value(node).phase, []).append(fake.dtype)
    return found


def saved_weights(graph: Graph) -> list[str]:
    """Saved memory that is as large as a whole cast weight of the blocks."""
    sizes = {FFN * WIDTH * 2, FFN * WIDTH * 4}
    return [b.name for b in memory_curve(graph).saved() if b.num_bytes in sizes]


# ZeRO-3: the cast shard is gathered, twice --------------------------------------------------------
@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "plan", "loss"), [
    ("dp=4", "fsdp", loss_of), ("dp=4", "fsdp", uncached),
    ("dp_replicate=2,dp_shard=2", "hsdp", loss_of), ("dp=2,tp=2", "fsdp+megatron", uncached),
])  # fmt: skip
def test_shards_are_cast_and_gathered_in_forward_and_backward(
    mesh: str, plan: str, loss: Loss
) -> None:
    graph = local(mesh, plan, Tower(), loss)
    found = gathers(graph)
    for name in ("up.weight", "down.weight"):
        assert found[f"blocks.1.{name}"] == {"F": [BF16], "B": [BF16]}
    assert found["blocks.1.norm.weight"]["F"] == [F32]
    assert not saved_weights(graph)
    sums = [n for n in graph.calls() if n.target in collectives.COLLECTIVES and "grad" in n.name]
    assert all(value(n).dtype == F32 for n in sums)
    reduced = {graph.grads[name].meta["value"].dtype for name in graph.grads}
    assert reduced == {F32}


def test_a_table_that_is_read_in_both_dtypes_is_gathered_in_both() -> None:
    found = gathers(local("dp=4", "fsdp", Tower(tied=True)))
    assert found["embed.weight"]["F"] in ([F32, BF16], [BF16])  # its rows may travel instead
    assert F32 not in found["embed.weight"].get("B", [])


@pytest.mark.exhaustive
def test_weights_that_are_gathered_for_a_step_are_gathered_once() -> None:
    found = gathers(local("dp=4", "zero1", Tower()))
    assert found["blocks.1.up.weight"] == {"F": [BF16]}
    # both dtypes are read all through the step: the float32 is there, and is cast
    assert gathers(local("dp=4", "zero1", Tower(tied=True)))["embed.weight"] == {"F": [F32]}


@pytest.mark.exhaustive
def test_views_and_casts_upwards_save_no_whole_weight() -> None:
    graph = local("dp=4", "fsdp", ByHand(), own_loss)
    found = gathers(graph)
    for name in ("qkv", "out", "mix"):
        assert found[f"blocks.1.{name}"] == {"F": [BF16], "B": [BF16]}
    whole = {num * WIDTH * WIDTH * size for num in (1, 3) for size in (2, 4)}
    saved = [b for b in memory_curve(graph).saved() if b.module.startswith("blocks")]
    assert not [b for b in saved if b.num_bytes in whole]


@pytest.mark.exhaustive
def test_gradients_are_cast_before_ranks_add_them() -> None:
    """Also where a transpose or a cat stands behind the cast; of a bf16 parameter behind it."""
    graph = local("dp=4", "fsdp", ByHand(), own_loss)
    sums = [n for n in graph.calls() if n.target in (collectives.all_reduce, *SCATTERS)]
    sums = [n for n in sums if value(n).shape]  # not the loss
    assert {kind_of(n) for n in sums} == {"reduce_scatter"}
    assert sum(value(n).dtype == BF16 for n in sums) == 3  # of each block's `mix`, a bf16 weight


def test_the_search_counts_the_bytes_that_are_gathered() -> None:
    graph = trace(Tower(), (tokens(),), loss_of, fold=True)
    (found,) = scaling_models(graph, "", ["cheap"], table())
    block = found.weights[found.units.index("blocks.0")]
    norm, product = 2 * WIDTH, 2 * WIDTH * FFN + WIDTH + FFN
    assert block.size.local(1, 1) == 4 * (norm + product)
    assert block.gathered.local(1, 1) == 4 * norm + 2 * product


# megatron sees through casts ----------------------------------------------------------------------
def flops(graph: Graph) -> int:
    return sum(node_flops(node) for node in graph.calls())


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", ["megatron", "megatron-sp"])
def test_four_tensor_ranks_compute_a_quarter_each(plan: str) -> None:
    whole, quarter = (local(mesh, plan, Tower()) for mesh in ("tp=1", "tp=4"))
    assert flops(quarter) * 4 == flops(whole)
    plain = trace(Tower(), (tokens(),), own_loss)
    plain.mesh = Mesh.parse("tp=4")
    full, _ = partition(plain, Plan(preset=plan, mesh=plain.mesh))
    cast = trace(Tower(), (tokens(),), loss_of)
    cast.mesh = plain.mesh
    assert partition(cast, Plan(preset=plan, mesh=plain.mesh))[0].params == full.params


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).square().sum()


def test_an_axis_that_cuts_nothing_is_named() -> None:
    found = partc.compile(Scale(), "dp=2,tp=2", (torch.ones(1, 6),), plan="fsdp+megatron")
    assert "tp=2 cuts no weight" in found.plan
    assert "dp=2 cuts no input" in found.plan
    assert "cuts no" in found.source(0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.head(self.rnn(self.table(tokens))[0])
        return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


@pytest.mark.exhaustive
def test_matrices_that_stay_whole_are_named() -> None:
    tokens = torch.zeros(4, 3, dtype=torch.long)
    found = partc.compile(Recurrent(), "tp=2", (tokens,), plan="megatron")
    assert "tp=2 leaves 67% of the weights whole" in found.plan
    assert "compute the same: rnn.weight_ih_l0, rnn.weight_hh_l0" in found.plan


# no layout changes what is computed ---------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "mesh", "plan", "options"), [
    ("autocast", "dp=4", "fsdp", {}),
    ("tied", "dp_replicate=2,dp_shard=2", "hsdp", {}),
    ("autocast", "dp=2,tp=2", "fsdp+megatron-sp", {"microbatches": 2}),
    ("tied", "dp=2", "zero2", {"microbatches": 2}),
    ("by hand", "dp=2,tp=2", "fsdp+megatron", {}),
    ("by hand", "pp=2,dp=2", "fsdp", {"microbatches": 4}),
    ("autocast", "pp=2,dp=2", "fsdp", {"microbatches": 4}),
])  # fmt: skip
def test_programs_compute_what_one_device_does(
    kind: str, mesh: str, plan: str, options: dict[str, Any]
) -> None:
    model = ByHand(4) if kind == "by hand" else Tower(tied=kind == "tied", layers=4)
    loss = own_loss if kind == "by hand" else loss_of
    made = partc.compile(model, mesh, (tokens(),), loss=loss, plan=plan, **options)
    assert partc.verify(made, model, (tokens(),), loss).check().worst.error < 1e-12
    own = partc.verify(made, model, (tokens(),), loss, dtype=None)
    assert own.worst.error < 0.05  # rounding of bf16


@pytest.mark.exhaustive
def test_a_cast_shard_gives_the_bits_of_the_cast_whole() -> None:
    """A batch of 1 is not cut: every rank computes what one device does, in the same order."""
    model, ids = Tower(), tokens()[:1]
    made = partc.compile(model, "dp=2", (ids,), loss=loss_of, plan="fsdp")
    assert "to(torch.bfloat16)" in made.source(0)
    assert partc.verify(made, model, (ids,), loss_of, dtype=None).worst.error == 0.0


def test_an_op_without_a_rule_is_named_where_tp_cuts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not the sizes, which are right."""
    monkeypatch.setattr("partc.rules.discover.discover", lambda node, num: [])
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def loss(model: Any, x: Tensor) -> Tensor:
        result: Tensor = model[1](torch.renorm(model[0](x), 2, 0, 1.0)).sum()
        return result

    with pytest.warns(UserWarning, match=r"tp=2 cuts no weight.*renorm.* has no sharding rule"):
        partc.compile(model, "tp=2", (torch.ones(4, 4),), loss=loss, plan="megatron")
