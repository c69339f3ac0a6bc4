"""Plans and partitions: what presets decide, what moves, and that every layout computes the
same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.checks.local_graph import check
from partc.errors import PlanError, ShardingError
from partc.graph import Graph, collectives, fake_of, tensor_args, value
from partc.graph.moves import kind_of
from partc.lowering import partition, trace
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.sharding import Layout, cut
from partc.verification.reference import eager
from tests.short_models import short
from tests.zoo import FAMILIES

Golden = Callable[..., None]


class Blocks(nn.Module):
    """Two layers of attention with two key heads for four query heads, and a head over 24
    tokens.
    """

    def __init__(self, heads: int = 4, key_heads: int = 2, width: int = 32, ffn: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, width)
        self.layers = nn.ModuleList(Block(heads, key_heads, width, ffn) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 24, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    def __init__(self, heads: int, key_heads: int, width: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.norm = nn.RMSNorm(width)
        self.q = nn.Linear(width, heads * self.size, bias=False)
        self.k = nn.Linear(width, key_heads * self.size, bias=False)
        self.v = nn.Linear(width, key_heads * self.size, bias=False)
        self.o = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, ffn), nn.GELU())
        self.down = nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = self.q(h).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k = self.k(h).unflatten(-1, (self.key_heads, self.size)).transpose(1, 2)
        v = self.v(h).unflatten(-1, (self.key_heads, self.size)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        x = x + self.down(self.mlp(x))
        return x


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    logits = model(ids)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(0, 24, (8, 12))
    targets[0, :7] = -1  # ranks have different numbers of tokens that count
    return torch.randint(0, 24, (8, 12)), targets


def blocks(**sizes: int) -> nn.Module:
    torch.manual_seed(1)
    return Blocks(**sizes).double()


@cache
def step() -> partc.Traced:
    return partc.Traced(blocks(), batch(), loss_of)


def partitioned(
    mesh: str, plan: str | Plan, model: nn.Module | partc.Traced | None = None
) -> tuple[Plan, Graph]:
    if isinstance(model, nn.Module):
        model = partc.Traced(model, batch(), loss_of)
    graph = (model or step()).graph()
    graph.mesh = Mesh.of(mesh)
    full, local = partition(graph, plan if isinstance(plan, Plan) else Plan(preset=plan))
    check(local)
    return full, local


def moved(local: Graph) -> str:
    """How often each collective runs per axis and phase, and the elements one rank gives it."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for node in local.calls():
        if node.target in collectives.COLLECTIVES:
            operands = tensor_args(node)
            weight = " of weights" if value(operands[0]).kind == "param" else ""
            key = f"{value(node).phase} {node.kwargs['axis']} {kind_of(node)}{weight}"
            counts[key] += 1
            sizes[key] += sum(fake_of(operand).numel() for operand in operands)
    return "".join(f"{k} x{counts[k]}, {sizes[k]} elements\n" for k in sorted(counts))


LAYOUTS = [
    ("dp=2", "ddp"),
    ("dp=2", "zero1"),
    ("dp=2", "fsdp"),
    ("dp_replicate=2,dp_shard=2", "hsdp"),
    ("tp=2", "megatron"),
    ("tp=2", "megatron-sp"),
    ("dp=2,tp=2", "fsdp+megatron-sp"),
    ("dp_replicate=2,dp_shard=2,tp=2", "hsdp+megatron"),
]


@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS, ids=[p for _, p in LAYOUTS])
def test_plan_and_traffic(mesh: str, plan: str, golden: Golden) -> None:
    full, local = partitioned(mesh, plan)
    golden(f"{full}\n{moved(local)}")


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS, ids=[p for _, p in LAYOUTS])
def test_every_layout_computes_the_same(mesh: str, plan: str) -> None:
    verify(mesh, plan)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), [("tp=4", "megatron"), ("tp=4", "megatron-sp")])
def test_fewer_key_heads_than_ranks(mesh: str, plan: str) -> None:
    verify(mesh, plan)


def verify(mesh: str, plan: str | Plan, tolerance: float = 1e-11) -> None:
    program = partc.compile(step(), mesh, plan=plan)
    partc.verify(program, step().model, batch(), loss_of).check(tolerance)


