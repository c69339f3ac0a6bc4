"""The rule of the gradients that a script gives back for results.

Each lies as its result does when the step gives it out, which the plan decides for all results
alike (``propagate``); so the rule itself cuts none.
"""

from __future__ import annotations

import partc.graph.given_back  # noqa: F401 - defines the op
from partc.rules.call import Call
from partc.rules.table import rule


def given_back(call: Call) -> str:
    """``__, _ -> __, _``: results, and new values of buffers behind them, as they are."""
    every = ["_" * call.rank(i) for i in range(len(call.slots))]
    return f"{','.join(every)}->{','.join(every[: len(call.results)])}"


rule("partc.given_back", given_back)
