"""A `Topology`: the kinds of devices of a machine, and the levels of links that join them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path

from partc.errors import PlanError
from partc.machines.devices import TERA, Device, slowest
from partc.machines.topology_checks import (
    check_keys,
    check_name,
    check_number,
    check_pair,
    check_whole,
    refusal,
)
from partc.wrong_calls import did_you_mean, known_arguments, known_fields

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
APART_S = 1e-2  # of computing between two meetings of ranks; beyond it delays even out
LIBRARIES = ("nccl", "gloo")


@dataclass(frozen=True)
class Level:
    """One level of links, which joins ``size`` units of the level below (devices, if innermost).

    ``bytes_per_s`` is one device's share of the bandwidth out of its unit, in one direction, while
    all devices send; ``efficiency`` is the fraction of it that large messages reach. ``latency_s``
    is the latency of one step of a collective. ``low_latency_s`` is the latency of a protocol for
    small messages at half the bandwidth (NCCL's LL), None without one. ``oversubscription`` is the
    bandwidth of all units together, divided by the bandwidth that the level carries.

    Where the switches can sum (NVLS, SHARP), an all_reduce through them runs at ``in_network``
    times ``bytes_per_s`` (0: they cannot sum) and takes ``in_network_s`` more. ``direct`` links
    join pairs of units without a switch: then m of n units have (m - 1) / (n - 1) of the bytes/s.
    ``factors`` are measured, by kind of collective: the measured latency and seconds per byte,
    divided by those of the formula, for collectives whose outermost level this is.
    """

    name: str
    size: int
    bytes_per_s: float
    latency_s: float
    low_latency_s: float | None = None
    efficiency: float = 1.0
    oversubscription: float = 1.0
    in_network: float = 0.0
    in_network_s: float = 0.0
    direct: bool = False
    factors: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        where = f"level {self.name}"
        check_name(where, self.name)
        check_whole(f"{where}, size", self.size, 1e9)
        check_number(f"{where}, bytes_per_s", self.bytes_per_s, 100 * TERA)
        check_number(f"{where}, latency_s", self.latency_s, 1.0)
        if self.low_latency_s is not None:
            check_number(f"{where}, low_latency_s", self.low_latency_s, self.latency_s)
        check_number(f"{where}, efficiency", self.efficiency, 1.0)
        check_number(f"{where}, oversubscription", self.oversubscription, 1e4)
        if self.oversubscription < 1:
            raise refusal(
                f"{where}, oversubscription",
                f"{self.oversubscription!r} means nothing",
                "links carry at most what enters them",
                "Write a number from 1 on: 2 where they carry half of it.",
            )
        if self.in_network != 0:
            check_number(f"{where}, in_network", self.in_network, 1.0)
            check_number(f"{where}, in_network_s", self.in_network_s, 1.0)
        if not isinstance(self.direct, bool) or (self.direct and self.size == 1):
            why = "it is true or false, and true only where there are pairs"
            do = "Write direct = true or false; leave it out where size = 1."
            raise refusal(f"{where}, direct", f"{self.direct!r} cannot be", why, do)
        check_keys(f"{where}, factors", self.factors, COLLECTIVES)
        for kind, pair in self.factors.items():
            check_pair(f"{where}, factors.{kind}", pair, 1e3)

    @property
    def reduces_in_network(self) -> bool:
        """Whether the level's switches can sum an all_reduce."""
        return self.in_network > 0

    def resized(self, size: int) -> Level:
        """The level with another number of units; direct links give each unit bytes/s in proportion
        to the other units that it is linked with."""
        if not self.direct or size == 1:
            return replace(self, size=size, direct=False)
        links = (size - 1) / (self.size - 1)
        return replace(self, size=size, bytes_per_s=self.bytes_per_s * links)

    def small(self, share: float) -> Level | None:
        """The level's protocol for small messages, at a share of the bytes/s; None without one."""
        if self.low_latency_s is None:
            return None
        return replace(
            self,
            latency_s=self.low_latency_s,
            low_latency_s=None,
            efficiency=self.efficiency * share,
            in_network=0.0,
        )

    @property
    def attained_bytes_per_s(self) -> float:
        """The attained bytes/s of one device, in one direction, while all devices send."""
        return self.bytes_per_s * self.efficiency / self.oversubscription


@known_fields
@dataclass(frozen=True)
class Topology:
    """The machines: (device, count) in rank order, and the levels of links, innermost first.

    ``start_s`` is the time of a collective beside its messages: launching it, waking the peers.
    ``contention`` is the fraction of a transfer's time that overlapped computing loses: 0 where
    links move data by themselves, 1 where nothing can be hidden, as busy processors move the data.
    ``skew`` is the time that ranks wait for the slowest rank where they meet, as a fraction of the
    time that they computed before (at most ``APART_S`` of it counts). ``sharing`` is how many times
    faster a device computes while all others wait: more than 1 where ranks share processors.
    ``library`` names the library of collectives (``LIBRARIES``). ``notes`` are for readers.
    """

    name: str
    groups: tuple[tuple[Device, int], ...]
    levels: tuple[Level, ...]
    start_s: float = 0.0
    contention: float = 0.0
    skew: float = 0.0
    sharing: float = 1.0
    library: str = "nccl"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"topology {self.name}"
        check_name(where, self.name)
        if not self.groups or not self.levels:
            raise refusal(
                where, f"it has no {'levels' if self.groups else 'devices'}",
                "a fleet has one of each or more, also where all devices are in one machine",
                "Write the table: [[devices]] has name, count and speed of some devices, "
                "[[levels]] name, size and speed of the links that join them.",
            )  # fmt: skip
        for device, count in self.groups:
            check_whole(f"{where}, count of {device.name}", count, 1e9)
        if prod(level.size for level in self.levels) != self.num_devices:
            sizes = " x ".join(str(level.size) for level in self.levels)
            raise refusal(
                where,
                f"{sizes} units are not {self.num_devices} devices",
                "the sizes of all levels multiply to the number of devices",
                _sizes_said(self.groups, self.levels),
            )
        if self.start_s != 0:
            check_number(f"{where}, start_s", self.start_s, 1.0)
        for name in ("contention", "skew"):
            if (share := getattr(self, name)) != 0:
                check_number(f"{where}, {name}", share, 1.0)
        if self.sharing < 1:
            raise refusal(
                f"{where}, sharing", f"{self.sharing} is less than 1",
                "a device is no slower where others wait", "Write a number from 1 on.",
            )  # fmt: skip
        if self.library not in LIBRARIES:
            raise refusal(
                f"{where}, library", f"{self.library!r} is unknown",
                f"known are {', '.join(LIBRARIES)}",
                did_you_mean(self.library, LIBRARIES) or "Take one of these.",
            )  # fmt: skip

    @classmethod
    @known_arguments
    def load(cls, name: str, devices: int | None = None) -> Topology:
        """A topology that comes with partc (one of ``shipped()``), perhaps resized."""
        from partc.machines.topology_text import read_shipped

        topology = read_shipped(name)
        return topology if devices is None else topology.resized(devices)

    @classmethod
    def read(cls, path: str | Path) -> Topology:
        """A topology from a TOML file; PlanError names the entry that is wrong."""
        from partc.machines.topology_text import read_topology

        return read_topology(path)

    def __str__(self) -> str:
        """The topology as TOML text, which ``topology_text.parse_topology`` reads back."""
        from partc.machines.topology_text import write_topology

        return write_topology(self)

    @property
    def num_devices(self) -> int:
        return sum(count for _, count in self.groups)

    @property
    def device(self) -> Device:
        """The kind of device; of several kinds the slowest, which all others wait for."""
        return slowest(device for device, _ in self.groups)

    @property
    def is_mixed(self) -> bool:
        """Whether the topology has several kinds of devices."""
        return len(self.groups) > 1

    @property
    def memory_bytes(self) -> int:
        """The memory of the device with the least memory."""
        return min(device.memory_bytes for device, _ in self.groups)

    @property
    def kinds(self) -> str:
        """The names of all kinds of devices, joined by "and"."""
        return " and ".join(device.name for device, _ in self.groups)

    def mean(self, figure: Callable[[Device], float]) -> float:
        """The average of a figure over all devices."""
        return sum(figure(device) * count for device, count in self.groups) / self.num_devices

    @property
    def unit_sizes(self) -> tuple[int, ...]:
        """Per level, the number of devices that the level joins: (8, 128) for 16 nodes of 8."""
        return tuple(accumulate((level.size for level in self.levels), mul))

    def device_of(self, rank: int) -> Device:
        """The kind of device of one rank."""
        for device, count in self.groups:
            if rank < count:
                return device
            rank -= count
        raise AssertionError("no such rank")

    def at(self, ranks: Iterable[int]) -> Topology:
        """The machines as given ranks that work together see them.

        Every device is as slow as the slowest of these ranks' devices, and has as little memory as
        the smallest of them.
        """
        kinds = list(dict.fromkeys(map(self.device_of, ranks)))
        least = min(kind.memory_bytes for kind in kinds)
        device = replace(slowest(kinds), memory_bytes=least)
        return replace(self, groups=((device, self.num_devices),))

    def resized(self, devices: int) -> Topology:
        """The machines with another number of devices; PlanError if that is impossible.

        Inner levels (a node) are filled first, the outermost level gets the rest. Several kinds of
        devices stay in proportion.
        """
        check_whole(f"topology {self.name}, devices", devices, 1e9)
        left, levels = devices, []
        for level in self.levels[:-1]:
            size = min(level.size, left)
            if left % size:
                raise self._cannot_have(devices, f"{level.name} joins {level.size} units")
            levels.append(level.resized(size))
            left //= size
        levels.append(self.levels[-1].resized(left))
        counts = [count * devices for _, count in self.groups]
        if any(count % self.num_devices or count < self.num_devices for count in counts):
            raise self._cannot_have(devices, "its kinds of devices stay in proportion")
        groups = zip((device for device, _ in self.groups), counts, strict=True)
        return replace(
            self,
            groups=tuple((device, count // self.num_devices) for device, count in groups),
            levels=tuple(levels),
        )

    def _cannot_have(self, devices: int, why: str) -> PlanError:
        return PlanError(
            where=f"topology {self.name}",
            what=f"it cannot have {devices} devices",
            why=why,
            do="Ask for a multiple of that, or write a mesh.toml of your own.",
        )


def _sizes_said(groups: Sequence[tuple[Device, int]], levels: Sequence[Level]) -> str:
    """Which entries say how many devices there are, and where one of them decides, what it says."""
    counts = " and ".join(f"{device.name} count = {count}" for device, count in groups)
    sizes = " and ".join(f"{level.name} size = {level.size}" for level in levels)
    total = sum(count for _, count in groups)
    inner = prod(level.size for level in levels[:-1])
    last = f", such as {levels[-1].name} size = {total // inner}" if total % inner == 0 else ""
    return f"Make them agree{last}: [[devices]] has {counts}, [[levels]] {sizes}."
