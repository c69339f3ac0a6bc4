"""The device mesh: named axes with sizes, and where each rank stands on them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from partc.errors import PlanError

PP = "pp"  # the axis whose ranks have different pipeline stages; the others cut tensors
_AXIS_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z", re.ASCII)


@dataclass(frozen=True)
class Mesh:
    """Axes in rank order, slowest first, as in torch's DeviceMesh: ``Mesh((("dp", 2), ("tp",
    4)))``.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for name, size in self.axes:
            _check_axis(name, size)
        if len(set(self.names)) != len(self.axes):
            raise PlanError(
                where=f"mesh {self}",
                what="an axis name stands twice",
                why="axes are found by name",
                do="Rename one.",
            )

    @classmethod
    def of(cls, mesh: Any) -> Mesh:
        """A Mesh from a Mesh, a torch DeviceMesh, a dict, ``"dp=2,tp=4"`` or the path of a
        mesh.toml.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, Mapping):
            return cls(tuple(mesh.items()))
        if isinstance(mesh, Path) or (isinstance(mesh, str) and mesh.endswith(".toml")):
            return cls._from_toml(Path(mesh))
        if isinstance(mesh, str):
            return cls.parse(mesh)
        names = getattr(mesh, "mesh_dim_names", None)
        if names is not None:
            return cls(tuple(zip(names, map(int, mesh.mesh.shape), strict=True)))
        raise PlanError(
            where="mesh",
            what=f"a {type(mesh).__name__} does not describe a mesh",
            why="no named axes could be read from it",
            do='Give a Mesh, a DeviceMesh with names, a dict, "dp=2,tp=4" or a .toml path.',
        )

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read ``"dp=2,tp=4"`` (commas or blanks between axes)."""
        axes = []
        for part in re.split(r"[,\s]+", text.strip()):
            name, equals, size = part.partition("=")
            if not equals or not size.isdigit():
                raise PlanError(
                    where=f"mesh {text!r}",
                    what=f"{part!r} is not an axis",
                    why="an axis is written name=size",
                    do='Write for example "dp=2,tp=4".',
                )
            axes.append((name, int(size)))
        return cls(tuple(axes))

    @classmethod
    def _from_toml(cls, path: Path) -> Mesh:
        import tomllib

        try:
            table = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise PlanError(
                where=str(path),
                what="the mesh file cannot be read",
                why=str(error),
                do="Mend or name another.",
            ) from None
        return cls(tuple(table.get("axes", table).items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def num_ranks(self) -> int:
        return prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along one axis; PlanError if the mesh has no such axis."""
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
        """Where a rank stands on each axis."""
        at = {}
        for name, size in reversed(self.axes):
            rank, at[name] = divmod(rank, size)
        return {name: at[name] for name in self.names}

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank that stands at these coordinates."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coords[name]
        return rank

    def peers(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from ``rank`` along ``axis`` only, itself among them, in axis
        order.
        """
        coords = self.coords(rank)
        return [self.rank({**coords, axis: i}) for i in range(self.size(axis))]

    def all_coords(self) -> list[dict[str, int]]:
        """The coordinates of every rank, in rank order."""
        ranges = (range(size) for _, size in self.axes)
        return [dict(zip(self.names, at, strict=True)) for at in itertools.product(*ranges)]

    @property
    def pipeline_ranks(self) -> int:
        """Ranks along the axis ``pp``; 1 without one."""
        return dict(self.axes).get(PP, 1)

    def without_pipeline(self) -> Mesh:
        """The axes that cut tensors."""
        return Mesh(tuple(axis for axis in self.axes if axis[0] != PP))

    def first_rank(self, pipeline_rank: int) -> int:
        """The first of all ranks that stand at this place of the pipeline."""
        return self.rank({**dict.fromkeys(self.names, 0), PP: pipeline_rank})

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes)


def _check_axis(name: str, size: int) -> None:
    if not isinstance(name, str) or not _AXIS_NAME.match(name):
        raise PlanError(
            where="mesh",
            what=f"{name!r} cannot name an axis",
            why="axis names become Python identifiers",
            do="Use letters, digits and _ only, a letter first.",
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(
            where=f"mesh axis {name}",
            what=f"{size!r} is not a size",
            why="an axis has one rank or more",
            do="Give a whole number from 1.",
        )
