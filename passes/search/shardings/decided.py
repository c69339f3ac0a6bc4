"""The decisions of a search: the strategies of calls and the stored layouts of parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from partc.passes.shard.price import Choices
from partc.plan.sharding import Layout

Life = Literal["use", "step"]  # how long an all-gathered parameter lives, as in ``Plan.gather``


@dataclass(frozen=True)
class Decided:
    """The decisions on some axes; a call or parameter without an entry is replicated."""

    choices: Choices = field(default_factory=dict)
    stored: dict[str, dict[str, Layout]] = field(default_factory=dict)  # parameter -> axis
