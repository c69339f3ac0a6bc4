"""The machines under a mesh: kinds of devices, and the levels of links that join them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from pathlib import Path

from partc.errors import PlanError
from partc.machines.topology_checks import (
    check_keys,
    check_name,
    check_number,
    check_pair,
    check_points,
    check_whole,
    refusal,
)

Points = tuple[tuple[float, float], ...]  # amount of work, fraction of the peak; amounts ascend

DTYPES = ("bf16", "f16", "f32", "f64", "tf32", "f8")
# The first two by FLOPs of a call, the others by bytes; functions are pointwise ops that evaluate
# exponentials and their like, which processors without units for them are slow at.
WORK = ("matmul", "attention", "pointwise", "functions", "optimizer")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
APART_S = 1e-2  # after so long, what delays ranks evens out rather than adds up
LIBRARIES = ("nccl", "gloo")
TERA, PETA = 1e12, 1e15


@dataclass(frozen=True)
class Device:
    """One kind of device: what its data sheet says, and how much of that kernels reach.

    ``flops_per_s`` has dense peaks by dtype (``DTYPES``), ``launch_s`` is the least time between
    two kernels, however small; ``call_s`` is what a call takes beside its work where the processor
    that computes also makes the calls. ``efficiency`` says per kind of work (``WORK``) which
    fraction of the peak, or of the memory's bandwidth, a call of so many FLOPs, or bytes, reaches.
    Of matrix products these are large ones that keep all ``processors`` busy (0: not known);
    ``hidden_writes`` is the part of a product's result that is written beside its arithmetic.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(hash=False)
    launch_s: float
    watts: float
    dollars_per_hour: float | None = None
    processors: int = 0
    call_s: float = 0.0
    hidden_writes: float = 1.0
    efficiency: Mapping[str, Points] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        where = f"device {self.name}"
        check_name(where, self.name)
        check_whole(f"{where}, memory_bytes", self.memory_bytes, PETA)
        check_number(f"{where}, memory_bytes_per_s", self.memory_bytes_per_s, 100 * TERA)
        check_number(f"{where}, watts", self.watts, 1e5)
        if self.dollars_per_hour is not None:
            check_number(f"{where}, dollars_per_hour", self.dollars_per_hour, 1e6)
        for name in ("launch_s", "call_s"):
            if getattr(self, name) != 0:
                check_number(f"{where}, {name}", getattr(self, name), 1.0)
        if self.processors != 0:
            check_whole(f"{where}, processors", self.processors, 1e6)
        if self.hidden_writes != 0:
            check_number(f"{where}, hidden_writes", self.hidden_writes, 1.0)
        check_keys(f"{where}, flops_per_s", self.flops_per_s, DTYPES)
        for dtype, peak in self.flops_per_s.items():
            check_number(f"{where}, flops_per_s.{dtype}", peak, 100 * PETA)
        if "f32" not in self.flops_per_s:
            raise refusal(
                f"{where}, flops_per_s",
                "f32 is missing",
                "dtypes without a figure take that of f32",
            )
        check_keys(f"{where}, efficiency", self.efficiency, WORK)
        for work, points in self.efficiency.items():
            check_points(f"{where}, efficiency.{work}", points)

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s in this dtype; that of f32 where none is known."""
        return self.flops_per_s.get(dtype, self.flops_per_s["f32"])

    def fraction(self, work: str, amount: float) -> float:
        """The fraction of the peak that a call of ``amount`` FLOPs (or bytes) reaches.

        Between two points the time is a straight line, beyond them the fraction stays. Where there
        are no points of functions or the optimizer, those of pointwise work are taken.
        """
        like = "pointwise" if work in ("functions", "optimizer") else work
        points = self.efficiency.get(work) or self.efficiency.get(like) or ((1.0, 1.0),)
        if amount <= points[0][0]:
            return points[0][1]
        for (less, low), (more, high) in pairwise(points):
            if amount <= more:
                begin, end = less / low, more / high
                return amount / (begin + (end - begin) * (amount - less) / (more - less))
        return points[-1][1]

    def seconds(self, flops: float, dtype: str, num_bytes: float, work: str = "matmul") -> float:
        """The time of a call by the roofline model: its arithmetic or its memory traffic,
        whichever takes longer, but no less than a launch, and making the call; what does nothing
        takes none.
        """
        if not flops and not num_bytes:
            return 0.0
        return max(self.parts(flops, dtype, num_bytes, work).values()) + self.call_s

    def parts(
        self,
        flops: float,
        dtype: str,
        num_bytes: float,
        work: str = "matmul",
        busy: float = 1.0,
        written_bytes: float = 0.0,
    ) -> dict[str, float]:
        """The seconds that a call's arithmetic, memory traffic and launch take, each by itself.

        A matrix product keeps a share ``busy`` of the processors at work, and writes so many bytes.
        """
        computing = flops / (self.peak(dtype) * self.fraction(work, flops) * busy)
        writing = (1 - self.hidden_writes) * self.memory_seconds(written_bytes)
        return {
            "arithmetic": computing + writing,
            "memory": self.memory_seconds(num_bytes, work if work in WORK[2:] else "pointwise"),
            "launches": self.launch_s,
        }

    def memory_seconds(self, num_bytes: float, work: str = "pointwise") -> float:
        """The time in which so many bytes are read and written."""
        return num_bytes / (self.memory_bytes_per_s * self.fraction(work, num_bytes))


@dataclass(frozen=True)
class Level:
    """One level of links: ``size`` units of the level below it (devices, at the innermost).

    ``bytes_per_s`` is one device's share of what leaves its unit, one way, when all devices send;
    ``efficiency`` the fraction of it that large messages reach. ``latency_s`` is one step of a
    collective. With ``low_latency_s`` there is a protocol for small messages that takes that
    long, at half the bandwidth (NCCL's LL). ``oversubscription`` is how many times more bytes/s
    enter the level than it carries when all units send. Where its switches sum (NVLS, SHARP),
    ``in_network`` is the fraction of ``bytes_per_s`` at which an all_reduce goes through them (0:
    they cannot) and ``in_network_s`` what it takes beside. ``direct`` links join pairs without a
    switch: m of n units have (m - 1) / (n - 1) of the bytes/s. ``factors`` has measurements: by
    how much the latency and the seconds per byte of a collective over the level (as the outermost
    that it crosses) are those of its formula.
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
            )
        if self.in_network != 0:
            check_number(f"{where}, in_network", self.in_network, 1.0)
            check_number(f"{where}, in_network_s", self.in_network_s, 1.0)
        if not isinstance(self.direct, bool) or (self.direct and self.size == 1):
            why = "it is true or false, and true only where there are pairs"
            raise refusal(f"{where}, direct", f"{self.direct!r} cannot be", why)
        check_keys(f"{where}, factors", self.factors, COLLECTIVES)
        for kind, pair in self.factors.items():
            check_pair(f"{where}, factors.{kind}", pair, 1e3)

    @property
    def reduces_in_network(self) -> bool:
        """Whether its switches can sum."""
        return self.in_network > 0

    def resized(self, size: int) -> Level:
        """This level with another number of units; without a switch each has fewer links then."""
        if not self.direct or size == 1:
            return replace(self, size=size, direct=False)
        links = (size - 1) / (self.size - 1)
        return replace(self, size=size, bytes_per_s=self.bytes_per_s * links)

    def small(self, share: float) -> Level | None:
        """This level as its protocol for small messages has it, with a share of the bytes/s."""
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
        """What one device sends through this level, one way, when all devices send."""
        return self.bytes_per_s * self.efficiency / self.oversubscription


