"""The costs of a pipeline step: actions, and also messages, collectives and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from partc.schedules.programs import FORWARD, Wiring
from partc.schedules.timing import Costs, Row


class Link(NamedTuple):
    """A connection between two ranks in one direction: latency (s) and bandwidth (bytes/s)."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class StepCosts(Costs):
    """``Costs`` of the actions, and the costs of messages and collectives.

    ``message[s]`` is the memory of one message between stages ``s`` and ``s + 1``.
    ``collectives[name]`` is the time of a collective, 0 for a missing name. All times share one
    unit and all memory shares one unit; `step_trace.py` reads them as seconds and bytes.
    """

    message: Row = ()
    collectives: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        costs: Costs,
        *,
        message: Sequence[float] | None = None,
        links: Sequence[Link] | None = None,
        collectives: Mapping[str, float] | None = None,
    ) -> StepCosts:
        """Add messages and collectives to ``costs``.

        ``links`` has one link per stage boundary; if given, the transfer times are the times of the
        messages' bytes on these links.
        """
        message = tuple(message or (0.0,) * len(costs.forward))
        given = {entry.name: getattr(costs, entry.name) for entry in fields(Costs)}
        if links is not None:
            pairs = zip(links, message, strict=False)
            given["transfer"] = tuple(link.seconds(size) for link, size in pairs)
        return cls(**given, message=message, collectives=dict(collectives or {}))

    def of_actions(self) -> list[float]:
        """The time of every action for one microbatch, by ``4 * stage + kind`` (F, B, I, W)."""
        rows = zip(self.forward, self.input_grad, self.weight_grad, strict=True)
        return [time for f, i, w in rows for time in (f, i + w, i, w)]

    def of_messages(self, wiring: Wiring, per_boundary: Row) -> list[float]:
        """A cost per stage boundary (``transfer`` or ``message``), by ``2 * stage + way``."""
        return [
            per_boundary[stage if way == FORWARD else stage - 1] if channel >= 0 else 0.0
            for row, channel in enumerate(wiring.channels)
            for stage, way in [divmod(row, 2)]
        ]
