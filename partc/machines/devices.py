"""A `Device`: one kind of processor, what it computes in a second, and how well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from partc.machines.topology_checks import (
    check_keys,
    check_name,
    check_number,
    check_points,
    check_whole,
    refusal,
)

Points = tuple[tuple[float, float], ...]  # amount of work, fraction of the peak; amounts ascend

DTYPES = ("bf16", "f16", "f32", "f64", "tf32", "f8")
# Kinds of work. The efficiency of the first two depends on a call's FLOPs, that of the others on
# its bytes. "functions" are pointwise ops with exponentials and the like, which processors without
# special function units (CPUs) compute slowly.
WORK = ("matmul", "attention", "pointwise", "functions", "optimizer")
TERA, PETA = 1e12, 1e15


@dataclass(frozen=True)
class Device:
    """One kind of device: the figures of its data sheet, and the fractions that kernels reach.

    ``flops_per_s`` has the dense peak by dtype (``DTYPES``). ``launch_s`` is the least time between
    two kernels, however small. ``call_s`` is the extra time of a call where the computing processor
    also issues the calls (a CPU). ``efficiency`` has points (amount, fraction) by kind of work
    (``WORK``): a call of so many FLOPs reaches this fraction of the peak, or a call of so many
    bytes this fraction of the memory's bandwidth. The points of matrix products are measured on
    large products that keep all ``processors`` (multiprocessors of a GPU; 0: unknown) busy.
    ``hidden_writes`` is the fraction of a matrix product's result that is written while the product
    still computes.
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
                "Write flops_per_s = { f32 = 9.1e13 }, with the figure of the data sheet.",
            )
        check_keys(f"{where}, efficiency", self.efficiency, WORK)
        for work, points in self.efficiency.items():
            check_points(f"{where}, efficiency.{work}", points)

    def peak(self, dtype: str) -> float:
        """The dense peak FLOP/s of a dtype; the peak of f32 for a dtype without a figure."""
        return self.flops_per_s.get(dtype, self.flops_per_s["f32"])

    def fraction(self, work: str, amount: float) -> float:
        """The fraction of the peak that a call of ``amount`` FLOPs (or bytes) reaches.

        Between two points of ``efficiency`` the time is interpolated linearly; outside of them the
        fraction is constant. Without points for functions or the optimizer, the points of pointwise
        work apply.
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
        """The time of a call by the roofline model.

        The largest of arithmetic, memory traffic and ``launch_s`` counts, plus ``call_s``. A call
        without FLOPs and bytes (a view) takes no time.
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
        """The seconds of a call's arithmetic, memory traffic and launch, each by itself.

        ``busy`` is the fraction of the processors that a matrix product keeps at work, and
        ``written_bytes`` the size of its result.
        """
        computing = flops / (self.peak(dtype) * self.fraction(work, flops) * busy)
        writing = (1 - self.hidden_writes) * self.memory_seconds(written_bytes)
        return {
            "arithmetic": computing + writing,
            "memory": self.memory_seconds(num_bytes, work if work in WORK[2:] else "pointwise"),
            "launches": self.launch_s,
        }

    def memory_seconds(self, num_bytes: float, work: str = "pointwise") -> float:
        """The seconds in which a call of this kind of work reads and writes so many bytes."""
        return num_bytes / (self.memory_bytes_per_s * self.fraction(work, num_bytes))


def slowest(kinds: Iterable[Device]) -> Device:
    # by bf16 first: matrix products take most of a training step
    return min(kinds, key=lambda kind: (kind.peak("bf16"), kind.memory_bytes_per_s))
