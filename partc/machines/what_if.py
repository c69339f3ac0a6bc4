"""What-if machines: factors on bandwidth, latency, FLOP/s and memory, applied to a topology."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partc.amounts import amount
from partc.errors import UsageError
from partc.machines.devices import Device
from partc.machines.topology import Level, Topology

ALL = ""  # every level of links
MORE_BYTES = 10**9  # of memory, in what an explanation tries


@dataclass(frozen=True)
class Change:
    """A change of machines: factors on speeds, more memory, another number of devices.

    ``bandwidth`` and ``latency`` have factors by the name of a level of links, or ``ALL`` for all.
    ``peak`` is a factor on FLOP/s, ``memory_bandwidth`` on the memory's bytes/s. ``memory_bytes``
    are bytes added to each device's memory limit; ``devices`` is another number of devices (0: as
    is).
    """

    bandwidth: Mapping[str, float] = field(default_factory=dict, hash=False)
    latency: Mapping[str, float] = field(default_factory=dict, hash=False)
    peak: float = 1.0
    memory_bandwidth: float = 1.0
    memory_bytes: int = 0
    devices: int = 0

    def apply(self, topology: Topology) -> Topology:
        """The changed topology; UsageError for an unknown level, PlanError for an impossible number
        of devices.

        ``memory_bytes`` is left to the caller, who raises the limit that a plan is chosen for: the
        topology keeps the memory of the data sheet.
        """
        for level in {**self.bandwidth, **self.latency}:
            _check_level(level, topology)
        resized = topology.resized(self.devices) if self.devices else topology
        return replace(
            resized,
            groups=tuple((self._device(device), count) for device, count in resized.groups),
            levels=tuple(map(self._level, resized.levels)),
            start_s=resized.start_s * self.latency.get(ALL, 1.0),
        )

    def _device(self, device: Device) -> Device:
        return replace(
            device,
            flops_per_s={dtype: self.peak * rate for dtype, rate in device.flops_per_s.items()},
            memory_bytes_per_s=self.memory_bandwidth * device.memory_bytes_per_s,
        )

    def _level(self, level: Level) -> Level:
        wider = self.bandwidth.get(ALL, 1.0) * self.bandwidth.get(level.name, 1.0)
        slower = self.latency.get(ALL, 1.0) * self.latency.get(level.name, 1.0)
        low = level.low_latency_s
        return replace(
            level,
            bytes_per_s=wider * level.bytes_per_s,
            latency_s=slower * level.latency_s,
            low_latency_s=None if low is None else slower * low,
            in_network_s=slower * level.in_network_s,
        )

    @classmethod
    def parse(
        cls, *, bandwidth: Sequence[str] = (), latency: Sequence[str] = (), peak: str = "1",
        memory_bandwidth: str = "1", devices: int = 0,
    ) -> Change:  # fmt: skip
        """A change from command line options: factors are written ``2`` or ``x2``; a factor for one
        level of links is ``nvlink=x2``. UsageError for anything else."""
        return cls(
            bandwidth=dict(_by_level("--bandwidth", text) for text in bandwidth),
            latency=dict(_by_level("--latency", text) for text in latency),
            peak=_factor("--peak", peak),
            memory_bandwidth=_factor("--memory-bandwidth", memory_bandwidth),
            devices=devices,
        )

    def __str__(self) -> str:
        parts = [f"{each:g} x bandwidth of {_name(n)}" for n, each in self.bandwidth.items()]
        parts += [f"{each:g} x latency of {_name(n)}" for n, each in self.latency.items()]
        parts += [f"{self.peak:g} x peak FLOP/s"] if self.peak != 1 else []
        parts += [f"{self.memory_bandwidth:g} x memory bandwidth"] * (self.memory_bandwidth != 1)
        parts += [f"{amount(self.memory_bytes, 'B')} more memory"] if self.memory_bytes else []
        parts += [f"{self.devices} devices"] if self.devices else []
        return ", ".join(parts)


def changes_to_try(topology: Topology) -> Iterator[Change]:
    """One change at a time: one gigabyte more memory, then twice of every other figure."""
    yield Change(memory_bytes=MORE_BYTES)
    yield from (Change(bandwidth={each.name: 2.0}) for each in topology.levels if each.size > 1)
    yield Change(memory_bandwidth=2.0)
    yield Change(peak=2.0)
    yield Change(devices=2 * topology.num_devices)


def _by_level(option: str, text: str) -> tuple[str, float]:
    level, _, factor = text.rpartition("=")
    return level, _factor(option, factor)


def _factor(option: str, text: str) -> float:
    try:
        factor = float(text.strip().lower().strip("x"))
    except ValueError:
        factor = 0.0
    if not 1e-6 <= factor <= 1e6:
        raise UsageError(
            where=f"{option} {text}",
            what="it is no factor",
            why="a factor is a number above 0",
            do=f"Write {option} 2, or {option} x0.5.",
        )
    return factor


def _name(level: str) -> str:
    return level or "all links"


def _check_level(name: str, topology: Topology) -> None:
    known = [level.name for level in topology.levels]
    if name != ALL and name not in known:
        raise UsageError(
            where=f"level {name!r}",
            what=f"{topology.name} has no such level of links",
            why="",
            do=f"Known are {', '.join(known)}.",
        )
