"""A mask ``bool[1,5,5]`` for all rows where another batch has ``bool[8,5,5]``, and the reverse.

On real gloo processes, in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import ShardingError
from partc.plan.sharding import cut
from partc.program.step.batch_fit import Pieces
from partc.program.wanted import Wanted
from partc.verification.processes import Processes
from tests.program.families import LAYOUTS, begun, close, compare_step

pytestmark = pytest.mark.gloo
ROWS, STEPS = 8, 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 12), nn.Linear(4, 4)])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.blocks[0](x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(~mask, -1e9)
        y: Tensor = self.blocks[1](scores.softmax(-1) @ v)
        return y


def attention() -> nn.Module:
    torch.manual_seed(0)
    return Attention().double()


def loss_of(model: nn.Module, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x, mask), y)


def batch_with(each: str, rows: int = ROWS, steps: int = STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with a mask for all of them, or with one for each."""
    generator = torch.Generator().manual_seed(rows)
    x, y = torch.randn(2, rows, steps, 4, generator=generator, dtype=torch.float64).unbind()
    causal = torch.ones(1, steps, steps, dtype=torch.bool).tril()
    padded = torch.arange(steps)[None, None] < 1 + torch.arange(rows)[:, None, None] % steps
    return x, causal & padded if each == "rows" else causal, y


def own(x: Tensor, batch: str) -> Tensor:
    """This rank's rows, or all; what is for all rows is whole on each rank."""
    return x.chunk(2)[dist.get_rank()].contiguous() if batch == "local" and len(x) > 1 else x


def follow(layout: str, batch: str, kinds: tuple[str, ...]) -> None:
    mesh, plan, options = LAYOUTS[layout]
    given, kept = [own(x, batch) for x in batch_with(kinds[0])], attention()
    program = partc.compile(
        kept, mesh, tuple(given), loss=loss_of, plan=plan, batch=batch, **options
    )
    stage, reference = begun(program, kept), attention()
    for kind, steps in zip(kinds, (STEPS, STEPS, 3), strict=True):
        x, mask, y = batch_with(kind, steps=steps)
        given = [own(each, batch) for each in (x, mask, y)]
        expected = loss_of(reference, x, mask, y)
        compare_step(stage.train(), reference, stage.step(*given), expected)
        close(stage.eval().eval_step(*given), expected, f"loss with a mask of {kind}")
        close(stage(*given[:2]), own(reference(x, mask), batch), f"results with a mask of {kind}")
    used = [each for each in stage._own.programs.values() if each.wanted.replicated]
    assert not used


ROWS_FIRST, ALL_FIRST = ("rows", "all", "rows"), ("all", "rows", "all")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "batch", "kinds"),
    [
        ("ddp", "global", ROWS_FIRST),
        ("ddp", "local", ALL_FIRST),
        ("fsdp", "global", ALL_FIRST),
        ("fsdp", "local", ROWS_FIRST),
    ],
)
def test_masks_of_data_ranks(
    world: Processes, layout: str, batch: str, kinds: tuple[str, ...]
) -> None:
    world.run(follow, layout, batch, kinds, num=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "kinds"), [("tp", ROWS_FIRST), ("pp", ALL_FIRST)])
def test_masks_of_other_ranks(world: Processes, layout: str, kinds: tuple[str, ...]) -> None:
    world.run(follow, layout, "global", kinds, num=2)


def one_row() -> None:
    """One row on each rank: its mask is its own, and no mask for all rows."""
    kept = attention()
    given = tuple(own(x, "local") for x in batch_with("rows"))
    program = partc.compile(kept, "dp=2", given, loss=loss_of, plan="ddp", batch="local")
    stage, reference = begun(program, kept), attention()
    x, mask, y = batch_with("rows", rows=2)
    found = stage.step(*(own(each, "local") for each in (x, mask, y)))
    compare_step(stage, reference, found, loss_of(reference, x, mask, y))


def test_one_row_on_each_rank_is_a_row(world: Processes) -> None:
    world.run(one_row, num=2)


def test_one_row_with_flat_targets_is_a_row() -> None:
    """``i64[1,5]`` with targets ``i64[5]`` is a batch of one row, and no tensor for all."""
    pieces = Pieces(({0: 2}, {0: 2}), ((8, 5), (40,)))
    wanted = Wanted("step", "train", (((1, 5), torch.int64), ((5,), torch.int64)))
    assert [shape for shape, _ in pieces.whole(wanted).inputs] == [(2, 5), (10,)]


def test_a_pinned_cut_of_one_row_says_what_helps() -> None:
    plan: Any = partc.Plan(preset="ddp", inputs={"mask": {"dp": cut(0)}})
    with pytest.raises(ShardingError, match=r"1 is not a multiple of 2.*mask\.expand\(\.\.\.\)"):
        partc.compile(attention(), "dp=2", batch_with("all"), loss=loss_of, plan=plan)


def evaluated_with_a_square_mask() -> None:
    """``mask bool[5,5]`` has no dim of the batch; the plan says so, for forwards as for steps."""
    model, x = attention(), batch_with("all")[0]
    mask = torch.ones(STEPS, STEPS, dtype=torch.bool).tril()
    expected = model(x, mask)
    plan = 'preset = "ddp"\n[inputs]\n"mask" = {}'
    stage = partc.parallelize(attention(), "dp=2", plan=plan)
    close(stage(own(x, "local"), mask).detach(), own(expected, "local"), "in train mode")
    with torch.no_grad():
        close(stage.eval()(own(x, "local"), mask), own(expected, "local"), "in eval mode")


@pytest.mark.exhaustive
def test_a_square_mask_is_whole_in_evaluations_too(world: Processes) -> None:
    world.run(evaluated_with_a_square_mask, num=2)
