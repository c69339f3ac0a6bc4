"""What a search has decided: the strategies of calls and the stored layouts of parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from partc.passes.shard.price import Choices
from partc.plan.sharding import Layout

Life = Literal["use", "step"]  # of a gathered parameter, as in ``Plan.gather``


@dataclass(frozen=True)
class Decided:
    """On some axes; what is missing is whole."""

    choices: Choices = field(default_factory=dict)
    stored: dict[str, dict[str, Layout]] = field(default_factory=dict)  # parameter -> axis