@dataclass(frozen=True)
class Topology:
    """A fleet: devices in rank order, kind after kind, and the levels that join them, innermost
    first.

    ``start_s`` is what a collective takes beside its messages: launching it, waking the peers.
    ``contention`` is which part of a transfer's time the computing beside it loses: 0 where links
    move data by themselves, 1 where nothing can be hidden, as processors that are busy move it.
    ``skew`` is which part of the time that they computed, counting ``APART_S`` at most, ranks wait
    for the slowest where they meet. ``sharing`` is how many times faster a device computes while
    all others wait: more than 1 where ranks have fewer processors than there are ranks. ``library``
    says whose algorithms there are (``LIBRARIES``). ``notes`` are for readers.
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
                where, "it has no devices or no levels", "a fleet has one of each or more"
            )
        for device, count in self.groups:
            check_whole(f"{where}, count of {device.name}", count, 1e9)
        if prod(level.size for level in self.levels) != self.num_devices:
            sizes = " x ".join(str(level.size) for level in self.levels)
            raise refusal(
                where,
                f"{sizes} units are not {self.num_devices} devices",
                "the sizes of all levels multiply to the number of devices",
            )
        if self.start_s != 0:
            check_number(f"{where}, start_s", self.start_s, 1.0)
        for name in ("contention", "skew"):
            if (share := getattr(self, name)) != 0:
                check_number(f"{where}, {name}", share, 1.0)
        if self.sharing < 1:
            raise refusal(
                f"{where}, sharing", f"{self.sharing} is less than 1",
                "a device is no slower where others wait",
            )  # fmt: skip
        if self.library not in LIBRARIES:
            raise refusal(
                f"{where}, library", f"{self.library!r} is unknown", f"known are {LIBRARIES}"
            )

    @classmethod
    def load(cls, name: str, devices: int | None = None) -> Topology:
        """A topology that comes with partc (one of ``shipped()``), with so many devices."""
        from partc.machines.topology_text import read_shipped

        topology = read_shipped(name)
        return topology if devices is None else topology.resized(devices)

    @classmethod
    def read(cls, path: str | Path) -> Topology:
        """A topology from a TOML file; PlanError names the entry that is wrong."""
        from partc.machines.topology_text import read_topology

        return read_topology(path)

    def __str__(self) -> str:
        """The TOML form; ``topology_text.parse_topology`` reads it back to an equal one."""
        from partc.machines.topology_text import write_topology

        return write_topology(self)

    @property
    def num_devices(self) -> int:
        return sum(count for _, count in self.groups)

    @property
    def device(self) -> Device:
        """The only kind of device, or of several the slowest: who works with all waits for it."""
        return _slowest(device for device, _ in self.groups)

    @property
    def is_mixed(self) -> bool:
        """Whether there are several kinds of devices."""
        return len(self.groups) > 1

    @property
    def memory_bytes(self) -> int:
        """What every device has at least."""
        return min(device.memory_bytes for device, _ in self.groups)

    @property
    def kinds(self) -> str:
        """The names of its devices."""
        return " and ".join(device.name for device, _ in self.groups)

    def mean(self, figure: Callable[[Device], float]) -> float:
        """A figure of a device, averaged over all."""
        return sum(figure(device) * count for device, count in self.groups) / self.num_devices

    @property
    def unit_sizes(self) -> tuple[int, ...]:
        """Per level, how many devices one unit of it joins."""
        return tuple(accumulate((level.size for level in self.levels), mul))

    def device_of(self, rank: int) -> Device:
        """The kind of device of one rank."""
        for device, count in self.groups:
            if rank < count:
                return device
            rank -= count
        raise AssertionError("no such rank")

    def at(self, ranks: Iterable[int]) -> Topology:
        """These machines as ranks that work together see them: every device is as slow as the
        slowest of theirs, and has as little memory as any of theirs.
        """
        kinds = list(dict.fromkeys(map(self.device_of, ranks)))
        least = min(kind.memory_bytes for kind in kinds)
        device = replace(_slowest(kinds), memory_bytes=least)
        return replace(self, groups=((device, self.num_devices),))

    def resized(self, devices: int) -> Topology:
        """The same machines with so many devices: inner levels are filled first, the outermost has
        the rest; several kinds of devices stay in proportion.
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


def _slowest(kinds: Iterable[Device]) -> Device:
    return min(kinds, key=lambda kind: (kind.peak("bf16"), kind.memory_bytes_per_s))