@pytest.mark.exhaustive
def test_a_saved_plan_replays_to_the_same_source() -> None:
    first = partc.compile(step(), "dp=2,tp=2", plan="fsdp+megatron-sp")
    again = partc.compile(step(), "dp=2,tp=2", plan=Plan.parse(first.plan))
    assert again.sources == first.sources
    assert again.plan == first.plan


@pytest.mark.exhaustive
def test_a_plan_by_hand() -> None:
    """Only one pair of weights is cut, and the batch over the same axis in another plan."""
    pair = {"layers.*.mlp.1.*": {"x": cut(0)}, "layers.*.down.weight": {"x": cut(1)}}
    full, local = partitioned("x=2", Plan(params=pair))
    assert full.stored("layers.0.mlp.1.weight") == {"x": cut(0)}
    assert "F x all_reduce x2" in moved(local)
    verify("x=2", Plan(params=pair))
    verify("x=2", Plan(inputs={"*": {"x": cut(0)}}))


@pytest.mark.exhaustive
def test_pins_go_before_the_preset() -> None:
    plan = Plan(preset="megatron", params={"layers.0.q.weight": {}})
    full, _ = partitioned("tp=2", plan)
    assert full.stored("layers.0.q.weight") == {}
    assert full.stored("layers.1.q.weight") == {"tp": cut(0)}
    verify("tp=2", plan)


@pytest.mark.exhaustive
def test_a_tied_weight_may_be_pinned_by_either_name() -> None:
    model = blocks()
    model.head.weight = model.embed.weight  # type: ignore[union-attr]
    for name in ("head.weight", "embed.weight"):
        full, _ = partitioned("tp=2", Plan(params={name: {"tp": cut(1)}}), model)
        assert full.stored("embed.weight") == {"tp": cut(1)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("one", "other"), [("embed.weight", "head.weight"), ("embed.*", "head.w*")]
)
def test_a_tied_weight_has_one_entry(one: str, other: str) -> None:
    tied = blocks()
    tied.head.weight = tied.embed.weight  # type: ignore[union-attr]
    model = partc.Traced(tied, batch(), loss_of)
    said = re.escape(f"plan, '{one}' and '{other}': they say different things of one parameter")
    for params in ({one: {"tp": cut(0)}, other: {"tp": cut(1)}}, {one: {}, other: {"tp": cut(1)}}):
        with pytest.raises(PlanError, match=said):
            partitioned("tp=2", Plan(params=params), model)
    alike, _ = partitioned("tp=2", Plan(params={one: {"tp": cut(0)}, other: {"tp": cut(0)}}), model)
    assert alike.stored("embed.weight") == {"tp": cut(0)}
    for pattern in ("*", "*.weight"):  # of all parameters: the entry of a name says more
        pins: dict[str, dict[str, Layout]] = {pattern: {}, "head.weight": {"tp": cut(1)}}
        found, _ = partitioned("tp=2", Plan(params=pins), model)
        assert found.stored("embed.weight") == {"tp": cut(1)}


@pytest.mark.exhaustive
def test_what_does_not_divide_stays_whole_or_is_refused_if_pinned() -> None:
    full, _ = partitioned("dp=5", Plan(preset="fsdp", inputs={"*": {}}), blocks(ffn=50))
    assert full.stored("layers.0.down.weight") == {"dp": cut(1)}
    assert full.stored("norm.weight") == {}
    assert "norm.weight stays whole: no dim is a multiple of dp=5" in full.notes
    pinned = Plan(params={"head.weight": {"tp": cut(0)}})
    with pytest.raises(ShardingError, match=r"head.weight: dim 0 of f64\[24,32\] cannot be cut"):
        partitioned("tp=5", pinned)
    with pytest.raises(ShardingError, match="batch of 8 cannot be cut by dp=3"):
        partitioned("dp=3", "ddp")


