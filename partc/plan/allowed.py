"""The tables of a plan that have a class of their own, most of which change a step's numbers: such
ones have to be allowed by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from partc.plan.coded import COMPRESS_WEIGHTS, Coded, read_compress_weights
from partc.plan.compress import COMPRESS, Compress, read_compress
from partc.plan.local_steps import LOCAL_STEPS, LocalSteps, read_local_steps
from partc.plan.servers import SERVERS, Servers, read_servers
from partc.plan.stale import STALE, Stale, read_stale
from partc.plan.uneven import UNEVEN, Uneven, read_uneven


@dataclass(frozen=True)
class OwnTable:
    """One such table.

    ``read`` makes an object of class ``made`` of it. ``example``: one as Python, and as a plan's
    text. ``without``: what a step does without it.
    """

    made: type
    read: Callable[[Mapping[str, Any], str], Any]
    example: str
    without: str


ALLOWED_TABLES: Mapping[str, OwnTable] = {
    COMPRESS: OwnTable(
        Compress, read_compress, 'partc.plan.compress.Compress("int8")', "all sums are exact"
    ),
    LOCAL_STEPS: OwnTable(
        LocalSteps, read_local_steps, "partc.plan.local_steps.LocalSteps(16)",
        "all ranks train one model",
    ),
    STALE: OwnTable(
        Stale, read_stale, "partc.plan.stale.Stale(1)", "gradients are applied in their own step"
    ),
    SERVERS: OwnTable(
        Servers, read_servers, "partc.plan.servers.Servers(1)", "every rank has an optimizer"
    ),
}  # fmt: skip
OWN_TABLES: Mapping[str, OwnTable] = {
    **ALLOWED_TABLES,
    COMPRESS_WEIGHTS: OwnTable(
        Coded, read_compress_weights, 'partc.plan.coded.Coded("int8")', "weights are gathered "
        "as they are",
    ),
    UNEVEN: OwnTable(
        Uneven, read_uneven, "partc.plan.uneven.Uneven((11, 5))",
        "all islands compute equally much",
    ),
}  # fmt: skip
