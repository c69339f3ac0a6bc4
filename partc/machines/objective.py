"""The objective of a plan: least time of a step, or least dollars or energy per million tokens.

Prices (dollars per hour) and watts come from the machine's file. A device is paid and draws its
watts for as long as the step runs, whether the device computes or waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from partc.errors import PlanError, UsageError
from partc.machines.devices import Device
from partc.machines.topology import Topology
from partc.wrong_calls import did_you_mean, is_word, quoted

Objective = Literal["time", "dollars", "energy"]
S_PER_HOUR = 3600.0
MILLION = 1e6
WATTS_PER_KILOWATT = 1000.0


@dataclass(frozen=True)
class Batch:
    """The size of a step's global batch: tokens, or samples if the inputs are no tokens."""

    size: int
    unit: str


NO_BATCH = Batch(0, "tokens")


# By parts of other words: which objective is meant by them, or what says the same.
_MEANT = (
    (("mem",), "Memory is a limit: memory_bytes=16_000_000_000 takes the fastest plan whose ranks "
     "need no more than 16 GB each."),
    (("cost", "price", "money", "cheap", "usd", "$"),
     'Write "dollars": the least price of a token.'),
    (("power", "watt", "kwh", "carbon", "co2"), 'Write "energy": the least energy of a token.'),
    (("speed", "fast", "throughput", "latency", "step", "tokens", "second", "mfu"),
     'Leave it out, or write "time": the step that takes least time.'),
)  # fmt: skip


def objective_of(name: str) -> Objective:
    """The objective of this name; UsageError says what the known ones are."""
    known: dict[str, Objective] = {each: each for each in get_args(Objective)}
    if not is_word(name, known):
        raise UsageError(
            where=f"objective={quoted(name)}",
            what="there is no such objective",
            why='it is "time", of a step, or "dollars" or "energy", of a token, whichever '
            'plan="auto" is to make least',
            do=_meant(name)
            or did_you_mean(name, known)
            or f"Write one of {', '.join(known)}; "
            "memory is limited by memory_bytes=16_000_000_000.",
        )
    return known[name]


def _meant(name: object) -> str:
    """What to write for another word; "" for one that is unknown."""
    said = name.lower() if isinstance(name, str) else ""
    found = (do for words, do in _MEANT if any(word in said for word in words))
    return next(found, "")


def check_price(objective: Objective, topology: Topology) -> None:
    """PlanError if the objective is dollars and some device has no price."""
    unknown = [kind.name for kind, _ in topology.groups if kind.dollars_per_hour is None]
    if objective == "dollars" and unknown:
        raise PlanError(
            where="objective 'dollars'",
            what=f"the price of {unknown[0]} is not known",
            why=f"[[devices]] of {topology.name} has no dollars_per_hour, and prices are yours",
            do="Write print(topology) to a mesh.toml and add `dollars_per_hour = ...`, what one "
            f'device costs, under name = "{unknown[0]}".',
        )


def per_million(
    objective: Objective, seconds: float, devices: int, topology: Topology, batch: Batch
) -> float | None:
    """The dollars or kWh for a million tokens (or samples), if a step takes so many seconds.

    The formula is ``seconds * devices * rate / batch * 1e6``; ``rate`` is the mean price or power
    of a device. None if the objective is time, a device has no price, or the batch is unknown.
    """
    if objective == "time" or not batch.size:
        return None
    if objective == "dollars" and any(d.dollars_per_hour is None for d, _ in topology.groups):
        return None
    rate = topology.mean(_dollars_per_hour if objective == "dollars" else _kilowatts)
    return seconds * devices / S_PER_HOUR * rate / batch.size * MILLION


def _dollars_per_hour(device: Device) -> float:
    return device.dollars_per_hour or 0.0


def _kilowatts(device: Device) -> float:
    return device.watts / WATTS_PER_KILOWATT


def price_text(objective: Objective, price: float | None, batch: Batch) -> str:
    """A price as text, such as ``0.42 $ per million tokens``; "" for None."""
    unit = "$" if objective == "dollars" else "kWh"
    return "" if price is None else f"{price:.3g} {unit} per million {batch.unit}"
