"""Tables of which rows travel: the model's numbers, and only where that takes less time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PlanError
from partc.program import Program
from partc.program.helper_file import helpers_of
from partc.verification.verification import verify
from tests.patience import patience

WIDTH, MANY, MORE, FEW = 8, 4096, 32768, 16
TABLE = '"table.weight" = { %s = 1 }'


class Recommender(nn.Module):
    """Tables of many and of few rows, for the columns of one input."""

    def __init__(self, *rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(each, WIDTH) for each in rows)
        self.top = nn.Linear(WIDTH * len(rows), 1)

    def forward(self, ids: Tensor) -> Tensor:
        looked_up = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        likely: Tensor = self.top(torch.cat(looked_up, 1)).squeeze(1)
        return likely


class Model(nn.Module):
    """A table that tokens are looked up in, blocks, and a head."""

    def __init__(self, rows: int = MANY, *, padding: int | None = None, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, padding_idx=padding)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, rows, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: Tensor = self.head(x)
        return logits


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def batch(rows: int, tokens: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(rows, (2, 8, tokens), generator=generator)
    return ids, targets


def compiled(model: Model, mesh: str, tokens: int = 6, **options: Any) -> Program:
    inputs = batch(model.table.num_embeddings, tokens)
    return partc.compile(model, mesh, inputs, loss=loss_of, **{"plan": "fsdp", **options})


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("mesh", "axis", "options"),
    [
        ("dp=2", "dp", {}),
        ("dp=4", "dp", {"microbatches": 2}),
        ("dp=2,tp=2", "dp", {"plan": "fsdp+megatron"}),
        ("tp=2,dp=2", "dp", {"plan": "fsdp+megatron-sp"}),
        ("dp_replicate=2,dp_shard=2", "dp_shard", {"plan": "hsdp"}),
        ("pp=2,dp=2", "dp", {"microbatches": 2, "schedule": "zb-v"}),
    ],
)
def test_rows_travel_and_numbers_stay(mesh: str, axis: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Model(padding=3)
    program = compiled(model, mesh, **options)
    assert TABLE % axis in program.plan
    assert "all_to_all" in helpers_of(program.sources)
    verify(program, model, batch(MANY), loss_of).check(1e-12)


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_every_rank_looks_up_the_tokens_of_all() -> None:
    """No token is sent: the whole batch is at hand."""
    torch.manual_seed(0)
    model = Model()
    program = compiled(model, "dp=2")
    assert "F.embedding(ids, self.table_weight)" in program.source()
    verify(program, model, batch(MANY), loss_of, processes=True, timeout=patience()).check(1e-12)
    again = compiled(model, "dp=2", plan=program.plan)
    assert (again.plan, again.sources) == (program.plan, program.sources)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "tokens"), [(Model(FEW), 64), (Model(tied=True), 6), (Model(MANY), 8192)]
)
def test_tables_travel_where_rows_are_many_or_more_is_done_with_them(
    model: Model, tokens: int
) -> None:
    assert TABLE % "dp" not in compiled(model, "dp=2", tokens).plan


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    "plan",
    [
        'preset = "fsdp"\n[params]\n"table.weight" = { dp = 0 }',
        'preset = "fsdp"\n[values]\n"table:embedding" = { dp = 0 }',
        'preset = "fsdp"\n[gather]\ndp = "step"',
        "zero2",
    ],
)
def test_what_the_user_says_stays(plan: str) -> None:
    assert TABLE % "dp" not in compiled(Model(), "dp=2", plan=plan).plan


@pytest.mark.parametrize("text", ["0 -> 1 -> 2 -> 3", "whole -> 2 ->", "-> 2 -> up"])
def test_slips_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="layout"):
        compiled(Model(), "dp=2", plan=f'[values]\n"table:embedding" = {{ dp = "{text}" }}')


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "axes", "options"),
    [
        ("dp=2", "dp", {}),
        ("dp=4", "dp", {"microbatches": 2}),
        ("dp=2", "dp", {"plan": "zero1"}),
        ("dp=2", "dp", {"plan": "zero2", "microbatches": 2}),
        ("dp=2,tp=2", "dp", {"plan": "ddp+megatron"}),
        ("dp_replicate=2,dp_shard=2", "dp_replicate dp_shard", {}),
        ("dp_replicate=2,dp_shard=2", "dp_replicate", {"plan": "hsdp"}),
        ("pp=2,dp=2", "dp", {"microbatches": 2, "schedule": "zb-v"}),
    ],
)
def test_gradients_of_rows_are_gathered(mesh: str, axes: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Model(MORE, padding=3)
    program = compiled(model, mesh, **{"plan": "ddp", **options})
    for axis in axes.split():
        assert f'{axis} = "whole, whole -> whole"' in program.plan
    verify(program, model, batch(MORE), loss_of).check(1e-12)


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_no_table_is_summed() -> None:
    torch.manual_seed(0)
    model = Model(MORE)
    program = compiled(model, "dp=2", plan="ddp")
    assert "embedding_grad(d_x_whole, ids, 32768)" in program.source()
    assert "all_gather over dp x1, 768 B" in program.source()
    verify(program, model, batch(MORE), loss_of, processes=True, timeout=patience()).check(1e-12)
    again = compiled(model, "dp=2", plan=program.plan)
    assert (again.plan, again.sources) == (program.plan, program.sources)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (Model(MANY), "ddp"),
        (Model(MORE, tied=True), "ddp"),
        (Model(MORE), 'preset = "ddp"\n[values]\n"*:d_embedding_dense_backward" = { dp = "sum" }'),
    ],
)
def test_tables_are_summed_where_a_start_takes_longer_or_the_user_says_so(
    model: Model, plan: str
) -> None:
    assert '"whole, whole -> whole"' not in compiled(model, "dp=2", plan=plan).plan


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [{"mesh": "dp=2"}, {"mesh": "dp=2", "microbatches": 2}])
def test_tables_of_few_rows_beside_them_are_summed_and_the_plan_replays(
    mesh: dict[str, Any],
) -> None:
    """No pattern may speak of the small table too."""
    torch.manual_seed(0)
    rows = (MORE, FEW, 2 * MORE)
    model = Recommender(*rows)
    ids = torch.stack([torch.randint(each, (16,)) for each in rows], 1)
    clicks = torch.rand(16)

    def loss(model: nn.Module, ids: Tensor, clicks: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(ids), clicks)

    def made(plan: str) -> Program:
        return partc.compile(model, inputs=(ids, clicks), loss=loss, plan=plan, **mesh)

    program = made("ddp")
    assert ["tables.1:d" in program.plan, "tables.2:d" in program.plan] == [False, True]
    verify(program, model, (ids, clicks), loss).check(1e-12)
    again = made(program.plan)
    assert (again.plan, again.sources) == (program.plan, program.sources)
