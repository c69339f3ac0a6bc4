"""The device mesh: named axes with sizes, the coordinates of each rank, and the machines below."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from math import gcd, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from partc.errors import PlanError, UsageError
from partc.machines.topology import Topology
from partc.plan.wrong_meshes import check_axis, no_axes, no_axis, no_mesh
from partc.wrong_calls import known_arguments, known_fields, quoted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# what a caller may give for a mesh; a str is "dp=2,tp=4" or the path of a mesh.toml
MeshLike: TypeAlias = "Mesh | DeviceMesh | Mapping[str, int] | str | Path"

DP, TP = "dp", "tp"
PP = "pp"  # the axis whose ranks have different pipeline stages
ISLAND = "island"  # the axis whose ranks train copies of the model apart, and meet now and then
MOST_RANKS = 2**20
MICROBATCH_AXIS = "mb"  # microbatches, as an axis that runs in time
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", re.ASCII)


@known_fields
@dataclass(frozen=True)
class Mesh:
    """Named axes with sizes, the slowest axis first, as in torch's DeviceMesh.

    ``Mesh((("dp", 2), ("tp", 4)))`` has ranks 0 to 3 at dp=0. ``topology`` is the machines that the
    ranks run on, in rank order. The topology does not count for equality, so that a plan replays
    on other machines. A mesh with a topology but without axes is open: the search chooses the axes.
    """

    axes: tuple[tuple[str, int], ...]
    topology: Topology | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.axes, tuple) or not all(map(_is_axis, self.axes)):
            raise no_axes(self.axes)
        for name, size in self.axes:
            check_axis(name, size)
        if len(set(self.names)) != len(self.axes):
            raise PlanError(
                where=f"mesh {self}",
                what="an axis name stands twice",
                why="axes are found by name",
                do="Rename one.",
            )
        if self.num_ranks > MOST_RANKS:
            raise PlanError(
                where=f"mesh {self}",
                what=f"it has more than {MOST_RANKS:,} ranks",
                why="files name meshes too, and what is made of one is as long as its ranks",
                do="Take fewer ranks.",
            )
        if self.axes and self.topology and self.topology.num_devices != self.num_ranks:
            raise PlanError(
                where=f"mesh {self}",
                what=f"{self.num_ranks} ranks are not {self.topology.num_devices} devices",
                why=f"every device of {self.topology.name} is one rank",
                do=f"Take {self.topology.name} with {self.num_ranks} devices, or other axes.",
            )

    @classmethod
    @known_arguments
    def load(cls, machine: str, devices: int | None = None) -> Mesh:
        """An open mesh of machines that come with partc: the plan chooses its axes.

        Args:
            machine: the name of a machine, such as ``"dgx-h100"``.
            devices: how many devices there are in all; None: those of one machine.

        Raises:
            PlanError: no machine has this name, or the devices do not fill machines.

        Example::

            program = partc.compile(model, partc.Mesh.load("dgx-h100", 64), batch, loss=loss_of)
        """
        return cls((), Topology.load(machine, devices))

    @classmethod
    @known_arguments
    def of(cls, mesh: MeshLike) -> Mesh:
        """A Mesh from whatever stands for one.

        Args:
            mesh: a Mesh, a torch DeviceMesh with names, a dict ``{"dp": 2, "tp": 4}``, the text
                ``"dp=2,tp=4"``, or the path of a mesh.toml. Axes are in rank order, slowest first.

        Raises:
            PlanError: an axis has no such name or size, or the file cannot be read.

        >>> Mesh.of("dp=2,tp=4").coords(5)
        {'dp': 1, 'tp': 1}
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, Mapping):
            return cls(tuple(mesh.items()))
        if isinstance(mesh, Path) or (isinstance(mesh, str) and mesh.endswith(".toml")):
            from partc.plan.mesh_file import read_mesh

            return read_mesh(Path(mesh))
        if isinstance(mesh, str):
            return cls.parse(mesh)
        names = getattr(mesh, "mesh_dim_names", None)
        if names is not None:
            return cls(tuple(zip(names, map(int, mesh.mesh.shape), strict=True)))
        raise no_mesh(mesh)

    @classmethod
    @known_arguments
    def parse(cls, text: str) -> Mesh:
        """Read ``"dp=2,tp=4"`` (commas or blanks between axes)."""
        if not isinstance(text, str):
            raise no_mesh(text)
        axes: list[tuple[str, Any]] = []
        for part in re.split(r"[,\s]+", text.strip()):
            name, equals, size = part.partition("=")
            if not equals or not re.fullmatch(_NUMBER, size):
                raise no_axis(text, part)
            axes.append((name, float(size) if "." in size else int(size)))
        return cls(tuple(axes))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def num_ranks(self) -> int:
        return prod(size for _, size in self.axes)

    @property
    def is_open(self) -> bool:
        """Whether the axes are still to be chosen."""
        return not self.axes and self.topology is not None and self.topology.num_devices > 1

    @cached_property  # the cost model asks at each call
    def hardware(self) -> Topology:
        """The machines to plan for; without a topology, CPU processes on one machine."""
        return self.topology or _processes(self.num_ranks)

    def at_place(self, place: int) -> Mesh:
        """The mesh with the devices of one pipeline rank, where kinds of devices differ."""
        return _at_place(self.axes, self.topology, place) if self._is_mixed else self

    @property
    def _is_mixed(self) -> bool:
        return self.topology is not None and self.topology.is_mixed

    def settled(self, axes: Mesh | None) -> Mesh:
        """The mesh itself; if it is open, the mesh with the given axes (PlanError without any)."""
        if not self.is_open:
            return self
        if axes is None:
            raise PlanError(
                where=f"mesh {self}",
                what="its axes are open",
                why="neither the mesh nor the plan says how its devices are arranged",
                do='Give the plan a [mesh], or the mesh axes: "dp=2,tp=4".',
            )
        return replace(self, axes=axes.axes)

    def size(self, axis: str) -> int:
        """The number of ranks along one axis; PlanError if the mesh has no such axis."""
        for name, size in self.axes:
            if name == axis:
                return size
        raise PlanError(
            where=f"mesh {self}",
            what=f"there is no axis {axis!r}",
            why=f"it has {', '.join(self.names)}",
            do="Use one of these names, or add the axis to the mesh.",
        )

    def coords(self, rank: int) -> dict[str, int]:
        """A rank's coordinate on each axis; UsageError for a rank that the mesh has not."""
        if not isinstance(rank, int) or not 0 <= rank < self.num_ranks:
            raise UsageError(
                where=f"rank {quoted(rank)}", what="there is no such rank",
                why=f"the mesh {self} has {self.num_ranks}",
                do=f"Give a rank from 0 to {self.num_ranks - 1}.",
            )  # fmt: skip
        at = {}
        for name, size in reversed(self.axes):  # the last axis is the fastest in rank order
            rank, at[name] = divmod(rank, size)
        return {name: at[name] for name in self.names}

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at these coordinates; UsageError where the mesh has none."""
        rank = 0
        for name, size in self.axes:
            if name not in coords or not 0 <= coords[name] < size:
                raise UsageError(
                    where=f"mesh {self}", what=f"there is no place {dict(coords)}",
                    why=f"it has coordinates from 0 to {size - 1} along {name}",
                    do=f"Give each of {', '.join(self.names)} such a coordinate.",
                )  # fmt: skip
            rank = rank * size + coords[name]
        return rank

    def peers(self, rank: int, axis: str) -> list[int]:
        """The process group of ``rank`` along ``axis``: the ranks that share its other coordinates.

        ``rank`` is one of them; they are in the order of the axis.
        """
        coords = self.coords(rank)
        return [self.rank({**coords, axis: i}) for i in range(self.size(axis))]

    def all_coords(self) -> list[dict[str, int]]:
        """The coordinates of every rank, in rank order."""
        ranges = (range(size) for _, size in self.axes)
        return [dict(zip(self.names, at, strict=True)) for at in itertools.product(*ranges)]

    @property
    def pipeline_ranks(self) -> int:
        """The number of ranks along the axis ``pp``; 1 without this axis."""
        return dict(self.axes).get(PP, 1)

    @property
    def islands(self) -> int:
        """The number of ranks along the axis ``island``; 1 without this axis."""
        return dict(self.axes).get(ISLAND, 1)

    def seed_of_island(self, seed: int, rank: int) -> int:
        """The seed from which the numbers of a rank's island follow: each has its own."""
        return self.islands * seed + self.coords(rank).get(ISLAND, 0)

    def cutting_axes(self) -> Mesh:
        """The mesh of all axes but ``pp`` and ``island``: the axes that shard tensors."""
        return Mesh(tuple(axis for axis in self.axes if axis[0] not in (PP, ISLAND)))

    def first_rank(self, pipeline_rank: int) -> int:
        """The first rank with this coordinate on the axis ``pp``."""
        return self.rank({**dict.fromkeys(self.names, 0), PP: pipeline_rank})

    def crosses(self, axis: str) -> tuple[int, ...]:
        """How a group of the axis is spread over the levels of links, innermost level first.

        Per level, the number of units of the level below that the group occupies inside one unit.
        In the example, a group of dp has 2 devices on a node, and 2 nodes:

        >>> Mesh((("dp", 4), ("tp", 4)), Topology.load("dgx-h100", 16)).crosses("dp")
        (2, 2)

        Groups differ if axes and levels do not nest; then the widest spread counts.
        """
        size, units = self.size(axis), self.hardware.unit_sizes
        return _crosses(self._stride(axis), size, units, self.num_ranks)

    def _stride(self, axis: str) -> int:
        """The difference of rank between neighbours along an axis."""
        return prod(size for _, size in self.axes[self.names.index(axis) + 1 :])

    def __str__(self) -> str:
        if self.is_open and self.topology:
            return f"of {self.topology.num_devices} devices of {self.topology.name}"
        return " ".join(f"{name}={size}" for name, size in self.axes)


