"""One way to train: what the search enumerates, estimates and hands on."""

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
    """One way to train: axis sizes, what the data axes shard, how weights are cut over ``tp``."""

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
    given: Mesh | None = None  # axes that the user has named

    @property
    def data_ranks(self) -> int:
        return self.replicate * self.shard

    def mesh(self, topology: Topology | None) -> Mesh:
        """Its axes, the pipeline outermost and tensor ranks next to each other."""
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
        return self.given.num_ranks if self.given else self.data_ranks * self.tp * self.pp

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return NAMES[self.schedule].rank_of(self.pp, self.chunks)

    def of_rank(self, stages: Sequence[T], rank: int) -> list[T]:
        """Those of a pipeline rank."""
        return [each for each, its in zip(stages, self.rank_of, strict=True) if its == rank]

    @property
    def preset(self) -> str:
        """The words of its plan: shardings that were searched are entries beside those of data."""
        if not is_searched(self.word):
            return self.words
        return self._data_word or "megatron"  # which has nothing left to cut

    @property
    def words(self) -> str:
        """What is sharded over data axes, and how weights are cut over ``tp``."""
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
    """So many of the machines."""
    return topology if topology.num_devices == devices else topology.resized(devices)


def can_have(topology: Topology, devices: int) -> bool:
    """Whether so many of the machines are a topology."""
    try:
        return _part(topology, devices).num_devices == devices
    except PlanError:
        return False
