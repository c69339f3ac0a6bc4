"""How many messages of each link may be under way, as a plan says it: by way, for each boundary.

``{"forward": 2, "backward": (1, 2)}``: two on every link that leads forward; one on the link from
stage 1 back to stage 0, two on the one from stage 2 to stage 1. 0 stands where both stages are on
one rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from partc.errors import PlanError
from partc.schedules.programs import BACKWARD, FORWARD, Wiring

Sends = Mapping[str, int | tuple[int, ...]]
WAYS = {"forward": FORWARD, "backward": BACKWARD}


def sends_of(wiring: Wiring, *, backward: bool) -> dict[str, int | tuple[int, ...]]:
    """The bounds of a wiring in this form; ways without a message between ranks are left out."""
    found: dict[str, int | tuple[int, ...]] = {}
    for name, way in WAYS.items():
        channels = _channels(wiring, way)
        each = tuple(wiring.bounds[c] if c >= 0 else 0 for c in channels)
        numbers = {number for number in each if number}
        if numbers and (backward or way == FORWARD):
            found[name] = numbers.pop() if len(numbers) == 1 else each
    return found


def bounds_of(sends: Sends, wiring: Wiring) -> list[int]:
    """The bound of every communicator, at least 1; PlanError for a list that is too short or long.

    A way that is not mentioned has 1.
    """
    bounds = [1 for _ in wiring.communicators]
    for name, given in sends.items():
        channels = _channels(wiring, WAYS[name])
        each = (given,) * len(channels) if isinstance(given, int) else given
        if len(each) != len(channels):
            raise PlanError(
                where=f"plan, sends.{name}",
                what=f"it has {len(each)} numbers, for {len(channels)} links",
                why=f"there is a link between each two of {wiring.stages} stages",
                do="Write one number for all, or leave sends out: they are then chosen.",
            )
        for channel, number in zip(channels, each, strict=True):
            if channel >= 0:
                bounds[channel] = max(1, number)
    return bounds


def _channels(wiring: Wiring, way: int) -> list[int]:
    """The communicators of one way, by boundary; -1 where both stages are on one rank."""
    ahead = 0 if way == FORWARD else 1  # the sender is the first, or the second of both stages
    return [wiring.channels[2 * (i + ahead) + way] for i in range(wiring.stages - 1)]
