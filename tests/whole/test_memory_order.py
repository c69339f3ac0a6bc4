"""What lies in memory in another order than its dims computes as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import TraceError
from partc.verification.processes import Processes
from partc.verification.verification import verify
from tests.whole.random_images import DrawnImages

torch.manual_seed(0)
NEAR = 3 * torch.eye(4, dtype=torch.float64)


class Between(nn.Module):
    """A convolution and a head, and between them what is tried on ``f64[4,8,6,6]``."""

    def __init__(self, tried: nn.Module | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)
        self.tried = tried
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        out: Tensor = self.head(self.tried(x).reshape(x.shape))
        return out


class Pixels(nn.Module):
    """A residual over rows of pixels, whose two gradients lie in memory in different orders."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.norm, self.mix = nn.GroupNorm(1, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.group(x).flatten(2).swapaxes(1, 2)
        rows = rows + self.mix(self.norm(rows))
        lying: Tensor = rows.swapaxes(1, 2)
        return lying


def attended(x: Tensor) -> Tensor:
    """Heads of four channels each, which the script lays out for the kernel."""
    rows = x.reshape(len(x), 2, 4, 36).transpose(2, 3).contiguous()
    return F.scaled_dot_product_attention(rows, rows, rows).transpose(2, 3)


def scaled_by(matrices: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A scale for each sample from matrices of its own."""

    def scaled(x: Tensor) -> Tensor:
        numbers = matrices(x.flatten(1)[:, :16].view(-1, 4, 4) + NEAR)
        return x * numbers.view(-1, 1, 1, 1)

    return scaled


class Rolled(nn.Module):
    """A roll keeps the order of a convolution's gradient, and the fake of a roll does not."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.conv = nn.GroupNorm(1, 8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.group(x)).roll(1, 2)
        return attended(x + self.conv(x))


def turned(x: Tensor) -> Tensor:
    """Attention with keys turned as complex numbers: the keys' gradient comes by columns."""
    heads = x.reshape(len(x), 36, 2, 4)
    pairs = torch.view_as_complex(heads.reshape(len(x), 36, 2, 2, 2)) * 1j
    keys = torch.view_as_real(pairs).flatten(3).transpose(1, 2)
    rows = heads.transpose(1, 2)
    return (torch.softmax(rows @ keys.mT, -1) @ rows).transpose(1, 2)


TRIED: dict[str, Any] = {
    "sum of gradients": Pixels(),
    "roll": Rolled(),
    "attention": attended,
    "rotary embedding of complex numbers": turned,
    "slogdet": scaled_by(lambda m: torch.linalg.slogdet(m)[1]),
    "slogdet of copies": scaled_by(
        lambda m: torch.linalg.slogdet(m.swapaxes(1, 2).contiguous().swapaxes(1, 2))[1]
    ),
    "det of a transpose": scaled_by(lambda m: torch.linalg.det(m.mT)),
    "solve": scaled_by(lambda m: torch.linalg.solve(m.mT, m[..., 0]).sum(-1)),
    "solve by columns": scaled_by(
        lambda m: torch.linalg.solve(m.mT.contiguous().mT, m.mT).sum((-1, -2))
    ),
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


@pytest.mark.rows(3)
@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2", 1), ("pp=2", 2)])
@pytest.mark.parametrize("tried", TRIED)
def test_kernels_that_ignore_strides_agree(tried: str, mesh: str, microbatches: int) -> None:
    model, batch = Between(TRIED[tried]), torch.randn(4, 3, 6, 6, dtype=torch.float64)
    program = partc.compile(
        model, mesh, (batch,), loss=loss_of, plan="ddp", microbatches=microbatches
    )
    verify(program, model, batch, loss=loss_of).check()


def train_in_another_order() -> None:
    model = Between(nn.GroupNorm(2, 8))
    with torch.no_grad():
        model.conv.weight = nn.Parameter(model.conv.weight.to(memory_format=torch.channels_last))
    batch = torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    stage = partc.compile(model, "dp=4", (batch,), loss=loss_of, plan="ddp").module()
    for x in (batch, batch.to(memory_format=torch.channels_last), batch.mT.contiguous().mT):
        model.zero_grad()
        loss_of(model, batch).backward()
        wanted = {name: param.grad for name, param in model.named_parameters()}
        stage.zero_grad()
        stage.step(x)
        for name, param in stage.named_parameters():
            grad: Any = param.grad
            torch.testing.assert_close(grad.full_tensor(), wanted[name])


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_weights_and_batches_in_any_order_train_alike(world: Processes) -> None:
    world.run(train_in_another_order)


class Windows(nn.Module):
    """Reads its weight by strides."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.as_strided(self.weight, (4, 2), (1, 4))


def test_strides_of_a_weight_that_ranks_hold_in_another_order_are_refused() -> None:
    batch = torch.randn(8, 4)
    with pytest.raises(TraceError, match="weight: it is not contiguous, and the step reads memory"):
        partc.compile(Windows(torch.randn(4, 2).T), "dp=2", (batch,), loss=loss_of, plan="ddp")


class Rows(nn.Module):
    """Looks up rows of a table whose gradient is sparse."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.table = kind(20, 4, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table(ids)
        return rows


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("mesh", "plan"), [("dp=2", "ddp"), ("dp=2", "fsdp"), ("tp=2", "megatron"), ("pp=2", "ddp")]
)
def test_sparse_gradients_are_refused(mesh: str, plan: str, kind: type[nn.Module]) -> None:
    ids = torch.randint(20, (8, 5))
    with pytest.raises(TraceError, match=r"table\.weight: its gradient is sparse"):
        partc.compile(Rows(kind), mesh, (ids,), loss=loss_of, plan=plan)


def sparse_rows(frozen: bool) -> str:
    """What a script for DDP is told at its first step, or that this was right."""
    model = Rows(nn.Embedding).double()
    model.table.requires_grad_(not frozen)
    head = nn.Linear(4, 3).double()
    whole = nn.Sequential(model, head)
    parallel: Any = partc.parallelize(
        copy.deepcopy(whole), "dp=2", loss=loss_of, plan="ddp", batch="global"
    )
    ids = torch.randint(20, (8, 5), generator=torch.Generator().manual_seed(0))
    try:
        loss = parallel.step(ids)
    except TraceError as error:
        return str(error)
    expected = loss_of(whole, ids)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    for mine, theirs in zip(parallel.parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-12, atol=1e-15)
    return ""


@pytest.mark.gloo
def test_a_sparse_table_is_refused_at_the_first_step_unless_it_is_frozen(world: Processes) -> None:
    """A table that is not trained has no gradient, whatever it says of it."""
    for said in world.run(sparse_rows, False, num=2):
        assert "0.table.weight: its gradient is sparse" in said
        assert "sparse=False" in said
    assert world.run(sparse_rows, True, num=2) == ["", ""]


ONCE_STRIDED = (
    "laid out attention", "gated_by_rows", "attention", "rolled", "pooled_both_ways",
    "convolution of pixels",
)  # fmt: skip


@pytest.mark.exhaustive
def test_sums_over_ranks_take_what_a_kernel_leaves_strided() -> None:
    """The gradient of a pool is contiguous as a fake, and on the CPU is not."""
    drawn = DrawnImages(0, ONCE_STRIDED, [(16, 4)], [("tp=2", "megatron")])
    _, report = drawn.report()
    report.check()
