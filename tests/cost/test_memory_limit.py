"""A program whose predicted peak is beyond the plan's memory is refused, and one at it is not."""

from __future__ import annotations

import re

import pytest

import partc
from partc.cost.memory_limit import Peak, check_memory
from partc.errors import PlanError
from partc.plan import Plan
from partc.reports.cost import CostReport
from partc.reports.pipeline_cost import PipelineCost
from tests.pipelines import toy

GPIPE = Plan(preset="ddp", stages=("blocks.1",), microbatches=24, schedule="gpipe")


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("mesh", "plan", "who"),
    [
        ("dp=2", Plan(preset="ddp"), "every rank"),
        ("pp=2", GPIPE, "pipeline rank 1"),
    ],
    ids=["one stage", "pipeline"],
)
def test_the_limit_is_the_predicted_peak(mesh: str, plan: Plan, who: str) -> None:
    def cost(memory_bytes: int) -> CostReport | PipelineCost:
        found = partc.compile(toy().step, mesh, plan=plan, memory_bytes=memory_bytes).cost
        assert isinstance(found, CostReport | PipelineCost)
        return found

    peaks = {peak.rank: peak.num_bytes for peak in cost(10**9).peaks()}
    most = max(peaks.values())
    assert peaks[who] == most
    cost(most)
    with pytest.raises(PlanError) as caught:
        cost(most - 1)
    error = caught.value
    assert error.where == f"memory_bytes={most - 1}, {who}"
    assert error.what == f"the step needs {most:,} bytes at its peak, {most - 1:,} are allowed"
    sizes = [int(text.replace(",", "")) for text in re.findall(r", ([\d,]+) bytes", error.why)]
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < sum(sizes) <= most


def test_advice_follows_what_is_held() -> None:
    for state, live, advice in ((90, 10, "plan fsdp"), (10, 90, "smaller microbatches")):
        peak = Peak("every rank", 100, (("parameters", state),), (("line 7: x @ w", live),))
        with pytest.raises(PlanError) as caught:
            check_memory([peak], [99])
        assert advice in caught.value.do