@cache
def _processes(num: int) -> Topology:
    return Topology.load("cpu", num)


@cache
def _at_place(axes: tuple[tuple[str, int], ...], topology: Topology, place: int) -> Mesh:
    mesh = Mesh(axes, topology)
    ranks = (r for r in range(mesh.num_ranks) if mesh.coords(r).get(PP, 0) == place)
    return Mesh(axes, topology.at(ranks))


@cache
def _crosses(stride: int, size: int, units: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    most = [_most_units(stride, size, unit, num_ranks) for unit in units]
    return tuple(-(-below // units) for below, units in pairwise([size, *most]))


def _most_units(stride: int, size: int, unit: int, num_ranks: int) -> int:
    """The most units, of ``unit`` consecutive ranks each, that a group of an axis touches.

    The group has ``size`` ranks, ``stride`` apart.
    """
    if stride >= unit:
        return size
    # With a stride below `unit` a group touches every unit between its first and its last member.
    # So only the place of the first member inside its unit matters, and these places repeat.
    step, span = stride * size, (size - 1) * stride
    groups = min(num_ranks // step, unit // gcd(step, unit))
    latest = (min(group * step % unit + stride, unit) - 1 for group in range(groups))
    return max((begin + span) // unit for begin in latest) + 1


def _is_axis(given: object) -> bool:
    return isinstance(given, tuple) and len(given) == 2


def layout_mesh(mesh: Mesh, microbatches: int) -> Mesh:
    """The axes along which values are cut: those of ``named_axes`` that have several ranks.

    >>> print(layout_mesh(Mesh.parse("pp=2,dp=1,tp=2"), 4))
    tp=2 mb=4
    """
    axes = named_axes(mesh, microbatches).axes
    return Mesh(tuple((name, size) for name, size in axes if size > 1))


def named_axes(mesh: Mesh, microbatches: int) -> Mesh:
    """The axes that a plan's cuts may name: those of one pipeline stage's ranks, then ``mb``.

    Microbatches are an axis in time. As the last axis, ``mb`` shards a batch first, so that ranks
    exchange data only within a microbatch. ``pp`` and ``island`` are left out, since stages hold
    different values, and islands values of other batches. A cut along an axis of one rank leaves a
    value whole. PlanError if the mesh has an axis named ``mb``.
    """
    if MICROBATCH_AXIS in mesh.names:
        raise PlanError(
            where=f"mesh {mesh}",
            what=f"an axis is called {MICROBATCH_AXIS!r}",
            why="this name stands for microbatches",
            do="Rename the axis, for example to dp.",
        )
    turns = ((MICROBATCH_AXIS, microbatches),) if microbatches > 1 else ()
    return Mesh((*mesh.cutting_axes().axes, *turns))
