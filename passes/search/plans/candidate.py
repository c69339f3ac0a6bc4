"""A candidate: one way to train, which the search enumerates, estimates and turns into a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeVar

from partc.errors import PlanError
from partc.machines.topology import Topology
from partc.passes.search.plans.scaling_model import is_searched
from partc.plan.mesh import PP, TP, Mesh
from partc.schedules import NAMES

Data = Literal["ddp", "zero1", "fsdp"]
Recompute = Literal["cheap", "block"]
RECOMPUTE: tuple[Recompute, ...] = ("cheap", "block")
REPLICATE, SHARD = "dp_replicate", "dp_shard"
T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """One way to train: axis sizes, ZeRO level (``data``), tensor preset (``word``), microbatches,
    schedule, virtual stages per rank (``chunks``), recomputation.
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    data: Data = "ddp"
    word: str = ""
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: Recompute = "cheap"
    given: Mesh | None = None  # the user's own axes; None: the candidate names its axes

    @property
    def data_ranks(self) -> int:
        """The number of data-parallel ranks on both data axes."""
        return self.replicate * self.shard

    def mesh(self, topology: Topology | None) -> Mesh:
        """The mesh of the candidate: ``pp`` is outermost, ``tp`` innermost, on adjacent ranks."""
        if self.given is not None:
            return self.given
        data = [(REPLICATE, self.replicate), (SHARD, self.shard)]
        if self.replicate == 1 or self.shard == 1:
            data = [("dp", self.data_ranks)]
        sizes = [(PP, self.pp), *data, (TP, self.tp)]
        axes = tuple((name, size) for name, size in sizes if size > 1)
        return Mesh(axes, topology and _part(topology, self.num_ranks))

    @property
    def num_ranks(self) -> int:
        """The number of devices that the candidate uses."""
        return self.given.num_ranks if self.given else self.data_ranks * self.tp * self.pp

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return NAMES[self.schedule].rank_of(self.pp, self.chunks)

    def of_rank(self, stages: Sequence[T], rank: int) -> list[T]:
        """The elements of ``stages`` that belong to a pipeline rank."""
        return [each for each, its in zip(stages, self.rank_of, strict=True) if its == rank]

    @property
    def preset(self) -> str:
        """The preset of the candidate's plan; searched shardings are entries of the plan, so that
        only the data axes' word is left.
        """
        if not is_searched(self.word):
            return self.words
        return self._data_word or "megatron"  # which has nothing left to cut

    @property
    def words(self) -> str:
        """The preset words of the data axes and of ``tp``: ``fsdp+megatron-sp``."""
        return "+".join(filter(None, [self._data_word, self.word if self.tp > 1 else ""]))

    @property
    def _data_word(self) -> str:
        data = "hsdp" if self.data == "fsdp" and self.replicate > 1 else self.data
        return data if self.data_ranks > 1 or self.tp == 1 else ""

    def __str__(self) -> str:
        pipeline = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        order = f", {self.schedule}" if self.pp > 1 else ""
        again = ", blocks recomputed" if self.recompute == "block" else ""
        where = str(self.mesh(None)) or "one device"
        return f"{self.words} on {where}{order}{pipeline}{again}"


@lru_cache(maxsize=256)
def _part(topology: Topology, devices: int) -> Topology:
    """The topology with this number of devices."""
    return topology if topology.num_devices == devices else topology.resized(devices)


def can_have(topology: Topology, devices: int) -> bool:
    """Whether this number of devices forms a topology: whole machines, or part of one."""
    try:
        return _part(topology, devices).num_devices == devices
    except PlanError:
        return False
