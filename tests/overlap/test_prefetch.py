"""Two blocks' weights are gathered over the head, where that is faster and fits into memory."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc.api import compile
from partc.errors import MemoryLimitError
from partc.plan import Plan
from partc.program import Program
from partc.traced import Traced
from partc.verification.verification import verify

WIDTH, WORDS, LAYERS = 64, 2048, 5
FSDP = Plan(preset="fsdp")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class Words(nn.Module):
    """Most is live in the head, where every token has a logit for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


IDS = torch.arange(8 * 64).view(8, 64) % WORDS


@cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return Words()


@cache
def step() -> Traced:
    return Traced(model(), (IDS,), lambda m, x: m(x))


def compiled(plan: Plan) -> Program:
    """A block's transfers take longer than its backward, and the head longer than these."""
    return compile(step(), "dp=2", plan=plan)


def seconds_and_peak(program: Program) -> tuple[float, int]:
    cost = program.cost.as_json()
    return cost["prediction"]["seconds"], cost["peak_bytes"]


def test_two_blocks_are_gathered_where_the_step_is_faster() -> None:
    one, two = (compiled(FSDP.changed(prefetch=num)) for num in (1, 2))
    (one_s, one_bytes), (two_s, two_bytes) = map(seconds_and_peak, (one, two))
    assert two_s < one_s
    whole = sum(p.nbytes for p in Block().parameters())
    assert whole / 2 < two_bytes - one_bytes <= whole * 3 / 2  # with what this rank sends of it
    chosen = compiled(FSDP)
    assert Plan.parse(chosen.plan).prefetch == 2
    assert chosen.sources == two.sources
    (text,) = two.sources.values()
    first, second = (text.index(f"self.blocks[-{n}].regather()") for n in (1, 2))
    assert first < second < text.index("# head")
    verify(two, model(), (IDS,), lambda m, x: m(x)).check()


def test_the_memory_limit_rules() -> None:
    (_, least), (_, most) = (
        seconds_and_peak(compiled(FSDP.changed(prefetch=num))) for num in (1, 2)
    )
    assert Plan.parse(compiled(FSDP.changed(memory_bytes=most)).plan).prefetch == 2
    assert Plan.parse(compiled(FSDP.changed(memory_bytes=most - 1)).plan).prefetch == 1
    for pinned, limit in ((0, least - 1), (2, most - 1)):
        with pytest.raises(MemoryLimitError):
            compiled(FSDP.changed(prefetch=pinned, memory_bytes=limit))


def test_what_is_replayed_is_what_was_chosen() -> None:
    first = compiled(FSDP.changed(prefetch=1))
    assert compiled(Plan.parse(first.plan)).sources == first.sources
    assert "prefetch" not in compiled(Plan(preset="ddp")).plan
