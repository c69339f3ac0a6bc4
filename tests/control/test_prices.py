"""What variants are predicted to take at the pace that a step was measured to have."""

from __future__ import annotations

from functools import cache

import pytest

from partc.control.meter import Seen
from partc.control.prices import Pace, Prices
from partc.control.variants import variants_of
from partc.cost.roofline import Box, Clock
from partc.cost.step_walk import step_times
from tests.control.test_controller import compiled


@cache
def prices(mesh: str = "dp=4", preset: str = "ddp") -> Prices:
    return Prices(variants_of(compiled(mesh, preset, "int8")))


def seen(prices: Prices, variant: str, links: dict[str, float], computing: float) -> Seen:
    """A step of which links and devices are so many times as slow as predicted."""
    boxes: list[Box] = []
    spent = step_times(prices.tapes[variant], prices.mesh, Clock(prices.mesh, boxes)).values()
    busy = dict.fromkeys(links, 0.0)
    base = prices._bases[variant]
    for axis, slower in links.items():
        fixed = base.fixed_s[axis]
        busy[axis] = fixed + slower * (base.moving_s[axis] - fixed)
    own = computing * sum(sum(each.computing.values()) for each in spent)
    return Seen(own, own, busy, dict.fromkeys(links, 0.0))


@pytest.mark.parametrize("slower", [0.1, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("variant", ["compiled", "exact"])
def test_the_pace_is_found_whichever_variant_runs(variant: str, slower: float) -> None:
    pace = prices().pace(variant, seen(prices(), variant, {"dp": slower}, 2.0))
    assert dict(pace.links)["dp"] == pytest.approx(slower, rel=0.03)
    assert pace.computing == pytest.approx(2.0, rel=0.03)


def test_axes_have_a_pace_each() -> None:
    two = prices("dp=2,tp=2", "ddp+megatron")
    pace = two.pace("exact", seen(two, "exact", {"dp": 20.0, "tp": 1.0}, 1.0))
    assert dict(pace.links) == pytest.approx({"dp": 20.0, "tp": 1.0}, rel=0.03)


def test_the_slower_the_link_the_more_a_variant_saves_that_sends_less() -> None:
    ratios = []
    for slower in (1.0, 10.0, 1000.0):
        seconds = prices().seconds(Pace(links=(("dp", slower),)))
        ratios.append(seconds["exact"] / seconds["compiled"])
    assert ratios == sorted(ratios)
    assert 2.0 < ratios[-1] < 4.0  # four bytes against one, and the scales of blocks
