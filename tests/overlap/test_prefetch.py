"""Two blocks' weights are gathered over the head, where that is faster and fits into memory."""

from __future__ import annotations

import pytest

from partc.api import compile
from partc.errors import MemoryLimitError
from partc.plan import Plan
from partc.program import Program
from partc.verification.verification import verify
from tests.overlap.words import IDS, Block, model, step
from tests.texts import one_role

FSDP = Plan(preset="fsdp")


def compiled(plan: Plan) -> Program:
    """A block's transfers take longer than its backward, and the head longer than these."""
    return compile(step(), "dp=2", plan=plan)


def seconds_and_peak(program: Program) -> tuple[float, int]:
    cost = program.cost.as_json()
    return cost["prediction"]["seconds"], cost["peak_bytes"]


@pytest.mark.exhaustive
def test_two_blocks_are_gathered_where_the_step_is_faster() -> None:
    one, two = (compiled(FSDP.changed(prefetch=num)) for num in (1, 2))
    (one_s, one_bytes), (two_s, two_bytes) = map(seconds_and_peak, (one, two))
    assert two_s < one_s
    whole = sum(p.nbytes for p in Block().parameters())
    assert whole / 2 < two_bytes - one_bytes <= whole * 3 / 2  # with what this rank sends of it
    chosen = compiled(FSDP)
    assert Plan.parse(chosen.plan).prefetch == 2
    assert chosen.sources == two.sources
    _, text = one_role(two)
    first, second = (text.index(f"self.blocks[-{n}].regather()") for n in (1, 2))
    assert text.index("# head") < first < second < text.index("reversed(self.blocks)")
    verify(two, model(), (IDS,), lambda m, x: m(x)).check()


@pytest.mark.exhaustive
def test_no_more_blocks_are_gathered_than_there_are() -> None:
    most = compiled(FSDP.changed(prefetch=100))
    verify(most, model(), (IDS,), lambda m, x: m(x)).check()


@pytest.mark.exhaustive
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
