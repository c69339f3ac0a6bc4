"""Enumerate the candidates: axis sizes, presets, microbatches, schedules, recomputation.

Entries of the user's plan and mesh are pins: every candidate agrees with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from partc.passes.search.plans.candidate import (
    REPLICATE,
    SHARD,
    Candidate,
    Data,
    Recompute,
    can_have,
)
from partc.passes.search.plans.scaling_model import searched_word
from partc.plan.batch import DATA_AXES
from partc.plan.mesh import PP, TP, Mesh
from partc.schedules import needs_of

WORDS = ("megatron-sp", "megatron")
DATA: tuple[Data, ...] = ("ddp", "zero1", "fsdp")
SCHEDULES = ("1f1b", "zb-h1", "interleaved-1f1b")  # tried where the user pins none
MOST_MICROBATCHES = 8  # per pipeline rank; more microbatches gain less than a percent each


@dataclass(frozen=True)
class Space:
    """The limits of the candidates: pins, the number of devices, and the sizes that axes must
    divide. A mesh with axes fixes their sizes. ``in_turns``: whether parts of a batch may take
    turns, as they do in pipelines and microbatches.
    """

    mesh: Mesh
    microbatches: int | None
    schedule: str
    recompute: tuple[Recompute, ...]
    devices: int
    dp_divides: int  # data ranks times microbatches have to divide this
    tp_divides: Mapping[str, int]  # by tensor preset
    units: int
    in_turns: bool = True
    fewer: bool = False  # candidates may leave devices of an open mesh unused

    def candidates(self) -> Iterator[Candidate]:
        """All candidates, in a fixed order."""
        for pp, replicate, shard, tp in self._sizes():
            for word in self._words(tp):
                for data in self._data(replicate, shard):
                    base = Candidate(
                        replicate, shard, tp, pp, 1, data, word,
                        given=self.mesh if self.mesh.axes else None,
                    )  # fmt: skip
                    yield from self._in_time(base)

    def _sizes(self) -> Iterator[tuple[int, int, int, int]]:
        """The possible sizes of ``pp``, ``dp_replicate``, ``dp_shard`` and ``tp``."""
        if self.mesh.axes:
            yield sizes_of(self.mesh)
            return
        for devices in self._numbers():
            yield from self._sizes_of(devices)

    def _numbers(self) -> Iterator[int]:
        """The numbers of devices that may be used; fewer than all must form a topology."""
        yield self.devices
        for number in reversed(divisors(self.devices)[1:-1] if self.fewer else []):
            if can_have(self.mesh.hardware, number):
                yield number

    def _sizes_of(self, devices: int) -> Iterator[tuple[int, int, int, int]]:
        for tp in divisors(devices):
            for pp in divisors(devices // tp):
                data = devices // tp // pp
                if self.dp_divides % data == 0 and pp <= (self.units if self.in_turns else 1):
                    for shard in self._shard_sizes(data, tp):
                        yield pp, data // shard, shard, tp

    def _shard_sizes(self, data: int, tp: int) -> Iterator[int]:
        """The sizes of ``dp_shard``: all data ranks, or those inside one hardware unit (HSDP)."""
        units = self.mesh.hardware.unit_sizes
        within = {unit // tp for unit in units if unit % tp == 0 and data % (unit // tp or 1) == 0}
        yield from sorted({size for size in within if 1 < size < data} | {data}, reverse=True)

    def _words(self, tp: int) -> Iterator[str]:
        if tp == 1:
            yield ""
            return
        for word in (*WORDS, searched_word(tp)):
            if word in self.tp_divides and self.tp_divides[word] % tp == 0:
                yield word

    def _data(self, replicate: int, shard: int) -> Iterator[Data]:
        if replicate > 1 and shard > 1:
            yield "fsdp"  # hybrid: sharded within, replicated between
        elif replicate * shard == 1:
            yield "ddp"
        else:
            yield from DATA

    def _in_time(self, base: Candidate) -> Iterator[Candidate]:
        """The candidate with every number of microbatches, recomputation and schedule."""
        left = self.dp_divides // base.data_ranks
        counts = [count for count in divisors(left) if _pays(base.pp, count)]
        counts = counts if self.in_turns else [1]
        if base.given and not counts:
            counts = [1]  # too few samples for the user's own pipeline
        for count in [self.microbatches] if self.microbatches else counts:
            if left % count:
                continue
            for again in self.recompute:
                yield from self._in_order(replace(base, microbatches=count, recompute=again))

    def _in_order(self, here: Candidate) -> Iterator[Candidate]:
        """The candidate with every allowed schedule and its numbers of virtual stages per rank."""
        pinned = self.schedule not in ("", "auto")
        if here.pp == 1:
            yield here
            return
        for name in [self.schedule] if pinned else SCHEDULES:
            least, most = needs_of(name).chunks
            whole_rounds = here.microbatches % here.pp == 0 or pinned
            for chunks in sorted({least, most or 2 * least}):
                if here.pp * chunks <= self.units and (whole_rounds or chunks == 1):
                    yield replace(here, schedule=name, chunks=chunks)


def _pays(pp: int, count: int) -> bool:
    """Whether to try ``count`` microbatches: a pipeline needs one per rank at least."""
    return (pp == 1 or count >= pp) and count <= MOST_MICROBATCHES * max(pp, 4)


def sizes_of(mesh: Mesh) -> tuple[int, int, int, int]:
    """The sizes of ``pp``, ``dp_replicate``, the sharding data axis and ``tp`` of a mesh."""
    size = dict(mesh.axes)
    shard = size.get(SHARD, 1) * size.get("dp", 1) * size.get("fsdp", 1)
    return size.get(PP, 1), size.get(REPLICATE, 1), shard, size.get(TP, 1)


def names_axes(mesh: Mesh) -> bool:
    """Whether candidates know every axis name of the mesh."""
    return all(name in (*DATA_AXES, TP, PP) for name in mesh.names)


def divisors(number: int) -> list[int]:
    """All divisors of a number, the least first."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return [*small, *(number // i for i in reversed(small) if i * i != number)]
