"""What a step's time and a rank's memory consist of, for reports, pictures and notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partc.cost.prediction import Prediction

OPTIMIZER = "optimizer"
WORDS = {
    "arithmetic": "arithmetic",
    "memory": "bound by memory",
    "launches": "launches of kernels",
    "bubble": "pipeline's bubble",
    "optimizer": "optimizer",
}
Holders = tuple[tuple[str, int], ...]


def part_text(name: str) -> str:
    """A part of the step as readers know it; an axis is what computing waits for."""
    return WORDS.get(name, f"waits for {name}")


def waterfall(step: Prediction) -> list[dict[str, Any]]:
    """What the step consists of, in seconds that add up to the step."""
    names = list(dict.fromkeys(name for phase in step.phases for name in phase.parts))
    order = ("arithmetic", "memory", "launches")
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    own = [phase for phase in step.phases if phase.name != OPTIMIZER]
    sums = {name: sum(phase.parts.get(name, 0.0) for phase in own) for name in names}
    rows = [{"part": name, "seconds": seconds} for name, seconds in sums.items() if seconds]
    ends = sum(phase.seconds for phase in step.phases if phase.name == OPTIMIZER)
    return [*rows, *([{"part": OPTIMIZER, "seconds": ends}] if ends else [])]


def peak_memory(cost: Mapping[str, Any]) -> tuple[int, Holders]:
    """The peak of the rank that needs most memory, and what it holds there, largest first."""
    if "ranks" in cost:
        rank = max(cost["ranks"], key=lambda each: each["peak_bytes"])
        state = {name: rank[name] for name in ("params", "optimizer", "buffers_and_inputs")}
        live, peak = rank["holders"], rank["peak_bytes"]
    elif "state_bytes" in cost:
        held = cost["state_bytes"]
        state = {name: held[name] for name in ("params", "optimizer", "buffers", "inputs")}
        live, peak = cost["holders"].items(), cost["peak_bytes"]
    else:
        return 0, ()
    names = {"params": "parameters", "optimizer": f"states of {cost['optimizer']}",
             "buffers_and_inputs": "buffers and inputs"}  # fmt: skip
    kept = [(names.get(name, name), size) for name, size in state.items()]
    holders = [(who, size) for who, size in (*kept, *map(tuple, live)) if size]
    return peak, tuple(sorted(holders, key=lambda holder: -holder[1]))