@pytest.mark.parametrize(
    ("mesh", "plan", "words"),
    [
        ("dp=2", "ddq", "there is no preset 'ddq'"),
        ("dp=2", "ddp+fsdp", "two presets for the same axes"),
        ("dp=2", "megatron", "finds no axis to work on"),
        ("dp=2,zz=2", "ddp", "no preset knows the axis 'zz'"),
        ("dp=2", "hsdp", "dp_replicate and dp_shard"),
        ("dp=2", Plan(preset="ddp", params={"head.weight": {"tp": cut(0)}}), "no axis 'tp'"),
        ("dp=2", Plan(preset="ddp", params={"haed.weight": {}}), "head.weight"),
        ("dp=2", Plan(preset="ddp", mesh=Mesh.of("dp=4")), "the plan is for mesh dp=4"),
    ],
)
def test_slips_in_plans_are_named(mesh: str, plan: str | Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        partitioned(mesh, plan)


class Padded(nn.Module):
    """An embedding whose row 1 has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 6, padding_idx=1)
        self.head = nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.table(ids))
        return y


def test_padding_is_one_row_of_a_table_that_two_axes_cut() -> None:
    torch.manual_seed(2)
    model, ids = Padded().double(), torch.arange(16).reshape(2, 8)
    plan = Plan(params={"table.weight": {"x": cut(0), "y": cut(0)}})

    def loss(m: nn.Module, given: Tensor) -> Tensor:
        squares: Tensor = m(given) ** 2
        return squares.mean()

    program = partc.compile(model, "x=2,y=2", (ids,), loss=loss, plan=plan)
    assert "window(given, self.y_rank, 8, ignore=1)" in program.source()  # among all rows
    partc.verify(program, model, (ids,), loss).check(1e-11)


class Residual(nn.Module):
    """A residual around two square weights, for many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.down(self.up(self.norm(x)).relu()))
        return y


def test_a_weight_gradient_reads_what_the_input_gradient_had_gathered() -> None:
    """By itself it would be cheaper to exchange its other operand and to scatter its sum."""
    graph = trace(Residual(), (torch.randn(4, 64, 8),), lambda m, x: (m(x) ** 2).mean())
    graph.mesh = Mesh.of("tp=2")
    _, local = partition(graph, Plan(preset="megatron-sp"))
    kinds = {kind_of(n) for n in local.calls() if n.target in collectives.COLLECTIVES}
    assert "all_to_all" not in kinds


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return y


@pytest.mark.exhaustive
def test_batch_statistics_are_the_global_batchs_unless_local() -> None:
    torch.manual_seed(2)
    model, x = Images().double(), torch.randn(8, 3, 6, 6, dtype=torch.float64)

    def loss(m: nn.Module, images: Tensor) -> Tensor:
        squares: Tensor = m(images) ** 2
        return squares.mean()

    program = partc.compile(model, "dp=2", (x,), loss=loss, plan="ddp")
    partc.verify(program, model, (x,), loss).check(1e-11)
    assert 'batch_norm = "global"' in program.plan
    local = partc.compile(model, "dp=2", (x,), loss=loss, plan="ddp", batch_norm="local")
    assert 'batch_norm = "local"' in local.plan

    def as_ddp(m: nn.Module, images: Tensor) -> Tensor:
        """Each half normalised by itself; the running statistics are the first half's."""
        copies = {name: buffer.clone() for name, buffer in m.named_buffers()}
        second = torch.func.functional_call(m, copies, (images[4:],))
        first = loss(m, images[:4])
        halves: Tensor = first + (second**2).mean()
        return halves / 2

    reference = eager(model, (x,), as_ddp, torch.float64, True)
    partc.verify(local, model, (x,), as_ddp, reference=reference).check(1e-11)


# t5, qwen3, bert and gemma2
LIKE_OTHERS = {"bart", "qwen2", "roberta", "distilbert", "electra", "mistral"}


@pytest.mark.rows(1)
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - LIKE_OTHERS))
def test_families_on_two_axes(family: str) -> None:
    """Sharded data parallel beside tensor parallel, on four ranks in threads."""
    case = short(family)
    double = next(case.model.parameters()).dtype == torch.float64
    program = partc.compile(
        case.model, "dp=2,tp=2", case.inputs, loss=case.loss, plan="fsdp+megatron"
    )
    dtype = torch.float64 if double else None
    report = partc.verify(program, case.model, case.inputs, case.loss, dtype=dtype)
    report.check(1e-9 if double else 1e-4)
